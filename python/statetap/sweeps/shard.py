"""safetensors files by their published layout, with numpy alone: a header's length, the header (JSON), the data.

Written piece by piece, so that neither side holds a file in memory; read over a memory map.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable

import numpy as np

from ..errors import CaptureError
from . import files

BF16 = np.dtype(np.uint16)  # numpy has no bfloat16: its sixteen bits, to be viewed as ml_dtypes' or torch's
_CODES = {
    "float64": "F64",
    "int64": "I64",
    "float32": "F32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint8": "U8",
}
_DTYPES = {code: BF16 if code == "BF16" else np.dtype(name) for name, code in _CODES.items()}
_RECORD = "statetap"  # in the metadata: what the file says of itself, as JSON
_CHECKSUM = "checksum"  # of that text


@dataclass
class Entry:
    """A tensor to be written: its bytes come in pieces."""

    dtype: str
    shape: list[int]
    pieces: Iterable[Any] = field(repr=False)

    @classmethod
    def of(cls, array: np.ndarray) -> Entry:
        """An array's, which is contiguous."""
        return cls(array.dtype.name, list(array.shape), [array.reshape(-1).view(np.uint8)])

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * _DTYPES[_CODES[self.dtype]].itemsize


def write(path: Path, tensors: dict[str, Entry], metadata: dict[str, Any] | None = None) -> None:
    """Write a file whole or not at all; the largest dtypes first, so that every tensor is aligned.

    Raises:
        CaptureError: the disk is full, or the file cannot be written.
    """
    order = sorted(tensors, key=lambda name: (-_DTYPES[_CODES[tensors[name].dtype]].itemsize, name))
    header: dict[str, Any] = {}
    if metadata is not None:
        record = _json(metadata)
        header["__metadata__"] = {_RECORD: record, _CHECKSUM: files.checksum([record.encode()])}
    end = 0
    for name in order:
        entry = tensors[name]
        start, end = end, end + entry.nbytes
        header[name] = {"dtype": _CODES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}

    def pieces() -> Iterable[Any]:
        yield _head(header)
        for name in order:
            yield from tensors[name].pieces

    files.write_whole(path, pieces())


def _head(header: dict[str, Any]) -> bytes:
    """The first bytes of a file with this header."""
    text = _json(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


class _Damage(Exception):
    """What is wrong with a file, in words."""


class Shard:
    """A file's tensors as read-only arrays; `bfloat16` tensors are arrays of their bits.

    Attributes:
        metadata: what the file says of itself, a dict; empty if nothing.

    Raises:
        CaptureError: the file is missing or damaged; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                self._bytes = path.stat().st_size
                if size > self._bytes:
                    raise _Damage("it ends before its header does")
                text = file.read(size)
            self._header = json.loads(text)
            self._sound = _head(self._header) == size.to_bytes(8, "little") + text
            about = self._header.pop("__metadata__", {})
            record = about.get(_RECORD, "{}")
            self._sound &= about.get(_CHECKSUM) == files.checksum([record.encode()])
            self.metadata: dict[str, Any] = json.loads(record)
            self._start = 8 + size
            end = self._start + _end(self._header)
        except FileNotFoundError:
            raise CaptureError(f"{path} is missing") from None
        except _Damage as error:
            raise CaptureError(f"{path} is damaged: {error}") from None
        except OSError as error:
            raise CaptureError(f"{path} cannot be read: {files.in_words(error)}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CaptureError(f"{path} is damaged: its header is not one of a safetensors file") from None
        if self._bytes != end:
            raise CaptureError(f"{path} is damaged: it has {self._bytes} bytes and needs {end}")

    def names(self) -> list[str]:
        return list(self._header)

    def shape(self, name: str) -> list[int]:
        return list(self._entry(name)["shape"])

    def raw(self, name: str) -> memoryview:
        """A tensor's bytes."""
        start, stop = self._entry(name)["data_offsets"]
        if self._map is None:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(self._map)[self._start + start : self._start + stop]

    def array(self, name: str) -> np.ndarray:
        """A tensor, over the memory map."""
        entry = self._entry(name)
        try:
            dtype, raw = _DTYPES[entry["dtype"]], self.raw(name)
            return np.frombuffer(raw, dtype).reshape(entry["shape"]) if len(raw) else np.zeros(entry["shape"], dtype)
        except (KeyError, ValueError):
            raise CaptureError(f"{self.path} is damaged: {name!r} does not have the size of its shape") from None

    def check(self) -> list[str]:
        """What is wrong with this file, judged by the checksums it carries."""
        problems = [] if self._sound else [f"{self.path} is damaged: its header is not as it was written"]
        checksums = self.metadata.get("checksums", {})
        if sorted(checksums) != sorted(self._header):
            problems.append(f"{self.path} is damaged: its tensors are not those it was written with")
        for name, checksum in checksums.items():
            if name in self._header and self.checksum(name) != checksum:
                problems.append(f"{self.path} is damaged: {name!r} does not have its checksum")
        return problems

    def checksum(self, name: str) -> str:
        """Of a tensor's dtype, shape and bytes."""
        entry = self._entry(name)
        return checksum(entry["dtype"], entry["shape"], [self.raw(name)])

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._header:
            raise CaptureError(f"{self.path} is damaged: it has no {name!r}")
        return self._header[name]


def _end(header: dict[str, Any]) -> int:
    """Where the data of a header's tensors ends; `_Damage` if they do not lie one after the other without a gap."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        count = _DTYPES[entry["dtype"]].itemsize
        for size in entry["shape"]:
            count *= size
        if (start, stop) != (end, end + count):
            raise _Damage(f"{name!r} is at {start}-{stop} and should be at {end}-{end + count}")
        end = stop
    return end


def checksum_of(entry: Entry) -> str:
    """The checksum that `Shard.check` compares with."""
    return checksum(_CODES[entry.dtype], entry.shape, entry.pieces)


def checksum(code: str, shape: list[int], pieces: Iterable[Any]) -> str:
    """blake2b, 16 bytes, of `DTYPE[a,b,...]` and then the tensor's bytes."""
    return files.checksum([f"{code}[{','.join(map(str, shape))}]".encode(), *pieces])
