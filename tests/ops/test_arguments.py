"""Bad input of every kind gives one sentence that names the argument; `out=`, drop-ins, backends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import cases
import statetap
from statetap.ops import (
    StateWrite,
    Taps,
    Trajectory,
    backends,
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    gated_delta_rule,
)

A = cases.inputs(1, batch=2, tokens=10, heads=4)
ONE = cases.inputs(1, tokens=10)
V = A["v"]


def cu(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


BAD = {
    "q": [
        dict(q=None),
        dict(q=A["q"][:, :5]),
        dict(q=A["q"][..., :8]),
        dict(q=A["q"].int()),
        dict(q=A["q"][0]),
        dict(q=A["q"].to("meta")),
        dict(q=A["q"].to_sparse()),
    ],
    "k": [dict(k="k"), dict(k=A["k"][:1])],
    "v": [dict(v=None), dict(v=V[:, :, :3]), dict(v=V[0]), dict(v=V.bool())],
    "g": [dict(g=A["g"][:, :, :1]), dict(g=A["g"][..., None]), dict(g=1.0)],
    "beta": [dict(beta=A["beta"][:, :, :2]), dict(beta=0.5)],
    "scale": [dict(scale=x) for x in ("big", True, math.nan, math.inf, 1j)],
    "initial_state": [dict(initial_state=torch.zeros(2, 4, 16, 17)), dict(initial_state=torch.zeros(4, 16, 16))],
    "precision": [dict(precision="low")],
    "taps": [dict(taps="all"), dict(taps={"states": "all"})],
    "trajectory": [dict(taps=Taps(trajectory=2))],
    "norms": [dict(taps=Taps(norms="yes"))],
    "use_qk_l2norm_in_kernel": [dict(use_qk_l2norm_in_kernel="yes")],
    "backend": [dict(backend="cuda"), dict(backend=""), dict(backend=[])],
    "states": [
        dict(taps=Taps(states=[10])),
        dict(taps=Taps(states=[-11])),
        dict(taps=Taps(states="last")),
        dict(taps=Taps(states=1.5)),
        dict(taps=Taps(states=np.array([1.0]))),
        dict(taps=Taps(states=slice(0, 4, 0))),
        dict(taps=Taps(states=slice(0.5, 4))),
        dict(taps=Taps(states=torch.ones(2, 9, dtype=torch.bool))),
    ],
    "heads": [
        dict(taps=Taps(states=[0], heads=[4])),
        dict(taps=Taps(norms=True, heads=1)),
        dict(taps=Taps(norms=True, heads=["a"])),
    ],
    "probes": [
        dict(taps=Taps(probes=torch.zeros(3, 15))),
        dict(taps=Taps(probes=torch.zeros(3, 2, 16))),
        dict(taps=Taps(probes=[1.0])),
        dict(taps=Taps(probes=torch.zeros(2, 16).int())),
    ],
    "dtype": [dict(taps=Taps(trajectory=True, dtype=torch.int8))],
    "out": [
        dict(taps=Taps(out={"state": V})),
        dict(taps=Taps(out=[V])),
        dict(taps=Taps(out={"states": V})),
        dict(taps=Taps(out={"outputs": V[:, :5]})),
        dict(taps=Taps(out={"outputs": V.double()})),
        dict(taps=Taps(out={"outputs": 3})),
    ],
    "state_writes": [
        dict(state_writes=StateWrite(0, torch.zeros(16, 16))),
        dict(state_writes=3),
        dict(state_writes=[StateWrite(10, torch.zeros(16, 16))]),
        dict(state_writes=[StateWrite(0, torch.zeros(16, 15))]),
        dict(state_writes=[StateWrite(0, torch.zeros(3, 4, 16, 16))]),
        dict(state_writes=[StateWrite(0, torch.zeros(16, 16), rows=[2])]),
        dict(state_writes=[StateWrite(0, torch.zeros(16, 16), heads=[4])]),
        dict(state_writes=[StateWrite(0, 1.0)]),
        dict(state_writes=[StateWrite("x", torch.zeros(16, 16))]),
        dict(state_writes=[(0, torch.zeros(16, 16))]),
    ],
}


@pytest.mark.parametrize("name,change", [(name, change) for name, changes in BAD.items() for change in changes])
def test_bad_arguments(name, change):
    with pytest.raises(statetap.ArgumentError, match=rf"^{name}\b") as caught:
        gated_delta_rule(**{**A, **change})
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, (statetap.Error, ValueError))


@pytest.mark.parametrize(
    "values",
    [
        cu(1, 10),
        cu(0, 8),
        cu(0, 8, 4, 10),
        cu(0, 11),
        cu(),
        cu(0.0, 10.0, dtype=torch.float32),
        [0, 10],
        cu(0, 10)[None],
    ],
)
def test_bad_cu_seqlens(values):
    with pytest.raises(statetap.ArgumentError, match="^cu_seqlens"):
        gated_delta_rule(**ONE, cu_seqlens=values)


def test_cu_seqlens_needs_one_row():
    with pytest.raises(statetap.ArgumentError, match="^cu_seqlens"):
        gated_delta_rule(**A, cu_seqlens=cu(0, 10))


def test_cu_seqlens_that_is_changed_in_place_is_read_again():
    bounds = cu(0, 4, 10)
    first = gated_delta_rule(**ONE, cu_seqlens=bounds).outputs
    bounds[1] = 6
    assert not gated_delta_rule(**ONE, cu_seqlens=bounds).outputs.equal(first)
    bounds[1] = 11
    with pytest.raises(statetap.ArgumentError, match="^cu_seqlens"):
        gated_delta_rule(**ONE, cu_seqlens=bounds)


def test_out_fills_every_field():
    a = cases.inputs(2, batch=2, tokens=70, heads=4, state=True)
    probes = torch.randn(2, 16)
    taps = dict(trajectory=True, states=[0, -1], norms=True, probes=probes)
    want = gated_delta_rule(**a, taps=Taps(**taps))
    fields = {n: getattr(want, n) for n in ("outputs", "final_state", "states", "norms", "reads")}
    t = want.trajectory
    fields |= {
        n: getattr(t, n) for n in ("chunk_states", "keys", "updates", "decays", "betas", "chunk_starts", "written")
    }
    buffers = {
        n: torch.full_like(x, float("nan")) if x.is_floating_point() else torch.zeros_like(x) for n, x in fields.items()
    }
    got = gated_delta_rule(**a, taps=Taps(**taps, out=buffers))
    assert all(buffers[n].equal(x) for n, x in fields.items())
    assert got.outputs is buffers["outputs"] and got.trajectory.updates is buffers["updates"]
    assert got.trajectory.states().equal(t.states())


BLOCK = torch.zeros(V.numel())
BAD_BUFFERS = {
    "int": dict(outputs=3),
    "requires a gradient": dict(outputs=torch.zeros_like(V).requires_grad_()),
    "expanded": dict(outputs=torch.zeros(1, 1, 1, 16).expand_as(V)),
    "memory": dict(outputs=BLOCK.view(V.shape), norms=BLOCK[-80:].view(2, 10, 4)),
}


@pytest.mark.parametrize("message,out", BAD_BUFFERS.items())
def test_bad_buffers(message, out):
    with pytest.raises(statetap.ArgumentError, match=rf"out\[.*{message}"):
        gated_delta_rule(**A, taps=Taps(norms=True, out=out))


def test_out_is_refused_under_gradients():
    a = {**ONE, "v": ONE["v"].clone().requires_grad_()}
    with pytest.raises(statetap.ArgumentError, match="^out"):
        gated_delta_rule(**a, taps=Taps(out={"outputs": torch.empty_like(ONE["v"])}))
    with torch.no_grad():
        gated_delta_rule(**a, taps=Taps(out={"outputs": torch.empty_like(ONE["v"])}))


def test_arrays_and_numbers_of_numpy():
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, 3] = mask[1, 5] = True
    for given, same in ((np.array([1, -1]), [1, -1]), (mask.numpy(), mask)):
        ours, want = (
            gated_delta_rule(**A, scale=s, taps=Taps(states=x)) for s, x in ((np.float32(0.5), given), (0.5, same))
        )
        assert ours.states.equal(want.states) and ours.outputs.equal(want.outputs)


@pytest.mark.parametrize("nothing", [dict(rows=[]), dict(heads=[])])
def test_a_write_to_nothing(nothing):
    write = StateWrite(3, torch.ones(16, 16), **nothing)
    assert gated_delta_rule(**A, state_writes=[write]).outputs.equal(gated_delta_rule(**A).outputs)


def test_defaults():
    """No gate is a gate of one; no beta is a beta of one; the scale is 1 / sqrt(K)."""
    a = {k: x for k, x in ONE.items() if k not in ("g", "beta")}
    zeros, ones = torch.zeros(1, 10, 2), torch.ones(1, 10, 2)
    want = gated_delta_rule(**a, g=zeros, beta=ones, scale=0.25)
    got = gated_delta_rule(**a, taps=Taps(trajectory=True))
    assert got.outputs.equal(want.outputs) and got.final_state.equal(want.final_state)
    assert got.trajectory.decays.equal(zeros) and got.trajectory.betas.equal(ones)


def test_unpacks_as_outputs_and_final_state():
    outputs, final_state = gated_delta_rule(**ONE)
    assert outputs.shape == ONE["v"].shape and final_state.shape == (1, 2, 16, 16)


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_drop_ins(function):
    outputs, state = function(**A, output_final_state=True)
    want = gated_delta_rule(**A)
    assert outputs.equal(want.outputs) and state.equal(want.final_state)
    assert function(**A)[1] is None
    with pytest.raises(statetap.ArgumentError, match="taps"):
        function(**A, taps=Taps())


def test_chunk_kda_needs_a_gate_per_channel():
    a = cases.inputs(1, tokens=10, channels=True)
    assert chunk_kda(**a, output_final_state=True)[1].equal(gated_delta_rule(**a).final_state)
    with pytest.raises(statetap.ArgumentError, match="^g"):
        chunk_kda(**ONE)


class Picky:
    """A backend that takes nothing."""

    name = "picky"

    def available(self, device):
        return "no such device"

    def refuses(self, call):
        return ["key_dim 16 is not 128"]

    def forward(self, call):
        raise AssertionError


def test_a_backend_says_why_not_and_auto_moves_on(monkeypatch):
    monkeypatch.setitem(backends.BACKENDS, "picky", Picky())
    monkeypatch.setattr(backends, "AUTO", ("picky", "torch"))
    assert gated_delta_rule(**ONE).outputs.equal(gated_delta_rule(**ONE, backend="torch").outputs)
    with pytest.raises(statetap.UnsupportedCall, match="no such device; key_dim 16 is not 128") as caught:
        gated_delta_rule(**ONE, backend="picky")
    assert "[1, 10, 2, 16]" in str(caught.value)


def test_trajectory_is_refused_nothing_it_gave():
    t = gated_delta_rule(**ONE, taps=Taps(trajectory=True)).trajectory
    assert isinstance(t, Trajectory)
    with pytest.raises(statetap.ArgumentError, match="^states"):
        t.states([10])
    with pytest.raises(statetap.ArgumentError, match="^heads"):
        t.states(heads=[2])
