from families.suite import Suite


class TestQwen3_5(Suite):
    model_type, wrapper = "qwen3_5_text", "qwen3_5"


class TestQwen3_5Wrapped(Suite):
    """As the text model that a multimodal checkpoint loads as."""

    model_type, family = "qwen3_5", "qwen3_5_text"
