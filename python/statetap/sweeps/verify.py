"""`verify`: whether a run's files are what the sweep wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import numpy as np

from ..errors import CaptureError
from . import files, store
from .shard import Shard
from .spec import digest


def verify(path: str | Path) -> list[str]:
    """Check a run's checksums, index, events and completeness.

    Returns:
        A sentence for each thing that is wrong, naming the file; empty if the run is as it was written.
    """
    return list(_problems(Path(path)))


def _problems(run: Path) -> Iterator[str]:
    try:
        manifest = store.read_manifest(run)
    except CaptureError as error:
        yield str(error)
        return
    if digest({k: v for k, v in manifest.items() if k != "checksum"}) != manifest["checksum"]:
        yield f"{run / store.MANIFEST} was edited: its checksum is not that of its content"
    try:
        yield from _against(run, manifest)
    except (KeyError, TypeError) as error:
        yield f"{run / store.MANIFEST} is damaged: {type(error).__name__}: {error}"


def _against(run: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """The files against the manifest and each other."""
    units = _units(run, manifest)
    checked = _Order(run, manifest)
    for unit in range(units):
        yield from _check(run, unit, checked)
    if checked.sound:  # else what is missing is told already
        yield from checked.end()
        if manifest["finished"] is not None:
            yield from _index(run, units)
        yield from _events(run, units)


def _units(run: Path, manifest: dict[str, Any]) -> int:
    """How many units there should be: what the manifest says at the end; before, the last there is a sign of."""
    found = [*store.numbers_of(run, store.SHARDS), -1]
    if manifest["finished"] is not None:
        return max(manifest["totals"]["units"], found[-2] + 1 if len(found) > 1 else 0)
    try:
        events = files.read_lines(run / store.EVENTS)
        told = sum(1 for event in events if event.startswith('{"event": "shard"'))
    except CaptureError:
        told = 0
    return max(told, max(found) + 1)


def _check(run: Path, unit: int, order: _Order) -> Iterator[str]:
    """A unit's two files: against the checksums they carry, and as the ones that follow the unit before."""
    for folder in (store.SHARDS, store.TOKENS):
        path = store.shard_path(run, folder, unit)
        try:
            shard = Shard(path)
            problems = shard.check()
            record = shard.metadata
            if not problems and (record["unit"], record["identity"]) != (unit, order.identity):
                problems.append(f"{path} is of another run or another place in it")
            if not problems and folder == store.SHARDS:
                problems += order.add(record, path)
        except CaptureError as error:
            problems = [str(error)]
        except (KeyError, TypeError, ValueError) as error:
            problems = [f"{path} is damaged: its record is not whole ({type(error).__name__}: {error})"]
        order.sound = order.sound and not problems
        yield from problems


class _Order:
    """No line twice, none missing, and as many as the manifest says."""

    def __init__(self, run: Path, manifest: dict[str, Any]) -> None:
        self.run, self.manifest, self.sound = run, manifest, True
        self.identity = digest(manifest["identity"])
        self._totals = {"units": 0, "lines": 0, "documents": 0, "tokens": 0, "skipped": 0}

    def add(self, record: dict[str, Any], path: Path) -> list[str]:
        so_far = self._totals
        if (record["first_line"], record["first_document"]) != (so_far["lines"] + 1, so_far["documents"]):
            return [f"{path} does not follow the one before it"] if self.sound else []
        so_far["units"] += 1
        so_far["lines"] += record["lines"]
        so_far["documents"] += record["rows"]["document"]
        so_far["tokens"] += record["rows"]["token"]
        so_far["skipped"] += len(record["skipped"])
        return []

    def end(self) -> Iterator[str]:
        for name, counted in self._totals.items():
            claimed = self.manifest["totals"][name] if self.manifest["finished"] else counted
            if counted != claimed:
                yield f"{self.run / store.MANIFEST} says {claimed} {name}, the shards hold {counted}"


def _index(run: Path, units: int) -> Iterator[str]:
    path = run / store.INDEX
    try:
        index = Shard(path)
        if sorted(index.names()) != sorted(store.COLUMNS):
            yield f"{path} is damaged: it has other columns"
            return
        for name, parts in store.index_columns(run, units).items():
            column, start = index.array(name), 0
            for part in parts:
                if not np.array_equal(column[start : start + len(part)], part):
                    yield f"{path} is not the index of the shards: {name!r} differs; it can be rebuilt from them"
                    return
                start += len(part)
            if start != len(column):
                yield f"{path} is not the index of the shards: it has {len(column)} rows, they have {start}"
                return
    except CaptureError as error:
        yield str(error)


def _events(run: Path, units: int) -> Iterator[str]:
    """The events are those of the shards; an unfinished run may not have told of its last one."""
    path = run / store.EVENTS
    try:
        told = files.read_lines(path)
        for unit in range(units):
            for line in store.event_lines(store.read_record(run, unit)):
                found = next(told, None)
                if found is None and store.read_manifest(run)["finished"] is None:
                    return
                if found != line:
                    yield f"{path} does not say what the shards say of unit {unit}; the capture command makes it anew"
                    return
        if next(told, None) is not None:
            yield f"{path} tells of more than the shards hold"
    except CaptureError as error:
        if units:
            yield str(error)
