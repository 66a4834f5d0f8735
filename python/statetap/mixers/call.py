"""`MixerCall`: one kernel call held open while it is looked at and edited."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import ArgumentError
from ..ops.checks import position
from .held import HeldCall
from .slots import ALL, STANDARD, Rows, Served, Snapshot, copy_of, fitting, ordinary, put, take


class MixerCall:
    """One kernel call held open: its arguments and results, for some rows of the batch.

    Everything can be read, written and edited in place in any order until the call closes; what is served
    is a copy. `heads` are the value heads; queries and keys are repeated to them.

    Attributes:
        layer: index of the block.
        queries, keys: `[rows, seq, heads, key_dim]`, before l2-norm and scale.
        values: `[rows, seq, heads, value_dim]`.
        decays: `[rows, seq, heads]`, Kimi `[rows, seq, heads, key_dim]`; log decay, fp32, <= 0.
        betas: `[rows, seq, heads]`; write strength.
        state_input: `[rows, heads, key_dim, value_dim]` fp32, or None on a fresh prompt.
        head_outputs: `[rows, seq, heads, value_dim]`; each head's read.
        state_output: `[rows, heads, key_dim, value_dim]` fp32; after the call's last token. Writing it changes
            what is handed on, not this call's outputs.
    """

    recurrent = True

    def __init__(self, held: HeldCall, rows: Rows = ALL) -> None:
        self._held = held
        self._rows = rows

    def part(self, start: int, size: int) -> MixerCall:
        """The same call, seen by the rows `start` to `start + size`."""
        return MixerCall(self._held, slice(start, start + size))

    @property
    def layer(self) -> int:
        return self._held.layer

    @property
    def closed(self) -> bool:
        return self._held.closed

    def served(self) -> Served:
        """What has been handed out so far."""
        return self._held.served()

    @property
    def edited(self) -> bool:
        """Whether the model gets something else than it would have."""
        return self._held.edited

    @property
    def batch(self) -> int:
        """How many rows this part has."""
        return self._span[1] - self._span[0]

    @property
    def tokens(self) -> int:
        return self._held.tokens

    # -- arguments and results ---------------------------------------------------------------

    def read(self, name: str) -> Tensor | None:
        """An argument, `head_outputs` or `state_output`: a copy that may be edited in place."""
        held = self._held
        if name == "head_outputs":
            return held.outputs.read(held.result().outputs, self._rows)
        if name == "state_output":
            return held.final_state.read(held.result().final_state, self._rows)
        return held.kernel.arguments[name].read(self._rows)

    def write(self, name: str, value: Tensor) -> None:
        """Replace an argument, `head_outputs` or `state_output`, for these rows."""
        held = self._held
        if name in ("head_outputs", "state_output"):
            result = held.result()
            slot, computed = (
                (held.outputs, result.outputs) if name == "head_outputs" else (held.final_state, result.final_state)
            )
            slot.write(computed, self._rows, self._checked(name, value, tuple(computed.shape), computed.dtype))
            return
        argument = held.kernel.arguments[name]
        dtype = held.state_dtype if argument.given is None else argument.given.dtype
        shape = held.kernel.expected_shape(name)
        value = self._checked(name, value, shape, dtype)
        if argument.read() is None:  # the other rows start from nothing, which is zero
            value = put(value.new_zeros(shape), self._rows, value)
        argument.write(self._rows, value)

    queries = property(lambda self: self.read("queries"), lambda self, x: self.write("queries", x))
    keys = property(lambda self: self.read("keys"), lambda self, x: self.write("keys", x))
    values = property(lambda self: self.read("values"), lambda self, x: self.write("values", x))
    decays = property(lambda self: self.read("decays"), lambda self, x: self.write("decays", x))
    betas = property(lambda self: self.read("betas"), lambda self, x: self.write("betas", x))
    state_input = property(lambda self: self.read("state_input"), lambda self, x: self.write("state_input", x))
    head_outputs = property(lambda self: self.read("head_outputs"), lambda self, x: self.write("head_outputs", x))
    state_output = property(lambda self: self.read("state_output"), lambda self, x: self.write("state_output", x))

    # -- states ------------------------------------------------------------------------------

    @property
    def trajectory(self) -> ops.Trajectory:
        """Every state of these rows without loss: see `statetap.ops.Trajectory`; read-only."""
        trajectory = self._trajectory
        for name, field in trajectory.fields().items():
            self._watched(f"trajectory.{name}", field)
        return trajectory

    @property
    def _trajectory(self) -> ops.Trajectory:
        trajectory = self._held.result(trajectory=True).trajectory
        assert trajectory is not None
        return trajectory if self._rows == ALL else trajectory[self._rows]

    def states(self, tokens: Any = None, heads: Any = None) -> Tensor:
        """The states after `tokens` (default: all), `[rows, t, heads, key_dim, value_dim]`; read-only."""
        return self._watched("states", self._states(tokens, heads))

    def _states(self, tokens: Any, heads: Any = None) -> Tensor:
        """By the trajectory, which reads where its chunks start; or, where only shapes are followed, by the op."""
        if self._held.has_values:
            with ordinary():
                return self._trajectory.states(tokens, heads)
        taps = ops.Taps(states="all" if tokens is None else tokens, heads=heads)
        return take(self._tapped(taps, "states"), self._rows)

    def _tapped(self, taps: ops.Taps, name: str) -> Tensor:
        found = getattr(self._held.tap(taps), name)
        assert found is not None
        return found

    all_states = property(lambda self: self.states())

    def state_after(self, token: int) -> Tensor:
        """The state after `token` `[rows, heads, key_dim, value_dim]`: a copy; editing it in place writes it."""
        token = self._token(token)
        return self._held.state_after(token, self._span, lambda: self._states([token])[:, 0])

    def set_state_after(self, token: int, value: Tensor) -> None:
        """Replace the state after `token`: its own output reads the new state, later tokens continue from it.

        Args:
            token: position in the call, negative from the end.
            value: `[rows, heads, key_dim, value_dim]`, or without the leading axes, which broadcast.
        """
        held, token = self._held, self._token(token)
        shape = held.kernel.expected_shape("state_input")
        if isinstance(value, Tensor) and value.ndim < 4:
            value = value.expand((self.batch, *shape[1:])) if _broadcasts(value, shape[1:]) else value
        held.write_state(token, self._span, copy_of(self._checked("state", value, shape, held.state_dtype)))

    @property
    def writes(self) -> Tensor:
        """What each token wrote, `[rows, seq, heads, value_dim]`: the trajectory's updates; read-only."""
        return self._watched("writes", self._trajectory.updates)

    @property
    def state_norms(self) -> Tensor:
        """Frobenius norm of the state after every token, `[rows, seq, heads]`; read-only."""
        if self._held.has_values:
            with ordinary():
                return self._watched("state_norms", self._trajectory.norms())
        return take(self._tapped(ops.Taps(norms=True), "norms"), self._rows)

    @property
    def effective_attention(self) -> tuple[Tensor, Tensor]:
        """Exact weights `[rows, heads, seq, seq]` and remainder `[rows, seq, heads, value_dim]`; read-only."""
        queries = take(self._held.kernel.reading_queries(), self._rows)
        with ordinary():
            weights, remainder = self._trajectory.effective_attention(queries)
        return self._watched("effective_attention", weights), self._watched("effective_attention", remainder)

    def probe(self, probes: Tensor) -> Tensor:
        """What every state answers to `probes`, `[rows, seq, heads, P, V]`.

        probes: `[P, K]`, `[heads, P, K]` or `[rows, seq, heads, P, K]`.
        """
        if probes is None:
            raise ArgumentError(f"{self._held.where}.read: got None, needs probes [P, key_dim]")
        if isinstance(probes, Tensor) and probes.ndim == 5 and self._rows != ALL:
            whole = probes.new_zeros((self._held.batch, *probes.shape[1:]))
            whole[self._rows] = probes
            probes = whole
        return self._watched("read", take(self._tapped(ops.Taps(probes=probes), "reads"), self._rows))

    def mask_padding(self, lengths: Tensor) -> None:
        """Tokens at and after a row's length leave its state alone: decay 0, beta 0.

        So `state_output` is the state after each row's own last token, with padding on the right.

        Args:
            lengths: `[rows]`, ints.
        """
        padding = torch.arange(self.tokens, device=lengths.device) >= lengths[:, None]
        for name in ("decays", "betas"):
            x = self.read(name)
            assert x is not None
            mask = padding.to(x.device).reshape(*padding.shape, *[1] * (x.ndim - 2))
            self.write(name, x.masked_fill(mask, 0))

    @property
    def _span(self) -> tuple[int, int]:
        return self._rows.indices(self._held.batch)[:2]

    # -- checks ------------------------------------------------------------------------------

    def _token(self, token: int) -> int:
        return position(f"{self._held.where}: state after a token", token, self._held.tokens)

    def _watched(self, name: str, tensor: Tensor) -> Tensor:
        self._held.snapshots.append((name, Snapshot(tensor)))
        return tensor

    def _checked(self, name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        where = f"{self._held.where}.{STANDARD.get(name, name)}"
        return fitting(where, value, (self.batch, *shape[1:]), dtype, self._held.device)


def _broadcasts(value: Tensor, shape: tuple[int, ...]) -> bool:
    tail = shape[len(shape) - value.ndim :]
    return all(a in (1, b) for a, b in zip(value.shape, tail))
