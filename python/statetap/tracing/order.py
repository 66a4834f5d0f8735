"""Which forward a request in a trace belongs to, and whether the model has already passed it.

nnsight counts how often the model has reached a place. Under `tracer.iter` a request is pinned to a count,
until the first one of a step is served; from then on it means "the forward in progress". If by then the
place has been reached as often as a forward has begun, this forward is past it, and nnsight would wait
for the next one's value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight.intervention.interleaver import Mediator

from .errors import NnsightOutOfOrderError, OutOfOrderError

if TYPE_CHECKING:
    from nnsight.intervention.envoy import Envoy


def location(envoy: Envoy, key: str) -> str:
    """nnsight's name for a place in the forward."""
    return f"{envoy.path}.{key}"


def mediator_for(envoy: Envoy, name: str) -> Mediator:
    """The block of a trace that is running; raises ValueError outside of a trace."""
    return Mediator.current(f"{envoy.path}.{name}")


def check_in_time(envoy: Envoy, key: str, name: str, at: Envoy | None = None) -> None:
    """Raise `OutOfOrderError` if the forward that a request means has already passed `key` of `envoy` (or of `at`)."""
    mediator = mediator_for(envoy, name)
    passed = mediator.occurrence(location(at or envoy, key))
    begun = envoy.root._forwards  # of this run; see StandardizedTransformer
    if passed > mediator.iteration if mediator.iteration is not None else passed >= begun:
        step = begun - 1 if mediator.iteration is None else mediator.iteration
        _raise_late(mediator, envoy, name, step)


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
