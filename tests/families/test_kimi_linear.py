from families.suite import Suite


class TestKimiLinear(Suite):
    model_type = "kimi_linear"
    value_dim = 16
    per_channel = True

    def exact_decays(self, mix):
        return mix.forget_gate.output
