"""Which backend serves a family or a model."""

from __future__ import annotations

from ..errors import ArgumentError
from ..ops.backends import BACKENDS
from .held import DEFAULT
from .spec import MixerSpec

_families: dict[MixerSpec, str] = {}


def checked(backend: str) -> str:
    """`backend` if it is a name that can be routed to."""
    names = ["auto", DEFAULT, *BACKENDS]
    if backend not in names:
        raise ArgumentError(f"backend: {backend!r} is not one of {', '.join(names)}")
    return backend


def of_family(spec: MixerSpec) -> str:
    """The backend of a family's models that have none of their own."""
    return _families.get(spec, "auto")


def route_family(spec: MixerSpec, backend: str) -> None:
    """Choose the backend of every instrumented model of a family, in this process."""
    _families[spec] = checked(backend)
