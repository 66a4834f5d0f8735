from families.suite import Suite


class TestGlm5Next(Suite):
    model_type, family = "glm5_next", "glm5_next_text"
    wrapper = "glm5_next"
    value_dim = 16
    per_channel = True
    streams = 2

    def exact_decays(self, mix):
        return mix.forget_gate.output
