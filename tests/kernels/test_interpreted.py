"""Every kernel against the token loop in fp64, in the interpreter, rounding as tensor cores do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import emulation  # noqa: F401  (it patches the interpreter)
from cases import exact
from numerics import error, judge
from statetap.ops import StateWrite, Taps, gated_delta_rule, triton_backend
from statetap.triton_kernels.launch import PIECES

ALL = Taps(trajectory=True, states="all", norms=True)
BOTH = pytest.mark.parametrize("channels", [False, True], ids=["a decay per head", "a decay per key channel"])


def compare(a, taps=ALL, floor=2e-6, **kw):
    """Every result of one call; `floor` is what the precision allows."""
    precision = kw.pop("precision", "high")
    ours = gated_delta_rule(**a, taps=taps, backend="triton", precision=precision, **kw)
    want = exact(a, taps, **kw)
    judge("outputs", ours.outputs, want.outputs, head_axis=2, floor=floor)
    judge("final_state", ours.final_state, want.final_state, head_axis=1, floor=floor)
    if taps.states is not None:
        judge("states", ours.states, want.states, head_axis=-3, floor=floor)
    if taps.norms and want.norms.numel():
        assert (ours.norms - want.norms).abs().le(1e-4 * want.norms + 1e-6 * want.norms.amax((0, 1)) + 1e-12).all()
    if taps.probes is not None:
        judge("reads", ours.reads, want.reads, head_axis=2, floor=floor)
    if taps.trajectory:
        for name in ("chunk_states", "keys", "updates", "final_state"):
            judge(name, getattr(ours.trajectory, name), getattr(want.trajectory, name), floor=floor)
        assert ours.trajectory.decays.double().equal(want.trajectory.decays)
        assert ours.trajectory.betas.double().equal(want.trajectory.betas)
        assert ours.trajectory.chunk_starts.equal(want.trajectory.chunk_starts)
        assert ours.trajectory.written.equal(want.trajectory.written)
    return ours, want


HARD = {
    "wiped by -1e4": lambda a: cases.with_gate(a, cases.wiping(-1e4, 21)),
    "wiped by -inf": lambda a: cases.with_gate(a, cases.wiping(float("-inf"), 21)),
    "no decay": lambda a: {**a, "g": None} if a["g"].ndim == 3 else cases.with_gate(a, lambda t: torch.zeros(t)),
    "every token forgets": lambda a: cases.with_gate(a, lambda t: torch.full((t,), -50.0)),
    "beta near two": lambda a: {**cases.with_gate(a, lambda t: torch.full((t,), -1e-3)), "beta": 1.9 + 0.1 * a["beta"]},
    "beta zero or one": lambda a: {**a, "beta": (a["beta"] > 0.5).float()},
    "no beta": lambda a: {**a, "beta": None},
    "zero keys": lambda a: {**a, "k": a["k"] * (torch.arange(a["k"].shape[1]) > 20)[None, :, None, None]},
    "keys of norm 100": lambda a: {**a, "k": a["k"] * 25},
    "as they are": lambda a: {**a, "k": 0.2 * a["k"], "use_qk_l2norm_in_kernel": False, "scale": 0.7},
}


@BOTH
@pytest.mark.parametrize("name", HARD)
def test_hard_cases(name, channels, poisoned):
    a = cases.inputs(3, tokens=67, heads=1 if channels else 2, key_heads=1, channels=channels, state=True)
    compare(HARD[name](a), Taps(**{**vars(ALL), "probes": torch.randn(1 if channels else 2, 16)}))


shapes = st.fixed_dictionaries(
    dict(
        seed=st.integers(0, 1000),
        batch=st.just(1),
        tokens=st.integers(1, 80),
        key_heads=st.integers(1, 2),
        key_dim=st.sampled_from([8, 20, 32]),
        value_dim=st.sampled_from([8, 20, 40]),
        channels=st.booleans(),
        state=st.booleans(),
        normalise=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    )
)


@settings(max_examples=6)
@given(shapes)
def test_any_shape(shape):
    compare(
        cases.inputs(**shape, heads=shape["key_heads"]), Taps(), floor=2e-6 if shape["dtype"] == torch.float32 else 1e-5
    )


@settings(max_examples=5)
@given(shapes, st.lists(st.integers(0, 90), max_size=4))
def test_packed(shape, cuts):
    tokens = max([*cuts, 1])
    cu = torch.tensor([0, *sorted(cuts), tokens])
    shape = {**shape, "batch": 1, "tokens": tokens, "dtype": torch.float32}
    compare(
        cases.inputs(**shape, heads=shape["key_heads"], sequences=len(cu) - 1), Taps(trajectory=True), cu_seqlens=cu
    )


@BOTH
def test_writes(channels):
    """At the first token, the last, neighbours; for some rows and heads."""
    a = cases.inputs(5, batch=2, tokens=45, heads=2, key_heads=1, channels=channels, state=True)
    value = lambda: torch.randn(16, 16)
    writes = [
        StateWrite(0, value(), rows=[1]),
        StateWrite(40, value(), heads=[1]),
        StateWrite(41, value()),
        StateWrite(-1, value(), [0]),
    ]
    ours, _ = compare(a, Taps(**{**vars(ALL), "probes": torch.randn(2, 16)}), state_writes=writes)
    assert ours.states[0, -1].equal(writes[-1].value.expand(2, 16, 16))


def test_writes_in_a_packed_row():
    cu = torch.tensor([0, 5, 5, 70, 90])
    a = cases.inputs(4, tokens=90, state=True, sequences=4)
    compare(a, cu_seqlens=cu, state_writes=[StateWrite(t, torch.randn(16, 16)) for t in (4, 5, 69, 89, 30)])


# -- precision ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision,allowed", [("fast", 2e-2), ("high", 1e-5), ("exact", 1e-6)])
def test_precision(precision, allowed, dtype, channels):
    """States of half-precision inputs: one, two or three pieces. One is seen to be worse, or nothing was rounded at all."""
    a = cases.inputs(9, tokens=80, heads=2, key_heads=1, dtype=dtype, channels=channels, state=True)
    a["k"] = a["k"] * 7  # far from normalised: keys are never rounded after they are
    ours, want = compare(a, Taps(trajectory=True), precision=precision, floor=allowed)
    if precision == "fast":
        assert error(ours.final_state, want.final_state, 1) > 3e-4


def test_the_same_precision_with_and_without_looking():
    for precision in ("fast", "high", "exact"):
        for channels in (False, True):
            a = cases.inputs(6, tokens=70, dtype=torch.bfloat16, channels=channels)
            plain = gated_delta_rule(**a, backend="triton", precision=precision)
            tapped = gated_delta_rule(**a, backend="triton", precision=precision, taps=ALL)
            assert tapped.outputs.equal(plain.outputs) and tapped.final_state.equal(plain.final_state)
            assert tapped.states[:, -1].equal(tapped.final_state)


def test_the_gate_sees_a_piece_that_is_missing(monkeypatch):
    a = cases.inputs(9, tokens=70, dtype=torch.bfloat16, state=True)
    compare(a, Taps(), floor=1e-5)
    monkeypatch.setitem(PIECES, "high", 1)
    with pytest.raises(AssertionError, match="final_state: off by"):
        compare(a, Taps(), floor=1e-5)


# -- taps --------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("tokens", [[0, 3, -1, 3], slice(5, 60, 17), 4, []])
def test_states_at_tokens_and_heads(tokens, channels):
    a = cases.inputs(7, batch=2, tokens=70, heads=3, key_heads=1, channels=channels)
    every = gated_delta_rule(**a, taps=Taps(states="all"), backend="triton").states
    taps = Taps(states=tokens, heads=[2, 0], norms=True, probes=torch.randn(3, 1, 16))
    some, want = gated_delta_rule(**a, taps=taps, backend="triton"), exact(a, taps)
    index = [tokens] if isinstance(tokens, int) else tokens
    assert some.states.equal(every[:, index][:, :, [2, 0]])
    judge("norms", some.norms, want.norms, head_axis=2)
    judge("reads", some.reads, want.reads, head_axis=2)


def test_states_by_mask_and_storage_dtype():
    a = cases.inputs(8, batch=2, tokens=70, heads=2)
    mask = torch.rand(2, 70) < 0.1
    full = gated_delta_rule(**a, taps=Taps(states="all"), backend="triton").states
    out = gated_delta_rule(**a, taps=Taps(states=mask, trajectory=True, dtype=torch.bfloat16), backend="triton")
    assert out.states.equal(full[mask].bfloat16()) and out.trajectory.updates.dtype == torch.bfloat16


@BOTH
@pytest.mark.parametrize("tokens", [1, 9, 66])
def test_probes_of_their_own_at_every_token(tokens, channels):
    a = cases.inputs(10, tokens=tokens, heads=2, key_heads=1, channels=channels, state=True)
    compare(a, Taps(probes=torch.randn(1, tokens, 2, 1, 16)))


def test_norms_where_writes_erase_the_state():
    """The recursion of norms cancels there; chunks in doubt are replayed, and without that the norms are wrong."""
    a = cases.inputs(11, tokens=66, heads=1, key_heads=1, key_dim=16, value_dim=16, state=True, normalise=False)
    keys = torch.linalg.qr(torch.randn(16, 16))[0]
    a["k"] = keys.repeat(5, 1)[:66].view(1, 66, 1, 16)
    a["v"], a["g"], a["beta"] = a["v"] * 1e-4, a["g"] * 0, torch.ones(1, 66, 1)
    run = triton_backend.Run(_call(a))
    norms = run.forward()[8]
    want = exact(a, Taps(norms=True)).norms
    assert run.found[1].any(), "no chunk was in doubt"
    assert (norms - want).abs().le(1e-4 * want + 1e-6 * want.amax()).all()
    alone = run.found[0].sum(0).clamp_min(0).sqrt()
    assert alone.equal(norms)  # the replay wrote its norms over the doubtful ones


def _call(a):
    from statetap.ops.call import DeltaCall, Wanted

    return DeltaCall(a["q"], a["k"], a["v"], a["g"], a["beta"], 1.0, a["initial_state"], wanted=Wanted(norms=True))


def test_out():
    """A buffer of the right kind is what the kernels write to."""
    a = cases.inputs(12, tokens=70)
    want = gated_delta_rule(**a, taps=ALL, backend="triton")
    out = {"states": torch.full_like(want.states, float("nan")), "norms": torch.full_like(want.norms, float("nan"))}
    got = gated_delta_rule(**a, taps=Taps(states="all", norms=True, out=out), backend="triton")
    assert got.states is out["states"] and out["states"].equal(want.states) and out["norms"].equal(want.norms)


@pytest.mark.parametrize("tokens", [1, 70])
def test_in_place(tokens):
    """The caller's final state may be the initial one, which the trajectory then still begins with."""
    a = cases.inputs(12, tokens=tokens, state=True)
    want = gated_delta_rule(**a, taps=Taps(trajectory=True), backend="triton")
    state = a["initial_state"].clone()
    taps = Taps(trajectory=True, out={"final_state": state})
    got = gated_delta_rule(**{**a, "initial_state": state}, taps=taps, backend="triton")
    assert got.final_state is state and state.equal(want.final_state) and got.outputs.equal(want.outputs)
    assert got.trajectory.chunk_states.equal(want.trajectory.chunk_states)


