"""The README of a run: what it is, and how to open it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import files, store


def write(run: Path, manifest: dict[str, Any]) -> None:
    """Write the card of a finished run."""
    spec, model, totals = manifest["identity"]["spec"], manifest["model"], manifest["totals"]
    rows = [
        f"| `{name}` | {x['dtype']} | {x['row']} | {x['axes']} = {x['shape']} |"
        for name, x in manifest["layouts"].items()
    ]
    first = f"linear_attn.{next(iter(manifest['layouts']))}"
    lines = [
        "# Recurrent states",
        "",
        f"Captured by statetap {manifest['versions']['statetap']} from `{model['id']}` ({model['class']}, commit {model['commit']}) over",
        f"`{manifest['data']['path']}`: {totals['documents']} documents, {totals['tokens']} tokens; layers {spec['layers']}.",
        f"{totals['skipped']} input lines were left out (`events.jsonl` has them with reasons).",
        "",
        "| value | dtype | a row is one | axes of a row |",
        "|---|---|---|---|",
        *rows,
        "",
        "```python",
        "import statetap",
        f'run = statetap.open("{run.name}")',
        f'run["{first}", {spec["layers"][0] if spec["layers"] else 0}][:8]',
        "run.row(0).text",
        "```",
        "",
    ]
    files.write_text(run / store.CARD, "\n".join(lines))
