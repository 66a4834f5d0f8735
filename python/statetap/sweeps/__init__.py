"""Sweeps: states of a corpus into a directory, and back. Names load their module when they are first used."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "capture": "runner",
    "Plan": "plan",
    "Interrupted": "stopping",
    "open": "reader",
    "Run": "reader",
    "Row": "row",
    "Column": "column",
    "verify": "verify",
    "Spec": "spec",
    "VALUES": "spec",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = found  # `verify` is also a module's name: the function is what is meant
    return found
