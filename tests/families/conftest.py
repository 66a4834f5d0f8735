"""Tiny models on one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def on_one_thread(one_thread): ...
