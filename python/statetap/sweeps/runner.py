"""The sweep: documents in, states out, a unit at a time."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn
from tqdm import tqdm

from ..errors import CaptureError
from ..mixers import MixerCall
from . import card, store
from .batches import Unit, Units, batches
from .data import Corpus
from .model import Loaded, load
from .reader import Run
from .reader import open as open_run
from .spec import Spec, chosen_layers, digest, names
from .values import Collector, document_bytes, dtype_of, fields_of, token_tensors


class Interrupted(Exception):
    """The sweep was asked to stop, and did at the end of a batch."""


class _Enough(Exception):
    """The last layer that is captured has run."""


@dataclass
class Plan:
    """What a sweep would do.

    Attributes:
        documents, tokens, bytes: of the whole corpus.
        bytes_by_value: bytes of each value, over all layers.
        layers: that are captured.
        free_bytes: on the disk of the output.
        seconds: estimated from one batch.
        skipped: lines that would be left out, with reasons.
    """

    documents: int
    tokens: int
    bytes: int
    bytes_by_value: dict[str, int]
    layers: tuple[int, ...]
    free_bytes: int
    seconds: float
    skipped: list[tuple[int, str]]


def capture(
    model: str | Path | nn.Module,
    data: str | Path,
    output: str | Path,
    *,
    values: str | tuple[str, ...] = "state_output",
    layers: Any = None,
    tokens: str = "last",
    dtype: str = "float32",
    batch_tokens: int = 16384,
    field: str = "text",
    on_error: str = "raise",
    long: str = "error",
    special_tokens: bool = True,
    limit: int | None = None,
    shard_bytes: int = 1 << 30,
    backend: str = "auto",
    device: str | None = None,
    model_dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: Any = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> Run | Plan:
    """Capture states of a corpus into a directory. The same call goes on with a run that was stopped.

    Args:
        model: a Hugging Face id, a folder, or a loaded transformers model (then with `tokenizer`).
        data: a text file (a document a line), JSON lines, either compressed, or "-" for JSON lines on standard input.
        output: the run's directory.
        values: of `statetap.sweeps.VALUES`, a list or comma-separated.
        layers: "0-8,12,-1", ints, or None for every recurrent block.
        tokens: where `states` are taken: "last", "all", "every:N", or positions like "0,5,-1".
        dtype: storage dtype of states, writes and keys. decays, betas and norms are float32.
        batch_tokens: tokens of a batch, padding included.
        field: of a JSON line, where the text is.
        on_error: "raise" at a bad line, or "skip" and record it.
        long: what to do with a text that is longer than the model's context: "error", "split", "truncate", "skip".
        special_tokens: whether the tokenizer adds its own.
        limit: how many documents at most.
        shard_bytes: about how large a shard is; also what is held in memory at once.
        backend, device, model_dtype, revision, trust_remote_code: how the model is run and loaded.
        overwrite: delete a run that is there first.
        dry_run: write nothing; returns a `Plan`.
        progress: a bar on stderr.
        should_stop: asked after every batch; True ends the sweep with `Interrupted`, to be gone on with later.

    Returns:
        The run, opened.

    Raises:
        ArgumentError, CaptureError, UnsupportedFamily: in one sentence; what is on the disk is whole.
    """
    spec = Spec(
        names(values),
        None,
        tokens,
        dtype,
        batch_tokens,
        field,
        on_error,
        long,
        special_tokens,
        limit,
        shard_bytes,
        backend,
    )
    corpus = Corpus(data, field)
    loaded = load(
        model,
        tokenizer,
        device=device,
        model_dtype=model_dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        backend=backend,
    )
    try:
        blocks = loaded.config.num_hidden_layers
        spec = replace(spec, layers=chosen_layers(layers, loaded.instrumented.layers, blocks))
        sweep = _Sweep(spec, corpus, loaded, Path(output), progress, should_stop)
        return sweep.plan() if dry_run else sweep.run(overwrite)
    finally:
        if loaded.ours:
            loaded.instrumented.remove()


class _Sweep:
    def __init__(
        self, spec: Spec, corpus: Corpus, loaded: Loaded, output: Path, progress: bool, should_stop: Callable[[], bool]
    ) -> None:
        self.spec, self.corpus, self.loaded, self.output = spec, corpus, loaded, output
        self.should_stop = should_stop
        self.shapes = loaded.shapes()
        self.document_bytes = document_bytes(spec, len(spec.layers or ()), self.shapes)
        self.bar = tqdm(unit="tok", unit_scale=True, disable=not progress, dynamic_ncols=True, desc=output.name)

    def units(self) -> Units:
        encode = lambda text: self.loaded.encode(text, self.spec.special_tokens)  # noqa: E731
        return Units(self.corpus, self.spec, encode, self.loaded.context, self.document_bytes)

    # -- the run -----------------------------------------------------------------------------

    def run(self, overwrite: bool) -> Run:
        kept = store.Store(self.output)
        try:
            manifest = self.manifest()
            records = kept.begin(manifest, overwrite)
            old = store.read_manifest(self.output)
            units = self.units()
            units.replay(records)
            if old["finished"] is not None:
                if not units.at_end():
                    raise CaptureError(
                        f"data: {self.corpus.name} has more lines than this finished run; use another output"
                    )
                return open_run(self.output)
            kept.write_events(records)
            self.bar.update(sum(r["tokens"] for r in records))
            for unit in units:
                records.append(self.write(kept, unit, records))
                kept.write_events(records)
            kept.write_index(records)
            finished = {**old, "finished": _now(), "totals": _totals(records)}
            finished.pop("checksum")
            finished.pop("format")
            kept.write_manifest(finished)
            card.write(self.output, finished)
            return open_run(self.output)
        finally:
            self.bar.close()
            kept.close()

    def write(self, kept: store.Store, unit: Unit, before: list[dict[str, Any]]) -> dict[str, Any]:
        """Run a unit and put it on the disk; its record."""
        collector = self.collect(unit)
        record = {
            "unit": unit.number,
            "identity": digest(self.identity()),
            "first_line": unit.first_line,
            "lines": unit.lines,
            "lines_checksum": unit.checksum,
            "first_document": sum(r["documents"] for r in before),
            "documents": len(unit.documents),
            "tokens": sum(map(len, unit.documents)),
            "skipped": unit.skipped,
            "overflow": collector.overflow(),
        }
        kept.write_unit(record, collector.tensors(), token_tensors(unit.documents))
        return record

    def collect(self, unit: Unit) -> Collector:
        collector = Collector(self.spec, unit.documents)
        for batch in batches(unit.documents, self.spec.batch_tokens):
            self.forward(collector, batch)
            self.bar.update(sum(len(unit.documents[n]) for n in batch))
            if self.should_stop():
                raise Interrupted
        return collector

    def forward(self, collector: Collector, batch: list[int]) -> None:
        """One batch. Rows are padded on the right: no token sees what follows, so each is computed as alone."""
        documents = [collector.documents[n] for n in batch]
        ids = torch.zeros(len(batch), max(map(len, documents)), dtype=torch.long)
        for row, document in enumerate(documents):
            ids[row, : len(document)] = torch.tensor(document.ids)
        wanted, last = set(self.spec.layers or ()), max(self.spec.layers or (0,))

        def look(call: Any) -> None:
            if isinstance(call, MixerCall) and call.layer in wanted:
                collector.take(call, batch)
                if call.layer == last:
                    raise _Enough

        with self.loaded.instrumented.watching(look), torch.inference_mode():
            try:
                self.loaded.instrumented.text_model(input_ids=ids.to(self.loaded.device), use_cache=False)
            except _Enough:
                pass
            except torch.OutOfMemoryError:
                raise CaptureError(
                    f"out of memory on {self.loaded.device} in a batch of {len(batch)} documents, {ids.numel()} tokens; "
                    "lower --batch-tokens"
                ) from None

    # -- what it says of itself --------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        return {"spec": self.spec.as_dict(), **self.loaded.identity, "device": self.loaded.device.type}

    def manifest(self) -> dict[str, Any]:
        config = self.loaded.config
        return {
            "identity": self.identity(),
            "model": self.loaded.about,
            "data": {"path": self.corpus.name, "field": self.spec.field if self.corpus.json else None},
            "layouts": {field: layout(field, self.spec, self.shapes) for field in fields_of(self.spec)},
            "shapes": self.shapes,
            "blocks": config.num_hidden_layers,
            "versions": versions(),
            "device": device_name(self.loaded.device),
            "started": _now(),
            "finished": None,
        }

    def plan(self) -> Plan:
        """Read the whole corpus, run one batch, write nothing."""
        documents = tokens = total = 0
        by_value = dict.fromkeys(self.spec.values, 0)
        skipped: list[tuple[int, str]] = []
        rate = None
        layers = len(self.spec.layers or ())
        one = {v: document_bytes(replace(self.spec, values=(v,)), layers, self.shapes) for v in by_value}
        for unit in self.units():
            documents += len(unit.documents)
            tokens += sum(map(len, unit.documents))
            total += unit.bytes
            skipped += unit.skipped
            for value, bytes_of in one.items():
                by_value[value] += sum(map(bytes_of, unit.documents))
            if rate is None and unit.documents:
                rate = self._rate(unit)
        self.bar.close()
        return Plan(
            documents,
            tokens,
            total,
            by_value,
            self.spec.layers or (),
            store.free_bytes(self.output),
            tokens / rate if rate else 0.0,
            skipped,
        )

    def _rate(self, unit: Unit) -> float:
        """Tokens a second, from the unit's first batch."""
        batch = next(batches(unit.documents, self.spec.batch_tokens))
        started = time.perf_counter()
        self.forward(Collector(self.spec, unit.documents), batch)
        return sum(len(unit.documents[n]) for n in batch) / (time.perf_counter() - started)


