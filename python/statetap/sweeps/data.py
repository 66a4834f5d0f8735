"""A corpus as a stream of lines: memory does not grow with it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import select
import sys
import zlib
from pathlib import Path
from typing import Any, Iterator

from ..errors import ArgumentError, CaptureError
from .stopping import ShouldStop, check

_TEXT, _JSON = (".txt", ".text"), (".jsonl", ".ndjson", ".json")
_BOM = b"\xef\xbb\xbf"


class BadLine(CaptureError):
    """A line that there is nothing to capture of; the message is the reason."""


class Corpus:
    """Lines of a text file (a document a line) or of JSON lines, compressed or not; of a pipe or standard input too.

    A line is ended by a line feed, or a carriage return and a line feed. A pipe is read once, from its beginning.

    Args:
        source: a path, or "-" for standard input.
        field: of a JSON line, where the text is.
        kind: "text", "jsonl", or "auto": by the file's name; else JSON lines if the first line begins with a brace.
            Standard input is JSON lines.
        should_stop: asked while a pipe is waited for.

    Attributes:
        name: the source.
        shown: the source, in messages.
        kind: "text" or "jsonl".
    """

    def __init__(
        self,
        source: str | Path,
        field: str = "text",
        kind: str = "auto",
        should_stop: ShouldStop = lambda: False,
    ) -> None:
        self.name, self.field, self._should_stop = str(source), field, should_stop
        self.shown = "standard input" if self.name == "-" else self.name
        path = Path(self.name)
        if self.name != "-":
            if not path.exists():
                raise CaptureError(f"data: {self.name} does not exist")
            if path.is_dir():
                raise CaptureError(f"data: {self.name} is a folder; give a .txt or .jsonl file")
        self.is_pipe = self.name == "-" or not path.is_file()
        self._stream: Any = None
        self._stamp = None if self.is_pipe else _stamp(path)
        suffixes = [s.lower() for s in path.suffixes]
        self._compressed = suffixes.pop() if suffixes and suffixes[-1] in (".gz", ".zst") else None
        self.kind = kind if kind != "auto" else self._guess(suffixes[-1] if suffixes else "")

    def _guess(self, suffix: str) -> str:
        if self.name == "-" or suffix in _JSON:
            return "jsonl"
        if suffix in _TEXT:
            return "text"
        if suffix and not self.is_pipe:
            raise ArgumentError(
                f"data: {self.name} is of no known kind; needs .txt or .jsonl, either with .gz or .zst, or "
                "--data-format"
            )
        try:
            stream = self._open()
            first = stream.peek(1 << 16).removeprefix(_BOM)
            if not self.is_pipe:
                stream.close()
        except (OSError, EOFError, zlib.error) as error:
            raise self._unreadable(error) from None
        return "jsonl" if first.lstrip().startswith(b"{") else "text"

    @property
    def fingerprint(self) -> str | None:
        """Of a file's bytes; None for a pipe, whose lines are checked as they come."""
        if self.is_pipe:
            return None
        found = hashlib.blake2b(digest_size=16)
        try:
            with open(self.name, "rb") as file:
                while piece := file.read(1 << 22):
                    found.update(piece)
                    check(self._should_stop)
        except OSError as error:
            raise self._unreadable(error) from None
        return found.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """(number from 1, bytes without the line's end) of every line.

        Raises:
            CaptureError: the file cannot be read to its end, or was changed meanwhile.
        """
        try:
            with self._open() as stream:
                self._stream = None
                for number, raw in enumerate(stream, 1):
                    check(self._should_stop)
                    if number == 1:
                        raw = raw.removeprefix(_BOM)
                    yield number, raw.removesuffix(b"\n").removesuffix(b"\r") if raw.endswith(b"\n") else raw
        except (OSError, EOFError, zlib.error) as error:
            raise self._unreadable(error) from None
        if self._stamp is not None and _stamp(Path(self.name)) != self._stamp:
            raise CaptureError(f"data: {self.name} was changed while it was read")

    def text(self, raw: bytes) -> str:
        """The text of a line.

        Raises:
            BadLine: there is none, with the reason.
        """
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadLine(f"not UTF-8 (at byte {error.start + 1})") from None
        if self.kind == "jsonl" and text.strip():
            text = self._field(text)
        if not text.strip():
            raise BadLine("only white space" if text else "empty")
        return text

    def _field(self, line: str) -> str:
        try:
            record = json.loads(line, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            where = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
            raise BadLine(f"not JSON ({getattr(error, 'msg', error)}{where})") from None
        if not isinstance(record, dict):
            raise BadLine(f"not a JSON object but {_kind(record)}")
        if self.field not in record:
            raise BadLine(f"no field {self.field!r} (it has {', '.join(map(repr, list(record)[:5])) or 'none'})")
        text = record[self.field]
        if not isinstance(text, str):
            raise BadLine(f"field {self.field!r} is {_kind(text)}, not text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise BadLine(f"field {self.field!r} holds half of a surrogate pair") from None
        return text

    def _open(self) -> Any:
        """The stream of bytes; the one that was peeked into, for a pipe."""
        if self._stream is None or not self.is_pipe:
            opened = _pipe(self.name, self._should_stop) if self.is_pipe else open(self.name, "rb")  # noqa: SIM115
            self._stream = self._decompressed(opened)
        return self._stream

    def _decompressed(self, stream: Any) -> Any:
        if self._compressed == ".gz":
            return gzip.GzipFile(fileobj=stream)
        if self._compressed == ".zst":
            return _zst(self.name, stream)
        return stream

    def _unreadable(self, error: Exception) -> CaptureError:
        reason = getattr(error, "strerror", None) or error
        return CaptureError(f"data: {self.shown} cannot be read to its end: {reason}")


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}
    return names.get(type(value), "null")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; which of two values a key should have, nobody can say."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadLine(f"has the key {twice!r} twice")
    return record


def _zst(name: str, stream: Any) -> Any:
    try:
        import zstandard
    except ImportError:
        raise CaptureError(f'data: {name} needs zstandard: pip install "statetap[data]"') from None
    return io.BufferedReader(_Zst(stream, zstandard.ZstdDecompressor()), 1 << 16)


class _Zst(io.RawIOBase):
    """Frames that follow each other, decompressed; zstandard's own reader takes a file that was cut for a whole one."""

    def __init__(self, stream: Any, decompressor: Any) -> None:
        self._stream, self._decompressor = stream, decompressor
        self._frame: Any = None
        self._read = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._read:
                self._read = self._stream.read(1 << 12)  # little: it may become a hundred megabytes
            if not self._read:
                if self._frame is not None:
                    raise EOFError("its last frame is cut")
                return 0
            self._ready = self._decompress()
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self) -> bytes:
        self._frame = self._frame or self._decompressor.decompressobj()
        try:
            found = self._frame.decompress(self._read)
        except Exception as error:  # zstandard's own kind, which is not to be named before it is imported
            raise EOFError(str(error)) from None
        self._read = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return found

    def close(self) -> None:
        self._stream.close()
        super().close()


def _pipe(name: str, should_stop: ShouldStop) -> Any:
    if os.name == "nt":  # no select for pipes there
        return sys.stdin.buffer if name == "-" else open(name, "rb")
    handle = os.dup(sys.stdin.fileno()) if name == "-" else os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    return io.BufferedReader(_Pipe(handle, should_stop), 1 << 16)


class _Pipe(io.RawIOBase):
    """A pipe that can be waited for without being deaf to a request to stop."""

    def __init__(self, handle: int, should_stop: ShouldStop) -> None:
        self._handle, self._should_stop = handle, should_stop

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not select.select([self._handle], [], [], 0.1)[0]:
            check(self._should_stop)
        data = os.read(self._handle, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            os.close(self._handle)
        super().close()