# -- decoding ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_a_few_tokens(tokens, channels):
    a = cases.inputs(13, batch=2, tokens=tokens, heads=2, key_heads=1, channels=channels, state=True)
    compare(a, Taps(**{**vars(ALL), "probes": torch.randn(2, 16)}))


def test_in_pieces():
    a = cases.inputs(14, tokens=90, heads=2)
    state, outputs = None, []
    for start, stop in ((0, 1), (1, 70), (70, 72), (72, 90)):
        piece = {k: x[:, start:stop] if torch.is_tensor(x) else x for k, x in a.items()}
        out, state = gated_delta_rule(**piece, initial_state=state, backend="triton")
        outputs.append(out)
    want = exact(a)
    judge("outputs", torch.cat(outputs, 1), want.outputs, head_axis=2)
    judge("final_state", state, want.final_state, head_axis=1)


# -- configurations, memory, gradients -----------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx942"])
def test_the_rows_of_other_architectures(arch, channels, monkeypatch):
    """Other tiles, the triangle inverted by its own kernel, outputs apart from the scan."""
    monkeypatch.setattr(triton_backend, "architecture", lambda device: arch)
    a = cases.inputs(15, tokens=70, heads=2, key_heads=1, value_dim=40, channels=channels, dtype=torch.bfloat16)
    compare(a, Taps(trajectory=True, norms=True), floor=1e-5)


