"""Several texts in one row: refused where the model would run one text's state into the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import ArgumentError


def refuse(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: raise if a row holds several texts.

    The recurrent mixers of transformers know nothing of position ids: their convolution and state run on.
    """
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if isinstance(positions, Tensor) and positions.shape[-1] > 1 and has_values(positions):
        if positions.ndim == 3:  # text, temporal, height, width: the first counts the tokens
            positions = positions[0]
        restart = positions[..., 1:] < positions[..., :-1]
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[-1] == positions.shape[-1]:
            restart = restart & mask[:, :-1].bool().to(restart.device)  # a left-padded row starts after its padding
        if bool(restart.any()):
            _raise("position_ids", "position_ids start again within a row")
    if kwargs.get("cu_seq_lens_q") is not None:
        _raise("cu_seq_lens_q", "cu_seq_lens_q packs several texts into one row")


def has_values(x: Tensor) -> bool:
    """Not where only shapes are followed: meta and fake tensors, `torch.compile`."""
    return not (x.is_meta or isinstance(x, FakeTensor) or torch.compiler.is_compiling())


def _raise(name: str, what: str) -> None:
    raise ArgumentError(
        f"{what}: this model's recurrent state runs across the texts of a row, so their states would mix. "
        f"Give each text a row of its own (padded), or pack with cu_seqlens in statetap.ops.gated_delta_rule."
    )
