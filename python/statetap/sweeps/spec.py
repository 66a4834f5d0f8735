"""What a sweep captures: the choices that determine a run's content, and the table of values."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Iterable

from ..errors import ArgumentError
from . import select

CHUNK = 64  # tokens between the states of a trajectory


@dataclass(frozen=True)
class Field:
    """One tensor a layer of a shard.

    Attributes:
        rows: what a row is: a "document", a "token", a "position" (a chosen token) or a "chunk" of `CHUNK` tokens.
        axes: of a row, by name; their sizes are the model's.
        exact: whether it is stored as float32 whatever `dtype` is.
    """

    rows: str
    axes: tuple[str, ...]
    exact: bool = False


_STATE = ("heads", "key_dim", "value_dim")
FIELDS = {
    "state_output": Field("document", _STATE),
    "states": Field("position", _STATE),
    "decays": Field("token", ("heads", "decay_dims"), exact=True),
    "betas": Field("token", ("heads",), exact=True),
    "writes": Field("token", ("heads", "value_dim")),
    "state_norms": Field("token", ("heads",), exact=True),
    "trajectory.chunk_states": Field("chunk", _STATE),
    "trajectory.keys": Field("token", ("key_heads", "key_dim")),
    "trajectory.updates": Field("token", ("heads", "value_dim")),
    "trajectory.decays": Field("token", ("heads", "decay_dims"), exact=True),
    "trajectory.betas": Field("token", ("heads",), exact=True),
    "trajectory.final_state": Field("document", _STATE),
}

VALUES = tuple(dict.fromkeys(name.split(".")[0] for name in FIELDS))
"""What can be asked for; a trajectory is several fields."""

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CHOICES = {
    "dtype": tuple(DTYPES),
    "data_format": ("auto", "text", "jsonl"),
    "on_error": ("raise", "skip"),
    "long": ("error", "split", "truncate", "skip"),
}


@dataclass(frozen=True)
class Spec:
    """The choices that determine a run's content; see `statetap.capture` for what each means."""

    values: tuple[str, ...] = ("state_output",)
    layers: tuple[int, ...] | str | None = None
    heads: tuple[int, ...] | str | None = None
    tokens: str = "last"
    dtype: str = "float32"
    batch_tokens: int = 16384
    data_format: str = "auto"
    field: str = "text"
    on_error: str = "raise"
    long: str = "error"
    special_tokens: bool = True
    limit: int | None = None
    shard_bytes: int = 1 << 30
    backend: str = "auto"

    def __post_init__(self) -> None:
        unknown = [value for value in self.values if value not in VALUES]
        if unknown or not self.values:
            raise ArgumentError(
                f"values: got {', '.join(map(repr, unknown)) or 'none'}, needs names from {', '.join(VALUES)}"
            )
        if len(set(self.values)) < len(self.values):
            raise ArgumentError(f"values: got {','.join(self.values)}, which has one twice")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ArgumentError(f"{name}: got {getattr(self, name)!r}, needs one of {', '.join(choices)}")
        for name in ("batch_tokens", "shard_bytes", "limit"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 1):
                raise ArgumentError(f"{name}: got {number!r}, needs a whole number of at least 1")
        select.check_syntax("layers", self.layers)
        select.check_syntax("heads", self.heads)
        select._terms(self.tokens)
        if self.tokens != "last" and "states" not in self.values:
            raise ArgumentError(
                f"tokens: {self.tokens} chooses where `states` are taken, and values ({','.join(self.values)}) has no "
                "`states`; add it or leave tokens out"
            )

    @property
    def fields(self) -> list[str]:
        """Names of the tensors that a layer has in a shard."""
        return [name for name in FIELDS if name.split(".")[0] in self.values]

    def dtype_of(self, field: str) -> str:
        """Storage dtype of a field."""
        return "float32" if FIELDS[field].exact else self.dtype

    def shape_of(self, field: str, sizes: dict[str, int]) -> list[int]:
        """Shape of a row of a field."""
        return [sizes[axis] for axis in self.axes_of(field, sizes)]

    def axes_of(self, field: str, sizes: dict[str, int]) -> list[str]:
        """Axes of a row of a field; a decay a head has no axis for the key channels."""
        return [axis for axis in FIELDS[field].axes if axis in sizes]

    def identity(self) -> dict[str, Any]:
        """What may not change when a run is gone on with."""
        return {k: v for k, v in _plain(self).items() if k not in POLICIES}

    def policies(self) -> dict[str, Any]:
        """What is done with lines that cannot be captured as they are."""
        return {name: getattr(self, name) for name in POLICIES}


POLICIES = {"on_error": "raise", "long": "error"}
"""Policy -> the choice under which nothing that is done depended on it, so that it may still be changed."""


def _plain(spec: Spec) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(spec)))


def digest(content: Any) -> str:
    """A short checksum of anything JSON can hold."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`name: was X, now Y` for every field that differs."""
    lines = []
    for name in dict.fromkeys([*old, *new]):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            lines.append(f"{prefix}{name}: was {_show(a)}, now {_show(b)}")
    return lines


def policy_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """As `differences`, for policies: one that was at its refusing choice may be changed."""
    fixed = {name: choice for name, choice in old.items() if choice != POLICIES[name]}
    return differences(fixed, {name: new[name] for name in fixed})


def _show(x: Any) -> str:
    return ",".join(map(str, x)) if isinstance(x, list) else str(x)


def value_names(values: str | Iterable[str]) -> tuple[str, ...]:
    """Value names from a list or by comma, in the order of `VALUES`; `linear_attn.` in front is allowed."""
    parts = values.split(",") if isinstance(values, str) else list(values)
    names = [part.strip().removeprefix("linear_attn.") for part in parts if part.strip()]
    return tuple(sorted(names, key=lambda name: VALUES.index(name) if name in VALUES else -1))
