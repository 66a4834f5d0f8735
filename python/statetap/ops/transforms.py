"""Which calls torch differentiates by other means than a backward pass, which an opaque operator cannot know."""

from __future__ import annotations

from typing import Any, Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def followed(values: Iterable[Any]) -> bool:
    """Whether a tensor has a tangent of forward-mode AD, or belongs to a `torch.func` transform that differentiates."""
    if torch.compiler.is_compiling():
        return False
    tensors = (x for x in values if isinstance(x, Tensor))
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return any(torch._C._functorch.is_gradtrackingtensor(x) for x in tensors)
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def tracked(values: Iterable[Any]) -> bool:
    """Whether torch differentiates by one of these tensors, in whatever way."""
    values = list(values)
    recorded = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)
    return recorded or followed(values)
