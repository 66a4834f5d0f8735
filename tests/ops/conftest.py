"""The ops' tests run on every backend that the CPU has."""

from __future__ import annotations

import pytest

from statetap.ops import backends, cpp_backend, native

needs_cpp = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


@pytest.fixture(params=["torch", pytest.param("cpp", marks=needs_cpp)])
def each_backend(request, monkeypatch):
    """What `auto` takes in this test; "torch" as where the C++ library was not built."""
    monkeypatch.setattr(backends, "AUTO", (request.param,))
    if request.param == "torch":
        monkeypatch.setattr(cpp_backend, "available", lambda device: "switched off for this test")
    return request.param
