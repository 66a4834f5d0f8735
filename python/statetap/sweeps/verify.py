"""`verify`: whether a run's files are what the sweep wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ..errors import CaptureError
from . import files, store
from .shard import Shard
from .spec import digest


def verify(path: str | Path) -> list[str]:
    """Check a run's checksums, index and completeness.

    Returns:
        A sentence for each thing that is wrong, naming the file; empty if the run is as it was written.
    """
    run = Path(path)
    try:
        manifest = store.read_manifest(run)
    except CaptureError as error:
        return [str(error)]
    problems = []
    claimed = {k: v for k, v in manifest.items() if k != "checksum"}
    if digest(claimed) != manifest["checksum"]:
        problems.append(f"{run / store.MANIFEST} was edited: its checksum is not that of its content")
    identity = digest(manifest["identity"])
    records: list[dict[str, Any]] = []
    for unit in range(_units(run, manifest)):
        found = [
            _check(store.shard_path(run, folder, unit), unit, identity, problems)
            for folder in (store.SHARDS, store.TOKENS)
        ]
        if found[0] is not None:
            records.append(found[0])
    if not problems:
        problems += _check_order(run, records) + _check_end(run, manifest, records)
    return problems


def _units(run: Path, manifest: dict[str, Any]) -> int:
    """How many units there should be: what the manifest says at the end, the events before."""
    if manifest["finished"] is not None:
        return manifest["totals"]["units"]
    events = run / store.EVENTS
    told = events.read_text("utf-8").count('"event": "shard"') if events.exists() else 0
    there = [int(p.stem) + 1 for p in (run / store.SHARDS).glob("*.safetensors") if p.stem.isdigit()]
    return max([told, *there])


def _check(path: Path, unit: int, identity: str, problems: list[str]) -> dict[str, Any] | None:
    """One file against the checksums it carries; its record."""
    try:
        shard = Shard(path)
        metadata = shard.metadata
        if metadata["unit"] != unit or metadata["identity"] != identity:
            problems.append(f"{path} is of another run or another place in it")
        if sorted(metadata["checksums"]) != sorted(shard.names()):
            problems.append(f"{path} is damaged: its tensors are not those it was written with")
        for name, checksum in metadata["checksums"].items():
            if name in shard.names() and files.checksum(shard.raw(name)) != checksum:
                problems.append(f"{path} is damaged: {name!r} does not have its checksum")
        return metadata
    except (CaptureError, KeyError, TypeError) as error:
        problems.append(
            str(error) if isinstance(error, CaptureError) else f"{path} is damaged: no {error} in its header"
        )
        return None


def _check_order(run: Path, records: list[dict[str, Any]]) -> list[str]:
    """No line twice, none missing."""
    line, document = 1, 0
    for record in records:
        if record["first_line"] != line or record["first_document"] != document:
            return [f"{store.shard_path(run, store.SHARDS, record['unit'])} does not follow the one before it"]
        line, document = line + record["lines"], document + record["documents"]
    return []


def _check_end(run: Path, manifest: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    if manifest["finished"] is None:
        return []
    problems = []
    totals = manifest["totals"]
    for name in ("lines", "documents", "tokens"):
        counted = sum(r[name] for r in records)
        if counted != totals[name]:
            problems.append(f"{run / store.MANIFEST} says {totals[name]} {name}, the shards hold {counted}")
    try:
        index = load_file(run / store.INDEX)
        expected = store.index_of(run, records)
        if set(index) != set(expected) or any(not index[n].equal(expected[n]) for n in expected):
            problems.append(f"{run / store.INDEX} is not the index of the shards; it can be rebuilt from them")
    except Exception as error:
        problems.append(f"{run / store.INDEX} cannot be read: {error}")
    return problems