@BOTH
def test_wide_heads(channels):
    a = cases.inputs(16, tokens=66, key_heads=1, heads=1, key_dim=256, value_dim=8, channels=channels)
    compare(a, Taps(trajectory=True, norms=True))
    a = cases.inputs(17, tokens=20, key_heads=1, heads=1, key_dim=8, value_dim=256, channels=channels)
    compare(a, Taps(states="all"))


def test_any_strides_and_inputs_are_left_alone():
    views = cases.strided(cases.inputs(18, batch=2, tokens=20, heads=2, state=True))
    before = {k: x.clone() for k, x in views.items() if torch.is_tensor(x)}
    compare(views)
    assert all(views[k].equal(x) for k, x in before.items())


def test_nan_stays_in_its_row_and_sequence():
    a = cases.inputs(19, tokens=70)
    a["v"][0, 20] = float("nan")
    out = gated_delta_rule(**a, cu_seqlens=torch.tensor([0, 20, 50, 70]), taps=Taps(norms=True), backend="triton")
    assert out.outputs[:, :20].isfinite().all() and out.outputs[:, 50:].isfinite().all()
    assert out.norms[:, :20].isfinite().all() and out.final_state[[0, 2]].isfinite().all()


@BOTH
def test_gradients(channels):
    a = cases.inputs(20, tokens=20, heads=2, key_heads=1, key_dim=8, value_dim=8, channels=channels, state=True)
    taps = Taps(states=[5, -1], norms=True, probes=torch.randn(2, 8))
    ours, theirs = (
        {k: x.detach().clone().to(t).requires_grad_() if torch.is_tensor(x) else x for k, x in a.items()}
        for t in (torch.float32, torch.float64)
    )
    got = gated_delta_rule(**ours, taps=taps, backend="triton")
    want = gated_delta_rule(**theirs, taps=Taps(**{**vars(taps), "probes": taps.probes.double()}), backend="reference")
    for out in (got, want):
        (
            out.outputs.sum() + (out.final_state**2).sum() + out.states.sum() + out.norms.sum() + (out.reads**2).sum()
        ).backward()
    for name, x in ours.items():
        if torch.is_tensor(x):
            judge(name, x.grad, theirs[name].grad, floor=1e-5)


def test_it_is_chosen_and_says_why_not():
    a = cases.inputs(21, tokens=5)
    assert triton_backend.available(torch.device("cpu")) is None
    from statetap.errors import UnsupportedCall

    with pytest.raises(UnsupportedCall, match="triton computes in fp32, not in fp64"):
        gated_delta_rule(**cases.double(a), backend="triton")
    with pytest.raises(UnsupportedCall, match="up to 256, not 300"):
        gated_delta_rule(**cases.inputs(22, tokens=5, value_dim=300), backend="triton")
