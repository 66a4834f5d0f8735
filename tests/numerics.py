"""The one tolerance rule: an error is judged against fp64, and allowed a multiple of what a peer makes of the same inputs.

    judge("outputs", ours, exact, peer)      error <= 2 x the peer's error + FLOOR, relative to each head's largest value

`exact` is from the reference in fp64; `peer` another implementation's result in the same dtype as ours (transformers' torch
kernel, or the reference itself). The message of a failure has both errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = 2e-6
FACTOR = 2.0


def error(x: Tensor, exact: Tensor, head_axis: int | None = None) -> float:
    """The largest error of a head over its largest value; infinite if the shape differs or x is not finite."""
    if x.shape != exact.shape:
        return float("inf")
    if not x.numel():
        return 0.0
    x, exact = x.detach().double(), exact.detach().double()
    if not bool(torch.isfinite(x).all()):
        return float("inf")
    if head_axis is None:
        return float((x - exact).abs().max() / exact.abs().max().clamp_min(1e-30))
    x, exact = (y.movedim(head_axis, 0).flatten(1) for y in (x, exact))
    largest = exact.abs().amax(1)
    largest = torch.maximum(largest, 1e-6 * largest.max()).clamp_min(1e-30)
    return float(((x - exact).abs().amax(1) / largest).max())


def judge(
    name: str, x: Tensor, exact: Tensor, peer: Tensor | None = None, head_axis: int | None = None, floor: float = FLOOR
):
    """Assert that `x` is as near to `exact` as the rule asks."""
    ours = error(x, exact, head_axis)
    theirs = 0.0 if peer is None else error(peer, exact, head_axis)
    allowed = FACTOR * theirs + max(floor, 0.51 * torch.finfo(x.dtype).eps)
    assert ours <= allowed, f"{name}: off by {ours:.2e}, may be {allowed:.2e} (the peer is off by {theirs:.2e})"


def judge_norms(x: Tensor, exact: Tensor):
    """Assert that norms `[B, T, H]` are within a 10^4-th of the norm, or a millionth of the head's largest."""
    allowed = 1e-4 * exact + 1e-6 * exact.amax((0, 1)) + 1e-12
    assert (x - exact).abs().le(allowed).all(), (
        f"norms: off by up to {((x - exact).abs() / allowed).max():.2f} of what is allowed"
    )
