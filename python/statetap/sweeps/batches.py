"""Documents into units of work, and a unit into batches. Both depend on the corpus and the specification alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

from ..errors import CaptureError
from .data import Corpus, Line
from .spec import Spec, positions_of

UNIT_DOCUMENTS = 1024
UNIT_BATCHES = 32


@dataclass
class Document:
    """One row of a run: a text's tokens, or a part of them."""

    line: int
    text: str
    ids: list[int]
    first_token: int = 0
    positions: list[int] = field(default_factory=list)  # where `states` are wanted

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Unit:
    """Documents of consecutive lines: one shard. `checksum` is of the lines as they were read, bad ones too."""

    number: int
    first_line: int
    lines: int = 0
    documents: list[Document] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    bytes: int = 0

    def __post_init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add_line(self, line: Line) -> None:
        self.lines += 1
        self._hash.update(len(line.raw).to_bytes(8, "little") + line.raw)

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest()


class Units:
    """The units of a corpus, one after the other.

    Args:
        corpus: where the lines come from.
        spec: limits, and what is done with bad and long texts.
        encode: text to token ids.
        context: the longest text the model takes, in tokens, or None.
        document_bytes: how many bytes a document takes in a shard.
    """

    def __init__(
        self,
        corpus: Corpus,
        spec: Spec,
        encode: Callable[[str], list[int]],
        context: int | None,
        document_bytes: Callable[[Document], int],
    ) -> None:
        self.corpus, self.spec, self.encode, self.context = corpus, spec, encode, context
        self.document_bytes = document_bytes
        self._lines: Iterator[Line] | None = None
        self._next_line = 1
        self._documents = 0
        self._number = 0

    def replay(self, done: list[dict[str, Any]]) -> None:
        """Pass over the lines of the units that are done, and make sure that they are the same lines.

        Raises:
            CaptureError: the corpus has changed.
        """
        for record in done:
            unit = Unit(record["unit"], self._next_line)
            for line in self._take(record["lines"]):
                unit.add_line(line)
            if unit.lines != record["lines"] or unit.checksum != record["lines_checksum"]:
                first, last = record["first_line"], record["first_line"] + record["lines"] - 1
                raise CaptureError(
                    f"data: lines {first}-{last} of {self.corpus.name} are not those of this run: checksum was "
                    f"{record['lines_checksum']}, now {unit.checksum}. Use another output, or --overwrite."
                )
            self._documents += record["documents"]
            self._number = record["unit"] + 1

    def __iter__(self) -> Iterator[Unit]:
        while True:
            unit = Unit(self._number, self._next_line)
            self._number += 1
            ended = self._fill(unit)
            if unit.lines:
                yield unit
            if ended:
                return

    def at_end(self) -> bool:
        """Whether the corpus (or the limit) has nothing more."""
        if self._full():
            return True
        return next(iter(self._take(1)), None) is None

    def _take(self, count: int) -> Iterator[Line]:
        self._lines = self._lines or self.corpus.lines()
        for _ in range(count):
            line = next(self._lines, None)
            if line is None:
                return
            self._next_line = line.number + 1
            yield line

    def _full(self) -> bool:
        return self.spec.limit is not None and self._documents >= self.spec.limit

    def _fill(self, unit: Unit) -> bool:
        """Add lines until the unit is large enough; whether the corpus ended."""
        tokens = 0
        while not self._full():
            line = next(iter(self._take(1)), None)
            if line is None:
                return True
            unit.add_line(line)
            try:
                documents = self._documents_of(line)
            except _TooLong as problem:
                unit.skipped.append((line.number, str(problem)))
                continue
            except CaptureError as problem:
                self._bad(unit, line, str(problem))
                continue
            unit.documents += documents
            self._documents += len(documents)
            unit.bytes += sum(map(self.document_bytes, documents))
            tokens += sum(map(len, documents))
            enough = len(unit.documents) >= UNIT_DOCUMENTS or tokens >= UNIT_BATCHES * self.spec.batch_tokens
            if enough or unit.bytes >= self.spec.shard_bytes:
                return False
        return True

    def _bad(self, unit: Unit, line: Line, problem: str) -> None:
        if self.spec.on_error == "raise":
            raise CaptureError(
                f"{self.corpus.name}, line {line.number}: {problem}. Mend the line, or pass --on-error skip to leave "
                "such lines out."
            )
        unit.skipped.append((line.number, problem))

    def _documents_of(self, line: Line) -> list[Document]:
        if line.text is None:
            raise CaptureError(line.problem)
        ids = self.encode(line.text)
        if not ids:
            raise CaptureError("the tokenizer makes no tokens of it")
        parts = [(0, ids)]
        if self.context is not None and len(ids) > self.context:
            parts = self._shorten(ids)
        wants_states = "states" in self.spec.values
        return [
            Document(
                line.number, line.text, part, first, positions_of(self.spec.tokens, len(part)) if wants_states else []
            )
            for first, part in parts
        ]

    def _shorten(self, ids: list[int]) -> list[tuple[int, list[int]]]:
        context = self.context or 0
        if self.spec.long == "truncate":
            return [(0, ids[:context])]
        if self.spec.long == "split":
            return [(i, ids[i : i + context]) for i in range(0, len(ids), context)]
        problem = f"{len(ids)} tokens, and the model takes {context}"
        if self.spec.long == "skip":
            raise _TooLong(problem)
        raise CaptureError(f"{problem} (--long split, truncate or skip)")


class _TooLong(CaptureError):
    """A text that is left out because it is too long, whatever is done with bad lines."""


def batches(documents: list[Document], budget: int) -> Iterator[list[int]]:
    """Indices of documents that are run together: of like length, at most `budget` tokens with their padding."""
    by_length = sorted(range(len(documents)), key=lambda i: (-len(documents[i]), i))
    batch: list[int] = []
    for i in by_length:
        if batch and (len(batch) + 1) * len(documents[batch[0]]) > budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
