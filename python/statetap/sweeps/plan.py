"""What a sweep would do: `--dry-run`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from .spec import Spec
from .units import Unit, Units
from .values import document_bytes


@dataclass
class Plan:
    """What a sweep would do.

    Attributes:
        documents, tokens, bytes: of the whole corpus.
        bytes_by_value: bytes of each value, over all layers.
        rows_by_value: rows of each value, of one layer; of a trajectory, its tokens.
        layers: that are captured.
        free_bytes: on the disk of the output.
        seconds: estimated from one batch.
        skipped: how many lines would be left out.
        first_skipped: the first of them, with reasons, at most ten.
    """

    documents: int
    tokens: int
    bytes: int
    bytes_by_value: dict[str, int]
    rows_by_value: dict[str, int]
    layers: tuple[int, ...]
    free_bytes: int
    seconds: float
    skipped: int
    first_skipped: list[tuple[int, str]]


_KINDS = {"state_output": "document", "states": "position"}


def plan(units: Units, spec: Spec, sizes: dict[str, int], output: Path, rate: Callable[[Unit], float]) -> Plan:
    """Read the whole corpus and run one batch; write nothing.

    Args:
        rate: tokens a second, measured on a unit's first batch.
    """
    found = Plan(0, 0, 0, {}, {}, spec.layers or (), free_bytes(output), 0.0, 0, [])  # type: ignore[arg-type]
    costs: dict[str, Any] = {value: document_bytes(spec, sizes, value) for value in spec.values}
    speed = 0.0
    while (unit := units.next()) is not None:
        found.documents += len(unit.documents)
        found.tokens += unit.tokens
        found.bytes += unit.size
        found.skipped += len(unit.skipped)
        found.first_skipped += unit.skipped[: 10 - len(found.first_skipped)]
        for value, cost in costs.items():
            kind = _KINDS.get(value, "token")
            found.bytes_by_value[value] = found.bytes_by_value.get(value, 0) + sum(map(cost, unit.documents))
            rows = sum(document.rows(kind) for document in unit.documents)
            found.rows_by_value[value] = found.rows_by_value.get(value, 0) + rows
        if not speed and unit.documents:
            speed = rate(unit)
    found.seconds = found.tokens / speed if speed else 0.0
    return found


def free_bytes(path: Path) -> int:
    """Free space where `path` is, or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
