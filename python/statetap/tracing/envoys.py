"""The envoys of a block's parts: what `model.layers[i]`, its attention and its MLP serve."""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

from nnsight.intervention.envoy import Envoy
from nnsight.intervention.interleaver import Mediator
from torch import Tensor

from ..errors import ArgumentError, Unavailable
from . import loops
from .order import describe, in_a_trace, location, mediator_for, wait_for
from .values import CallValue, InTime, ModuleValue

CALL = "call"  # the place in the forward where a mixer's kernel call is served


class Module(Envoy):
    """Any module's envoy: nnsight's, whose values are never the next step's, and which takes no name that it lacks."""

    inputs = InTime.of(Envoy.inputs)
    input = InTime.of(Envoy.input)
    output = InTime.of(Envoy.output)

    def _resolve_envoy_class(self, module: Any, path: str) -> type[Envoy]:
        found = super()._resolve_envoy_class(module, path)
        return Module if found is Envoy else found

    def __setattr__(self, name: str, value: Any) -> None:
        """An assignment in a trace is an edit: one that would reach nothing is an error."""
        if in_a_trace() and not name.startswith("_"):
            known = getattr(type(self), name, None)
            if inspect.isfunction(known):
                raise ArgumentError(f"{describe(self)}.{name} is a method: call it")
            if known is None:
                values = ", ".join(getattr(self, "VALUES", ("input", "output")))
                raise ArgumentError(f"{describe(self)} has no value {name!r} to assign; it has {values}")
        super().__setattr__(name, value)


class CallEnvoy(Module):
    """An envoy whose values are those of one held kernel call a forward.

    A block of the trace parks once for the call, at one place; from then until it waits for something else,
    every value is read from and written to the call it was handed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # block of the trace -> (which call of the run, the call seen by the block's rows)
        self._held: WeakKeyDictionary[Mediator, tuple[int, Any]] = WeakKeyDictionary()

    def _call(self, name: str) -> Any:
        """The call that `name` belongs to, for the rows of the running block."""
        reason = self._unavailable()
        if reason is not None:
            raise Unavailable(f"{describe(self)}.{name}: {reason}")
        mediator = mediator_for(self, name)
        occurrence, call = self._held.get(mediator, (-1, None))
        # a step's call can still be open when the next step's body begins: the pin tells them apart
        wanted = mediator.iteration if mediator.iteration is not None else occurrence
        if call is not None and not call.closed and occurrence == wanted:
            return call
        call = wait_for(self, CALL, name)
        batcher, group = mediator.interleaver.batcher, mediator.batch_group
        if group is not None and batcher is not None and batcher.batching:
            call = call.part(*_rows(group, batcher.total, call))
        self._held[mediator] = mediator.occurrence(location(self, CALL)), call
        return call

    def _unavailable(self) -> str | None:
        """Why the call's values cannot be had, or None."""
        return None


def _rows(group: list, total: int, call: Any) -> tuple[int, int]:
    """A block's rows of the call's batch: beams of a row lie next to each other."""
    start, size = group
    beams = call.batch // total
    return start * beams, size * beams


