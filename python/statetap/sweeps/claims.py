"""Who makes which unit: a claim is a file, so any disk that the workers share will do, and any launcher.

A claim is made exclusively and holds who made it. The claim of a worker that is gone expires: at once where its process
was on this machine, else when the file has not been touched for `PATIENCE` seconds. An expired claim is not deleted but
followed by one of the next generation, of which there can be only one too; so no two workers follow the same claim.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from . import files, worker
from .worker import Worker

PATIENCE = 120.0  # seconds without a sign of life
BEAT = 15.0  # seconds between them


class Claims:
    """The claims of a run, as one worker makes and sees them.

    Args:
        folder: of the run, for claims alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mine: dict[str, Path] = {}
        self._seen: dict[Path, tuple[int, float]] = {}  # of other machines: when touched by their clock, seen by ours
        self._closed = threading.Event()
        self._beating: threading.Thread | None = None

    def take(self, name: str) -> bool:
        """Claim a name; False if a worker that is alive has it."""
        latest = self._latest(name)
        if latest is not None and self._alive(latest):
            return False
        path = self.folder / f"{name}.{0 if latest is None else _generation(latest) + 1}"
        if not _make(path, _text(worker.me(), None)):
            return False
        self._mine[name] = path
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, daemon=True)
            self._beating.start()
        return True

    def publish(self, name: str, said: Any) -> None:
        """Say something about a name that is ours."""
        files.write_whole(self._mine[name], [_text(worker.me(), said)])

    def said(self, name: str) -> Any:
        """What the worker that has a name said of it; None if nobody has, or nothing yet."""
        latest = self._latest(name)
        return None if latest is None else _content(latest)[1]

    def is_held(self, name: str) -> bool:
        """Whether a worker that is alive has it."""
        latest = self._latest(name)
        return latest is not None and self._alive(latest)

    def release(self, name: str) -> None:
        """Let go of a name that is ours; of those that were before us too."""
        mine = self._mine.pop(name)
        for path in self._all(name):
            if _generation(path) <= _generation(mine):
                path.unlink(missing_ok=True)

    def remove_dead(self) -> None:
        """Delete the claims of workers that are gone; for when there is nothing left to claim."""
        for path in list(self.folder.glob("*")):
            if path.suffix[1:].isdigit() and not self._alive(path):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of everything that is ours."""
        self._closed.set()
        for name in list(self._mine):
            self.release(name)
        if self._beating is not None:
            self._beating.join()

    def _all(self, name: str) -> list[Path]:
        try:
            found = list(self.folder.glob(f"{name}.*"))
        except OSError:
            return []
        return sorted((path for path in found if path.suffix[1:].isdigit()), key=_generation)

    def _latest(self, name: str) -> Path | None:
        found = self._all(name)
        return found[-1] if found else None

    def _alive(self, claim: Path) -> bool:
        try:
            touched = claim.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        holder = _content(claim)[0]
        known = None if holder is None else holder.is_alive()
        if known is not None:
            return known
        now = time.monotonic()
        if self._seen.get(claim, (None, 0.0))[0] != touched:
            self._seen[claim] = touched, now
        return now - self._seen[claim][1] < PATIENCE

    def _beat(self) -> None:
        """Touch what is ours, again and again."""
        while not self._closed.wait(BEAT):
            for path in list(self._mine.values()):
                try:
                    os.utime(path)
                except OSError:
                    pass  # released meanwhile; or a disk that is away, which the writing will tell of


def _generation(claim: Path) -> int:
    return int(claim.suffix[1:])


def _text(holder: Worker, said: Any) -> bytes:
    return json.dumps({"host": holder.host, "pid": holder.pid, "started": holder.started, "said": said}).encode()


def _content(claim: Path) -> tuple[Worker | None, Any]:
    """Who made a claim, and what it said; None for what cannot be read (yet)."""
    try:
        content = json.loads(claim.read_bytes())
        return Worker(content["host"], content["pid"], content["started"]), content["said"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def _make(path: Path, text: bytes) -> bool:
    """Make a file with its content at once, or not at all if it is there."""
    try:
        return files.write_new(path, [text])
    except files.NoLinks:
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except OSError as error:
            if error.errno == errno.EEXIST:
                return False
            raise files.cannot_write(path, error) from None
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        return True
