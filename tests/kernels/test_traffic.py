"""The byte counts, against the tensors that a recorded call really hands to its kernels."""

import pytest

pytest.importorskip("triton")

import binaries
from statetap.triton_kernels import traffic


def handed(launch):
    """Bytes of the tensors among a launch's arguments, each once."""
    tensors = {x.data_ptr(): x.numel() * x.element_size() for x in launch.args.values() if hasattr(x, "element_size")}
    return sum(tensors.values())


def test_a_plain_call():
    shape = traffic.Shape(tokens=128)
    counted = traffic.plain(shape)
    found = {}
    for launch in binaries.launches(binaries.call(), "sm_90"):
        found[launch.name] = found.get(launch.name, 0) + handed(launch)
    # beta comes in bf16 and is fp32 in the count: half of one number a token and head
    assert counted["prepare"] == found["prepare"]
    assert counted["solve"] == found["solve"] + shape.per_token // 2
    beta_and_gate = shape.per_token // 2 + shape.per_token  # handed to the scan, read only for norms
    assert counted["scan"] == found["scan"] - beta_and_gate


def test_taps():
    shape = traffic.Shape(tokens=128)
    plain = sum(map(handed, binaries.launches(binaries.call(), "sm_90")))
    for name, taps in {"trajectory": dict(trajectory=True), "probes": dict(probes=binaries.PROBES)}.items():
        with_tap = sum(map(handed, binaries.launches(binaries.call(**taps), "sm_90")))
        small = 1024  # lists of heads and chunks
        assert abs(with_tap - plain - traffic.tap(shape, name, probes=2)) <= small, name


def test_linear_in_tokens_and_heads():
    one, two = (sum(traffic.plain(traffic.Shape(tokens=n, Hv=h)).values()) for n, h in ((8192, 64), (16384, 64)))
    assert 1.9 < two / one <= 2.0
    assert traffic.floor(traffic.Shape(tokens=8192)) < one