class LinearAttention(CallEnvoy):
    """A recurrent mixer. `heads` are the value heads; queries and keys are repeated to them.

    Values are served in any order, at every step, as copies that may be edited in place.
    """

    attention_output = ModuleValue("`[batch, seq, hidden]`: what the mixer adds to the residual stream.")
    attention_queries = CallValue("`[batch, seq, heads, key_dim]`, before l2-norm and scale.", "queries")
    attention_keys = CallValue("`[batch, seq, heads, key_dim]`, before l2-norm.", "keys")
    attention_values = CallValue("`[batch, seq, heads, value_dim]`.", "values")
    decays = CallValue("`[batch, seq, heads]` fp32, <= 0: log of how much of the state each token keeps.")
    betas = CallValue("`[batch, seq, heads]`: how strongly each token is written.")
    state_input = CallValue("`[batch, heads, key_dim, value_dim]`: the state the call starts from; None on a prompt.")
    state_output = CallValue("`[batch, heads, key_dim, value_dim]`: the state after the call's last token.")
    attention_head_outputs = CallValue("`[batch, seq, heads, value_dim]`: each head's read.", "head_outputs")

    _WRITE = "write a state with set_state_after(token, value), or assign `state` in a loop over tracer.iter"
    _DERIVED = "it is computed from queries, keys, values, decays, betas and states; edit those"
    states = CallValue(
        "`[batch, seq, heads, key_dim, value_dim]`: the state after every token.", "all_states", instead=_WRITE
    )
    trajectory = CallValue("Every state without loss: `statetap.ops.Trajectory`.", instead=_DERIVED)
    writes = CallValue("`[batch, seq, heads, value_dim]`: what each token wrote.", instead=_DERIVED)
    state_norms = CallValue("`[batch, seq, heads]`: Frobenius norm of every state.", instead=_DERIVED)
    effective_attention = CallValue(
        "Exact weights `[batch, heads, seq, seq]` and remainder `[batch, seq, heads, value_dim]`.", instead=_DERIVED
    )

    VALUES = (
        "attention_output",
        "attention_queries",
        "attention_keys",
        "attention_values",
        "decays",
        "betas",
        "state_input",
        "state_output",
        "attention_head_outputs",
        "states",
        "state",
        "state_after",
        "set_state_after",
        "trajectory",
        "writes",
        "state_norms",
        "effective_attention",
        "read",
    )

    @property
    def state(self) -> Tensor:
        """`[batch, heads, key_dim, value_dim]`: after the token that `tracer.iter` is at; assign or edit to write."""
        token, call = self._token("state")
        return call.state_after(token)

    @state.setter
    def state(self, value: Tensor) -> None:
        token, call = self._token("state")
        call.set_state_after(token, value)

    def state_after(self, token: int) -> Tensor:
        """The state after `token` (negative: from the end), `[batch, heads, key_dim, value_dim]`.

        Editing it in place writes it.
        """
        return self._call("state_after").state_after(token)

    def set_state_after(self, token: int, value: Tensor) -> None:
        """Replace the state after `token`: its own output reads it, and later tokens continue from it.

        `value`: `[batch, heads, key_dim, value_dim]`, or without its leading axes, which broadcast.
        """
        self._call("set_state_after").set_state_after(token, value)

    def read(self, probes: Tensor) -> Tensor:
        """What every state answers to `probes`.

        probes: `[P, key_dim]`, `[heads, P, key_dim]` or `[batch, seq, heads, P, key_dim]`.
        Returns `[batch, seq, heads, P, value_dim]`, in the values' dtype.
        """
        return self._call("read").probe(probes)

    def _token(self, name: str) -> tuple[int, Any]:
        mediator = mediator_for(self, name)
        token = loops.token_of(mediator)
        call = self._call(name)
        loops.walk(mediator, call.tokens)
        return token, call


class SelfAttention(CallEnvoy):
    """Softmax attention. Its inner values need `attn_implementation="eager"`: the fused ones never form them."""

    attention_output = ModuleValue("`[batch, seq, hidden]`: what attention adds to the residual stream.")
    attention_queries = CallValue("`[batch, heads, seq, head_dim]`, after norm and rotation.", "queries")
    attention_keys = CallValue("`[batch, kv_heads, seq, head_dim]`, after norm and rotation.", "keys")
    attention_values = CallValue("`[batch, kv_heads, seq, head_dim]`.", "values")
    attention_scores = CallValue("`[batch, heads, seq, seq]`: scaled and masked, before softmax.", "scores")
    attention_probabilities = CallValue("`[batch, heads, seq, seq]`.", "probabilities")
    attention_head_outputs = CallValue("`[batch, seq, heads, head_dim]`, before gate and projection.", "head_outputs")

    VALUES = (
        "attention_output",
        "attention_queries",
        "attention_keys",
        "attention_values",
        "attention_scores",
        "attention_probabilities",
        "attention_head_outputs",
    )

    def _unavailable(self) -> str | None:
        implementation = getattr(self._module.config, "_attn_implementation", "eager")
        if implementation == "eager":
            return None
        return f"attention runs through {implementation!r}, which never forms it; load with attn_implementation='eager'"


class Mlp(Module):
    """The block's feed-forward part, dense or a mixture of experts."""

    mlp_output = ModuleValue("`[batch, seq, hidden]`: what the MLP adds to the residual stream.")
    VALUES = ("mlp_output",)


class Layer(Module):
    """One block. What it lacks (`self_attn` or `linear_attn`) is None."""

    layer_output = ModuleValue("`[batch, seq, hidden]`: the residual stream after the block.")
    VALUES = ("layer_output",)


PARTS: dict[str, Any] = {"linear_attn": LinearAttention, "self_attn": SelfAttention, "mlp": Mlp}
"""What a block may have, by name; the block's own value is `Layer`'s."""
