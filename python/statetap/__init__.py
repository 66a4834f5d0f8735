"""statetap: the recurrent states of hybrid language models, captured and edited."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import ArgumentError as ArgumentError
from .errors import CaptureError as CaptureError
from .errors import Error as Error
from .errors import Unavailable as Unavailable
from .errors import UnsupportedCall as UnsupportedCall
from .errors import UnsupportedFamily as UnsupportedFamily

__version__ = "0.1.0"

# Public names that load their module when they are first used: `import statetap` stays light.
_HOME = {
    "ops": (
        "gated_delta_rule",
        "chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
        "chunk_kda",
        "Taps",
        "StateWrite",
        "RecurrenceOutput",
        "Trajectory",
    ),
    "tracing": ("StandardizedTransformer", "route_kernels", "OutOfOrderError"),
    "sweeps": ("capture", "open", "verify"),
}
_LAZY = {name: module for module, names in _HOME.items() for name in names}
_MODULES = ("ops", "mixers", "families", "tracing", "sweeps", "analysis")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, *_MODULES])
