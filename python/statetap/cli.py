"""`statetap`: capture, verify, info, doctor. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import os
import signal
import sys
from types import FrameType
from typing import Annotated, Any, Optional

import typer

from .errors import Error

app = typer.Typer(
    help="The recurrent states of hybrid language models: capture them over a corpus, check and read a run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


class _Stop:
    """Set by SIGINT and SIGTERM; a second one ends the process at once."""

    def __init__(self) -> None:
        self.asked = False

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(130)
        self.asked = True
        print("stopping after this batch; again to stop at once", file=sys.stderr)

    def __call__(self) -> bool:
        return self.asked


@app.command()
def capture(
    model: Annotated[Optional[str], typer.Argument(help="A Hugging Face id or a folder.")] = None,
    data: Annotated[Optional[str], typer.Option(help="A .txt or .jsonl file (.gz, .zst), or - for JSON lines.")] = None,
    output: Annotated[Optional[str], typer.Option("--output", "-o", help="The run's directory.")] = None,
    values: Annotated[
        str, typer.Option(help="state_output, states, trajectory, decays, betas, writes, state_norms.")
    ] = "state_output",
    layers: Annotated[Optional[str], typer.Option(help="Blocks, like 0-8,12,-1; default all recurrent ones.")] = None,
    tokens: Annotated[str, typer.Option(help="Where states are taken: last, all, every:N, or like 0,5,-1.")] = "last",
    dtype: Annotated[str, typer.Option(help="Storage: float32, bfloat16, float16.")] = "float32",
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch, padding included.")] = 16384,
    field: Annotated[str, typer.Option(help="Of a JSON line, where the text is.")] = "text",
    on_error: Annotated[str, typer.Option(help="At a bad line: raise or skip.")] = "raise",
    long: Annotated[str, typer.Option(help="Texts longer than the context: error, split, truncate, skip.")] = "error",
    special_tokens: Annotated[bool, typer.Option(help="Let the tokenizer add its own (BOS, ...).")] = True,
    limit: Annotated[Optional[int], typer.Option(help="Documents at most.")] = None,
    shard_bytes: Annotated[int, typer.Option(help="About how large a shard is.")] = 1 << 30,
    backend: Annotated[str, typer.Option(help="Kernels: auto, torch, reference, default (transformers').")] = "auto",
    device: Annotated[Optional[str], typer.Option(help="cpu, cuda, cuda:1; default CUDA if there is one.")] = None,
    model_dtype: Annotated[Optional[str], typer.Option(help="The model's own dtype; default the checkpoint's.")] = None,
    revision: Annotated[Optional[str], typer.Option(help="Branch, tag or commit of the model.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the model's repository.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run that is there first.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be captured; write nothing.")] = False,
    config: Annotated[Optional[str], typer.Option(help="A manifest.json: run what it says again.")] = None,
    as_json: Json = False,
) -> None:
    """Capture states of a corpus. The same command goes on with a run that was stopped."""
    stop = _Stop()
    stop.install()  # before the heavy imports, which take seconds
    options = _from_config(config, dict(locals()))
    for name in ("model", "data", "output"):
        if not options[name]:
            raise typer.BadParameter("is missing", param_hint=name if name == "model" else f"--{name}")
    from .sweeps.runner import Interrupted, Plan
    from .sweeps.runner import capture as run_capture

    try:
        found = run_capture(
            **{k: v for k, v in options.items() if k not in ("as_json", "config", "stop")},
            progress=not as_json,
            should_stop=stop,
        )
    except Interrupted:
        print(f"stopped; what is in {options['output']} is whole. The same command goes on.", file=sys.stderr)
        raise typer.Exit(130) from None
    if isinstance(found, Plan):
        _print_plan(found, as_json)
        return
    if as_json:
        print(json.dumps(_describe(found)))
    else:
        print(found.path)
    if found.skipped:
        print(f"{len(found.skipped)} lines were left out; see {found.path}/events.jsonl", file=sys.stderr)
    if found.overflow:
        _print_overflow(found)
        raise typer.Exit(1)


def _from_config(config: Optional[str], options: dict[str, Any]) -> dict[str, Any]:
    """Options from a manifest, where the command line left the default."""
    if config is None:
        return options
    from .sweeps.files import read_json
    from pathlib import Path

    manifest = read_json(Path(config))
    spec = dict(manifest["identity"]["spec"])
    spec["values"] = ",".join(spec["values"])
    spec["layers"] = ",".join(map(str, spec["layers"]))
    given = {
        "model": manifest["model"]["id"],
        "data": manifest["data"]["path"],
        "revision": manifest["model"]["revision"],
    }
    for name, value in {**spec, **given}.items():
        if options[name] == _DEFAULTS.get(name):
            options[name] = value
    return options


@app.command()
def verify(run: Annotated[str, typer.Argument(help="A run's directory.")], as_json: Json = False) -> None:
    """Check a run: checksums, index, completeness. Exit status 1 if anything is wrong."""
    from .sweeps.verify import verify as check

    problems = check(run)
    if as_json:
        print(json.dumps({"run": run, "problems": problems}))
    else:
        print("\n".join(problems) or f"{run}: whole")
    if problems:
        raise typer.Exit(1)


@app.command()
def info(run: Annotated[str, typer.Argument(help="A run's directory.")], as_json: Json = False) -> None:
    """Print what a run holds."""
    from .sweeps.reader import open as open_run

    found = _describe(open_run(run))
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, x in value.items():
                print(f"  {key}: {x}")
        else:
            print(f"{name}: {value}")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Print versions, devices, each backend with its reason, and the families' kernels as found."""
    from . import doctor as reports

    raise typer.Exit(reports.main(as_json))


