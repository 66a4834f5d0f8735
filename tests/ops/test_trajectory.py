"""`Trajectory`: what is computed from it after the fact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cases
from numerics import judge, judge_norms
from statetap import ArgumentError
from statetap.ops import StateWrite, Taps, Trajectory, gated_delta_rule

pytestmark = pytest.mark.usefixtures("each_backend")
ALL = Taps(trajectory=True, states="all", norms=True)
WRITES = [
    StateWrite(3, torch.ones(16, 16), rows=[1]),
    StateWrite(40, torch.eye(16), heads=[0]),
    StateWrite(69, torch.ones(16, 16)),
]


@pytest.fixture(params=["per head", "per channel", "packed", "written", "packed and written"])
def call(request):
    """(call, output) of some kind."""
    channels = request.param == "per channel"
    kw = {}
    packed = "packed" in request.param
    a = cases.inputs(
        1, batch=1 if packed else 2, tokens=70, heads=4, channels=channels, state=True, sequences=3 if packed else None
    )
    if packed:
        kw["cu_seqlens"] = torch.tensor([0, 20, 20, 70])
    if "written" in request.param:
        kw["state_writes"] = [StateWrite(w.token, w.value, None if packed else w.rows, w.heads) for w in WRITES]
    return {**a, **kw}, gated_delta_rule(**a, **kw, taps=ALL)


def queries_of(a):
    q = a["q"].double()
    return q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5


def test_states_norms_and_reads(call):
    a, out = call
    t = out.trajectory
    assert t.states().equal(out.states)
    judge_norms(t.norms(), out.norms)
    assert t.states([3, -1], heads=[2]).equal(out.states[:, [3, -1]][:, :, [2]])
    assert t.state_after(40).equal(out.states[:, 40])
    reads = t.read(queries_of(a).float())
    judge(
        "read", reads, (out.states.double() * queries_of(a).repeat_interleave(2, 2)[..., None]).sum(-2), out.outputs, 2
    )


def test_effective_attention_is_exact(call):
    """weights @ values + remainder is the output, in fp64 to fp64's rounding; and it is lower triangular."""
    a, _ = call
    writes = a.get("state_writes")
    if writes is not None:
        writes = [StateWrite(w.token, w.value.double(), w.rows, w.heads) for w in writes]
    out = gated_delta_rule(**{**cases.double(a), "state_writes": writes}, taps=Taps(trajectory=True))
    weights, remainder = out.trajectory.effective_attention(queries_of(a))
    assert weights.shape == (*a["v"].shape[:1], 4, 70, 70)
    assert weights.triu(1).abs().max() == 0
    values = a["v"].double().transpose(1, 2)
    judge("C v + remainder", (weights @ values).transpose(1, 2) + remainder, out.outputs, head_axis=2, floor=1e-12)


def test_effective_attention_is_the_derivative_of_the_output_by_the_values(call):
    a, _ = call
    v = a["v"].clone().requires_grad_()
    out = gated_delta_rule(**{**a, "v": v}, taps=Taps(trajectory=True))
    weights, _ = out.trajectory.effective_attention(queries_of(a).float())
    (slope,) = torch.autograd.grad(out.outputs[0, 65, 1, 2], v)
    judge("one row of weights", weights[0, 1, 65].detach(), slope[0, :, 1, 2], floor=1e-4)


def test_own_storage(call):
    a, out = call
    pointers = {x.untyped_storage().data_ptr() for x in a.values() if torch.is_tensor(x)}
    assert not pointers & {x.untyped_storage().data_ptr() for x in out.trajectory.fields().values()}


def test_fields_round_trip(call, tmp_path):
    _, out = call
    torch.save(out.trajectory.fields(), tmp_path / "t.pt")
    again = Trajectory.from_fields(torch.load(tmp_path / "t.pt"))
    assert again.states().equal(out.states)
    assert again.nbytes == sum(x.nbytes for x in out.trajectory.fields().values())


def test_rows():
    a = cases.inputs(2, batch=3, tokens=70, heads=4, state=True)
    writes = [StateWrite(3, torch.ones(16, 16), rows=[2])]
    out = gated_delta_rule(**a, taps=ALL, state_writes=writes)
    t = out.trajectory
    assert len(t) == 3
    for rows in (0, -1, slice(1, 3), slice(2, 2)):
        index = [rows] if isinstance(rows, int) else rows
        assert t[rows].states().equal(out.states[index])
        assert t[rows].norms().allclose(out.norms[index])
    with pytest.raises(IndexError):
        t[3]


BAD = {
    "queries": [lambda t, x=x: t.read(x) for x in (None, "a", torch.zeros(3), torch.zeros(2, 10, 4, 15))]
    + [lambda t: t.effective_attention(torch.zeros(2, 10, 3, 16)), lambda t: t.read(torch.zeros(2, 10, 4, 16).int())],
    "token": [lambda t, x=x: t.state_after(x) for x in ("a", 10, -11, True, None)],
    "states": [lambda t: t.states(1.5), lambda t: t.states("first")],
    "heads": [lambda t: t.norms("a"), lambda t: t.states([0], heads=[4])],
    "dtype": [lambda t: t.to(torch.int32)],
    "rows of a trajectory": [lambda t: t[::-1], lambda t: t["a"], lambda t: t[1.0], lambda t: t[True]],
    "tensors": [
        lambda t: Trajectory.from_fields({}),
        lambda t: Trajectory.from_fields({**t.fields(), "states": t.keys}),
    ],
}


@pytest.mark.parametrize("name,ask", [(name, ask) for name, asks in BAD.items() for ask in asks])
def test_what_cannot_be_had_is_said_plainly(name, ask):
    a = cases.inputs(1, batch=2, tokens=10, heads=4)
    trajectory = gated_delta_rule(**a, taps=Taps(trajectory=True)).trajectory
    with pytest.raises(ArgumentError, match=f"^{name}: got"):
        ask(trajectory)


def test_to():
    out = gated_delta_rule(**cases.inputs(3, tokens=70), taps=ALL)
    t = out.trajectory.to(torch.float64)
    assert t.updates.dtype == torch.float64 and t.chunk_starts.dtype == torch.int64
    judge("states", t.states(), out.states.double(), floor=1e-6)
    assert out.trajectory.to("meta").updates.is_meta


def test_smaller_than_the_states():
    a = cases.inputs(4, tokens=1024, key_heads=1, heads=1, key_dim=128, value_dim=128)
    out = gated_delta_rule(**a, taps=Taps(trajectory=True, states="all"))
    assert out.states.nbytes > 30 * out.trajectory.nbytes


@given(st.integers(0, 1000), st.booleans())
def test_norms_where_a_write_erases_the_state(seed, channels):
    """The same key twice with beta 1 leaves nothing of the first value: the norm is far below what made it."""
    a = cases.inputs(seed, tokens=66, channels=channels, strength=0.0)
    a["k"][:, 1::2] = a["k"][:, ::2]
    a["v"][:, 1::2] *= 1e-3
    a["beta"] = torch.ones_like(a["beta"])
    ours = gated_delta_rule(**a, taps=Taps(norms=True)).norms
    want = gated_delta_rule(**cases.double(a), taps=Taps(norms=True), backend="reference").norms
    judge_norms(ours, want)
