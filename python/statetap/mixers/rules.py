"""The kernels that mixers call, one class for each rule: read in the standard names and layouts, run, handed back.

Standard is tokens second, heads third: queries and keys `[B, T, H, K]`, values `[B, T, H, V]`, decays
`[B, T, H]` (or `[B, T, H, K]`) as logs, betas `[B, T, H]`, states `[B, H, K, V]`; `H` the value heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import torch
from torch import Tensor

from .. import ops
from ..errors import UnsupportedCall
from .slots import Argument, copy_of

Values = dict[str, Tensor | None]


class DeltaRuleCall:
    """One call of a delta-rule kernel, prompt or decode step: both have flash-linear-attention's arguments.

    Args:
        original: the kernel that the modeling file would have run.
        query, key: `[B, T, Hk, K]`; value: `[B, T, Hv, V]`; g: `[B, T, Hv]` or `[B, T, Hv, K]`; beta: `[B, T, Hv]`;
        initial_state: `[B, Hv, K, V]` or None. Anything else is the original's business.
    """

    def __init__(
        self,
        original: Callable,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        scale: float | None = None,
        cu_seqlens: Tensor | None = None,
        **others: Any,
    ) -> None:
        if cu_seqlens is not None:
            raise UnsupportedCall(
                "cu_seqlens: this model's convolution runs across packed sequences, so their states would mix; "
                "give each sequence a row of its own, padded"
            )
        self.original = original
        self.others = others
        self.output_final_state = output_final_state
        self.normalise = use_qk_l2norm_in_kernel
        self.scale = scale
        repeat = partial(_repeat_heads, heads=value.shape[2])
        # transformers writes the next state into the cached tensor: what autograd keeps must be ours
        state = initial_state.clone() if initial_state is not None and torch.is_grad_enabled() else initial_state
        self.arguments = {
            "queries": Argument(query, repeat),
            "keys": Argument(key, repeat),
            "values": Argument(value),
            "decays": Argument(_at_least_fp32(g)),
            "betas": Argument(beta),
            "state_input": Argument(state),
        }

    def expected_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an argument in the standard layout."""
        batch, tokens, heads, value_dim = self._given("values").shape
        key_dim = self._given("queries").shape[-1]
        if name in ("queries", "keys"):
            return (batch, tokens, heads, key_dim)
        if name == "state_input":
            return (batch, heads, key_dim, value_dim)
        given = self.arguments[name].given
        return (batch, tokens, heads) if given is None else tuple(given.shape)

    def run(self, taps: ops.Taps | None, writes: list[ops.StateWrite], backend: str) -> ops.RecurrenceOutput:
        """The call as it stands, on one of our backends."""
        now = self._now()
        return ops.gated_delta_rule(
            now["queries"],
            now["keys"],
            now["values"],
            now["decays"],
            now["betas"],
            scale=self.scale,
            initial_state=now["state_input"],
            use_qk_l2norm_in_kernel=self.normalise,
            taps=taps,
            state_writes=writes or None,
            backend=backend,
        )

    def run_original(self) -> tuple[Tensor, Tensor]:
        """The call as it stands, on the modeling file's own kernel: outputs and final state."""
        now = self._now()
        scale = {} if self.scale is None else {"scale": self.scale}
        return self.original(
            now["queries"],
            now["keys"],
            now["values"],
            g=now["decays"],
            beta=now["betas"],
            initial_state=now["state_input"],
            output_final_state=True,
            use_qk_l2norm_in_kernel=self.normalise,
            **scale,
            **self.others,
        )

    def reading_queries(self) -> Tensor:
        """The queries as the rule uses them: normalised if the kernel does that, and scaled."""
        queries = self._now()["queries"].to(torch.promote_types(self._given("queries").dtype, torch.float32))  # type: ignore[union-attr]
        if self.normalise:
            queries = ops.l2norm(queries)
        return queries * (queries.shape[-1] ** -0.5 if self.scale is None else self.scale)

    def close(self, outputs: Tensor, final_state: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the modeling file is handed back."""
        return outputs, final_state if self.output_final_state else None

    def _given(self, name: str) -> Tensor:
        return self.arguments[name].given  # type: ignore[return-value]

    def _now(self) -> Values:
        now = {name: argument.value for name, argument in self.arguments.items()}
        # an edited copy has a key head for every value head: so must its partner
        heads = {now[name].shape[2] for name in ("queries", "keys")}  # type: ignore[union-attr]
        if len(heads) > 1:
            for name in ("queries", "keys"):
                now[name] = _repeat_heads(now[name], self._given("values").shape[2])  # type: ignore[arg-type]
        return now


def _at_least_fp32(x: Tensor | None) -> Tensor | None:
    """Decays are served in fp32 also where the modeling file rounds them: exactly as rounded."""
    return None if x is None else x.to(torch.promote_types(x.dtype, torch.float32))


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, Hk, K]` to `[B, T, heads, K]`: value head `h` uses key head `h // (heads // Hk)`."""
    return copy_of(x) if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


RULES: dict[str, type[DeltaRuleCall]] = {"delta": DeltaRuleCall}
