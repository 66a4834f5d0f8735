"""`statetap`: capture, verify, info, families, doctor. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import os
import signal
import sys
from types import FrameType
from typing import Annotated, Any

import typer

from .errors import ArgumentError, CaptureError, Error

app = typer.Typer(
    help="The recurrent states of hybrid language models: capture them over a corpus, check and read a run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
RunPath = Annotated[str, typer.Argument(help="A run's directory.")]

DONE, FAILED, USAGE, STOPPED = 0, 1, 2, 130


class _Stop:
    """Set by SIGINT and SIGTERM; a second one ends the process at once."""

    def __init__(self) -> None:
        self.asked = False

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(STOPPED)
        self.asked = True
        os.write(2, b"\nstopping after this batch; once more to stop at once\n")

    def __call__(self) -> bool:
        return self.asked


@app.command()
def capture(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="A Hugging Face id or a folder.")] = None,
    data: Annotated[
        str | None, typer.Option(help="A .txt or .jsonl file (.gz, .zst), a pipe, or - for JSON lines.")
    ] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="The run's directory.")] = None,
    values: Annotated[
        str, typer.Option(help="By commas: state_output, states, trajectory, decays, betas, writes, state_norms.")
    ] = "state_output",
    layers: Annotated[str | None, typer.Option(help="Blocks, like 0-8,12,-1; default all recurrent ones.")] = None,
    heads: Annotated[str | None, typer.Option(help="Value heads, like 0-3,-1; default all.")] = None,
    tokens: Annotated[
        str, typer.Option(help="Where states are taken: by commas last, all, every:N, 0,5,-1, 0-8, -8:.")
    ] = "last",
    dtype: Annotated[str, typer.Option(help="Storage: float32, bfloat16, float16.")] = "float32",
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch, padding included.")] = 16384,
    data_format: Annotated[str, typer.Option(help="text, jsonl, or auto: by the name, else the first line.")] = "auto",
    field: Annotated[str, typer.Option(help="Of a JSON line, where the text is.")] = "text",
    on_error: Annotated[str, typer.Option(help="At a bad line: raise or skip.")] = "raise",
    long: Annotated[str, typer.Option(help="Texts longer than the context: error, split, truncate, skip.")] = "error",
    special_tokens: Annotated[bool, typer.Option(help="Let the tokenizer add its own (BOS, ...).")] = True,
    limit: Annotated[int | None, typer.Option(help="Stop reading at so many documents.")] = None,
    shard_bytes: Annotated[int, typer.Option(help="About how large a shard is.")] = 1 << 30,
    backend: Annotated[str, typer.Option(help="Kernels: auto, a backend's name, or default (transformers').")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default CUDA if there is one.")] = None,
    model_dtype: Annotated[str | None, typer.Option(help="The model's own dtype; default the checkpoint's.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the model's repository.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run that is there first.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be captured; write nothing.")] = False,
    config: Annotated[str | None, typer.Option(help="A manifest.json: run what it says again.")] = None,
    as_json: Json = False,
) -> None:
    """Capture states of a corpus. The same command goes on with a run that was stopped."""
    stop = _Stop()
    stop.install()  # before the heavy imports, which take seconds
    options = {k: v for k, v in context.params.items() if k not in ("config", "as_json")}
    if config is not None:
        options |= _of_manifest(config, {k for k in options if context.get_parameter_source(k).name == "DEFAULT"})  # type: ignore[union-attr]
    for name in ("model", "data", "output"):
        if not options[name]:
            raise typer.BadParameter("is missing", param_hint=name if name == "model" else f"--{name}")
    from .sweeps.plan import Plan
    from .sweeps.runner import Interrupted
    from .sweeps.runner import capture as run_capture

    try:
        found = run_capture(**options, progress=not as_json, should_stop=stop)
    except Interrupted:
        print(f"stopped; what is in {options['output']} is whole. The same command goes on.", file=sys.stderr)
        raise typer.Exit(STOPPED) from None
    if isinstance(found, Plan):
        _print_plan(found, as_json)
        return
    print(json.dumps(_describe(found)) if as_json else found.path)
    skipped = found.manifest["totals"]["skipped"]
    if skipped:
        print(f"{skipped} lines were left out; {found.path}/events.jsonl has them with reasons", file=sys.stderr)
    for x in found.overflow:
        where = f"layer {x['layer']}, {x['value']}, head {x['head']}"
        print(f"overflow in float16: {where}: {x['count']} values are infinite", file=sys.stderr)
    if found.overflow:
        raise typer.Exit(FAILED)


def _of_manifest(path: str, names: set[str]) -> dict[str, Any]:
    """The options of a run, from its manifest, as far as they are among `names`."""
    from pathlib import Path

    from .sweeps.store import MANIFEST, read_manifest

    if not Path(path).exists():
        raise CaptureError(f"config: {path} does not exist; give the manifest.json of a run, or its folder")
    if Path(path).is_file() and Path(path).name != MANIFEST:
        raise CaptureError(f"config: {path} is not the manifest.json of a run")
    manifest = read_manifest(Path(path).parent if Path(path).is_file() else Path(path))
    identity, said = manifest["identity"], {**manifest["identity"], **manifest["policies"]}
    said |= {"model": manifest["model"]["id"], "data": manifest["data"], "data_format": identity["data"]["format"]}
    said |= {"revision": identity["model"]["revision"], "model_dtype": identity["model"]["dtype"]}
    said |= {"values": ",".join(said["values"]), "device": None}
    return {name: said[name] for name in names if name in said}


@app.command()
def verify(run: RunPath, as_json: Json = False) -> None:
    """Check a run: checksums, index, completeness. Exit status 1 if anything is wrong."""
    from .sweeps.verify import verify as check

    problems = check(run)
    if as_json:
        print(json.dumps({"run": run, "problems": problems}))
    else:
        print("\n".join(problems) or f"{run}: {_extent(run)}, every checksum right")
    if problems:
        raise typer.Exit(FAILED)


@app.command()
def info(run: RunPath, as_json: Json = False) -> None:
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


@app.command()
def families(as_json: Json = False) -> None:
    """List the families: their kernels as found in the installed transformers, and what each offers."""
    from . import families as known
    from .sweeps.spec import VALUES

    about = {name: known.describe(name) for name in known.names()}
    traced = _traced()
    if as_json:
        print(json.dumps({name: {**about[name], "traced": traced, "captured": list(VALUES)} for name in about}))
        return
    for name, found in about.items():
        print(f"{name}: {found['about']}")
        print(f"  wrappers: {', '.join(found['wrappers']) or 'none'}\n  transformers: {found['transformers']}")
        for kernel, reason in found["kernels"].items():
            print(f"  {kernel}: {reason}")
    print("each offers:")
    for part, values in traced.items():
        print(f"  {part}: {values if isinstance(values, str) else ', '.join(values)}")
    print(f"  statetap capture: {', '.join(VALUES)}")


def _traced() -> dict[str, Any]:
    """The values of each part of a block, as far as tracing is installed."""
    try:
        from .tracing.envoys import PARTS
    except ImportError as error:
        return {"tracing": f"{error}: pip install 'statetap[trace]'"}
    return {part: list(kind.VALUES) for part, kind in PARTS.items()}


def _extent(path: str) -> str:
    from .sweeps.reader import open as open_run

    run = open_run(path)
    return f"{len(run)} documents, {run.tokens} tokens, {'finished' if run.finished else 'not finished'}"


def _describe(run: Any) -> dict[str, Any]:
    from .sweeps.store import size_on_disk

    manifest, identity = run.manifest, run.manifest["identity"]
    model, kept = manifest["model"], identity["model"]
    return {
        "run": str(run.path),
        "finished": manifest["finished"] or f"no: {len(run)} documents so far; the same capture command goes on",
        "model": f"{model['id']} ({model['class']}, {kept['dtype']}, commit {kept['commit'] or 'none: a folder'})",
        "data": f"{manifest['data']} ({identity['data']['format']})",
        "documents": len(run),
        "tokens": run.tokens,
        "skipped lines": len(run.skipped),
        "layers": run.layers,
        "heads": identity["heads"] or "all",
        "values": {f"linear_attn.{name}": _line(run, name, x) for name, x in manifest["layouts"].items()},
        "bytes": size_on_disk(run.path),
        "overflowed in float16": sum(x["count"] for x in run.overflow),
        "device": manifest["device"],
        "versions": manifest["versions"],
    }


def _line(run: Any, field: str, layout: dict[str, Any]) -> str:
    """`float32 [243, 4, 16, 24]: document, heads, key_dim, value_dim`: of one layer."""
    shape = list(run[field, run.layers[0]].shape)
    return f"{layout['dtype']} {shape}: {', '.join([layout['row'], *layout['axes']])}"


def _print_plan(plan: Any, as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        print(json.dumps(asdict(plan)))
        return
    print(f"documents: {plan.documents:,}\ntokens: {plan.tokens:,}\nlayers: {list(plan.layers)}")
    for value, size in plan.bytes_by_value.items():
        rows, layers = plan.rows_by_value[value], len(plan.layers)
        print(f"  {value}: {rows:,} rows a layer, {size // layers:,} bytes a layer, {size:,} bytes")
    print(f"bytes: {plan.bytes:,} of {plan.free_bytes:,} free\ntime: about {plan.seconds:,.0f} s")
    if plan.bytes > plan.free_bytes:
        print("this does not fit on the disk")
    for line, reason in plan.first_skipped:
        print(f"left out: line {line}, {reason}")
    if plan.skipped > len(plan.first_skipped):
        print(f"and {plan.skipped - len(plan.first_skipped)} more lines")


def main() -> None:
    """The entry point: one sentence for what goes wrong. STATETAP_DEBUG=1 shows where instead."""
    try:
        app()
    except BrokenPipeError:
        os._exit(FAILED)
    except Exception as error:
        if os.environ.get("STATETAP_DEBUG"):
            raise
        known = isinstance(error, Error)
        reason = error if known else f"unexpected {type(error).__name__}: {error} (STATETAP_DEBUG=1 shows where)"
        print(f"statetap: {reason}", file=sys.stderr)
        sys.exit(USAGE if isinstance(error, ArgumentError) else FAILED)


if __name__ == "__main__":
    main()