def _describe(run: Any) -> dict[str, Any]:
    from .sweeps.store import size_on_disk

    manifest = run.manifest
    layouts = manifest["layouts"]
    return {
        "run": str(run.path),
        "finished": manifest["finished"] or f"no: {len(run)} documents so far",
        "model": f"{manifest['model']['id']} ({manifest['model']['class']})",
        "data": manifest["data"]["path"],
        "documents": len(run),
        "tokens": run.tokens,
        "skipped lines": len(run.skipped),
        "layers": run.layers,
        "values": {
            f"linear_attn.{n}": f"{x['dtype']}, a {x['row']} a row, {x['axes']} = {x['shape']}"
            for n, x in layouts.items()
        },
        "bytes": size_on_disk(run.path),
        "overflowed in float16": sum(x["count"] for x in run.overflow),
    }


def _print_plan(plan: Any, as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        print(json.dumps(asdict(plan)))
        return
    print(f"documents: {plan.documents:,}\ntokens: {plan.tokens:,}\nlayers: {list(plan.layers)}")
    for value, size in plan.bytes_by_value.items():
        print(f"  {value}: {size:,} bytes, {size // max(len(plan.layers), 1):,} a layer")
    print(f"bytes: {plan.bytes:,} of {plan.free_bytes:,} free\ntime: about {plan.seconds:,.0f} s")
    if plan.skipped:
        print(f"lines left out: {len(plan.skipped)} (the first: line {plan.skipped[0][0]}, {plan.skipped[0][1]})")


def _print_overflow(run: Any) -> None:
    counts: dict[tuple[Any, ...], int] = {}
    for x in run.overflow:
        key = x["layer"], x["value"], x["head"]
        counts[key] = counts.get(key, 0) + x["count"]
    for (layer, value, head), count in sorted(counts.items()):
        print(f"overflow in float16: layer {layer}, {value}, head {head}: {count} values are infinite", file=sys.stderr)


def main() -> None:
    """The entry point: one sentence for what we know to go wrong, exit status 1."""
    try:
        app()
    except Error as error:
        print(f"statetap: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        os._exit(1)


_DEFAULTS = dict(zip(capture.__code__.co_varnames[: capture.__code__.co_argcount], capture.__defaults__ or ()))

if __name__ == "__main__":
    main()
