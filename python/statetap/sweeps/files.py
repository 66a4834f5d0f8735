"""Files that exist only when they are whole: written to a neighbour, flushed to the disk, renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Iterable, Iterator

from ..errors import CaptureError
from . import worker
from .worker import Worker

TEMPORARY = ".part"
_NEIGHBOUR = re.compile(r"(.+)\.([^.]*)" + re.escape(TEMPORARY))
MARGIN = 1 << 18  # bytes that are left free on a disk, for the small files at the end


def write_whole(path: Path, pieces: Iterable[Any]) -> None:
    """Write bytes to a neighbour, then rename it to `path`. If anything goes wrong nothing is left behind.

    Raises:
        CaptureError: the disk is full, or the file cannot be written.
    """
    neighbour = neighbour_of(path)
    try:
        _write(neighbour, pieces)
        os.replace(neighbour, path)
        sync_folder(path.parent)
    except BaseException as error:
        _forget(neighbour)
        if isinstance(error, OSError):
            raise cannot_write(path, error) from None
        raise


class NoLinks(Exception):
    """A disk on which a file cannot have two names."""


def write_new(path: Path, pieces: Iterable[Any]) -> bool:
    """As `write_whole`, but False if the file is there already: of many workers that write it, one does.

    Raises:
        NoLinks: this disk cannot do it in one step.
    """
    neighbour = neighbour_of(path)
    try:
        _write(neighbour, pieces)
        os.link(neighbour, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
            raise NoLinks from None
        raise cannot_write(path, error) from None
    finally:
        _forget(neighbour)
    sync_folder(path.parent)
    return True


def neighbour_of(path: Path) -> Path:
    """Where a file is written before it is renamed: a name that no other worker uses."""
    return path.with_name(f"{path.name}.{worker.me().tag}{TEMPORARY}")


def left_by(path: Path) -> tuple[str, Worker] | None:
    """Of a neighbour, the name that it was to get and the worker that wrote it; None for any other file."""
    found = _NEIGHBOUR.fullmatch(path.name)
    writer = None if found is None else worker.of_tag(found[2])
    return None if found is None or writer is None else (found[1], writer)


def _write(path: Path, pieces: Iterable[Any]) -> None:
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


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


def json_text(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def write_text(path: Path, text: str) -> None:
    write_whole(path, [text.encode()])


def read_json(path: Path) -> Any:
    """The content of a JSON file; `CaptureError` if it is not there or not JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CaptureError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"{path} cannot be read: {in_words(error)}") from None


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
        raise CaptureError(f"{path} cannot be read: {in_words(error)}") from None


def in_words(error: Exception) -> str:
    """What Python says of a file's content or of the disk, in plain words."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (at byte {error.start + 1})"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg[:1].lower()}{error.msg[1:]} at line {error.lineno}, character {error.colno})"
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)
