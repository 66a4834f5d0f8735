"""`verify`: whether a run's files are what the sweep wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import numpy as np

from ..errors import CaptureError
from . import files, store
from .shard import Shard
from .spec import digest
from .units import Totals


def verify(path: str | Path) -> list[str]:
    """Check a run's checksums, index, events and completeness.

    Returns:
        A sentence for each thing that is wrong, naming the file; empty if the run is as it was written.
    """
    return list(_problems(Path(path)))


def _problems(run: Path) -> Iterator[str]:
    try:
        manifest = store.load_manifest(run)
    except CaptureError as error:
        yield str(error)
        return
    if store.was_edited(manifest):
        yield store.edited(run)
    try:
        yield from _against(run, manifest)
    except (KeyError, TypeError) as error:
        yield f"{run / store.MANIFEST} is damaged: {type(error).__name__}: {error}"


def _against(run: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """The files against the manifest and each other."""
    due, finished = _due(run, manifest), manifest["finished"] is not None
    found = {*store.numbers_of(run, store.SHARDS), *(store.numbers_of(run, store.TOKENS) if finished else ())}
    checked = _Order(run, manifest)
    for unit in sorted(due | found):
        if unit not in due and (stranger := _stranger(run, unit, checked.identity)):
            checked.sound = False
            yield stranger
        else:
            yield from _check(run, unit, checked)
    if finished and checked.sound:  # else what is missing is told already
        yield from checked.end()
        yield from _index(run, len(due))
        yield from _events(run, len(due))


def _due(run: Path, manifest: dict[str, Any]) -> set[int]:
    """The units that there must be: what the manifest says at the end; before, those that were told of."""
    if manifest["finished"] is not None:
        return set(range(manifest["totals"]["units"]))
    return set(store.units_told(run))


def _stranger(run: Path, unit: int, identity: str) -> str | None:
    """What is wrong with the files of a unit that nobody expects, if they are not this run's."""
    path = store.shard_path(run, store.SHARDS, unit)
    if not path.exists():
        path = store.shard_path(run, store.TOKENS, unit)
    try:
        record = Shard(path).metadata
    except CaptureError as error:
        return f"{error}; and this run has no unit {unit}"
    if (record.get("unit"), record.get("identity")) == (unit, identity):
        return None
    return f"{path} is of another run or another place in it"


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
        except (KeyError, TypeError, ValueError):
            problems = [f"{path} is damaged: its record is not whole"]
        order.sound = order.sound and not problems
        yield from problems


class _Order:
    """No line twice, none missing, and as many as the manifest says."""

    def __init__(self, run: Path, manifest: dict[str, Any]) -> None:
        self.run, self.manifest, self.sound = run, manifest, True
        self.identity = digest(manifest["identity"])
        self._totals = Totals()
        self._next: tuple[int, int, int] = (0, 1, 0)  # unit, line and document; those of the unit after the last seen

    def add(self, record: dict[str, Any], path: Path) -> list[str]:
        unit, line, document = self._next
        here = record["unit"], record["first_line"], record["first_document"]
        self._totals.add(record)
        self._next = here[0] + 1, here[1] + record["lines"], here[2] + record["rows"]["document"]
        # of units that are made at the same time, a later one may be there before the one it follows
        return [f"{path} does not follow the one before it"] if here[0] == unit and here[1:] != (line, document) else []

    def end(self) -> Iterator[str]:
        """What the manifest of a finished run says otherwise."""
        claimed = self.manifest["totals"]
        for name, counted in self._totals.as_dict().items():
            if counted != claimed[name]:
                yield f"{self.run / store.MANIFEST} says {claimed[name]} {name}, the shards hold {counted}"


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
    """The events of a finished run are those of the shards, unit after unit."""
    path = run / store.EVENTS
    try:
        told = files.read_lines(path)
        for unit in range(units):
            for line in store.event_lines(store.read_record(run, unit)):
                if next(told, None) != line:
                    yield f"{path} does not say what the shards say of unit {unit}; the capture command makes it anew"
                    return
        if next(told, None) is not None:
            yield f"{path} tells of more than the shards hold"
    except CaptureError as error:
        yield str(error)
