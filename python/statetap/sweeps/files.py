"""Files that exist only when they are whole: written to a neighbour, flushed to the disk, renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Iterable, Iterator

from ..errors import CaptureError

TEMPORARY = ".part"
MARGIN = 1 << 18  # bytes that are left free on a disk, for the small files at the end


def write_whole(path: Path, pieces: Iterable[Any]) -> None:
    """Write bytes to a neighbour, then rename it to `path`. If anything goes wrong nothing is left behind.

    Raises:
        CaptureError: the disk is full, or the file cannot be written.
    """
    neighbour = path.with_name(path.name + TEMPORARY)
    try:
        with open(neighbour, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(neighbour, path)
        sync_folder(path.parent)
    except BaseException as error:
        _forget(neighbour)
        if isinstance(error, OSError):
            raise cannot_write(path, error) from None
        raise


def cannot_write(path: Path, error: OSError) -> CaptureError:
    """What to tell of an error of the disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CaptureError(
            f"the disk is full: {path} could not be written. What is there is whole; make room and give the same "
            "command again to go on."
        )
    return CaptureError(f"{path} cannot be written: {error.strerror or error}")


def require_space(folder: Path, needed: int) -> None:
    """Stop while the disk can still hold what is about to be written.

    Raises:
        CaptureError: it cannot.
    """
    free = shutil.disk_usage(folder).free
    if free < needed + MARGIN:
        raise CaptureError(
            f"the disk is nearly full: {folder} has {free:,} bytes free and the next shard needs {needed:,}. What is "
            "there is whole; make room and give the same command again to go on."
        )


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    write_whole(path, [text.encode()])


def read_json(path: Path) -> Any:
    """The content of a JSON file; `CaptureError` if it is not there or not JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CaptureError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"{path} cannot be read: {error}") from None


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CaptureError(f"output: {path} cannot be made: {error.strerror or error}") from None


def checksum(pieces: Iterable[Any]) -> str:
    """blake2b, 16 bytes, of things that have a buffer, one after the other."""
    found = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be synced there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _forget(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # what went wrong first is what to tell


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, one at a time.

    Raises:
        CaptureError: it is not there or not text.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            yield from file
    except FileNotFoundError:
        raise CaptureError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CaptureError(f"{path} cannot be read: {error}") from None
