from families.suite import Suite


class TestQwen3_5Moe(Suite):
    model_type, wrapper = "qwen3_5_moe_text", "qwen3_5_moe"
