"""A corpus as a stream of documents, one line at a time: memory does not grow with it."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Iterator

from ..errors import ArgumentError, CaptureError


@dataclass(frozen=True)
class Line:
    """One line of the input: its number from 1, its bytes, and the text or why there is none."""

    number: int
    raw: bytes
    text: str | None
    problem: str | None = None


class Corpus:
    """Lines of a text file (a document a line), of JSON lines, of a pipe, or of standard input (`-`, JSON lines).

    A line that is empty or holds only white space is a bad line: there is nothing to capture.
    """

    def __init__(self, source: str | Path, field: str = "text") -> None:
        self.name = str(source)
        self.field = field
        path = Path(self.name)
        if self.name != "-":
            if not path.exists():
                raise CaptureError(f"data: {self.name} does not exist")
            if path.is_dir():
                raise CaptureError(f"data: {self.name} is a folder; give a .txt or .jsonl file")
        suffixes = [s.lower() for s in path.suffixes]
        self.compressed = next((s for s in suffixes[-1:] if s in (".gz", ".zst")), None)
        kind = suffixes[-2] if self.compressed and len(suffixes) > 1 else (suffixes[-1] if suffixes else "")
        self.json = self.name == "-" or kind in (".jsonl", ".ndjson", ".json")
        if not self.json and kind not in (".txt", ".text", "") and not path.is_fifo():
            raise ArgumentError(
                f"data: {self.name} is of no known kind; needs .txt, .jsonl, either with .gz or .zst, or -"
            )

    def lines(self) -> Iterator[Line]:
        """Every line in order. A line is ended by a line feed only."""
        with self._open() as stream:
            try:
                for number, raw in enumerate(stream, 1):
                    raw = raw.rstrip(b"\n").rstrip(b"\r")
                    yield Line(number, raw, *self._text(raw))
            except (OSError, EOFError) as error:
                raise CaptureError(f"data: {self.name} cannot be read to its end: {error}") from None

    def _open(self) -> Any:
        if self.name == "-":
            return sys.stdin.buffer
        try:
            if self.compressed == ".gz":
                return gzip.open(self.name, "rb")
            if self.compressed == ".zst":
                return _zst(self.name)
            return open(self.name, "rb")
        except OSError as error:
            raise CaptureError(f"data: {self.name} cannot be opened: {error.strerror or error}") from None

    def _text(self, raw: bytes) -> tuple[str | None, str | None]:
        """The text of a line, or what is wrong with it."""
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            return None, f"not UTF-8 (byte {error.start})"
        if not self.json:
            return _nonempty(line)
        if not line.strip():
            return None, "empty"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            return None, f"not JSON ({error})"
        if not isinstance(record, dict) or self.field not in record:
            return None, f"no field {self.field!r}"
        text = record[self.field]
        if not isinstance(text, str):
            return None, f"field {self.field!r} is {type(text).__name__}, not text"
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            return None, f"field {self.field!r} holds half of a surrogate pair"
        return _nonempty(text)


def _nonempty(text: str) -> tuple[str | None, str | None]:
    return (text, None) if text.strip() else (None, "empty" if not text else "only white space")


def _zst(name: str) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise CaptureError(f'data: {name} needs zstandard: pip install "statetap[data]"') from None
    return zstandard.open(name, "rb")
