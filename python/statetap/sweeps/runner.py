"""The sweep: documents in, states out, a unit at a time."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable

import torch
from torch import nn
from tqdm import tqdm

from ..errors import CaptureError
from ..mixers import MixerCall
from . import provenance, select, stopping, store
from .batches import batches
from .data import Corpus
from .model import Loaded, loaded
from .plan import Plan
from .plan import plan as make_plan
from .reader import Run
from .reader import open as open_run
from .select import Choice
from .spec import Spec, value_names
from .stopping import Interrupted as Interrupted
from .stopping import ShouldStop
from .units import Totals, Unit, Units
from .values import Collector, document_bytes, token_entries

FINISH = "finish"  # the claim of the worker that writes the rest

log = logging.getLogger("statetap")


class _Enough(Exception):
    """The last layer that is captured has run."""


def capture(
    model: str | Path | nn.Module,
    data: str | Path,
    output: str | Path,
    *,
    values: str | Iterable[str] = "state_output",
    layers: Choice = None,
    heads: Choice = None,
    tokens: Choice = "last",
    dtype: str = "float32",
    batch_tokens: int = 16384,
    data_format: str = "auto",
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
    should_stop: ShouldStop = lambda: False,
) -> Run | Plan:
    """Capture states of a corpus into a directory. The same call goes on with a run that was stopped.

    Args:
        model: a Hugging Face id, a folder, or a loaded transformers model (then with `tokenizer`).
        data: a text file (a document a line), JSON lines, either compressed, a pipe, or "-" for JSON lines on standard
            input.
        output: the run's directory.
        values: of `statetap.sweeps.VALUES`, a list or comma-separated.
        layers: "0-8,12,-1", ints, or None for every recurrent block.
        heads: value heads in the same way, or None for all.
        tokens: where `states` are taken: by commas "last", "all", "every:N" (after N tokens, after 2N, ...), positions
            like "0,5,-1", ranges like "0-8", slices like "-8:".
        dtype: storage dtype of states, writes and keys. decays, betas and norms are float32.
        batch_tokens: tokens of a batch, padding included.
        data_format: "text", "jsonl", or "auto" (by name, else by the first line).
        field: of a JSON line, where the text is.
        on_error: "raise" at a bad line, or "skip" and record it.
        long: what to do with a text that is longer than the model's context: "error", "split", "truncate", "skip".
        special_tokens: whether the tokenizer adds its own.
        limit: no more lines are read once there are so many documents.
        shard_bytes: about how large a shard is; also what is held in memory at once.
        backend, device, model_dtype, revision, trust_remote_code: how the model is run and loaded.
        overwrite: delete a run that is there first.
        dry_run: write nothing; returns a `Plan`.
        progress: a bar on stderr.
        should_stop: asked before every batch and line; True ends the sweep with `Interrupted`.

    Returns:
        The run, opened.

    Raises:
        ArgumentError, CaptureError, UnsupportedFamily: in one sentence; what is on the disk is whole.
    """
    spec = Spec(
        value_names(values),
        select.expression(layers),
        select.expression(heads),
        select.expression(tokens) or "last",
        dtype,
        batch_tokens,
        data_format,
        field,
        on_error,
        long,
        special_tokens,
        limit,
        shard_bytes,
        backend,
    )
    corpus = Corpus(data, field, data_format, should_stop)
    options = dict(
        device=device,
        model_dtype=model_dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        backend=backend,
    )
    stopping.check(should_stop)
    with loaded(model, tokenizer, **options) as ready:  # type: ignore[arg-type]
        stopping.check(should_stop)
        sweep = Sweep(spec, corpus, ready, Path(output), progress, should_stop)
        return sweep.plan() if dry_run else sweep.run(overwrite)


class Sweep:
    """A specification on its way through a corpus and a model, into a folder."""

    def __init__(
        self, spec: Spec, corpus: Corpus, ready: Loaded, output: Path, progress: bool, should_stop: ShouldStop
    ) -> None:
        layers = select.recurrent_layers(spec.layers, ready.instrumented.layers, ready.config.num_hidden_layers)
        self.sizes = ready.sizes()
        heads = None if spec.heads is None else tuple(select.chosen("heads", spec.heads, self.sizes["all_heads"]))
        if heads is not None:  # keys are then stored for each of them
            self.sizes.update(heads=len(heads), key_heads=len(heads))
        self.spec = replace(spec, layers=layers, heads=heads)
        self.corpus, self.ready, self.output, self.should_stop = corpus, ready, output, should_stop
        self.progress = progress

    def units(self) -> Units:
        ready, special = self.ready, self.spec.special_tokens
        cost = document_bytes(self.spec, self.sizes)
        return Units(self.corpus, self.spec, lambda text: ready.encode(text, special), ready.context, cost)

    def run(self, overwrite: bool) -> Run:
        """Capture what is not there yet, with any other workers that do the same."""
        kept = store.Store(self.output)
        try:
            manifest = provenance.manifest(self.spec, self.corpus, self.ready, self.sizes)
            manifest = kept.begin(manifest, overwrite, alone=self.corpus.is_pipe)  # which only one can read
            if manifest["versions"] != provenance.versions():
                log.warning("%s was begun with other versions: %s", self.output, manifest["versions"])
            if not manifest["finished"] or self.corpus.is_pipe or not self._is_whole(kept, manifest):
                self._capture(kept)
                self._finish(kept, manifest)
            kept.remove_leftovers()
            kept.claims.remove_dead()
            return open_run(self.output)
        finally:
            kept.close()

    def _is_whole(self, kept: store.Store, manifest: dict[str, Any]) -> bool:
        there = all((self.output / name).exists() for name in (store.INDEX, store.EVENTS, store.CARD))
        return there and all(kept.record(unit) for unit in range(manifest["totals"]["units"]))

    def _capture(self, kept: store.Store) -> None:
        """Go over the corpus until every unit is done, by this worker or another."""
        bar = tqdm(unit="tok", unit_scale=True, disable=not self.progress, dynamic_ncols=True, desc=self.output.name)
        with bar:
            while others := self._pass(kept, bar):
                self._wait_for(kept, others)
                bar.reset()

    def _pass(self, kept: store.Store, bar: Any) -> list[int]:
        """Every unit in order: captured, or passed over if it is done or another worker's; those of others."""
        units, others = self.units(), list[int]()
        while True:
            number = units.number
            record = self._record_of(kept, number)
            if record is None:
                record = self._make(kept, units, bar)
                if record is None:
                    return others
            else:
                units.pass_over(record)
                bar.update(record["rows"]["token"])
                if "checksums" not in record:
                    others.append(number)

    def _record_of(self, kept: store.Store, number: int) -> dict[str, Any] | None:
        """What a unit's shard says of it, or the worker that makes it; None if it is ours now."""
        while True:
            if (record := kept.record(number)) is not None:
                return record
            if kept.claims.take(store.number_of(number)):
                if (record := kept.record(number)) is None:  # not finished between the two
                    return None
                kept.claims.release(store.number_of(number))
            elif (said := kept.claims.said(store.number_of(number))) is not None:
                return said
            else:  # it is reading the lines
                self._pause()

    def _make(self, kept: store.Store, units: Units, bar: Any) -> dict[str, Any] | None:
        """Capture the next unit, which is ours; its record, or None at the end of the corpus."""
        name, first = store.number_of(units.number), units.documents
        unit = units.next()
        if unit is not None:
            kept.claims.publish(name, unit.record(first))
            record = self._write(kept, unit, first, bar)
            kept.tell(record)
        kept.claims.release(name)
        return None if unit is None else record

    def _wait_for(self, kept: store.Store, others: list[int]) -> None:
        """Until the units of other workers are done, or one of these workers is gone."""
        for number in others:
            while kept.record(number) is None:
                if not kept.claims.is_held(store.number_of(number)):
                    break
                self._pause()

    def _finish(self, kept: store.Store, manifest: dict[str, Any]) -> None:
        """Write the rest of the run, if no other worker does."""
        while not kept.claims.take(FINISH):
            self._pause()
        if manifest["finished"] or not store.read_manifest(self.output)["finished"]:
            totals = Totals.of(kept.records())
            manifest = {**manifest, "finished": manifest["finished"] or provenance.now(), "totals": totals.as_dict()}
            kept.finish(manifest, totals.units)

    def _pause(self) -> None:
        stopping.check(self.should_stop)
        time.sleep(0.05)

    def _write(self, kept: store.Store, unit: Unit, first_document: int, bar: Any) -> dict[str, Any]:
        """Run a unit and put it on the disk; its record."""
        collector = Collector(self.spec, unit.documents, self.sizes)
        for batch in batches(unit.documents, self.spec.batch_tokens):
            stopping.check(self.should_stop)
            self.forward(collector, batch)
            bar.update(sum(len(unit.documents[n]) for n in batch))
        record = {**unit.record(first_document), "overflow": collector.overflow()}
        return kept.write_unit(record, collector.entries(), token_entries(unit.documents))

    def forward(self, collector: Collector, batch: list[int]) -> None:
        """One batch. Rows are padded on the right: no token sees what follows, so each is computed as alone."""
        documents = [collector.documents[n] for n in batch]
        ids = torch.zeros(len(batch), max(map(len, documents)), dtype=torch.long)
        for row, document in enumerate(documents):
            ids[row, : len(document)] = torch.tensor(document.ids)
        wanted: set[int] = set(self.spec.layers or ())  # type: ignore[arg-type]

        def look(call: Any) -> None:
            if isinstance(call, MixerCall) and call.layer in wanted:
                collector.take(call, batch)
                if call.layer == max(wanted):
                    raise _Enough

        instrumented = self.ready.instrumented
        with instrumented.watching(look), torch.inference_mode():
            try:
                instrumented.text_model(input_ids=ids.to(self.ready.device), use_cache=False)
            except _Enough:
                pass
            except torch.OutOfMemoryError:
                raise CaptureError(
                    f"out of memory on {self.ready.device} in a batch of {len(batch)} documents, {ids.numel()} tokens; "
                    "lower --batch-tokens"
                ) from None

    def plan(self) -> Plan:
        """What `run` would do."""
        return make_plan(self.units(), self.spec, self.sizes, self.output, self._rate)

    def _rate(self, unit: Unit) -> float:
        """Tokens a second, from the unit's first batch."""
        batch = next(batches(unit.documents, self.spec.batch_tokens))
        started = time.perf_counter()
        self.forward(Collector(self.spec, unit.documents, self.sizes), batch)
        return sum(len(unit.documents[n]) for n in batch) / (time.perf_counter() - started)
