"""Which mixer is calling its kernel now.

A kernel cannot know which layer called it; the mixer's forward can. So an instrumented mixer stands on
this thread's stack while its forward runs, and the dispatcher in the kernel's place looks here.

A thread-local and not a context variable: dynamo cannot trace the latter, and the dispatchers are also
in the way of other people's plain models, which they may compile with `fullgraph=True`.
"""

from __future__ import annotations

import threading
from typing import Any

_thread = threading.local()


def enter(mixer: Any) -> None:
    """Put `mixer` on top of this thread's stack: its forward begins."""
    if not hasattr(_thread, "mixers"):
        _thread.mixers = []
    _thread.mixers.append(mixer)


def leave() -> None:
    """Take the top off again: the forward ended, or raised."""
    _thread.mixers.pop()


def mixer() -> Any | None:
    """The mixer whose forward runs in this thread, or None."""
    mixers = getattr(_thread, "mixers", None)
    return mixers[-1] if mixers else None


class standing_aside:
    """While a call is served, whatever runs (a user's code, another model) is nobody's mixer."""

    def __enter__(self) -> None:
        enter(None)

    def __exit__(self, *exc: object) -> None:
        leave()
