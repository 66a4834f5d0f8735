"""A run on disk: the manifest, a shard and a token file for every unit, the index, the events. See docs/format.md."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from ..errors import CaptureError
from . import card, files, shard
from .claims import PATIENCE, Claims
from .shard import Entry, Shard
from .spec import differences, digest, policy_differences

FORMAT = 1
MANIFEST, INDEX, EVENTS, CARD, LOCK = "manifest.json", "index.safetensors", "events.jsonl", card.NAME, ".lock"
SHARDS, TOKENS, CLAIMS = "shards", "tokens", "claims"
COLUMNS = ("shard", "row", "document", "first_token", "last_token", "length")
_RECORD = {"unit", "identity", "first_line", "lines", "lines_checksum", "last", "first_document", "rows"}
_CLAIM = re.compile(r"(\d{5,}|finish)\.\d+")
_NUMBERED = re.compile(r"(\d{5,})\.safetensors")


class Store:
    """A run's folder, for a worker that writes it, with others or alone."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.claims = Claims(self.path / CLAIMS)
        self._identity = ""
        self._lock: Any = None

    # -- beginning and going on --------------------------------------------------------------

    def begin(self, manifest: dict[str, Any], overwrite: bool = False, alone: bool = False) -> dict[str, Any]:
        """Make the folder, or take up the run that is in it; the manifest that is there now.

        Args:
            overwrite: delete the run that is there; it is refused while others write it.
            alone: refuse to write beside others.

        Raises:
            CaptureError: the folder holds something else, another run, or other processes write to it.
        """
        self._identity = digest(manifest["identity"])
        there = (self.path / MANIFEST).exists()
        if there:
            load_manifest(self.path)  # not of another program
        elif self.path.exists():
            self._refuse_foreign()
        for folder in (self.path, *(self.path / name for name in (SHARDS, TOKENS, CLAIMS))):
            files.make_folder(folder)
        self._take_lock(alone or overwrite)
        if overwrite:
            self._remove()
            self.write_manifest(manifest)
            if not alone:
                self._share_lock()
            return manifest
        if there or not self._write_first(manifest):
            return self._take_up(manifest)
        return manifest

    def _take_up(self, manifest: dict[str, Any]) -> dict[str, Any]:
        old = load_manifest(self.path)
        if was_edited(old):  # what it says is worth nothing; the shards know which run they are of
            self.write_manifest(manifest)
            old = manifest
        self._refuse_other(old, manifest)
        self.remove_leftovers()
        if old["policies"] != manifest["policies"]:
            self.write_manifest({**old, "policies": manifest["policies"]})
        return read_manifest(self.path)

    def _write_first(self, manifest: dict[str, Any]) -> bool:
        """Write the manifest; False if another worker was first."""
        try:
            return files.write_new(self.path / MANIFEST, [files.json_text(_with_checksum(manifest))])
        except files.NoLinks:
            self.write_manifest(manifest)
            return True

    def _refuse_foreign(self) -> None:
        """A folder without a manifest may hold nothing but what a sweep leaves that was killed before it wrote one."""
        if not self.path.is_dir():
            raise CaptureError(f"output: {self.path} is a file; give a folder")
        mine = {self.path / LOCK, *(p for p in self._neighbours() if p.name.startswith(MANIFEST))}
        mine |= {p for p in map(self.path.joinpath, (SHARDS, TOKENS, CLAIMS)) if p.is_dir() and not any(p.iterdir())}
        foreign = sorted(p.name for p in self.path.iterdir() if p not in mine)
        if foreign and not (self.path / MANIFEST).exists():  # which another worker may have made meanwhile
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

    def _neighbours(self) -> list[Path]:
        """The files of ours that are being written, or were when their worker was killed."""
        folders = [self.path, *(self.path / name for name in (SHARDS, TOKENS, CLAIMS))]
        found = [p for folder in folders if folder.is_dir() for p in folder.glob(f"*{files.TEMPORARY}")]
        return [p for p in found if (left := files.left_by(p)) and self._is_ours(p.with_name(left[0]))]

    def _is_ours(self, path: Path) -> bool:
        where, name = path.parent, path.name
        if where == self.path:
            return name in (INDEX, EVENTS, CARD, MANIFEST)
        return bool((_CLAIM if where.name == CLAIMS else _NUMBERED).fullmatch(name))

    def _remove(self) -> None:
        """Delete the run's files, the manifest last."""
        folders = [self.path / name for name in (CLAIMS, SHARDS, TOKENS)]
        mine = [p for folder in folders for p in sorted(folder.iterdir()) if self._is_ours(p)]
        mine += [*self._neighbours(), *(self.path / name for name in (INDEX, EVENTS, CARD, MANIFEST))]
        for path in mine:
            path.unlink(missing_ok=True)

    def _take_lock(self, alone: bool) -> None:
        """Held until the process ends, however it ends: by one that writes alone, or by all that write together."""
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            return
        try:
            self._lock = open(self.path / LOCK, "w")  # noqa: SIM115 - open as long as the run is written
            fcntl.flock(self._lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CaptureError(
                f"output: another process is writing {self.path}; wait for it or use another output"
            ) from None
        except OSError as error:
            if error.errno in (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK):
                return  # a disk without locks
            raise files.cannot_write(self.path / LOCK, error) from None

    def _share_lock(self) -> None:
        if self._lock is not None:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let others have what is ours, and write here."""
        self.claims.close()
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

    def records(self) -> Iterator[dict[str, Any]]:
        """Of all units, none missing between them."""
        return iter_records(self.path, len(numbers_of(self.path, SHARDS)))

    def write_unit(self, record: dict[str, Any], values: dict[str, Entry], tokens: dict[str, Entry]) -> dict[str, Any]:
        """One unit: its tokens, then its shard. It is done when both exist."""
        files.require_space(self.path, sum(x.nbytes for x in (*values.values(), *tokens.values())))
        for folder, entries in ((TOKENS, tokens), (SHARDS, values)):
            checksums = {name: shard.checksum_of(x) for name, x in entries.items()}
            metadata = {"format": FORMAT, "identity": self._identity, **record, "checksums": checksums}
            shard.write(shard_path(self.path, folder, record["unit"]), entries, metadata)
        return record

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        files.write_whole(self.path / MANIFEST, [files.json_text(_with_checksum(manifest))])

    def tell(self, record: dict[str, Any]) -> None:
        """Add a unit's lines to the events. `finish` puts them in order."""
        try:
            with open(self.path / EVENTS, "a", encoding="utf-8") as file:
                file.write("".join(event_lines(record)))
        except OSError as error:
            raise files.cannot_write(self.path / EVENTS, error) from None

    def finish(self, manifest: dict[str, Any], units: int) -> None:
        """Write what a finished run has besides its units; the manifest last. `manifest` has the totals already."""
        entries = {
            name: Entry("int64", [manifest["totals"]["documents"]], _column(self.path, units, name)) for name in COLUMNS
        }
        shard.write(self.path / INDEX, entries)  # a column at a time: it may be larger than memory
        lines = (line for record in iter_records(self.path, units) for line in event_lines(record))
        files.write_whole(self.path / EVENTS, (line.encode() for line in lines))
        card.write(self.path, manifest)
        self.write_manifest(manifest)

    def remove_leftovers(self) -> None:
        """What workers were writing that are gone: of another machine, what was not touched for long."""
        now = (self.path / MANIFEST).stat().st_mtime  # by the clock of this disk, if it was just written
        for path in self._neighbours():
            alive = files.left_by(path)[1].is_alive()  # type: ignore[index]
            try:
                if alive is False or (alive is None and now - path.stat().st_mtime > PATIENCE):
                    path.unlink()
            except FileNotFoundError:
                pass  # renamed meanwhile


def units_told(run: Path) -> list[int]:
    """The units that the events tell of, so far."""
    found = []
    try:
        for line in files.read_lines(run / EVENTS):
            event = json.loads(line)
            if event["event"] == "shard":
                found.append(int(event["unit"]))
    except (CaptureError, ValueError, KeyError, TypeError):
        pass  # not there yet, or a line that was cut by a kill: `finish` writes them anew
    return found


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


def number_of(unit: int) -> str:
    """A unit's number as files have it."""
    return f"{unit:05d}"


def shard_path(run: Path, folder: str, unit: int) -> Path:
    return run / folder / f"{number_of(unit)}.safetensors"


def numbers_of(run: Path, folder: str) -> list[int]:
    """The units that have a file in a folder, in order."""
    names = (p.name for p in (run / folder).iterdir()) if (run / folder).is_dir() else ()
    return sorted(int(found[1]) for found in map(_NUMBERED.fullmatch, names) if found)


def read_manifest(run: Path) -> dict[str, Any]:
    """The manifest of a run, as the sweep wrote it.

    Raises:
        CaptureError: as `load_manifest`, or it was edited.
    """
    manifest = load_manifest(run)
    if was_edited(manifest):
        raise CaptureError(edited(run))
    return manifest


def _with_checksum(manifest: dict[str, Any]) -> dict[str, Any]:
    content = {k: v for k, v in manifest.items() if k != "checksum"}
    return {**content, "checksum": digest(content)}


def was_edited(manifest: dict[str, Any]) -> bool:
    return manifest["checksum"] != digest({k: v for k, v in manifest.items() if k != "checksum"})


def edited(run: Path) -> str:
    """What is wrong with a manifest whose checksum is, and what to do."""
    return (
        f"{run / MANIFEST} was edited: its checksum is not that of its content. Put back the file that the sweep "
        "wrote, or give the same capture command again, which makes it anew from the shards"
    )


def load_manifest(run: Path) -> dict[str, Any]:
    """The manifest of a run, edited or not.

    Raises:
        CaptureError: there is none, it is of another program, or of a format that is not known here.
    """
    if run.exists() and not run.is_dir():
        raise CaptureError(f"{run} is a file; give the folder of a run")
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


def iter_records(run: Path, units: int) -> Iterator[dict[str, Any]]:
    return (read_record(run, unit) for unit in range(units))


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
