"""Files that exist only when they are whole: written to a neighbour, flushed to the disk, renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Callable

from ..errors import CaptureError

TEMPORARY = ".part"
MARGIN = 1 << 20  # bytes that are left free on a disk


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """`write(neighbour)`, then rename it to `path`. On a full disk nothing is left behind.

    Raises:
        CaptureError: the disk is full, or the file cannot be written.
    """
    neighbour = path.with_name(path.name + TEMPORARY)
    try:
        write(neighbour)
        with open(neighbour, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(neighbour, path)
        _sync_folder(path.parent)
    except Exception as error:
        neighbour.unlink(missing_ok=True)
        if _is_full(error):
            raise CaptureError(
                f"the disk is full: {path} could not be written. What is there is whole; make room and give the same "
                "command again to go on."
            ) from None
        if isinstance(error, OSError):
            raise CaptureError(f"{path} cannot be written: {error.strerror or error}") from None
        raise


def require_space(folder: Path, needed: int) -> None:
    """Stop while the disk can still hold what is about to be written."""
    free = shutil.disk_usage(folder).free
    if free < needed + MARGIN:
        raise CaptureError(
            f"the disk is nearly full: {folder} has {free:,} bytes free and the next shard needs {needed:,}. What is there "
            "is whole; make room and give the same command again to go on."
        )


def write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_whole(path, lambda neighbour: _write_text(neighbour, text))


def read_json(path: Path) -> Any:
    """The content of a JSON file; `CaptureError` if it is not there or not JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CaptureError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise CaptureError(f"{path} cannot be read: {error}") from None


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda neighbour: _write_text(neighbour, text))


def remove_temporaries(folder: Path) -> None:
    """What a killed run left of files that it was writing."""
    for path in folder.rglob("*" + TEMPORARY):
        path.unlink(missing_ok=True)


def checksum(data: Any) -> str:
    """Of the bytes of anything that has a buffer."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _is_full(error: Exception) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT)
    return (isinstance(error, OSError) and error.errno in full) or "No space left" in str(error)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be synced there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
