"""What the tests of traced models share: a prompt, the rule in fp64, tolerance, a prompt run in pieces on one cache."""

from __future__ import annotations

import inspect

from torch import Tensor

from statetap import Taps, ops

PROMPT = "The Eiffel Tower is in the city of"
SERVED = ("attention_queries", "attention_keys", "attention_values", "decays", "betas")


def rule(q, k, v, g, beta, state=None):
    """The fp64 recurrence over served values: outputs, final state, states."""
    a = [x.double() for x in (q, k, v, g, beta)]
    out = ops.gated_delta_rule(
        *a,
        initial_state=None if state is None else state.double(),
        use_qk_l2norm_in_kernel=True,
        taps=Taps(states="all"),
        backend="reference",
    )
    return out.outputs, out.final_state, out.states


def near(x: Tensor, y: Tensor, rtol: float = 1e-4) -> None:
    """Equal to rtol of the largest value."""
    assert x.shape == y.shape, (x.shape, y.shape)
    error = (x.double() - y.double()).abs().max()
    assert error <= rtol * y.abs().max() + 1e-7, error


class Cached:
    """Calls on one cache: `with model.trace(**cached.given(input_ids=...))`, then `cached.keep` of its output."""

    def __init__(self, model) -> None:
        parameters = inspect.signature(type(model._module).forward).parameters
        self.name = "cache" if "cache" in parameters else "past_key_values"  # before transformers 5.24
        self.cache = None

    def given(self, **inputs):
        return {"use_cache": True, **inputs, **({} if self.cache is None else {self.name: self.cache})}

    def keep(self, result) -> None:
        self.cache = getattr(result, self.name, None) or result.past_key_values
