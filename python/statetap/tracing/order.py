"""Which forward a request in a trace belongs to, and whether the model has already passed it.

nnsight counts how often the model has reached a place. Under `tracer.iter` a request is pinned to a count,
until the first one of a step is served; from then on it means "the forward in progress". If by then this
forward has reached the place as often as the last one did, it is past it, and nnsight would wait for the
next one's value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from greenlet import getcurrent
from nnsight.intervention.interleaver import Mediator

from ..errors import Unavailable
from .errors import NnsightOutOfOrderError, OutOfOrderError

if TYPE_CHECKING:
    from nnsight.intervention.envoy import Envoy
    from nnsight.intervention.interleaver import Interleaver


class Forwards:
    """The forwards of a run, and how often each has reached a place.

    Attributes:
        begun: how many have begun.
    """

    def __init__(self, interleaver: Interleaver) -> None:
        self._interleaver = interleaver
        self.reset()

    def reset(self) -> None:
        """A run begins."""
        self.begun = 0
        self._before: tuple[dict[str, int], dict[str, int]] = ({}, {})  # counts when the last two began

    def begin(self) -> None:
        """A forward begins."""
        self.begun += 1
        self._before = self._before[1], dict(self._interleaver.counts)

    def passed(self, place: str) -> bool:
        """Whether the forward in progress has nothing more to serve at a place."""
        last, this = (counts.get(place, 0) for counts in self._before)
        return self._interleaver.counts.get(place, 0) - this >= max(this - last, 1)


def location(envoy: Envoy, key: str) -> str:
    """nnsight's name for a place in the forward."""
    return f"{envoy.path}.{key}"


def in_a_trace() -> bool:
    """Whether a block of a trace is what is running."""
    return getattr(getcurrent(), "mediator", None) is not None


def mediator_for(envoy: Envoy, name: str) -> Mediator:
    """The block of a trace that is running; raises `Unavailable` outside of a trace."""
    try:
        return Mediator.current(name)
    except ValueError:
        raise Unavailable(
            f"{describe(envoy)}.{name}: no forward is running here. Ask for it inside `with model.trace(...)` or "
            "`model.generate(...)`, and .save() what is needed afterwards."
        ) from None


def check_in_time(envoy: Envoy, key: str, name: str, at: Envoy | None = None) -> None:
    """Raise `OutOfOrderError` if the forward that a request means has already passed `key` of `envoy` (or of `at`)."""
    mediator, forwards = mediator_for(envoy, name), envoy.root._forwards
    place, step = location(at or envoy, key), mediator.iteration
    if mediator.occurrence(place) > step if step is not None else forwards.passed(place):
        _raise_late(mediator, envoy, name, forwards.begun - 1 if step is None else step)


def wait_for(envoy: Envoy, key: str, name: str) -> Any:
    """Park until the model reaches `key` of `envoy`; what is served there."""
    check_in_time(envoy, key, name)
    mediator = mediator_for(envoy, name)
    step = mediator.iteration
    try:
        return Mediator.value(location(envoy, key))
    except NnsightOutOfOrderError:
        if step:  # a loop that outran the generation: nnsight warns and keeps what there is
            raise
        raise OutOfOrderError(
            f"{describe(envoy)}.{name} was never reached: the model ended, or was stopped or skipped, before this "
            "module ran. Ask for it in a forward that runs it."
        ) from None


def describe(envoy: Envoy) -> str:
    """The envoy as one writes it: `layers[3].linear_attn`."""
    if "standard_name" in vars(envoy):
        return vars(envoy)["standard_name"]
    parts = envoy.path.split(".")
    numbered = [f"[{part}]" if part.isdigit() else f".{part}" for part in parts]
    text = "".join(numbered).lstrip(".")
    return text[text.index("layers[") :] if "layers[" in text else text


def _raise_late(mediator: Mediator, envoy: Envoy, name: str, step: int) -> None:
    error = OutOfOrderError(
        f"{describe(envoy)}.{name} was asked for too late (step {step}): the model had already run this module. "
        f"Move the read or write of {name} up, before whatever in this block waits for a later module "
        "(a later layer, layer_output, logits), or into an invoke of its own."
    )
    mediator.late = error  # the deprecated `with tracer.iter[...]` swallows it: see loops.Iterations.execute
    raise error
