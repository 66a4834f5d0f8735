from families.suite import Suite


class TestQwen4Exp(Suite):
    model_type, wrapper = "qwen4_exp_text", "qwen4_exp"
    streams = 2
