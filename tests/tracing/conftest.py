"""The models whose mechanics are tested here; what every family must do is in tests/families/suite.py."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def on_one_thread(one_thread): ...


@pytest.fixture
def qwen(models):
    return models("qwen3_5_text")
