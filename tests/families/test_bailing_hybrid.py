from families.suite import Suite


class TestBailingHybrid(Suite):
    model_type = "bailing_hybrid"
    value_dim = 16
    per_channel = True

    def exact_decays(self, mix):
        """The model itself rounds its gate to its own dtype: served as it is, in fp32."""
        return mix.forget_gate.output.float()
