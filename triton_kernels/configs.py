"""Tile sizes, warps and stages: one table, as data. Nothing is tuned at run time.

A row is taken for the first match from the top: kernel, architectures, the largest padded key_dim, and the pieces
that an fp32 number is split into. Registers and spills of every row on every chip are in `budget.json`, and
`make kernels-check` holds them there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class Config:
    """BV: value channels of a tile; KB: key channels; rows: tokens; fused: the scan gives the outputs too, and
    the solve inverts its triangle; else that is a kernel of its own."""

    warps: int = 4
    stages: int = 2
    BV: int = 32
    KB: int = 32
    rows: int = 16
    fused: bool = True

    def at_most(self, value_dim: int) -> Config:
        """With a tile no wider than the (padded) value_dim."""
        return self if self.BV <= value_dim else replace(self, BV=value_dim)


@dataclass(frozen=True)
class Row:
    kernel: str
    config: Config
    archs: tuple[str, ...] = ARCHS
    key_dim: int = 256
    pieces: tuple[int, ...] = (1, 2, 3)
    channels: bool | None = None
    inputs: tuple[int, ...] = (1, 2, 3)  # pieces of queries and keys: 1 bf16, 2 fp16, 3 fp32


TABLE = (
    Row("prepare", Config(rows=16)),
    Row("solve", Config(fused=False), ("sm_80",)),
    Row("solve", Config(fused=False), ("sm_90", "sm_100"), inputs=(3,)),
    Row("solve", Config(fused=False), ("sm_100",), pieces=(2, 3)),
    Row("solve", Config(warps=8), ("sm_90",), pieces=(2, 3)),
    Row("solve", Config()),
    Row("invert", Config(warps=8), ("sm_80", "sm_100"), pieces=(2, 3)),
    Row("invert", Config()),
    Row("decay", Config(KB=32)),
    Row("products", Config(KB=16), ("sm_90",)),
    Row("products", Config(KB=32)),
    # the norms' recursion beside it: narrower tiles
    Row("scan with norms", Config(BV=16, warps=8), ("sm_80",), 128, channels=False),
    Row("scan with norms", Config(BV=16), ("sm_90",), 128, channels=False),
    Row("scan with norms", Config(BV=16, warps=8), ("sm_100",), 128, channels=False),
    Row("scan with norms", Config(BV=16, stages=1), ("gfx942",), 128, channels=False),
    Row("scan with norms", Config(BV=16, stages=1, warps=8)),
    # a decay per head
    Row("scan", Config(BV=32, warps=8), ("sm_80",), 128, (1,), False),
    Row("scan", Config(BV=16, warps=8), ("sm_80",), 128, (2,), False),
    Row("scan", Config(BV=16, warps=8, fused=False), ("sm_80",), 128, (3,), False),
    Row("scan", Config(BV=16), ("sm_100",), 128, (1, 2), False, inputs=(2,)),
    Row("scan", Config(BV=32), ("sm_90", "sm_100"), 128, (1, 2), False),
    Row("scan", Config(BV=16, fused=False), ("sm_90",), 128, (3,), False),
    Row("scan", Config(BV=16, stages=1, fused=False), ("sm_100",), 128, (3,), False),
    Row("scan", Config(BV=32, stages=1), ("gfx942",), 128, (1, 2), False),
    # a decay per key channel: decayed copies of queries and keys take three times the shared memory
    Row("scan", Config(BV=32), ("sm_90", "sm_100"), 128, (1,), True),
    Row("scan", Config(BV=32, fused=False), ("sm_90", "sm_100"), 128, (2,), True),
    Row("scan", Config(BV=16, warps=8, stages=1, fused=False), ("sm_90",), 128, (3,), True),
    Row("scan", Config(BV=32, stages=1), ("gfx942",), 128, (1, 2), True),
    Row("scan", Config(BV=16, stages=1, fused=False), ("sm_80", "sm_100"), 128, channels=True),
    # wide keys
    Row("scan", Config(BV=16, fused=False), ("sm_90",), 256, (1, 2), False),
    Row("scan", Config(BV=16, stages=1, fused=False), ("gfx942",)),
    Row("scan", Config(BV=16, warps=8, stages=1, fused=False)),
    Row("output", Config(BV=32)),
    Row("replay", Config(BV=32), key_dim=128),
    Row("replay", Config(BV=16)),
    Row("probe", Config(BV=32), key_dim=128),
    Row("probe", Config(BV=16, warps=8)),
    Row("step", Config(BV=16)),
)


@cache  # asked at every launch
def lookup(kernel: str, arch: str, key_dim: int, pieces: int, channels: bool = False, inputs: int = 1) -> Config:
    """The first row that matches. An architecture that the table does not know is served as its nearest relative."""
    known = nearest(arch)
    for row in TABLE:
        fits = known in row.archs and key_dim <= row.key_dim and pieces in row.pieces and inputs in row.inputs
        if row.kernel == kernel and fits and row.channels in (None, channels):
            return row.config
    raise LookupError(f"no configuration of {kernel} for {arch}, key_dim {key_dim}, {pieces} pieces")


def nearest(arch: str) -> str:
    """The table's name for an architecture; one with less shared memory than its relatives (sm_86, sm_89, sm_120) has
    the rows of sm_80, the most modest ones."""
    if arch.startswith("gfx"):
        return "gfx942"
    return {"sm_90": "sm_90", "sm_100": "sm_100", "sm_103": "sm_100"}.get(arch, "sm_80")
