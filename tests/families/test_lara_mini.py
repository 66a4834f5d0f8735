from families.suite import Suite


class TestLaraMini(Suite):
    model_type = "lara_mini"
