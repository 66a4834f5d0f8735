from families.suite import Suite


class TestQwen4Exp(Suite):
    model_type = "qwen4_exp_text"
    streams = 2
