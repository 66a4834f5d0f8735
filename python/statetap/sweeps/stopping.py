"""Being asked to stop."""

from __future__ import annotations

from typing import Callable

ShouldStop = Callable[[], bool]


class Interrupted(Exception):
    """The sweep was asked to stop, and did; what is on the disk is whole, and the same command goes on."""


def check(should_stop: ShouldStop) -> None:
    """Raise `Interrupted` if it is time to stop."""
    if should_stop():
        raise Interrupted("asked to stop")
