"""The documents of a unit into batches, by the documents alone."""

from __future__ import annotations

from typing import Iterator

from .units import Document


def batches(documents: list[Document], budget: int) -> Iterator[list[int]]:
    """Indices of documents that are run together: of like length, at most `budget` tokens with their padding.

    A document longer than `budget` is a batch of its own.
    """
    by_length = sorted(range(len(documents)), key=lambda i: (-len(documents[i]), i))
    batch: list[int] = []
    for i in by_length:
        if batch and (len(batch) + 1) * len(documents[batch[0]]) > budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
