"""The recurrence, one token after the other: the definition that every backend is tested against.

    S~  = D_t o S_{t-1}              decay
    u_t = beta_t (v_t - S~^T k_t)    delta rule
    S_t = S~ + k_t u_t^T             write, always rank one
    o_t = S_t^T q_t                  read

Gated DeltaNet, arXiv:2412.06464, eq. 10; with a decay per key channel Kimi Delta Attention, arXiv:2510.26692, eq. 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def l2norm(x: Tensor, scale: float = 1.0) -> Tensor:
    """`scale x / sqrt(sum x^2 + 1e-6)` over the last axis."""
    return x * (scale * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6))


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """`[..., Hk, K]` to `[..., heads, K]`: value head `h` uses key head `h // (heads // Hk)`."""
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], -2)


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One token: the state after it, its update and its output.

    Args:
        state: `[B, H, K, V]`; q, k: `[B, H, K]`; v: `[B, H, V]`; g: `[B, H, 1]` or `[B, H, K]`; beta: `[B, H]`.
    """
    state = g.exp()[..., None] * state
    update = beta[..., None] * (v - (k[..., None] * state).sum(-2))
    state = state + k[..., None] * update[..., None, :]
    return state, update, (q[..., None] * state).sum(-2)


def read(state: Tensor, q: Tensor) -> Tensor:
    """What `state` `[..., K, V]` answers to `q` `[..., K]`."""
    return (q[..., None] * state).sum(-2)
