"""Bytes that the kernels move for a call, computed from its shapes; and the time that they take at least.

Each tensor is counted once for each kernel that reads or writes it (tiles that read it again find it in the L2 cache).
The time is an estimate: bytes over bandwidth, with no word about arithmetic or launches.
"""

from __future__ import annotations

from dataclasses import dataclass

from .launch import CHUNK

H200_BANDWIDTH = 4.8e12
"""Bytes a second, as its maker gives it."""


@dataclass(frozen=True)
class Shape:
    """A call: `tokens` in all rows, `rows` states, heads and dims; bytes of an input number, pieces of an fp32 one."""

    tokens: int
    rows: int = 1
    Hk: int = 16
    Hv: int = 64
    K: int = 128
    V: int = 128
    width: int = 2
    pieces: int = 2

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.rows // CHUNK) * self.rows

    @property
    def keys(self) -> int:
        return self.tokens * self.Hk * self.K * self.width

    @property
    def values(self) -> int:
        return self.tokens * self.Hv * self.V * self.width

    @property
    def per_token(self) -> int:
        """One fp32 number a token and value head."""
        return self.tokens * self.Hv * 4

    @property
    def square(self) -> int:
        """A chunk by chunk matrix a chunk and value head, in bf16 pieces."""
        return self.tokens * self.Hv * CHUNK * 2 * self.pieces

    @property
    def states(self) -> int:
        """fp32 states of every row."""
        return self.rows * self.Hv * self.K * self.V * 4

    @property
    def chunk_states(self) -> int:
        return self.chunks * self.Hv * self.K * self.V * 4

    @property
    def updates(self) -> int:
        return self.tokens * self.Hv * self.V * 4


def plain(s: Shape) -> dict[str, int]:
    """Bytes of each kernel of a call with a decay per head, outputs in the scan, normalised, with an initial state."""
    factors = 2 * s.tokens * s.Hk * 4
    return {
        "prepare": 2 * s.keys + factors,
        "solve": 2 * s.keys + factors + 2 * s.per_token + 2 * s.square + 3 * s.per_token + s.chunks * s.Hv * 4,
        "scan": 2 * s.keys + 2 * s.square + 3 * s.per_token + s.chunks * s.Hv * 4 + 2 * s.values + 2 * s.states,
    }


def tap(s: Shape, name: str, probes: int = 8) -> int:
    """Bytes that a tap adds: what it gives, and what is kept or read for that."""
    kept = s.chunk_states + s.updates
    own_keys = s.tokens * s.Hk * s.K * 4
    return {
        "trajectory": kept + own_keys,
        "states": 2 * kept + 2 * own_keys + s.tokens * s.Hv * s.K * s.V * 4,
        "norms": 2 * own_keys + (s.V // 16 + 3) * s.per_token,
        "probes": 2 * kept + 2 * own_keys + s.per_token + s.Hv * probes * (s.K * 4 + s.tokens * s.V * s.width),
    }[name]


def floor(s: Shape) -> int:
    """What any kernel must move for the plain call: inputs and outputs once, states once."""
    return 2 * s.keys + 2 * s.values + 2 * s.per_token + 2 * s.states


def seconds(nbytes: float, bandwidth: float = H200_BANDWIDTH) -> float:
    """An estimate from below: the time to move so many bytes."""
    return nbytes / bandwidth


def table(s: Shape) -> str:
    """Bytes a token and value head, and the estimated time on an H200, of each kernel and tap."""
    count = s.tokens * s.Hv
    parts = plain(s)
    rows = {**parts, "all of them": sum(parts.values()), "floor of any kernel": floor(s)}
    rows |= {f"tap: {name}": tap(s, name) for name in ("trajectory", "norms", "probes", "states")}
    lines = [f"{s.tokens} tokens, {s.Hv} heads, {s.pieces} pieces: bytes a token and head, ms on an H200 (estimates from bytes alone)"]
    return "\n".join(lines + [f"  {name:22s}{n / count:10.0f}{seconds(n) * 1e3:10.3f}" for name, n in rows.items()])


if __name__ == "__main__":
    print(table(Shape(tokens=8192)))
