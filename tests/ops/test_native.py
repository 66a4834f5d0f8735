"""The C++ library in a process: its instruction sets, threads of the caller's, forks, and what it says when it is not there."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import cases
from cases import exact
from numerics import judge, judge_norms
from statetap.ops import Taps, gated_delta_rule, native

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
HERE = Path(__file__).parent
TAPS = Taps(trajectory=True, states="all", norms=True)


def call(channels=False, dtype=torch.float32):
    a = cases.inputs(1, batch=2, tokens=130, heads=4, key_dim=24, value_dim=40, channels=channels, state=True)
    return {k: x.to(dtype) if torch.is_tensor(x) else x for k, x in a.items()}


def run(a, taps=TAPS):
    return gated_delta_rule(**a, taps=taps, backend="cpp")


CHILD = """
import sys, torch
from test_native import call, run
from statetap.ops import native
if native.why_not():
    sys.exit(print(native.why_not()))
found = {(c, str(d)): run(call(c, d)) for c in (False, True) for d in (torch.float32, torch.float64)}
torch.save({k: (x.outputs, x.states, x.norms) for k, x in found.items()}, sys.argv[1])
print(native.instruction_set())
"""


def with_level(name, path):
    """What a process that is told to use this instruction set prints."""
    paths = [str(Path(native.__file__).parents[2]), str(HERE), str(HERE.parent)]
    environment = {**os.environ, "STATETAP_INSTRUCTION_SET": name, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("level", native.LEVELS)
def test_every_instruction_set_gives_the_rule(level, tmp_path):
    said = with_level(level, tmp_path / "found.pt")
    if "at most" in said:
        pytest.skip(said)
    assert said == level
    for (channels, dtype), (outputs, states, norms) in torch.load(tmp_path / "found.pt").items():
        a = call(channels, torch.float64 if "64" in dtype else torch.float32)
        want, peer = exact(a, taps=TAPS), gated_delta_rule(**a, taps=TAPS, backend="reference")
        floor = 1e-14 if "64" in dtype else 2e-6
        judge("outputs", outputs, want.outputs, peer.outputs, 2, floor)
        judge("states", states, want.states, peer.states, -3, floor)
        judge_norms(norms, want.norms)


def test_an_unknown_instruction_set_is_named(tmp_path):
    assert "got 'avx9', needs one of avx512" in with_level("avx9", tmp_path / "none")


def test_the_number_of_threads_changes_no_bit():
    before, a = torch.get_num_threads(), call()
    try:
        found = []
        for threads in (1, 2, 3, 40):
            torch.set_num_threads(threads)
            found.append(run(a))
    finally:
        torch.set_num_threads(before)
    for x in found[1:]:
        assert x.outputs.equal(found[0].outputs) and x.states.equal(found[0].states)


def test_callers_in_several_threads_get_their_own_results():
    calls = [call(channels) for channels in (False, True)] * 4
    alone = [run(a) for a in calls]
    with ThreadPoolExecutor(4) as pool:
        for want, found in zip(alone * 5, pool.map(run, calls * 5)):
            assert found.outputs.equal(want.outputs) and found.states.equal(want.states)


def child(queue, a):
    x = run(a)
    queue.put((x.outputs.numpy(), x.final_state.numpy()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_of_fork_makes_threads_of_its_own():
    a = call()
    want = run(a)  # the parent's threads are running
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    forked = context.Process(target=child, args=(queue, a))
    forked.start()
    outputs, final_state = queue.get(timeout=60)
    forked.join(60)
    assert forked.exitcode == 0
    assert torch.from_numpy(outputs).equal(want.outputs) and torch.from_numpy(final_state).equal(want.final_state)
    assert run(a).outputs.equal(want.outputs)


def test_a_library_that_was_not_built_says_how_to_build_it(monkeypatch, tmp_path):
    """In a source tree; an installed package can only be installed again."""
    native.load.cache_clear()
    monkeypatch.setattr(native, "PATH", tmp_path / "python/statetap/ops" / native.PATH.name)
    try:
        assert "built without a C++ compiler; reinstall" in native.why_not()
        native.load.cache_clear()
        (tmp_path / "csrc").mkdir()
        (tmp_path / "setup.py").touch()
        assert f"not built; run `python setup.py build_ext --inplace` in {tmp_path}" in native.why_not()
    finally:
        native.load.cache_clear()
