"""A run on disk: the manifest, a shard and a token file for every unit, the index, the events. See docs/format.md."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from ..errors import CaptureError
from . import files, shard
from .shard import Entry, Shard
from .spec import differences, digest, policy_differences

FORMAT = 1
MANIFEST, INDEX, EVENTS, CARD, LOCK = "manifest.json", "index.safetensors", "events.jsonl", "README.md", ".lock"
SHARDS, TOKENS = "shards", "tokens"
COLUMNS = ("shard", "row", "document", "first_token", "last_token", "length")
_RECORD = {"unit", "identity", "first_line", "lines", "lines_checksum", "last", "first_document", "rows"}
_NUMBERED = re.compile(r"(\d{5,})\.safetensors")


class Store:
    """A run's folder, for the one process that writes it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._identity = ""
        self._lock: Any = None

    # -- beginning and going on --------------------------------------------------------------

    def begin(self, manifest: dict[str, Any], overwrite: bool = False) -> dict[str, Any]:
        """Make the folder, or take up the run that is in it; the manifest that is there now.

        Raises:
            CaptureError: the folder holds something else, another run, or another process writes to it.
        """
        self._identity = digest(manifest["identity"])
        there = (self.path / MANIFEST).exists()
        if there:
            old = read_manifest(self.path)
        elif self.path.exists():
            self._refuse_foreign()
        for folder in (self.path, self.path / SHARDS, self.path / TOKENS):
            files.make_folder(folder)
        self._take_lock()
        if there and not overwrite:
            self._refuse_other(old, manifest)
            self._remove(files.TEMPORARY)
            if old["policies"] != manifest["policies"]:
                self.write_manifest({**old, "policies": manifest["policies"]})
            return read_manifest(self.path)
        self._remove()
        self.write_manifest(manifest)
        return manifest

    def _refuse_foreign(self) -> None:
        """A folder without a manifest may hold nothing but what a sweep leaves that was killed before it wrote one."""
        if not self.path.is_dir():
            raise CaptureError(f"output: {self.path} is a file; give a folder")
        left = {LOCK, MANIFEST + files.TEMPORARY}
        empty = [p for p in (self.path / SHARDS, self.path / TOKENS) if p.is_dir() and not any(p.iterdir())]
        foreign = sorted(p.name for p in self.path.iterdir() if p.name not in left and p not in empty)
        if foreign:
            raise CaptureError(
                f"output: {self.path} has no {MANIFEST} and holds other files ({', '.join(foreign[:3])}); give an "
                "empty or new folder"
            )

    def _refuse_other(self, old: dict[str, Any], manifest: dict[str, Any]) -> None:
        changed = differences(old["identity"], manifest["identity"])
        changed += policy_differences(old["policies"], manifest["policies"])
        if changed:
            raise CaptureError(
                f"output: {self.path} holds a run of another specification ({'; '.join(changed)}). Use another output, "
                "or --overwrite to delete that run."
            )

    def _remove(self, ending: str = "") -> None:
        """Delete the run's files, the manifest last; or those that were being written (`ending`)."""
        mine = [self.path / name for name in (INDEX, EVENTS, CARD, MANIFEST)]
        for folder in (SHARDS, TOKENS):
            for path in sorted((self.path / folder).iterdir()):
                if _NUMBERED.fullmatch(path.name.removesuffix(files.TEMPORARY)) and path.name.endswith(ending):
                    path.unlink()
        for path in mine:
            path.with_name(path.name + files.TEMPORARY).unlink(missing_ok=True)
            if not ending:
                path.unlink(missing_ok=True)

    def _take_lock(self) -> None:
        """Held until the process ends, however it ends."""
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            return
        try:
            self._lock = open(self.path / LOCK, "w")  # noqa: SIM115 - open as long as the run is written
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CaptureError(
                f"output: another process is writing {self.path}; wait for it or use another output"
            ) from None
        except OSError as error:
            raise files.cannot_write(self.path / LOCK, error) from None

    def close(self) -> None:
        """Let another process write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- writing -----------------------------------------------------------------------------

    def record(self, unit: int) -> dict[str, Any] | None:
        """What the shard of a unit says of itself, if the unit is done."""
        if not all(shard_path(self.path, folder, unit).exists() for folder in (SHARDS, TOKENS)):
            return None
        try:
            record = read_record(self.path, unit)
        except CaptureError as error:
            raise CaptureError(f"{error}. Delete it and give the same command again to capture it anew.") from None
        if record["identity"] != self._identity:
            raise CaptureError(f"{shard_path(self.path, SHARDS, unit)} is of another run; delete it and capture again")
        return record

    def write_unit(self, record: dict[str, Any], values: dict[str, Entry], tokens: dict[str, Entry]) -> dict[str, Any]:
        """One unit: its tokens, then its shard. It is done when both exist."""
        files.require_space(self.path, sum(x.nbytes for x in (*values.values(), *tokens.values())))
        for folder, entries in ((TOKENS, tokens), (SHARDS, values)):
            checksums = {name: shard.checksum_of(x) for name, x in entries.items()}
            metadata = {"format": FORMAT, "identity": self._identity, **record, "checksums": checksums}
            shard.write(shard_path(self.path, folder, record["unit"]), entries, metadata)
        return record

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        content = {k: v for k, v in manifest.items() if k != "checksum"}
        files.write_json(self.path / MANIFEST, {**content, "checksum": digest(content)})

    def write_index(self, documents: int, units: int) -> None:
        """The index of a finished run, a column at a time: it may be larger than memory."""
        entries = {name: Entry("int64", [documents], _column(self.path, units, name)) for name in COLUMNS}
        shard.write(self.path / INDEX, entries)

    def events(self) -> Events:
        return Events(self.path / EVENTS)


class Events:
    """`events.jsonl`, as the shards have it: written anew beside the old one, which it replaces with `publish`."""

    def __init__(self, path: Path) -> None:
        self._path, self._published = path, False
        try:
            self._file = open(path.with_name(path.name + files.TEMPORARY), "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise files.cannot_write(path, error) from None

    def add(self, record: dict[str, Any]) -> None:
        """The lines of a unit that is done."""
        try:
            self._file.write("".join(event_lines(record)))
            if self._published:
                self._sync()
        except OSError as error:
            raise files.cannot_write(self._path, error) from None

    def publish(self) -> None:
        """From here on a reader sees the file."""
        if self._published:
            return
        try:
            self._sync()
            os.replace(self._file.name, self._path)
            files.sync_folder(self._path.parent)
        except OSError as error:
            raise files.cannot_write(self._path, error) from None
        self._published = True

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        try:
            self._file.close()
            if not self._published:
                os.unlink(self._file.name)
        except OSError:
            pass  # a full disk, which was told already; the lines are made anew from the shards


def event_lines(record: dict[str, Any]) -> Iterator[str]:
    """The lines of a unit: what was left out, shortened, lost; then the unit itself."""
    events: list[dict[str, Any]] = []
    events += [{"event": "skipped", "line": line, "reason": reason} for line, reason in record["skipped"]]
    events += [{"event": "long", "line": line, "tokens": tokens} for line, tokens in record["long"]]
    events += [{"event": "overflow", **where} for where in record["overflow"]]
    told = {name: record[name] for name in ("unit", "first_line", "lines", "first_document")}
    rows = record["rows"]
    events.append({"event": "shard", **told, "documents": rows["document"], "tokens": rows["token"]})
    return (json.dumps(event, ensure_ascii=False) + "\n" for event in events)


def shard_path(run: Path, folder: str, unit: int) -> Path:
    return run / folder / f"{unit:05d}.safetensors"


def numbers_of(run: Path, folder: str) -> list[int]:
    """The units that have a file in a folder, in order."""
    names = (p.name for p in (run / folder).iterdir()) if (run / folder).is_dir() else ()
    return sorted(int(found[1]) for found in map(_NUMBERED.fullmatch, names) if found)


def read_manifest(run: Path) -> dict[str, Any]:
    """The manifest of a run.

    Raises:
        CaptureError: there is none, it is of another program, or of a format that is not known here.
    """
    manifest = files.read_json(run / MANIFEST)
    parts = {"format": int, "identity": dict, "policies": dict, "model": dict, "layouts": dict, "checksum": str}
    if not isinstance(manifest, dict) or manifest.get("program") != "statetap":
        raise CaptureError(f"{run / MANIFEST} is not the manifest of a run")
    if manifest.get("format") != FORMAT:
        raise CaptureError(f"{run / MANIFEST} is of format {manifest.get('format')}; this statetap reads {FORMAT}")
    if manifest.get("finished"):
        parts["totals"] = dict
    for name, kind in parts.items():
        if not isinstance(manifest.get(name), kind):
            raise CaptureError(f"{run / MANIFEST} is damaged: {name!r} is missing or not what it was")
    return manifest


def read_record(run: Path, unit: int) -> dict[str, Any]:
    """What a shard says of itself.

    Raises:
        CaptureError: it is missing or damaged.
    """
    path = shard_path(run, SHARDS, unit)
    record = Shard(path).metadata
    if _RECORD - set(record) or record["unit"] != unit:
        raise CaptureError(f"{path} is damaged: its record is not that of unit {unit}")
    return record


def _column(run: Path, units: int, name: str) -> Iterator[np.ndarray]:
    """A column of the index, a unit at a time; see docs/format.md for what each is."""
    documents = tokens = 0
    for unit in range(units):
        offsets = Shard(shard_path(run, TOKENS, unit)).array("offsets")
        count = len(offsets) - 1
        yield {
            "shard": np.full(count, unit, np.int64),
            "row": np.arange(count, dtype=np.int64),
            "document": np.arange(documents, documents + count, dtype=np.int64),
            "first_token": offsets[:-1] + tokens,
            "last_token": offsets[1:] + tokens - 1,
            "length": np.diff(offsets),
        }[name]
        documents, tokens = documents + count, tokens + int(offsets[-1])


def index_columns(run: Path, units: int) -> dict[str, Iterator[np.ndarray]]:
    """The index as it should be, from the token files, a unit at a time."""
    return {name: _column(run, units, name) for name in COLUMNS}


def size_on_disk(run: Path) -> int:
    return sum(os.path.getsize(p) for p in run.rglob("*") if p.is_file())
