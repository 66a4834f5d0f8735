"""`gated_delta_rule`: every result of every backend against the token loop in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cases
from cases import exact
from numerics import judge, judge_norms
from statetap.ops import StateWrite, Taps, gated_delta_rule

pytestmark = pytest.mark.usefixtures("each_backend")
ALL = Taps(trajectory=True, states="all", norms=True)


def loop(a, **kw):
    return gated_delta_rule(**a, backend="reference", **kw)


def compare(a, taps=ALL, probes=None, **kw):
    """Every result of one call."""
    taps = Taps(**{**vars(taps), "probes": probes})
    ours = gated_delta_rule(**a, taps=taps, **kw)
    want = exact(a, taps=taps, **kw)
    peer = loop(a, taps=taps, **kw)
    judge("outputs", ours.outputs, want.outputs, peer.outputs, 2)
    judge("final_state", ours.final_state, want.final_state, peer.final_state, 1)
    if taps.states is not None:
        judge("states", ours.states, want.states, peer.states, -3)
    if taps.norms:
        assert ours.norms.shape == want.norms.shape
    if taps.norms and want.norms.numel():
        judge_norms(ours.norms, want.norms)
    if probes is not None:
        judge("reads", ours.reads, want.reads, peer.reads, 2)
    if taps.trajectory:
        for name in ("chunk_states", "keys", "updates", "decays", "betas", "final_state"):
            judge(name, getattr(ours.trajectory, name), getattr(want.trajectory, name), getattr(peer.trajectory, name))
        assert ours.trajectory.chunk_starts.equal(want.trajectory.chunk_starts)
        assert ours.trajectory.written.equal(want.trajectory.written)
    return ours, want


@pytest.mark.parametrize("channels", [False, True], ids=["a decay per head", "a decay per key channel"])
@pytest.mark.parametrize("name", cases.HARD)
def test_hard_cases(name, channels, poisoned):
    a = cases.HARD[name](channels)
    probes = torch.randn(3, a["k"].shape[3])
    compare(a, probes=probes)


shapes = st.fixed_dictionaries(
    dict(
        seed=st.integers(0, 1000),
        batch=st.integers(1, 3),
        tokens=st.integers(1, 140),
        key_heads=st.integers(1, 2),
        key_dim=st.sampled_from([8, 12, 16]),
        value_dim=st.sampled_from([8, 20]),
        channels=st.booleans(),
        state=st.booleans(),
        normalise=st.booleans(),
    )
)


@given(shapes, st.integers(1, 3))
def test_any_shape(shape, groups):
    compare(cases.inputs(**shape, heads=shape["key_heads"] * groups))


@given(shapes, st.lists(st.integers(0, 60), max_size=5))
def test_packed(shape, cuts):
    tokens = max([*cuts, 1])
    shape = {**shape, "batch": 1, "tokens": tokens}
    cu = torch.tensor([0, *sorted(cuts), tokens])
    a = cases.inputs(**shape, heads=shape["key_heads"], sequences=len(cu) - 1)
    ours, _ = compare(a, cu_seqlens=cu)
    for i, (start, stop) in enumerate(zip(cu.tolist(), cu.tolist()[1:])):
        alone = {
            k: x[:, start:stop] if torch.is_tensor(x) and x.ndim > 2 and k != "initial_state" else x
            for k, x in a.items()
        }
        if "initial_state" in a:
            alone["initial_state"] = a["initial_state"][i : i + 1]
        judge(
            "a packed sequence",
            ours.final_state[i : i + 1],
            exact(alone).final_state,
            gated_delta_rule(**alone).final_state,
        )


@given(shapes, st.data())
def test_writes(shape, data):
    """At any tokens, neighbours and the last among them, for any rows and heads, later ones winning."""
    heads = shape["key_heads"] * 2
    a = cases.inputs(**shape, heads=heads)
    batch, tokens = shape["batch"], shape["tokens"]
    writes = []
    for _ in range(data.draw(st.integers(1, 5))):
        rows = data.draw(st.one_of(st.none(), st.lists(st.integers(0, batch - 1), min_size=1, unique=True)))
        chosen = data.draw(st.one_of(st.none(), st.lists(st.integers(0, heads - 1), min_size=1, unique=True)))
        token = data.draw(st.integers(-tokens, tokens - 1))
        value = torch.randn(shape["key_dim"], shape["value_dim"])
        writes.append(StateWrite(token, value, rows, chosen))
    ours, _ = compare(a, state_writes=writes, probes=torch.randn(2, shape["key_dim"]))
    last = writes[-1]
    row = 0 if last.rows is None else last.rows[0]
    head = 0 if last.heads is None else last.heads[0]
    assert ours.states[row, last.token, head].equal(last.value.float())


def test_a_write_at_every_token():
    a = cases.inputs(3, batch=2, tokens=70, heads=2)
    values = torch.randn(70, 2, 2, 16, 16)
    compare(a, state_writes=[StateWrite(t, values[t]) for t in range(70)])


def test_writes_in_a_packed_row():
    cu = torch.tensor([0, 5, 5, 70, 90])
    a = cases.inputs(4, tokens=90, state=True, sequences=4)
    compare(a, cu_seqlens=cu, state_writes=[StateWrite(t, torch.randn(16, 16)) for t in (4, 5, 69, 89, 30)])


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 130])
def test_the_last_state_is_the_final_state_bit_for_bit(tokens, channels):
    a = cases.inputs(5, batch=2, tokens=tokens, channels=channels, state=True)
    for writes in (None, [StateWrite(tokens - 1, torch.randn(16, 16), rows=[1])]):
        out = gated_delta_rule(**a, taps=ALL, state_writes=writes)
        assert out.states[:, -1].equal(out.final_state)
        assert out.trajectory.states()[:, -1].equal(out.final_state)
        assert out.final_state.equal(gated_delta_rule(**a, state_writes=writes).final_state)


def test_looking_changes_nothing():
    a = cases.inputs(6, batch=2, tokens=130, heads=4, state=True)
    plain = gated_delta_rule(**a)
    for taps in (ALL, Taps(norms=True), Taps(probes=torch.randn(2, 16)), Taps(states=[0, -1], heads=[1])):
        tapped = gated_delta_rule(**a, taps=taps)
        assert tapped.outputs.equal(plain.outputs) and tapped.final_state.equal(plain.final_state)


@pytest.mark.parametrize("tokens", [[0, 3, -1], slice(5, 60, 7), 4, range(3), torch.tensor([1, 2]), []])
def test_states_at_tokens_and_heads(tokens):
    a = cases.inputs(7, batch=2, tokens=70, heads=4)
    every = gated_delta_rule(**a, taps=Taps(states="all")).states
    some = gated_delta_rule(**a, taps=Taps(states=tokens, heads=[3, 0], norms=True, probes=torch.randn(2, 16)))
    index = [tokens] if isinstance(tokens, int) else tokens
    assert some.states.equal(every[:, index][:, :, [3, 0]])
    assert some.norms.shape == (2, 70, 2) and some.reads.shape == (2, 70, 2, 2, 16)


def test_states_by_mask():
    a = cases.inputs(8, batch=2, tokens=70, heads=4)
    mask = torch.rand(2, 70) < 0.2
    every = gated_delta_rule(**a, taps=Taps(states="all")).states
    assert gated_delta_rule(**a, taps=Taps(states=mask)).states.equal(every[mask])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype):
    """Given the same rounded inputs, states are as good as in fp32, and outputs rounded once."""
    a = cases.inputs(9, batch=2, tokens=100, dtype=dtype)
    ours = gated_delta_rule(**a, taps=ALL)
    want = exact(a, taps=ALL)
    assert ours.outputs.dtype == dtype and ours.final_state.dtype == torch.float32
    judge("outputs", ours.outputs, want.outputs, head_axis=2)
    judge("states", ours.states, want.states, head_axis=2, floor=1e-5)


def test_fp64_stays_fp64():
    a = cases.double(cases.inputs(10, tokens=70))
    out = gated_delta_rule(**a, taps=ALL)
    assert {out.outputs.dtype, out.final_state.dtype, out.states.dtype, out.norms.dtype} == {torch.float64}
    judge("outputs", out.outputs, exact(a).outputs, floor=1e-13)


def test_storage_dtype():
    a = cases.inputs(11, tokens=70)
    out = gated_delta_rule(**a, taps=Taps(trajectory=True, states="all", dtype=torch.bfloat16))
    t = out.trajectory
    assert {out.states.dtype, t.chunk_states.dtype, t.updates.dtype} == {torch.bfloat16}
    assert {t.keys.dtype, t.decays.dtype, out.final_state.dtype} == {torch.float32}
    full = gated_delta_rule(**a, taps=Taps(states="all")).states
    assert out.states.equal(full.bfloat16())


def test_any_strides_and_inputs_are_left_alone():
    views = cases.strided(cases.inputs(12, batch=2, tokens=70, heads=2, state=True))
    before = {k: x.clone() for k, x in views.items() if torch.is_tensor(x)}
    compare(views)
    assert all(views[k].equal(x) for k, x in before.items())


def test_nan_stays_in_its_row_and_sequence():
    a = cases.inputs(13, batch=2, tokens=70)
    a["v"][1, 3] = float("nan")
    out = gated_delta_rule(**a, taps=ALL)
    assert all(x[0].isfinite().all() for x in (out.outputs, out.states, out.norms))
    b = cases.inputs(14, tokens=70)
    b["v"][0, 20] = float("nan")
    cu = torch.tensor([0, 20, 50, 70])
    out = gated_delta_rule(**b, cu_seqlens=cu)
    assert out.outputs[:, :20].isfinite().all() and out.outputs[:, 50:].isfinite().all()
    assert out.final_state[[0, 2]].isfinite().all()


class _Setting:
    """A matmul precision set in one of torch's two ways, and put back."""

    def __init__(self, name, precision):
        self.holder = {"cuda": torch.backends.cuda.matmul, "mkldnn": torch.backends.mkldnn.matmul}.get(name)
        self.precision = precision

    def __enter__(self):
        if self.holder is None:
            torch.set_float32_matmul_precision(self.precision)
            return self
        self.was, self.holder.fp32_precision = self.holder.fp32_precision, self.precision
        return self

    def still(self):
        return (
            torch.get_float32_matmul_precision() if self.holder is None else self.holder.fp32_precision
        ) == self.precision

    def __exit__(self, *exc):
        if self.holder is None:
            torch.set_float32_matmul_precision("highest")
        else:
            self.holder.fp32_precision = self.was


