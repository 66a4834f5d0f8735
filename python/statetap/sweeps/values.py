"""From a kernel call to the rows of a shard."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Iterator

import torch
from torch import Tensor

from ..mixers import MixerCall
from .batches import Document
from .spec import Spec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXACT = ("decays", "betas", "state_norms")  # always float32
TRAJECTORY = ("chunk_states", "keys", "updates", "decays", "betas", "final_state")
_CHUNK = 64


def fields_of(spec: Spec) -> list[str]:
    """Names of the tensors that a layer has in a shard."""
    names: list[str] = []
    for value in spec.values:
        names += [f"trajectory.{field}" for field in TRAJECTORY] if value == "trajectory" else [value]
    return names


def dtype_of(field: str, spec: Spec) -> torch.dtype:
    return torch.float32 if field.split(".")[-1] in EXACT else _DTYPES[spec.dtype]


def document_bytes(spec: Spec, layers: int, shape: dict[str, int]) -> Any:
    """How many bytes a document takes, as a function of the document.

    shape: heads, key_heads, key_dim, value_dim, channels (decays a head and token).
    """
    state = shape["heads"] * shape["key_dim"] * shape["value_dim"]
    per_token = {
        "decays": shape["heads"] * shape["channels"],
        "betas": shape["heads"],
        "state_norms": shape["heads"],
        "writes": shape["heads"] * shape["value_dim"],
        "updates": shape["heads"] * shape["value_dim"],
        "keys": shape["key_heads"] * shape["key_dim"],
    }

    def of(document: Document) -> int:
        total = 0
        for field in fields_of(spec):
            name, size = field.split(".")[-1], torch.empty(0, dtype=dtype_of(field, spec)).element_size()
            rows = {"states": len(document.positions), "chunk_states": -(-len(document) // _CHUNK)}
            count = state * rows.get(name, 1) if name not in per_token else per_token[name] * len(document)
            total += count * size
        return total * layers

    return of


class Collector:
    """Takes the values of a unit out of the kernel calls of its batches, and puts them in the corpus's order."""

    def __init__(self, spec: Spec, documents: list[Document]) -> None:
        self.spec = spec
        self.documents = documents
        self.rows: dict[tuple[int, str], dict[int, Tensor]] = defaultdict(dict)
        self.overflowed: dict[tuple[int, str], Tensor] = {}  # (layer, field) -> count for each head

    def take(self, call: MixerCall, batch: list[int]) -> None:
        """The values of one layer's call; row i of the call is document `batch[i]`."""
        lengths = [len(self.documents[n]) for n in batch]
        if len(set(lengths)) > 1:
            call.mask_padding(torch.tensor(lengths, device=call.values.device))
        for field, row, x in self._parts(call, batch, lengths):
            dtype = dtype_of(field, self.spec)
            if dtype == torch.float16:
                self._count_overflow(call.layer, field, x)
            # a copy: a view would keep, and write, the whole batch
            self.rows[call.layer, field][batch[row]] = x.detach().to("cpu", dtype, copy=True).contiguous()

    def _parts(self, call: MixerCall, batch: list[int], lengths: list[int]) -> Iterator[tuple[str, int, Tensor]]:
        """(field, row of the batch, its values)."""
        values = self.spec.values
        trajectory = call.trajectory if {"trajectory", "states", "writes", "state_norms"} & {*values} else None
        for value in values:
            if value == "trajectory":
                assert trajectory is not None
                for name in TRAJECTORY:
                    x = getattr(trajectory, name)
                    for row, length in enumerate(lengths):
                        end = -(-length // _CHUNK) if name == "chunk_states" else length
                        yield f"trajectory.{name}", row, x[row] if name == "final_state" else x[row, :end]
            elif value == "states":
                yield from self._states(call, batch, lengths)
            elif value == "state_output":
                for row in range(len(batch)):
                    yield value, row, call.state_output[row]
            else:
                x = getattr(call, value)
                for row, length in enumerate(lengths):
                    yield value, row, x[row, :length]

    def _states(self, call: MixerCall, batch: list[int], lengths: list[int]) -> Iterator[tuple[str, int, Tensor]]:
        wanted = [self.documents[n].positions for n in batch]
        mask = torch.zeros(len(batch), max(lengths), dtype=torch.bool)
        for row, positions in enumerate(wanted):
            mask[row, positions] = True
        states = call.states(mask)
        for row, part in enumerate(states.split([len(p) for p in wanted])):
            yield "states", row, part

    def _count_overflow(self, layer: int, field: str, x: Tensor) -> None:
        lost = x.isfinite() & ~x.to(torch.float16).isfinite()
        if not lost.any():
            return
        state_like = field in ("state_output", "trajectory.final_state")
        axis = 0 if state_like else 1
        count = lost.sum([d for d in range(lost.ndim) if d != axis]).cpu()
        key = layer, field
        self.overflowed[key] = self.overflowed[key] + count if key in self.overflowed else count

    def tensors(self) -> dict[str, Tensor]:
        """`<layer>.<field>`: the documents' rows one after the other, `[documents, ...]` for one row a document."""
        found = {}
        for (layer, field), rows in self.rows.items():
            parts = [rows[n] for n in range(len(self.documents))]
            one_each = field in ("state_output", "trajectory.final_state")
            found[f"{layer}.{field}"] = torch.stack(parts) if one_each else torch.cat(parts)
        return dict(sorted(found.items()))

    def overflow(self) -> list[dict[str, Any]]:
        """Values that were finite and are infinite in float16, by layer, field and head."""
        return [
            {"layer": layer, "value": field, "head": head, "count": int(n)}
            for (layer, field), counts in sorted(self.overflowed.items())
            for head, n in enumerate(counts)
            if n
        ]


def token_tensors(documents: list[Document]) -> dict[str, Tensor]:
    """A unit's token file: ids and texts, one after the other, with offsets."""
    texts: dict[int, tuple[int, int]] = {}  # line -> where its text is; parts of a line share it
    blob = bytearray()
    for document in documents:
        if document.line not in texts:
            encoded = document.text.encode("utf-8")
            texts[document.line] = len(blob), len(blob) + len(encoded)
            blob += encoded
    lengths = torch.tensor([len(d) for d in documents], dtype=torch.int64)
    positions = [p for d in documents for p in d.positions]
    return {
        "ids": torch.tensor([i for d in documents for i in d.ids], dtype=torch.int64),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "line": torch.tensor([d.line for d in documents], dtype=torch.int64),
        "first_token": torch.tensor([d.first_token for d in documents], dtype=torch.int64),
        "text": torch.frombuffer(blob, dtype=torch.uint8).clone() if blob else torch.zeros(0, dtype=torch.uint8),
        "text_span": torch.tensor([texts[d.line] for d in documents], dtype=torch.int64).reshape(-1, 2),
        "positions": torch.tensor(positions, dtype=torch.int64),
        "position_offsets": torch.tensor([0, *_running([len(d.positions) for d in documents])], dtype=torch.int64),
    }


def _running(counts: list[int]) -> list[int]:
    total, sums = 0, []
    for n in counts:
        total += n
        sums.append(total)
    return sums
