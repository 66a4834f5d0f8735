"""`tracer.iter`, extended so that a loop can walk the tokens of a call (`mix.state`) as well as the steps.

    for step in tracer.iter[:3]:        # steps of a generation
        for t in tracer.iter[:5]:       # tokens of that step's call
            mix.state

A loop is one over tokens from the first time `state` is asked for in its body. The pin it sets is then a
token; the step is the one that the loop around it had pinned.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import CodeType
from typing import Any, Iterator

from greenlet import getcurrent
from nnsight.intervention.interleaver import Mediator
from nnsight.intervention.iterator import Iterations as NnsightIterations
from nnsight.intervention.tracer import InterleavingTracer


@dataclass
class Loop:
    """One `for ... in tracer.iter[...]` in progress."""

    step: int | None  # what was pinned around it
    index: int = 0
    tokens: int | None = None  # of the call it walks, once it is known to walk one


class Iterations(NnsightIterations):
    """nnsight's, which also remembers its loops on the block that runs them."""

    def __getitem__(self, key: Any) -> Iterations:
        chosen = super().__getitem__(key)
        return Iterations(chosen.start, chosen.stop, chosen.steps)

    def __iter__(self) -> Iterator[int]:
        mediator = getcurrent().mediator()
        loops, loop = _loops(mediator), Loop(mediator.iteration)
        loops.append(loop)
        try:
            for index in super().__iter__():
                if loop.tokens is not None:
                    if self.stop is None and self.steps is None and index >= loop.tokens:
                        break
                    mediator.iteration = loop.step
                loop.index = index
                yield index
        finally:
            loops.remove(loop)

    def execute(self, code: CodeType) -> None:
        mediator = getcurrent().mediator()
        super().execute(code)
        late = mediator.__dict__.pop("late", None)
        if late is not None:
            raise late


class Tracer(InterleavingTracer):
    """nnsight's tracer with our `iter`."""

    @property
    def iter(self) -> Iterations:
        return Iterations()


def token_of(mediator: Mediator) -> int:
    """The token that the innermost loop is at, and the pin put back to the step; without a loop the first token."""
    loops = _loops(mediator)
    if not loops:
        token, mediator.iteration = mediator.iteration or 0, 0
        return token
    mediator.iteration = loops[-1].step
    return loops[-1].index


def walk(mediator: Mediator, tokens: int) -> None:
    """The innermost loop walks a call of this many tokens."""
    loops = _loops(mediator)
    if loops:
        loops[-1].tokens = tokens


def _loops(mediator: Mediator) -> list[Loop]:
    return mediator.__dict__.setdefault("loops", [])
