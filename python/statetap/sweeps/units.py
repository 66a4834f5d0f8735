"""Lines into documents, documents into units of work: by the corpus and the specification alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable

from ..errors import CaptureError
from .data import BadLine, Corpus
from .select import token_positions
from .spec import CHUNK, Spec, digest

UNIT_LINES, UNIT_DOCUMENTS, UNIT_BATCHES = 8192, 1024, 32


@dataclass
class Document:
    """One row of a run: a text's tokens, or a part of them.

    Attributes:
        line: of the input, from 1.
        text: the line's, whole.
        ids: token ids.
        first_token: where `ids` begins in the text's tokens, if the text was split.
        positions: in `ids`, where `states` are wanted.
    """

    line: int
    text: str
    ids: list[int]
    first_token: int = 0
    positions: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, kind: str) -> int:
        """How many rows it has in a field whose rows are of this kind."""
        if kind == "document":
            return 1
        if kind == "position":
            return len(self.positions)
        return len(self) if kind == "token" else -(-len(self) // CHUNK)


@dataclass
class Unit:
    """The documents of consecutive lines: one shard. `checksum` is of the lines as they were read, bad ones too."""

    number: int
    first_line: int
    lines: int = 0
    documents: list[Document] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    long: list[tuple[int, int]] = field(default_factory=list)  # lines that were split or truncated, their tokens
    last: bool = False  # whether the corpus ended before the unit was full
    tokens: int = 0
    size: int = 0  # of its shard, in bytes

    def __post_init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add_line(self, raw: bytes) -> None:
        self.lines += 1
        self._hash.update(len(raw).to_bytes(8, "little") + raw)

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest()

    def record(self, first_document: int) -> dict[str, Any]:
        """What the unit's shard says of it."""
        return {
            "unit": self.number,
            "first_line": self.first_line,
            "lines": self.lines,
            "lines_checksum": self.checksum,
            "last": self.last,
            "first_document": first_document,
            "rows": {k: sum(d.rows(k) for d in self.documents) for k in ("document", "token", "position", "chunk")},
            "skipped": self.skipped,
            "long": self.long,
        }


class Units:
    """The units of a corpus, one after the other: each is made (`next`) or, if it is done already, passed over.

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
        self.documents = 0  # before the next unit
        self.number = 0  # of the next unit
        self._lines = iter(corpus)
        self._next_line = 1
        self._ended = False  # a unit that was passed over was the last

    def next(self) -> Unit | None:
        """The next unit, or None at the end of the corpus or at the limit."""
        unit = Unit(self.number, self._next_line)
        while not self._is_full(unit):
            number, raw = next(self._lines, (0, b""))
            if not number:
                unit.last = True
                break
            if self._ended:
                raise CaptureError(
                    f"data: {self.corpus.shown} has more lines than the {number - 1} of this run. Use another output, "
                    "or --overwrite."
                )
            self._next_line = number + 1
            unit.add_line(raw)
            for document in self._captured(unit, number, raw):
                unit.documents.append(document)
                unit.tokens += len(document)
                unit.size += self.document_bytes(document)
        if not unit.lines:
            return None
        self._count(len(unit.documents))
        return unit

    def pass_over(self, record: dict[str, Any]) -> None:
        """Read the lines of a unit that is done, and make sure that they are those it was made of.

        Raises:
            CaptureError: the corpus has changed.
        """
        unit = Unit(self.number, self._next_line)
        for _ in range(record["lines"]):
            number, raw = next(self._lines, (0, b""))
            if not number:
                break
            self._next_line = number + 1
            unit.add_line(raw)
        if (unit.first_line, unit.lines, unit.checksum) != (
            record["first_line"],
            record["lines"],
            record["lines_checksum"],
        ):
            raise CaptureError(
                f"data: lines {unit.first_line}-{unit.first_line + record['lines'] - 1} of {self.corpus.shown} are not "
                f"those of this run: their checksum was {record['lines_checksum']}, now {unit.checksum}. Use another "
                "output, or --overwrite."
            )
        self._ended = record["last"]
        self._count(record["rows"]["document"])

    def _count(self, documents: int) -> None:
        self.documents += documents
        self.number += 1

    def _is_full(self, unit: Unit) -> bool:
        limit = self.spec.limit
        return (
            (limit is not None and self.documents + len(unit.documents) >= limit)
            or unit.lines >= UNIT_LINES
            or len(unit.documents) >= UNIT_DOCUMENTS
            or unit.tokens >= UNIT_BATCHES * self.spec.batch_tokens
            or unit.size >= self.spec.shard_bytes
        )

    def _captured(self, unit: Unit, number: int, raw: bytes) -> list[Document]:
        """The documents of a line; none if it is left out, which the unit records."""
        try:
            documents, tokens = self._documents(number, raw)
            if len(documents) > 1 or len(documents[0]) < tokens:
                unit.long.append((number, tokens))
            return documents
        except _LeftOut as reason:
            unit.skipped.append((number, str(reason)))
        except CaptureError as reason:
            if self.spec.on_error == "raise":
                raise CaptureError(
                    f"{self.corpus.shown}, line {number}: {reason}. Pass --on-error skip to leave such lines out and "
                    "go on, or mend the file and start anew."
                ) from None
            unit.skipped.append((number, str(reason)))
        return []

    def _documents(self, number: int, raw: bytes) -> tuple[list[Document], int]:
        """What a line becomes, and how many tokens its text has."""
        text = self.corpus.text(raw)
        ids = self.encode(text)
        if not ids:
            raise BadLine("the tokenizer makes no tokens of it")
        choose = self.spec.tokens if "states" in self.spec.values else None
        documents = [
            Document(number, text, part, first, [] if choose is None else token_positions(choose, len(part)))
            for first, part in self._parts(ids)
        ]
        return documents, len(ids)

    def _parts(self, ids: list[int]) -> list[tuple[int, list[int]]]:
        """(first token, ids) of the documents that a text becomes."""
        context = self.context
        if context is None or len(ids) <= context:
            return [(0, ids)]
        if self.spec.long == "truncate":
            return [(0, ids[:context])]
        if self.spec.long == "split":
            return [(i, ids[i : i + context]) for i in range(0, len(ids), context)]
        reason = f"{len(ids)} tokens, and the model takes {context}"
        if self.spec.long == "skip":
            raise _LeftOut(reason)
        raise BadLine(f"{reason} (or --long split, truncate or skip)")


class _LeftOut(Exception):
    """A text that is left out because it is too long, whatever is done with bad lines."""


class Totals:
    """What the units come to, added up as they pass."""

    def __init__(self) -> None:
        self.units = self.lines = self.documents = self.tokens = self.skipped = self.overflowed = 0
        self._lines_checksum = ""

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]]) -> Totals:
        totals = cls()
        for record in records:
            totals.add(record)
        return totals

    def add(self, record: dict[str, Any]) -> None:
        self.units += 1
        self.lines += record["lines"]
        self.documents += record["rows"]["document"]
        self.tokens += record["rows"]["token"]
        self.skipped += len(record["skipped"])
        self.overflowed += sum(where["count"] for where in record["overflow"])
        self._lines_checksum = digest([self._lines_checksum, record["lines_checksum"]])

    def as_dict(self) -> dict[str, Any]:
        counts = ("units", "lines", "documents", "tokens", "skipped", "overflowed")
        return {**{name: getattr(self, name) for name in counts}, "lines_checksum": self._lines_checksum}
