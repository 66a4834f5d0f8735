"""What a sweep captures: the part of a run that may not change when it is resumed."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Iterable

from ..errors import ArgumentError, CaptureError

VALUES = {
    "state_output": "document",
    "states": "selected",
    "trajectory": "trajectory",
    "decays": "token",
    "betas": "token",
    "writes": "token",
    "state_norms": "token",
}
"""Value -> what its rows are."""

DTYPES = ("float32", "bfloat16", "float16")
_CHOICES = {"on_error": ("raise", "skip"), "long": ("error", "split", "truncate", "skip"), "dtype": DTYPES}


@dataclass(frozen=True)
class Spec:
    """The choices that determine a run's content.

    Attributes:
        values: names from `VALUES`.
        layers: block indices, or None for every recurrent block.
        tokens: for `states`: "last", "all", "every:N", or positions like "0,5,-1".
        dtype: storage dtype of states, writes and keys; decays, betas and norms are float32 always.
        batch_tokens: tokens of a batch, padding included.
        field: of a JSON line, where the text is.
        on_error: "raise" at a bad line, or "skip" and record it.
        long: what to do with a text longer than the model's context: "error", "split", "truncate", "skip".
        special_tokens: whether the tokenizer adds its own (BOS, ...).
        limit: how many documents at most, or None.
        shard_bytes: about how large a shard is.
        backend: that runs the kernels.
    """

    values: tuple[str, ...] = ("state_output",)
    layers: tuple[int, ...] | None = None
    tokens: str = "last"
    dtype: str = "float32"
    batch_tokens: int = 16384
    field: str = "text"
    on_error: str = "raise"
    long: str = "error"
    special_tokens: bool = True
    limit: int | None = None
    shard_bytes: int = 1 << 30
    backend: str = "auto"

    def __post_init__(self) -> None:
        for value in self.values:
            if value not in VALUES:
                raise ArgumentError(f"values: got {value!r}, needs names from {', '.join(VALUES)}")
        if not self.values:
            raise ArgumentError(f"values: got none, needs names from {', '.join(VALUES)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ArgumentError(f"{name}: got {getattr(self, name)!r}, needs one of {', '.join(choices)}")
        for name in ("batch_tokens", "shard_bytes", "limit"):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise ArgumentError(f"{name}: got {number!r}, needs a whole number of at least 1")
        positions_of(self.tokens, 1 << 30)

    def as_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Spec:
        lists = {"values", "layers"}
        return cls(**{k: tuple(v) if k in lists and v is not None else v for k, v in fields.items()})


def digest(content: Any) -> str:
    """A short checksum of anything JSON can hold."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`name: was X, now Y` for every field that differs."""
    lines = []
    for name in sorted({*old, *new}):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            lines.append(f"{prefix}{name}: was {_show(a)}, now {_show(b)}")
    return lines


def _show(x: Any) -> str:
    return ",".join(map(str, x)) if isinstance(x, list) else str(x)


def names(text: str | Iterable[str]) -> tuple[str, ...]:
    """Value names from a list by comma; `linear_attn.` in front is allowed."""
    parts = text.split(",") if isinstance(text, str) else list(text)
    return tuple(part.strip().removeprefix("linear_attn.") for part in parts if part.strip())


def layer_numbers(text: str | Iterable[int] | int | None) -> list[int] | None:
    """Block indices from "0-8,12,-1", ints, or None for all."""
    if text is None:
        return None
    if isinstance(text, int):
        return [text]
    if not isinstance(text, str):
        return [int(n) for n in text]
    numbers: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        span = re.fullmatch(r"(\d+)-(\d+)", part)
        if span:
            first, last = int(span[1]), int(span[2])
            if last < first:
                raise ArgumentError(f"layers: {part!r} runs backwards")
            numbers += range(first, last + 1)
        elif re.fullmatch(r"-?\d+", part):
            numbers.append(int(part))
        else:
            raise ArgumentError(f"layers: got {part!r}, needs numbers and ranges like 0-8,12,-1")
    return numbers


def chosen_layers(text: Any, recurrent: Iterable[int], count: int) -> tuple[int, ...]:
    """The recurrent blocks that `layers` means, in order."""
    have = sorted(recurrent)
    wanted = layer_numbers(text)
    if wanted is None:
        return tuple(have)
    chosen = set()
    for n in wanted:
        layer = n + count if n < 0 else n
        if layer not in have:
            kind = "does not exist" if not 0 <= layer < count else "has no recurrent mixer"
            raise ArgumentError(f"layers: layer {n} {kind}; those that have one: {_ranges(have)}")
        chosen.add(layer)
    return tuple(sorted(chosen))


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def positions_of(tokens: str, length: int) -> list[int]:
    """Token positions in a document of `length` tokens.

    "every:N" is the tokens N-1, 2N-1, ...: the states after N tokens, after 2N, and so on.
    """
    if tokens == "last":
        return [length - 1]
    if tokens == "all":
        return list(range(length)) if length < 1 << 30 else []
    every = re.fullmatch(r"every:(\d+)", tokens)
    if every:
        step = int(every[1])
        if step < 1:
            raise ArgumentError("tokens: every:N needs N of at least 1")
        return list(range(step - 1, length, step)) if length < 1 << 30 else []
    positions = []
    for part in tokens.split(","):
        if not re.fullmatch(r"\s*-?\d+\s*", part):
            raise ArgumentError(f"tokens: got {part.strip()!r}, needs last, all, every:N, or positions like 0,5,-1")
        n = int(part)
        if not -length <= n < length:
            raise CaptureError(f"token {n} is outside of its {length} tokens")
        positions.append(n % length)
    return sorted(set(positions))
