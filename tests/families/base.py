"""What the contract's parts share: a family's attributes and its models."""

from __future__ import annotations

import pytest
import torch
import transformers

import tiny

HEADS, HIDDEN = 4, 64


class Base:
    """A family's tests set `model_type`, and what differs from the defaults below.

    Attributes:
        model_type: of `tiny.CONFIGS` or `tiny.WRAPPERS`: what the checkpoint is.
        family: the family's name, if that is not `model_type`.
        wrapper: the multimodal configuration that holds this text model.
        key_dim, value_dim: of a head of the tiny checkpoint.
        per_channel: whether decays are one per key channel.
        largest_beta: what betas stay below.
        streams: how many residual streams run beside each other.
    """

    model_type: str
    family: str | None = None
    wrapper: str | None = None
    key_dim = 16
    value_dim = 24
    per_channel = False
    largest_beta = 1.0
    streams = 1

    def exact_decays(self, mix):
        """The decays as fp32 arithmetic gives them from what the mixer's projections put out; called in a trace."""
        module, raw = mix._module, mix.in_proj_a.output.float()
        return -module.A_log.float().exp() * torch.nn.functional.softplus(raw + module.dt_bias)

    @pytest.fixture(autouse=True)
    def installed(self):
        if not tiny.has(self.model_type):
            pytest.skip(f"transformers {transformers.__version__} has no {self.model_type}")

    @pytest.fixture
    def model(self, models):
        return models(self.model_type)

    @pytest.fixture
    def theirs(self, plain):
        return plain(self.model_type)

    @pytest.fixture
    def mix(self, model):
        return self.linear(model)[0]

    @staticmethod
    def linear(model):
        """The recurrent mixers."""
        return [layer.linear_attn for layer in model.layers if layer.linear_attn is not None]

    @staticmethod
    def softmax(model):
        """The first block with softmax attention."""
        return next(i for i, layer in enumerate(model.layers) if layer.self_attn is not None)
