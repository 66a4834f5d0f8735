"""What only a card can show. Left out where there is none; `make test-gpu` runs it."""

from __future__ import annotations

import pytest
import torch

import cases
from numerics import error, judge
from statetap.ops import StateWrite, Taps, gated_delta_rule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
ALL = Taps(trajectory=True, states="all", norms=True)
BOTH = pytest.mark.parametrize("channels", [False, True], ids=["a decay per head", "a decay per key channel"])


def move(x, device="cuda"):
    """Tensors of a call, of its taps or of its writes, on a device."""
    if isinstance(x, dict):
        return {k: move(v, device) for k, v in x.items()}
    if isinstance(x, Taps):
        return Taps(**move(vars(x), device))
    if isinstance(x, StateWrite):
        return StateWrite(x.token, x.value.to(device), x.rows, x.heads)
    if isinstance(x, list):
        return [move(v, device) for v in x]
    return x.to(device) if torch.is_tensor(x) else x


def compare(a, taps=ALL, floor=2e-6, precision="high", **kw):
    ours = gated_delta_rule(**move(a), taps=move(taps), backend="triton", precision=precision, **move(kw))
    want = cases.exact(a, taps, **kw)
    for name, axis in (("outputs", 2), ("final_state", 1), ("states", -3), ("norms", 2), ("reads", 2)):
        if getattr(want, name) is not None and getattr(want, name).numel():
            judge(
                name,
                getattr(ours, name).cpu(),
                getattr(want, name),
                head_axis=axis,
                floor=1e-4 if name == "norms" else floor,
            )
    return ours


@BOTH
@pytest.mark.parametrize("name", cases.HARD)
def test_hard_cases(name, channels):
    a = cases.HARD[name](channels)
    compare(a, Taps(**{**vars(ALL), "probes": torch.randn(3, a["k"].shape[3])}))


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision,allowed", [("fast", 2e-2), ("high", 1e-5), ("exact", 1e-6)])
@pytest.mark.parametrize("dim", [64, 128])
def test_precision(precision, allowed, dtype, channels, dim):
    a = cases.inputs(
        9, batch=2, tokens=300, heads=4, key_dim=dim, value_dim=dim, dtype=dtype, channels=channels, state=True
    )
    compare(a, Taps(trajectory=True, states=[0, 64, -1]), precision=precision, floor=allowed)


@BOTH
def test_writes_and_packed_rows(channels):
    cu = torch.tensor([0, 5, 5, 70, 190])
    a = cases.inputs(4, tokens=190, state=True, sequences=4, channels=channels)
    compare(a, cu_seqlens=cu, state_writes=[StateWrite(t, torch.randn(16, 16)) for t in (4, 5, 69, 189, 30)])


@BOTH
def test_two_runs_are_equal_bit_for_bit(channels):
    """256 programs and more, so that a race between them would show."""
    a = move(
        cases.inputs(
            5, batch=8, tokens=1024, heads=16, key_dim=128, value_dim=128, dtype=torch.bfloat16, channels=channels
        )
    )
    runs = [gated_delta_rule(**a, taps=Taps(trajectory=True, norms=True), backend="triton") for _ in range(2)]
    for name in ("outputs", "final_state", "norms"):
        assert getattr(runs[0], name).equal(getattr(runs[1], name))


@BOTH
@pytest.mark.parametrize("tokens", [1, 4])
def test_decoding_in_a_cuda_graph(tokens, channels):
    a = move(
        cases.inputs(
            6,
            batch=2,
            tokens=tokens,
            heads=4,
            key_dim=128,
            value_dim=128,
            dtype=torch.bfloat16,
            channels=channels,
            state=True,
        )
    )
    want = gated_delta_rule(**a, backend="triton")
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        gated_delta_rule(**a, backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        got = gated_delta_rule(**a, backend="triton")
    graph.replay()
    torch.cuda.synchronize()
    assert got.outputs.equal(want.outputs) and got.final_state.equal(want.final_state)


def test_gradients():
    a = cases.inputs(7, batch=2, tokens=90, heads=4, state=True)
    grads = []
    for device, dtype, backend in (("cuda", torch.float32, "triton"), ("cpu", torch.float64, "reference")):
        b = {k: x.to(device, dtype).requires_grad_() if torch.is_tensor(x) else x for k, x in a.items()}
        out = gated_delta_rule(**b, taps=Taps(states=[5, -1], norms=True), backend=backend)
        (out.outputs.sum() + (out.final_state**2).sum() + out.states.sum() + out.norms.sum()).backward()
        grads.append({k: x.grad for k, x in b.items() if torch.is_tensor(x)})
    for name, want in grads[1].items():
        assert error(grads[0][name].cpu(), want) < 1e-4, name


def test_more_than_two_to_the_31_elements():
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    r = torch.Generator("cuda").manual_seed(0)
    n = lambda *s: torch.randn(*s, generator=r, device="cuda", dtype=torch.bfloat16)
    rows, tokens, heads, dim = 17, 16384, 64, 128
    a = dict(q=n(rows, tokens, 16, dim), k=n(rows, tokens, 16, dim), v=n(rows, tokens, heads, dim))
    a |= dict(
        g=-0.1 * torch.rand(rows, tokens, heads, device="cuda"), beta=torch.rand(rows, tokens, heads, device="cuda")
    )
    every = gated_delta_rule(**a, use_qk_l2norm_in_kernel=True, backend="triton")
    last = gated_delta_rule(**{k: x[-1:] for k, x in a.items()}, use_qk_l2norm_in_kernel=True, backend="triton")
    assert every.outputs[-1:].equal(last.outputs) and every.final_state[-1:].equal(last.final_state)


def test_the_tensors_own_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    a = move(cases.inputs(8, tokens=70, state=True), "cuda:1")
    out = gated_delta_rule(**a, backend="triton")
    assert out.outputs.device == a["v"].device
    judge("outputs", out.outputs.cpu(), gated_delta_rule(**move(a, "cpu"), backend="reference").outputs, head_axis=2)


def test_auto_takes_triton():
    a = move(cases.inputs(9, tokens=70))
    assert gated_delta_rule(**a).outputs.equal(gated_delta_rule(**a, backend="triton").outputs)