@pytest.mark.parametrize("name,precision", [("all", "medium"), ("all", "high"), ("cuda", "tf32"), ("mkldnn", "bf16")])
def test_full_precision_at_any_matmul_setting(name, precision):
    a = cases.inputs(15, batch=2, tokens=100, key_dim=64, value_dim=64)
    want = gated_delta_rule(**a, taps=ALL)
    with _Setting(name, precision) as setting:
        got = gated_delta_rule(**a, taps=ALL)
        later = got.trajectory.states([50])
        assert setting.still()
    assert got.outputs.equal(want.outputs) and later.equal(want.trajectory.states([50]))


def test_full_precision_under_autocast():
    a = cases.inputs(15, batch=2, tokens=100, key_dim=64, value_dim=64)
    want = gated_delta_rule(**a, taps=ALL)
    with torch.autocast("cpu", torch.bfloat16):
        got = gated_delta_rule(**a, taps=ALL)
        later = got.trajectory.states([50])
    assert got.outputs.equal(want.outputs) and later.equal(want.trajectory.states([50]))


def test_in_pieces():
    """A prompt in pieces, each from the state of the one before, is the prompt at once."""
    a = cases.inputs(16, batch=2, tokens=200, heads=4)
    state, outputs = None, []
    for start, stop in ((0, 1), (1, 8), (8, 72), (72, 137), (137, 200)):
        piece = {k: x[:, start:stop] if torch.is_tensor(x) else x for k, x in a.items()}
        out, state = gated_delta_rule(**piece, initial_state=state)
        outputs.append(out)
    want = exact(a)
    judge("outputs", torch.cat(outputs, 1), want.outputs, head_axis=2, floor=1e-5)
    judge("final_state", state, want.final_state, head_axis=1, floor=1e-5)