def layout(field: str, spec: Spec, shapes: dict[str, int]) -> dict[str, Any]:
    """Dtype, what a row is, and the axes of a row."""
    name = field.split(".")[-1]
    head, state = ["heads"], ["heads", "key_dim", "value_dim"]
    axes = {
        "decays": [*head, "key_dim"] if shapes["channels"] > 1 else head,
        "betas": head,
        "state_norms": head,
        "writes": ["heads", "value_dim"],
        "updates": ["heads", "value_dim"],
        "keys": ["key_heads", "key_dim"],
    }.get(name, state)
    rows = {"state_output": "document", "final_state": "document", "states": "position", "chunk_states": "chunk"}
    return {
        "dtype": str(dtype_of(field, spec)).removeprefix("torch."),
        "row": rows.get(name, "token"),
        "axes": axes,
        "shape": [shapes[a] for a in axes],
    }


def versions() -> dict[str, str]:
    """Of the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for package in ("statetap", "torch", "transformers", "safetensors", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} {device.type}"


def _totals(records: list[dict[str, Any]]) -> dict[str, Any]:
    sums = {n: sum(r[n] for r in records) for n in ("lines", "documents", "tokens")}
    return {
        **sums,
        "units": len(records),
        "skipped": sum(len(r["skipped"]) for r in records),
        "overflowed": sum(o["count"] for r in records for o in r["overflow"]),
        "lines_checksum": digest([r["lines_checksum"] for r in records]),
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
