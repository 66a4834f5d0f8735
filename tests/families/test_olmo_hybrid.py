import pytest
import torch

from families.suite import Suite
from statetap import StandardizedTransformer
from traced import PROMPT, SERVED, near, rule


class TestOlmoHybrid(Suite):
    model_type = "olmo_hybrid"
    largest_beta = 2.0

    def exact_decays(self, mix):
        module, raw = mix._module, mix.a_proj.output.float()
        return -module.A_log.float().exp() * torch.nn.functional.softplus(raw + module.dt_bias)

    @pytest.mark.parametrize("allowed", [True, False])
    def test_betas_above_one(self, checkpoints, allowed):
        path = checkpoints("olmo_hybrid", linear_allow_neg_eigval=allowed)
        model = StandardizedTransformer(str(path), device="cpu")
        mix = model.layers[0].linear_attn
        with model.trace(PROMPT):
            served = [getattr(mix, name).save() for name in SERVED]
            served = list(served).save()
            states = mix.states.save()
        assert (served[4].max() > 1) == allowed and served[4].max() < 2
        near(states, rule(*served)[2])
