"""A run that several workers make, and lose workers in, is the run that one worker makes."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest

from statetap import CaptureError
from statetap.sweeps import claims, verify, worker
from statetap.sweeps.claims import Claims
from sweeping import begun, contents, texts

LINES = [*texts(25, seed=6), "", *texts(15, seed=7)]
OPTIONS = {"values": "state_output,betas", "batch_tokens": 256, "on_error": "skip"}


@pytest.fixture
def whole(small_units, corpus, sweep):
    """A run of one worker: `(data, its contents)`."""
    data = corpus(LINES)
    return data, contents(sweep(data, "whole", **OPTIONS).path)


def ended(children):
    return [os.waitpid(child, 0)[1] for child in children]


@pytest.mark.parametrize("count", [2, 4])
def test_workers_share_a_run(whole, sweep, tmp_path, count):
    data, expected = whole
    assert ended([begun(lambda: sweep(data, **OPTIONS)) for _ in range(count)]) == [0] * count
    assert contents(tmp_path / "run") == expected and verify(tmp_path / "run") == []
    assert not list((tmp_path / "run" / "claims").iterdir()) and not list(tmp_path.rglob("*.part"))


def test_a_worker_that_is_killed_is_replaced_by_the_others(whole, sweep, tmp_path):
    data, expected = whole
    chance, kills = random.Random(1), 0
    for attempt in range(6):
        name = f"run{attempt}"
        workers = [begun(lambda name=name: sweep(data, name, **OPTIONS)) for _ in range(3)]
        for victim in workers[:2]:
            time.sleep(chance.uniform(0, 0.15))
            os.kill(victim, signal.SIGKILL)
        *killed, status = ended(workers)
        kills += sum(map(os.WIFSIGNALED, killed))
        assert status == 0
        assert contents(tmp_path / name) == expected and verify(tmp_path / name) == []
    assert kills > 3


def test_an_other_specification_is_refused_while_a_run_is_shared(whole, sweep, tmp_path):
    data, _ = whole
    first = begun(lambda: sweep(data, **OPTIONS))
    while not (tmp_path / "run" / "manifest.json").exists():
        time.sleep(0.01)
    with pytest.raises(CaptureError, match="values: was"):
        sweep(data, **{**OPTIONS, "values": "betas"})
    with pytest.raises(CaptureError, match="another process is writing"):
        os.kill(first, signal.SIGSTOP)
        try:
            sweep(data, overwrite=True, **OPTIONS)
        finally:
            os.kill(first, signal.SIGCONT)
    assert ended([first]) == [0]


def test_a_claim_is_one_worker_s(tmp_path):
    one, other = Claims(tmp_path), Claims(tmp_path)
    assert one.take("00001") and not other.take("00001") and other.is_held("00001")
    one.publish("00001", {"lines": 3})
    assert other.said("00001") == {"lines": 3}
    one.release("00001")
    assert other.take("00001") and other.said("00001") is None
    one.close(), other.close()
    assert not list(tmp_path.iterdir())


def test_the_claim_of_a_process_that_is_gone_expires(tmp_path):
    assert ended([begun(lambda: Claims(tmp_path).take("00001"))]) == [0]
    ours = Claims(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1 and not ours.is_held("00001") and ours.take("00001")
    ours.close()
    assert not list(tmp_path.iterdir())


def test_the_claim_of_another_machine_expires_when_it_is_not_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "PATIENCE", 0.3)
    theirs = tmp_path / "00001.0"
    theirs.write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": 1, "said": None}))
    ours = Claims(tmp_path)
    for _ in range(4):
        assert not ours.take("00001")
        time.sleep(0.1)
        os.utime(theirs)
    assert not ours.take("00001")
    time.sleep(0.35)
    assert ours.take("00001")
    ours.close()


def test_a_claim_that_was_cut_by_a_kill_expires_too(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "PATIENCE", 0.1)
    (tmp_path / "00001.0").write_text('{"host": "el')
    ours = Claims(tmp_path)
    assert not ours.take("00001")
    time.sleep(0.15)
    assert ours.take("00001")
    ours.close()


@pytest.mark.parametrize("environment,rank", [({}, None), ({"LOCAL_RANK": "3"}, 3), ({"SLURM_LOCALID": "1"}, 1)])
def test_which_of_a_machine_s_workers(environment, rank):
    assert worker.local_rank(environment) == rank
