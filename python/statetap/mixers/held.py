"""`HeldCall`: what the parts of one open kernel call share: arguments, writes, results, and how edits are noticed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable

import torch
from torch import Tensor

from .. import ops
from ..errors import ArgumentError, Error
from .packing import has_values
from .rules import DeltaRuleCall
from .slots import STANDARD, Argument, Result, Served, Snapshot, copy_of, ordinary

DEFAULT = "default"  # the backend that is the modeling file's own kernel


@dataclass
class Write:
    """A state replaced after a token, for some rows.

    Attributes:
        value: `[rows, heads, key_dim, value_dim]`.
        mine: bool, like `value`: what of it the user edited; None for all of it. The rest follows from the call.
        base: the `HeldCall.before` that the rest was computed from.
        serial: later writes have higher ones.
    """

    token: int
    rows: tuple[int, int]
    value: Tensor
    mine: Tensor | None = None
    base: Any = None
    serial: int = 0

    def of(self, value: Tensor) -> list[ops.StateWrite]:
        """As the op takes it, with this value: one write for each set of heads that was edited in the same rows."""
        rows = range(*self.rows)
        if self.mine is None:
            return [ops.StateWrite(self.token, value, rows=list(rows))]
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, edited in enumerate(self.mine.flatten(2).any(-1).tolist()):
            rows_of.setdefault(tuple(head for head, here in enumerate(edited) if here), []).append(row)
        return [
            ops.StateWrite(self.token, value[chosen][:, heads], rows=[rows[row] for row in chosen], heads=list(heads))
            for heads, chosen in rows_of.items()
            if heads
        ]

    @cached_property
    def as_edited(self) -> list[ops.StateWrite]:
        return self.of(self.value)


@dataclass
class ServedState:
    """A state that was handed out to look at and to edit: editing it in place writes it."""

    token: int
    rows: tuple[int, int]
    state: Tensor
    clean: Tensor  # as it was when served
    base: Any  # what it was computed from
    shows: Any  # what the call has to stand at for it to be what is there
    write: Write | None = None

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
        self.state_dtype = torch.promote_types(kernel.arguments["values"].given.dtype, torch.float32)  # type: ignore[union-attr]
        self.writes: list[Write] = []
        self._written = 0  # times
        self.served_states: list[ServedState] = []
        self.snapshots: list[tuple[str, Snapshot]] = []
        self.outputs, self.final_state = Result(), Result()
        self.closed = False
        self._computed: tuple[Any, ops.RecurrenceOutput] | None = None

    @property
    def has_values(self) -> bool:
        """Not where only shapes are followed."""
        return has_values(self.kernel.arguments["values"].given)  # type: ignore[arg-type]

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
            self._check_decays()
            result = ops.RecurrenceOutput(*self.kernel.run_original())
        else:
            result = self.tap(ops.Taps(trajectory=True) if trajectory else None)
        self._computed = self.stamp, result
        return result

    @property
    def stamp(self) -> Any:
        """Changes when what the results are computed from changes."""
        return (*self._arguments, self._written)

    @property
    def _arguments(self) -> tuple:
        return tuple(argument.stamp for argument in self.kernel.arguments.values())

    def tap(self, taps: ops.Taps | None) -> ops.RecurrenceOutput:
        """The call as it now stands, run with these taps."""
        self.collect_writes()
        return self._run(taps, self._state_writes())

    def _run(self, taps: ops.Taps | None, writes: list[ops.StateWrite]) -> ops.RecurrenceOutput:
        self._check_decays()
        with ordinary():
            return self.kernel.run(taps, writes, "auto" if self.backend == DEFAULT else self.backend)

    def _check_decays(self) -> None:
        argument = self.kernel.arguments["decays"]
        decays = argument.value if argument.edited else None
        if decays is not None and self.has_values and bool((decays > 0).any()):
            raise ArgumentError(f"{self.where}.decays: above 0; they are logs of how much is kept, at most 0")

    # -- states --------------------------------------------------------------------------------

    def state_after(self, token: int, rows: tuple[int, int], compute: Callable[[], Tensor]) -> Tensor:
        """The served copy of a state: the same tensor as long as it is still what it shows."""
        self.collect_writes()
        now = self._before(token, rows)
        for served in reversed(self.served_states):
            if (served.token, served.rows, served.shows) == (token, rows, now):
                return served.state
        clean = compute()
        self.served_states.append(ServedState(token, rows, copy_of(clean), clean, now, now))
        return self.served_states[-1].state

    def write_state(self, token: int, rows: tuple[int, int], value: Tensor) -> None:
        """The state after `token` is `value` for these rows; the latest write of a token wins."""
        self.collect_writes()
        self._add(Write(token, rows, value))

    def collect_writes(self) -> None:
        """Served states that were edited in place become writes, of what is different in them."""
        for served in self.served_states:
            if served.take_edit():
                current = served.shows == self._before(served.token, served.rows)
                if self.writes and self.writes[-1] is served.write:
                    self.writes.pop()  # edited again: one write of both edits
                with ordinary():
                    mine = served.state.detach() != served.clean.detach()
                served.write = Write(
                    served.token, served.rows, copy_of(served.state), None if mine.all() else mine, served.base
                )
                self._add(served.write)
                if current:
                    served.shows = self._before(served.token, served.rows)

    def _add(self, write: Write) -> None:
        self._written += 1
        write.serial = self._written
        self.writes.append(write)

    def _before(self, token: int, rows: tuple[int, int], end: int | None = None) -> Any:
        """Changes when what these rows' state after `token` is computed from changes.

        That is the arguments, and the latest write to these rows up to this token, `end` and those after it not
        counting at this token itself.
        """
        latest = 0
        for write in self.writes:
            last = token if end is None or write.serial < end else token - 1
            if write.token <= last and write.rows[0] < rows[1] and rows[0] < write.rows[1]:
                latest = max(latest, write.serial)
        return self._arguments, latest

    def _state_writes(self) -> list[ops.StateWrite]:
        """The writes as the op takes them, in the order of tokens: the rest of each follows from those before."""
        ready: list[ops.StateWrite] = []
        for write in sorted(self.writes, key=lambda write: write.token):
            if write.mine is None or write.base == self._before(write.token, write.rows, write.serial):
                ready += write.as_edited
                continue
            now = self._run(ops.Taps(states=[write.token]), ready).states
            assert now is not None
            ready += write.of(torch.where(write.mine, write.value, now[slice(*write.rows), 0]))
        return ready

    # -- the end -------------------------------------------------------------------------------

    def served(self) -> Served:
        """What has been handed out so far."""
        slots: dict[str, Argument | Result] = {
            **self.kernel.arguments,
            "head_outputs": self.outputs,
            "state_output": self.final_state,
        }
        named = [(STANDARD.get(name, name), slot.served) for name, slot in slots.items()]
        return Served(self.where, [*named, *(("state", x.state) for x in self.served_states)])

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
