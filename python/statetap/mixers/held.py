"""`HeldCall`: what the parts of one open kernel call share: arguments, writes, results, and how edits are noticed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from torch import Tensor

from .. import ops
from ..errors import Error
from .layouts import DeltaRuleCall
from .slots import Result, Snapshot, copy_of

DEFAULT = "default"  # the backend that is the modeling file's own kernel


@dataclass
class ServedState:
    """A state that was handed out to look at and to edit: editing it in place writes it."""

    token: int
    rows: tuple[int, int]
    state: Tensor
    stamp: Any  # of the call when it was served
    written: bool = False

    def __post_init__(self) -> None:
        self.version = self.state._version

    def take_edit(self) -> bool:
        edited = self.state._version != self.version
        self.version = self.state._version
        return edited


class HeldCall:
    """What the parts of one call share: arguments, writes, and what was computed from them.

    Results are computed when first asked for and dropped when an argument or a state changes.
    """

    def __init__(self, kernel: DeltaRuleCall, where: str, layer: int, backend: str) -> None:
        self.kernel = kernel
        self.where = where
        self.layer = layer
        self.backend = backend
        self.batch, self.tokens, self.heads = kernel.expected_shape("values")[:3]
        self.device = kernel.arguments["values"].given.device  # type: ignore[union-attr]
        self.writes: list[ops.StateWrite] = []
        self.served_states: list[ServedState] = []
        self.snapshots: list[tuple[str, Snapshot]] = []
        self.outputs, self.final_state = Result(), Result()
        self.closed = False
        self._computed: tuple[Any, ops.RecurrenceOutput] | None = None

    @property
    def edited(self) -> bool:
        """Whether the model gets something else than it would have."""
        self.collect_writes()
        touched = any(argument.edited for argument in self.kernel.arguments.values())
        return touched or bool(self.writes) or self.outputs.edited or self.final_state.edited

    def result(self, trajectory: bool = False) -> ops.RecurrenceOutput:
        """Outputs and final state (and the trajectory) of the call as it now stands."""
        self.collect_writes()
        if self._computed is not None:
            then, result = self._computed
            if then == self.stamp and (result.trajectory is not None or not trajectory):
                return result
        if self.backend == DEFAULT and not trajectory and not self.writes:
            result = ops.RecurrenceOutput(*self.kernel.run_original())
        else:
            result = self.tap(ops.Taps(trajectory=True) if trajectory else None)
        self._computed = self.stamp, result
        return result

    @property
    def stamp(self) -> Any:
        """Changes when what the results are computed from changes."""
        return (*(argument.stamp for argument in self.kernel.arguments.values()), len(self.writes))

    def tap(self, taps: ops.Taps | None) -> ops.RecurrenceOutput:
        """The call as it now stands, run with these taps."""
        self.collect_writes()
        backend = "auto" if self.backend == DEFAULT else self.backend
        return self.kernel.run(taps, self.writes, backend)

    def state_after(self, token: int, rows: tuple[int, int], compute: Callable[[], Tensor]) -> Tensor:
        """The served copy of a state: the same tensor as long as it is still what it shows."""
        self.collect_writes()
        for served in reversed(self.served_states):
            if (served.token, served.rows) == (token, rows) and (served.written or served.stamp == self.stamp):
                return served.state
        state = copy_of(compute())
        self.served_states.append(ServedState(token, rows, state, self.stamp))
        return state

    def write_state(self, token: int, rows: tuple[int, int], value: Tensor) -> None:
        """The state after `token` is `value` for these rows; the latest write of a token wins."""
        self.writes.append(ops.StateWrite(token, value, rows=list(range(*rows))))
        for served in self.served_states:
            if served.token == token:
                served.written, served.stamp = False, None

    def collect_writes(self) -> None:
        """Served states that were edited in place become writes."""
        for served in self.served_states:
            if served.take_edit():
                self.write_state(served.token, served.rows, served.state)
                served.written = True

    def close(self) -> Any:
        """End the call: what the modeling file gets in the kernel's place."""
        result = self.result()
        self._refuse_dead_edits()
        outputs = self.outputs.value(result.outputs)
        final_state = self.final_state.value(result.final_state)
        self.closed = True
        self._computed = None
        self.snapshots.clear()
        self.served_states.clear()
        return self.kernel.close(outputs, final_state)

    def _refuse_dead_edits(self) -> None:
        for name, snapshot in self.snapshots:
            if snapshot.edited:
                raise Error(
                    f"{self.where}.{name} was edited in place, which cannot reach the model: it is computed from "
                    f"the call. Write states with set_state_after(token, value), or clone() it before working on it."
                )
