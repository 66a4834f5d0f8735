"""From a kernel call to the rows of a shard."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ..mixers import MixerCall
from .shard import Entry
from .spec import DTYPES, FIELDS, Spec
from .units import Document


def document_bytes(spec: Spec, sizes: dict[str, int], value: str | None = None) -> Callable[[Document], int]:
    """How many bytes a document takes, all layers together, as a function of the document; of one value, or all."""
    wanted = [field for field in spec.fields if value in (None, field.split(".")[0])]
    fields = [(FIELDS[f].rows, np.prod(spec.shape_of(f, sizes)) * DTYPES[spec.dtype_of(f)]) for f in wanted]
    layers = len(spec.layers or ())
    return lambda document: layers * sum(document.rows(kind) * int(size) for kind, size in fields)


class Collector:
    """Takes the values of a unit out of the kernel calls of its batches, and puts them in the corpus's order.

    Args:
        spec: what is captured.
        documents: of the unit.
        sizes: of the model's axes, see `Loaded.sizes`.
    """

    def __init__(self, spec: Spec, documents: list[Document], sizes: dict[str, int]) -> None:
        self.spec, self.documents, self.sizes = spec, documents, sizes
        self.heads = None if spec.heads is None else [int(head) for head in spec.heads]
        kinds = {FIELDS[field].rows for field in spec.fields}
        self.ends = {kind: [0, *accumulate(d.rows(kind) for d in documents)] for kind in kinds}
        self.tensors: dict[tuple[int, str], Tensor] = {}
        self.overflowed: dict[tuple[int, str], Tensor] = {}  # (layer, field) -> count for each head

    def take(self, call: MixerCall, batch: list[int]) -> None:
        """The values of one layer's call; row i of the call is document `batch[i]`."""
        lengths = [len(self.documents[n]) for n in batch]
        if len(set(lengths)) > 1:
            call.mask_padding(torch.tensor(lengths, device=call.values.device))
        for field, values in self._values(call, batch):
            stored = values.detach().to(getattr(torch, self.spec.dtype_of(field))).cpu()
            out = self._tensor(call.layer, field)
            lost = stored.isinf() & values.isfinite().cpu() if stored.dtype == torch.float16 else None
            for n, mine in self._places(field, batch):
                start, stop = self.ends[FIELDS[field].rows][n : n + 2]
                out[start:stop] = stored[mine]
                if lost is not None:
                    self._count_overflow(call.layer, field, lost[mine])

    def _tensor(self, layer: int, field: str) -> Tensor:
        """Where a layer's rows of a field go: room for the whole unit."""
        if (layer, field) not in self.tensors:
            shape = (self.ends[FIELDS[field].rows][-1], *self.spec.shape_of(field, self.sizes))
            self.tensors[layer, field] = torch.empty(shape, dtype=getattr(torch, self.spec.dtype_of(field)))
        return self.tensors[layer, field]

    def _places(self, field: str, batch: list[int]) -> Iterator[tuple[int, Any]]:
        """(document, where its rows are in the field's values of this batch)."""
        kind, start = FIELDS[field].rows, 0
        for row, n in enumerate(batch):
            count = self.documents[n].rows(kind)
            if kind == "position":  # these come one document after the other
                yield n, slice(start, start + count)
            else:
                yield n, slice(row, row + 1) if kind == "document" else (row, slice(count))
            start += count

    def _values(self, call: MixerCall, batch: list[int]) -> Iterator[tuple[str, Tensor]]:
        """(field, `[rows, heads, ...]`, `[rows, tokens or chunks, heads, ...]` or `[positions, heads, ...]`)."""
        if any(name in self.spec.values for name in ("trajectory", "states", "writes", "state_norms")):
            trajectory = call.trajectory  # first: what else is asked for then comes from it
        for field in self.spec.fields:
            if field == "states":
                yield field, self._states(call, batch)
            elif field == "state_norms":
                yield field, trajectory.norms(self.heads)
            elif field == "writes":
                yield field, self._of_heads(field, trajectory.updates)
            elif field.startswith("trajectory."):
                yield field, self._of_heads(field, getattr(trajectory, field.removeprefix("trajectory.")))
            else:
                yield field, self._of_heads(field, getattr(call, field))

    def _of_heads(self, field: str, x: Tensor) -> Tensor:
        if self.heads is None:
            return x
        axis = 1 if FIELDS[field].rows == "document" else 2
        share = self.sizes["all_heads"] // x.shape[axis]  # value heads of a key head
        return x.index_select(axis, torch.tensor([h // share for h in self.heads], device=x.device))

    def _states(self, call: MixerCall, batch: list[int]) -> Tensor:
        """The states at the chosen positions of each document in turn, `[positions, heads, key_dim, value_dim]`."""
        mask = torch.zeros(len(batch), call.tokens, dtype=torch.bool)
        places: list[int] = []  # of last tokens: a padded row's state there is its `state_output`, bit for bit
        rows: list[int] = []
        for row, n in enumerate(batch):
            document = self.documents[n]
            mask[row, document.positions] = True
            if document.positions[-1:] == [len(document) - 1]:
                places.append(int(mask[: row + 1].sum()) - 1)
                rows.append(row)
        states = call.trajectory.states(mask, self.heads)
        states[places] = self._of_heads("state_output", call.state_output)[rows].to(states.dtype)
        return states

    def _count_overflow(self, layer: int, field: str, lost: Tensor) -> None:
        """Count a document's values that became infinite in float16, by head; `lost` is `[rows, heads, ...]`."""
        if lost.any():
            counts = lost.flatten(2).sum((0, 2)) if lost.ndim > 2 else lost.sum(0)
            before = self.overflowed.get((layer, field), torch.zeros_like(counts))
            self.overflowed[layer, field] = before + counts

    def entries(self) -> dict[str, Entry]:
        """`<layer>.<field>`: the documents' rows one after the other."""
        return {
            f"{layer}.{field}": Entry(self.spec.dtype_of(field), list(x.shape), [_bytes(x)])
            for (layer, field), x in sorted(self.tensors.items())
        }

    def overflow(self) -> list[dict[str, Any]]:
        """Values that were finite and are infinite in float16, by layer, field and head."""
        return [
            {"layer": layer, "value": field, "head": head, "count": int(n)}
            for (layer, field), counts in sorted(self.overflowed.items())
            for head, n in zip(self.heads or range(len(counts)), counts)
            if n
        ]


def _bytes(x: Tensor) -> np.ndarray:
    return x.reshape(-1).view(torch.uint8).numpy()


def token_entries(documents: list[Document]) -> dict[str, Entry]:
    """A unit's token file: ids and texts, one after the other, with offsets."""
    spans: dict[int, tuple[int, int]] = {}  # line -> where its text is; parts of a line share it
    texts = bytearray()
    for document in documents:
        if document.line not in spans:
            encoded = document.text.encode("utf-8")
            spans[document.line] = len(texts), len(texts) + len(encoded)
            texts += encoded
    columns = {
        "ids": [i for d in documents for i in d.ids],
        "offsets": [0, *accumulate(map(len, documents))],
        "line": [d.line for d in documents],
        "first_token": [d.first_token for d in documents],
        "text_span": [spans[d.line] for d in documents],
        "positions": [p for d in documents for p in d.positions],
        "position_offsets": [0, *accumulate(len(d.positions) for d in documents)],
    }
    arrays: dict[str, np.ndarray] = {name: np.array(column, dtype=np.int64) for name, column in columns.items()}
    arrays["text_span"] = arrays["text_span"].reshape(-1, 2)
    arrays["text"] = np.frombuffer(bytes(texts), np.uint8)
    return {name: Entry.of(x) for name, x in arrays.items()}
