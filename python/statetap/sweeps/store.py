"""A run on disk: the manifest, a shard and a token file for every unit, the index. The format is docs/format.md."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CaptureError
from . import files
from .spec import differences, digest

FORMAT = 1
MANIFEST, INDEX, EVENTS, CARD, LOCK = "manifest.json", "index.safetensors", "events.jsonl", "README.md", ".lock"
SHARDS, TOKENS = "shards", "tokens"
OURS = (MANIFEST, INDEX, EVENTS, CARD, LOCK, SHARDS, TOKENS)


class Store:
    """A run's folder, for the one process that writes it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: Any = None

    # -- beginning and resuming --------------------------------------------------------------

    def begin(self, manifest: dict[str, Any], overwrite: bool = False) -> list[dict[str, Any]]:
        """Make the folder, or take up the run that is in it; the records of the units that are done.

        Raises:
            CaptureError: the folder holds something else, another run, or another process writes to it.
        """
        if overwrite:
            self._remove_ours()
        exists = (self.path / MANIFEST).exists()
        if not exists and self.path.exists() and any(self.path.iterdir()):
            foreign = sorted(p.name for p in self.path.iterdir() if p.name not in OURS)
            if foreign:
                raise CaptureError(
                    f"output: {self.path} holds files that are not a run ({', '.join(foreign[:3])}); give an empty or new "
                    "folder"
                )
        for folder in (self.path, self.path / SHARDS, self.path / TOKENS):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CaptureError(f"output: {folder} cannot be made: {error.strerror or error}") from None
        self._take_lock()
        files.remove_temporaries(self.path)
        if not exists:
            self.write_manifest(manifest)
            return []
        self._refuse_other(manifest)
        return self.records()

    def _refuse_other(self, manifest: dict[str, Any]) -> None:
        old = read_manifest(self.path)
        changed = differences(old["identity"], manifest["identity"])
        if changed:
            raise CaptureError(
                f"output: {self.path} holds a run of another specification ({'; '.join(changed)}). Use another output, or "
                "--overwrite to delete that run."
            )

    def _remove_ours(self) -> None:
        if not self.path.exists():
            return
        if not (self.path / MANIFEST).exists() and any(self.path.iterdir()):
            raise CaptureError(f"output: {self.path} holds no run, so --overwrite deletes nothing there")
        for name in OURS:
            target = self.path / name
            if target.is_dir():
                for pattern in ("*.safetensors", "*" + files.TEMPORARY):
                    for file in target.glob(pattern):
                        file.unlink()
                if not any(target.iterdir()):
                    target.rmdir()
            elif target.exists():
                target.unlink()

    def _take_lock(self) -> None:
        """Held until the process ends, however it ends."""
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            return
        self._lock = open(self.path / LOCK, "w")  # noqa: SIM115 - open as long as the run is written
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CaptureError(
                f"output: another process is writing {self.path}; wait for it or use another output"
            ) from None

    def close(self) -> None:
        """Let another process write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- writing -----------------------------------------------------------------------------

    def write_unit(self, record: dict[str, Any], values: dict[str, Tensor], tokens: dict[str, Tensor]) -> None:
        """One unit: its tokens, then its shard. It is done when the shard exists."""
        needed = sum(x.numel() * x.element_size() for x in (*values.values(), *tokens.values()))
        files.require_space(self.path, needed)
        self._save(TOKENS, record, tokens)
        self._save(SHARDS, record, values)

    def _save(self, folder: str, record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        checksums = {name: files.checksum(as_bytes(x)) for name, x in tensors.items()}
        metadata = {"statetap": json.dumps({**record, "format": FORMAT, "checksums": checksums}, ensure_ascii=False)}
        path = shard_path(self.path, folder, record["unit"])
        files.write_whole(path, lambda neighbour: save_file(tensors, neighbour, metadata))

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        content = {"format": FORMAT, **manifest}
        files.write_json(self.path / MANIFEST, {**content, "checksum": digest(content)})

    def write_events(self, records: list[dict[str, Any]]) -> None:
        """`events.jsonl`, from what the shards say of themselves: nothing twice, nothing missing."""
        lines = []
        for record in records:
            lines += [{"event": "skipped", "line": line, "reason": why} for line, why in record["skipped"]]
            lines += [{"event": "overflow", **where} for where in record["overflow"]]
            keys = ("unit", "first_line", "lines", "first_document", "documents", "tokens")
            lines.append({"event": "shard", **{k: record[k] for k in keys}})
        files.write_text(self.path / EVENTS, "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines))

    def write_index(self, records: list[dict[str, Any]]) -> None:
        index = index_of(self.path, records)
        files.write_whole(self.path / INDEX, lambda neighbour: save_file(index, neighbour))

    def records(self) -> list[dict[str, Any]]:
        """What the finished shards say of themselves, in order.

        Raises:
            CaptureError: a shard is missing between others, or cannot be read.
        """
        return read_records(self.path)


def shard_path(run: Path, folder: str, unit: int) -> Path:
    return run / folder / f"{unit:05d}.safetensors"


def read_manifest(run: Path) -> dict[str, Any]:
    """The manifest, if it is one of ours and as we wrote it."""
    manifest = files.read_json(run / MANIFEST)
    if not isinstance(manifest, dict) or "identity" not in manifest or "checksum" not in manifest:
        raise CaptureError(f"{run / MANIFEST} is not the manifest of a run")
    if manifest.get("format") != FORMAT:
        raise CaptureError(f"{run / MANIFEST} is of format {manifest.get('format')}; this statetap reads {FORMAT}")
    return manifest


def read_metadata(path: Path) -> dict[str, Any]:
    """What a shard or token file says of itself."""
    try:
        with safe_open(path, "pt") as file:
            return json.loads((file.metadata() or {})["statetap"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CaptureError(f"{path} is damaged: {error}. Delete it and give the capture command again.") from None


def read_records(run: Path) -> list[dict[str, Any]]:
    """The records of a run's shards, in order of their units."""
    shards = sorted(p for p in (run / SHARDS).glob("*.safetensors"))
    for number, path in enumerate(shards):
        expected = shard_path(run, SHARDS, number)
        if path != expected:
            raise CaptureError(f"{expected} is missing, and later shards are there: restore it, or --overwrite the run")
    return [read_metadata(path) for path in shards]


def index_of(run: Path, records: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The index's columns, a row a document: int64."""
    columns: dict[str, list[Tensor]] = {
        n: [] for n in ("shard", "row", "document", "first_token", "last_token", "length")
    }
    before = 0
    for record in records:
        with safe_open(shard_path(run, TOKENS, record["unit"]), "pt") as file:
            offsets = file.get_tensor("offsets")
        count = len(offsets) - 1
        columns["shard"].append(torch.full((count,), record["unit"]))
        columns["row"].append(torch.arange(count))
        columns["document"].append(torch.arange(count) + record["first_document"])
        columns["first_token"].append(offsets[:-1] + before)
        columns["last_token"].append(offsets[1:] + before - 1)
        columns["length"].append(offsets.diff())
        before += int(offsets[-1])
    return {name: torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64) for name, parts in columns.items()}


def as_bytes(x: Tensor) -> Any:
    """The bytes of a contiguous CPU tensor, as a buffer."""
    return x.contiguous().view(-1).view(torch.uint8).numpy() if x.numel() else b""


def free_bytes(path: Path) -> int:
    """Free space where `path` is, or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def size_on_disk(run: Path) -> int:
    return sum(os.path.getsize(p) for p in run.rglob("*") if p.is_file())
