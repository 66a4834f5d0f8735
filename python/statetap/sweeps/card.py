"""The README of a run: what it is, and how to open it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import files

NAME = "README.md"


def write(run: Path, manifest: dict[str, Any]) -> None:
    """Write the card of a finished run."""
    model, totals, layers = manifest["model"], manifest["totals"], manifest["identity"]["layers"]
    first = next(iter(manifest["layouts"]))
    rows = [
        f"| `linear_attn.{name}` | {x['dtype']} | {x['row']} | {', '.join(x['axes'])} = {x['shape']} |"
        for name, x in manifest["layouts"].items()
    ]
    lines = [
        "# Recurrent states",
        "",
        f"Captured by statetap {manifest['versions']['statetap']} from `{model['id']}` ({model['class']}) over",
        f"`{manifest['data']}`: {totals['documents']} documents, {totals['tokens']} tokens; layers {layers}.",
        f"{totals['skipped']} input lines were left out (`events.jsonl` has them with reasons).",
        "",
        "| value | dtype | a row is one | axes of a row |",
        "|---|---|---|---|",
        *rows,
        "",
        "```python",
        "import statetap",
        "",
        f'run = statetap.open("{run.name}")',
        f'run["linear_attn.{first}", {layers[0]}][:8]',
        "run.row(0).text",
        "```",
        "",
        "`statetap verify` checks the files against their checksums.",
        "",
    ]
    files.write_text(run / NAME, "\n".join(lines))
