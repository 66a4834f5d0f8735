import torch

from families.suite import Suite


class TestQwen3Next(Suite):
    model_type = "qwen3_next"

    def exact_decays(self, mix):
        """One projection gives b and a of the value heads, key head by key head."""
        module = mix._module
        b_and_a = mix.in_proj_ba.output.unflatten(-1, (module.num_k_heads, -1))
        raw = b_and_a.chunk(2, dim=-1)[1].flatten(-2).float()
        return -module.A_log.float().exp() * torch.nn.functional.softplus(raw + module.dt_bias)
