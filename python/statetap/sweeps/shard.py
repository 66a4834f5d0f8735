"""Reading a safetensors file by its published layout, with numpy alone: eight bytes of header length, JSON, the data."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CaptureError

_NUMPY = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I64": np.int64, "I32": np.int32, "U8": np.uint8}
BF16 = np.uint16  # numpy has no bfloat16: its sixteen bits, to be viewed as ml_dtypes' or torch's


class Shard:
    """A file's tensors as read-only arrays over a memory map; `bfloat16` tensors are arrays of their bits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            size = int.from_bytes(self._map[:8], "little")
            header = json.loads(self._map[8 : 8 + size])
            self.metadata: dict[str, Any] = json.loads(header.pop("__metadata__")["statetap"])
        except FileNotFoundError:
            raise CaptureError(f"{path} is missing") from None
        except (OSError, ValueError, KeyError, UnicodeDecodeError) as error:
            raise CaptureError(f"{path} is damaged: {error}") from None
        self._start, self._header = 8 + size, header

    def names(self) -> list[str]:
        return list(self._header)

    def raw(self, name: str) -> memoryview:
        """A tensor's bytes."""
        a, b = self._header[name]["data_offsets"]
        if self._start + b > len(self._map):
            raise CaptureError(f"{self.path} is damaged: it ends before {name!r} does")
        return memoryview(self._map)[self._start + a : self._start + b]

    def array(self, name: str) -> np.ndarray:
        """A tensor."""
        if name not in self._header:
            raise CaptureError(f"{self.path} is damaged: it has no {name!r}")
        entry = self._header[name]
        dtype = BF16 if entry["dtype"] == "BF16" else _NUMPY[entry["dtype"]]
        return np.frombuffer(self.raw(name), dtype).reshape(entry["shape"])
