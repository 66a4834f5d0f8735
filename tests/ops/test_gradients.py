"""Gradients of every result, against the token loop in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import cases
from numerics import error
from statetap.ops import StateWrite, Taps, gated_delta_rule

pytestmark = pytest.mark.usefixtures("each_backend")
LEAVES = ("q", "k", "v", "g", "beta", "initial_state")


def leaves(a):
    return {k: x.detach().clone().requires_grad_() if k in LEAVES and torch.is_tensor(x) else x for k, x in a.items()}


def weighted(x, seed):
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * weight.to(x.dtype)).sum()


def gradients(a, pick, backend, value=None, probes=None, **kw):
    """Gradients of a weighted sum of what `pick(output)` gives, by argument."""
    a = leaves(a)
    extra = {n: x.detach().clone().requires_grad_() for n, x in (("value", value), ("probes", probes)) if x is not None}
    writes = (
        [StateWrite(10, extra["value"], rows=[0]), StateWrite(11, extra["value"] * 2)] if value is not None else None
    )
    taps = Taps(trajectory=True, states=[0, 5, 11, -1], norms=True, probes=extra.get("probes"))
    out = gated_delta_rule(**a, taps=taps, state_writes=writes, backend=backend, **kw)
    sum(weighted(x, i) for i, x in enumerate(pick(out))).backward()
    named = {**{k: a[k] for k in LEAVES if torch.is_tensor(a.get(k))}, **extra}
    return {k: torch.zeros_like(x) if x.grad is None else x.grad for k, x in named.items()}


PICKS = {
    "outputs": lambda o: [o.outputs],
    "final_state": lambda o: [o.final_state],
    "states": lambda o: [o.states],
    "norms": lambda o: [o.norms],
    "reads": lambda o: [o.reads],
    "updates": lambda o: [o.trajectory.updates],
    "chunk_states": lambda o: [o.trajectory.chunk_states],
    "keys, decays, betas": lambda o: [o.trajectory.keys, o.trajectory.decays, o.trajectory.betas],
    "states of the trajectory": lambda o: [o.trajectory.states([3, 12]), o.trajectory.norms()],
    "everything": lambda o: [o.outputs, o.final_state, o.states, o.norms, o.reads, o.trajectory.updates],
}


def test_gradients_of_what_a_trajectory_is_read_with():
    a = cases.inputs(1, tokens=70, heads=4)
    trajectory = gated_delta_rule(**a, taps=Taps(trajectory=True)).trajectory
    queries = torch.randn(1, 70, 4, 16, requires_grad=True)
    states = trajectory.states().detach()
    weighted(trajectory.read(queries), 0).backward()
    weighted(torch.einsum("bthkv,bthk->bthv", states, twin := queries.detach().requires_grad_()), 0).backward()
    torch.testing.assert_close(queries.grad, twin.grad)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("pick", PICKS)
def test_forward_mode(pick, channels):
    """The derivative along a direction is what the backward pass says it is, for every result and argument."""
    a = cases.double(
        cases.inputs(1, batch=2, tokens=75, heads=4, key_dim=8, value_dim=12, channels=channels, state=True)
    )
    taps = Taps(trajectory=True, states=[0, 5, 11, -1], norms=True, probes=torch.randn(2, 8).double())

    def total(*values):
        out = gated_delta_rule(**{**a, **dict(zip(LEAVES, values))}, taps=taps)
        return sum(weighted(x, i) for i, x in enumerate(PICKS[pick](out)))

    values = tuple(a[name] for name in LEAVES)
    along = tuple(torch.randn_like(x) for x in values)
    tracked = [x.clone().requires_grad_() for x in values]
    found = torch.autograd.grad(total(*tracked), tracked, allow_unused=True, materialize_grads=True)
    want = sum((x * y).sum() for x, y in zip(found, along))
    torch.testing.assert_close(torch.func.jvp(total, values, along)[1], want)
    torch.testing.assert_close(torch.func.grad(total, tuple(range(len(values))))(*values), found)
    with forward_ad.dual_level():
        dual = total(*(forward_ad.make_dual(x, t) for x, t in zip(values, along)))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, want)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("pick", PICKS)
def test_gradients(pick, channels):
    a = cases.inputs(1, batch=2, tokens=75, heads=4, key_dim=8, value_dim=12, channels=channels, state=True)
    extra = dict(value=torch.randn(8, 12), probes=torch.randn(2, 8))
    ours = gradients(a, PICKS[pick], "auto", **extra)
    want = gradients(cases.double(a), PICKS[pick], "reference", **{k: x.double() for k, x in extra.items()})
    scale = max(float(x.abs().max()) for x in want.values())
    for name in want:
        small = float(want[name].abs().max()) < 1e-6 * scale
        assert small or error(ours[name], want[name]) < 2e-5, (name, error(ours[name], want[name]))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("wipe", [-1e4, float("-inf"), -50.0])
def test_gradients_across_a_wipe(wipe, channels):
    a = cases.with_gate(cases.inputs(2, tokens=100, channels=channels, state=True), cases.wiping(wipe))
    ours = gradients(a, PICKS["everything"], "auto", probes=torch.ones(1, 16))
    want = gradients(cases.double(a), PICKS["everything"], "reference", probes=torch.ones(1, 16).double())
    for name in want:
        assert ours[name].isfinite().all()
        assert error(ours[name], want[name]) < 5e-5, name


def test_gradients_of_packed_rows():
    cu = torch.tensor([0, 20, 20, 75])
    a = cases.inputs(3, tokens=75, state=True, sequences=3)
    ours = gradients(a, PICKS["everything"], "auto", probes=torch.ones(1, 16), cu_seqlens=cu)
    want = gradients(
        cases.double(a), PICKS["everything"], "reference", probes=torch.ones(1, 16).double(), cu_seqlens=cu
    )
    assert all(error(ours[name], want[name]) < 2e-5 for name in want)


def test_a_written_value_gets_its_gradient_and_nothing_flows_past_it():
    a = leaves(cases.inputs(4, tokens=20, state=True))
    value = torch.randn(1, 2, 16, 16, requires_grad=True)
    out = gated_delta_rule(**a, state_writes=[StateWrite(9, value)])
    out.final_state.sum().backward()
    assert value.grad.abs().min() > 0
    assert a["initial_state"].grad.abs().max() == 0
    assert a["v"].grad[:, :10].abs().max() == 0 and a["v"].grad[:, 10:].abs().min() > 0


def test_the_norm_of_a_zero_state_has_gradient_zero():
    a = leaves(cases.inputs(5, tokens=8))
    a["beta"] = torch.zeros(1, 8, 2, requires_grad=True)
    gated_delta_rule(**a, taps=Taps(norms=True)).norms.sum().backward()
    assert all(a[k].grad is None or a[k].grad.isfinite().all() for k in ("q", "k", "v", "g", "beta"))


def test_in_place_edits_of_results_do_not_break_backward():
    a = leaves(cases.inputs(6, tokens=70))
    out = gated_delta_rule(**a, taps=Taps(trajectory=True))
    out.outputs[:, 3] = 0
    out.final_state.mul_(2)
    (out.outputs.sum() + out.final_state.sum()).backward()
    assert a["v"].grad.isfinite().all()


def test_inputs_may_be_written_to_after_a_call_without_gradients():
    a = cases.inputs(7, tokens=70, state=True)
    out = gated_delta_rule(**a, taps=Taps(trajectory=True))
    kept = {k: x.clone() for k, x in out.trajectory.fields().items()}
    for x in a.values():
        if torch.is_tensor(x):
            x.fill_(7)
    assert all(x.equal(out.trajectory.fields()[k]) for k, x in kept.items())
