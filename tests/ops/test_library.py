"""The operator under torch's own checks, and under `torch.compile`."""

from __future__ import annotations

import pytest
import torch

import cases
import statetap
from statetap.ops import StateWrite, Taps, delta, gated_delta_rule

TAPS = {
    "plain": None,
    "all taps": Taps(trajectory=True, states="all", norms=True, probes=torch.ones(2, 8), heads=[1]),
    "at tokens": Taps(states=[0, -1], dtype=torch.bfloat16),
}
WRITES = {"no writes": None, "writes": [StateWrite(3, torch.ones(8, 8)), StateWrite(5, torch.ones(8, 8), rows=[1])]}


def recorded(**a):
    """The operator's arguments for a call."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        real = delta.torch.ops.statetap.gated_delta_rule
        patch.setattr(delta, "_call_operator", lambda args: seen.append(args) or real(*args))
        gated_delta_rule(**a)
    return seen[0]


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("taps", TAPS)
def test_opcheck(taps, writes, channels):
    a = cases.inputs(1, batch=2, tokens=9, heads=2, key_dim=8, value_dim=8, channels=channels, state=True)
    for name in ("q", "v", "g", "initial_state"):
        a[name].requires_grad_()
    args = recorded(**a, taps=TAPS[taps], state_writes=WRITES[writes])
    torch.library.opcheck(torch.ops.statetap.gated_delta_rule.default, args)


def test_opcheck_packed():
    a = cases.inputs(2, tokens=9, key_dim=8, value_dim=8)
    args = recorded(**a, taps=Taps(norms=True, states=[1]), cu_seqlens=torch.tensor([0, 4, 9]))
    torch.library.opcheck(torch.ops.statetap.gated_delta_rule.default, args)


def test_opcheck_out():
    a = cases.inputs(3, batch=2, tokens=9, key_dim=8, value_dim=8)
    args = recorded(**a)
    out = [torch.empty_like(a["v"]), torch.empty(2, 2, 8, 8)]
    operator = torch.ops.statetap.gated_delta_rule_out.default
    torch.library.opcheck(
        operator, (*args, ["outputs", "final_state"], out), test_utils=("test_schema", "test_autograd_registration")
    )


@pytest.mark.slow
@pytest.mark.parametrize("channels", [False, True])
def test_compile(channels):
    """One graph, taps, writes and backward included, with the eager results."""
    a = cases.inputs(4, batch=2, tokens=20, key_dim=8, value_dim=8, channels=channels, state=True)

    def loss(v, g, value):
        taps = Taps(trajectory=True, states=[0, -1], norms=True, probes=torch.ones(1, 8))
        out = gated_delta_rule(**{**a, "v": v, "g": g}, taps=taps, state_writes=[StateWrite(4, value, rows=[0])])
        return (
            out.outputs.square().sum()
            + out.states.sum()
            + out.norms.sum()
            + out.trajectory.updates.sum()
            + out.reads.sum()
        )

    def gradients(function):
        leaves = [x.detach().clone().requires_grad_() for x in (a["v"], a["g"], torch.ones(8, 8))]
        value = function(*leaves)
        value.backward()
        return [value.detach(), *(x.grad for x in leaves)]

    eager = gradients(loss)
    compiled = gradients(torch.compile(loss, fullgraph=True, backend="aot_eager"))
    for x, y in zip(eager, compiled):
        torch.testing.assert_close(x, y)


def test_double_backward_is_refused_plainly():
    a = cases.inputs(5, tokens=9)
    v = a["v"].requires_grad_()
    (grad,) = torch.autograd.grad(gated_delta_rule(**a).outputs.square().sum(), v, create_graph=True)
    with pytest.raises(statetap.Error, match="second derivatives"):
        grad.sum().backward()
