"""Decays within a chunk, always as sums of log decays and never as differences of two cumulative sums.

`G_i - G_j` stands for `g_{j+1} + ... + g_i`. A difference of cumulative sums loses everything after a token with
g = -1e4, and is nan after one with g = -inf; the sum is exact for both, and every exponent is <= 0.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor


def to_each(g: Tensor) -> Tensor:
    """Gamma_ij = exp(g_{j+1} + ... + g_i) for j <= i, else 0: `[..., C, 1]` to `[..., C, C]`."""
    size = g.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)  # [j, l]: l > j
    sums = torch.where(later, g.transpose(-1, -2), 0).cumsum(-1)  # [j, i]
    return torch.where(later, 0, sums.transpose(-1, -2).exp())


def from_start(g: Tensor) -> Tensor:
    """exp(g_1 + ... + g_i): how much of the entering state is left at each token; `[..., C, D]`."""
    return g.cumsum(-2).exp()


def to_end(g: Tensor) -> Tensor:
    """exp(g_{i+1} + ... + g_C): how much of each token's write is left at the end; `[..., C, D]`."""
    after = torch.cat([g[..., 1:, :], torch.zeros_like(g[..., :1, :])], -2)
    return after.flip(-2).cumsum(-2).flip(-2).exp()


def decayed_products(rows: Sequence[Tensor], keys: Tensor, g: Tensor) -> list[Tensor]:
    """A_ij = sum_c x_ic k_jc exp(g_{j+1,c} + ... + g_{i,c}) for j <= i, else 0, for each x of `rows`.

    `rows`, `keys`, `g`: `[..., C, K]`; gives `[..., C, C]` each. With a decay per key channel the exponent does not
    factor, except around a boundary m between j and i: exp(sum to m) exp(sum from m), both <= 1. So blocks are
    halved: at each level the later half's rows meet the earlier half's keys around the middle. Memory is linear
    in the chunk: C K a level, and log2(C) levels.
    """
    size = keys.shape[-2]
    padding = (1 << max(size - 1, 0).bit_length()) - size
    if padding:
        rows, keys, g = [_pad(x, padding) for x in rows], _pad(keys, padding), _pad(g, padding)
    blocks = [(x * keys).sum(-1)[..., None, None] for x in rows]  # [..., blocks, s, s], here s = 1
    into, out_of = g, torch.zeros_like(g)  # sums from the block's start to i, and from after j to its end
    span = 1
    while span < size + padding:
        early = _halves(keys, span)[0] * _halves(out_of, span)[0].exp()
        reach = _halves(into, span)[1].exp()
        for n, x in enumerate(rows):
            blocks[n] = _join(blocks[n], _products(_halves(x, span)[1] * reach, early))
        into, out_of = _double(into, out_of, span)
        span *= 2
    return [block.squeeze(-3)[..., :size, :size] for block in blocks]


def _pad(x: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, count))


def _halves(x: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """`[..., C, K]` to the earlier and later halves of its blocks of `2 span`: `[..., C / 2 span, span, K]` each."""
    x = x.unflatten(-2, (-1, 2, span))
    return x[..., 0, :, :], x[..., 1, :, :]


def _products(late: Tensor, early: Tensor) -> Tensor:
    if late.shape[-2] <= 2:  # too small for a matrix product
        return (late[..., :, None, :] * early[..., None, :, :]).sum(-1)
    return late @ early.transpose(-1, -2)


def _join(blocks: Tensor, corner: Tensor) -> Tensor:
    """Blocks `[..., 2n, s, s]` and the corners below them `[..., n, s, s]` to `[..., n, 2s, 2s]`."""
    first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    top = torch.cat([first, torch.zeros_like(first)], -1)
    return torch.cat([top, torch.cat([corner, second], -1)], -2)


def _double(into: Tensor, out_of: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """The sums for blocks twice as large: two sums of log decays are added, none is taken away."""
    early_in, late_in = _halves(into, span)
    early_out, late_out = _halves(out_of, span)
    to_middle, from_middle = early_in[..., -1:, :], late_in[..., -1:, :]
    into = torch.stack([early_in, late_in + to_middle], -3).flatten(-4, -2)
    out_of = torch.stack([early_out + from_middle, late_out], -3).flatten(-4, -2)
    return into, out_of
