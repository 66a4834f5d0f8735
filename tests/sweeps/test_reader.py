import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import statetap
from statetap import ArgumentError, CaptureError
from sweeping import texts

VALUES = "state_output,states,betas,trajectory"


@pytest.fixture
def run(small_units, corpus, sweep):
    """Fourteen documents in four shards, states at every eighth token: some documents have none."""
    return sweep(corpus(["ab", *texts(12, seed=7), "cd"]), values=VALUES, tokens="every:8", dtype="bfloat16")


def test_slices_of_a_column(run):
    for value in ("state_output", "states", "betas", "trajectory.chunk_states"):
        column = run[f"linear_attn.{value}", 1]
        whole = torch.cat([x[None] if value == "state_output" else x for x in (row[value, 1] for row in run.rows())])
        assert torch.equal(column[:], whole) and column.shape == tuple(whole.shape) and len(column) == len(whole)
        assert torch.equal(column[...], whole) and torch.equal(column[()], whole)
        for part in [slice(3, 7), slice(-3, None), slice(None, None, 3), slice(9, 2, -2), slice(5, 5), slice(8, 900)]:
            expected = torch.from_numpy(whole.float().numpy()[part].copy()).to(whole.dtype)
            assert torch.equal(column[part], expected), part
        assert torch.equal(column[-1], whole[-1]) and torch.equal(column[np.int64(4)], whole[4])
        assert torch.equal(column[[4, -1, 4]], whole[[4, -1, 4]])
        assert torch.equal(column[np.arange(len(whole)) % 5 == 2], whole[2::5])
        assert torch.equal(column[2:9, 1], whole[2:9, 1]) and torch.equal(column[3, 2], whole[3, 2])
        assert torch.equal(column[[]], whole[:0])
        for outside in (len(whole), -len(whole) - 1, [0, len(whole)], [True], 1.5, [[0]]):
            with pytest.raises(IndexError):
                column[outside]


def test_offsets_say_where_a_document_begins(run):
    for value in ("state_output", "states", "betas", "trajectory.chunk_states"):
        column = run[value, 0]
        assert column.offsets.dtype == np.int64 and len(column.offsets) == len(run) + 1
        for n, row in enumerate(run.rows()):
            part = column[column.offsets[n] : column.offsets[n + 1]]
            assert torch.equal(part[0] if value == "state_output" else part, row[value, 0])


def test_what_a_caller_does_to_a_result_reaches_no_file(run):
    for reading in (run, run.numpy()):
        reading["betas", 0][:][...] = 9
        reading.row(0).tokens[...] = 9
    assert statetap.sweeps.verify(run.path) == [] and (run["betas", 0][:] < 9).all()


def test_numpy(run):
    arrays = run.numpy()
    state = arrays["state_output", 0][:]
    assert isinstance(state, np.ndarray) and state.dtype == ml_dtypes.bfloat16
    assert np.array_equal(state.astype(np.float32), run["state_output", 0][:].float().numpy())
    assert arrays.row(3)["betas", 1].dtype == np.float32 and isinstance(arrays.row(3).tokens, np.ndarray)
    assert np.array_equal(np.asarray(run["betas", 0]), run["betas", 0][:].numpy())
    assert torch.equal(arrays.row(3).trajectory(0).final_state, run.row(3).trajectory(0).final_state)


def test_torch_is_not_imported_for_numpy(run):
    code = f"""
import sys, statetap
run = statetap.open({str(run.path)!r}).numpy()
run["linear_attn.state_output", 0][3:7], run["linear_attn.betas", 1][-1], run["states", 0].offsets
[(row.text, row.tokens, row.positions, row["state_output", 0]) for row in run.rows()]
assert statetap.sweeps.verify({str(run.path)!r}) == []
found = sorted({{"torch", "transformers", "safetensors", "typer", "tqdm"}} & set(sys.modules))
assert found == [], found
import torch
assert "torch" in sys.modules  # this check would have seen it
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unfinished_run_says_so(small_units, corpus, sweep, tmp_path):
    asked = iter(range(12))
    with pytest.raises(statetap.sweeps.Interrupted):
        sweep(corpus(texts(16)), should_stop=lambda: next(asked, None) is None)
    run = statetap.open(tmp_path / "run")
    assert not run.finished and "unfinished" in repr(run)
    assert len(run["state_output", 0][:]) == len(run) > 0 and run.row(-1).text == texts(16)[len(run) - 1]


@pytest.mark.parametrize("key", ["a", 1.5, None, True, [0], (0, 1), slice(0, 2), np.float64(1), torch.ones(2)])
def test_a_number_that_is_none_is_refused_in_a_sentence(run, key):
    for reading in (run, run.numpy()):
        for ask in (
            lambda reading: reading.row(key),
            lambda reading: reading["betas", key],
            lambda reading: reading.row(0)["betas", key],
            lambda reading: reading.row(0).trajectory(key),
        ):
            with pytest.raises(ArgumentError, match="needs a whole number"):
                ask(reading)
    for name in (key, 3):
        with pytest.raises(ArgumentError, match="value: "):
            run[name, 0] if name != "a" else run["nothing", 0]


@pytest.mark.parametrize("key", ["a", 1.5, None, True, slice("a", None), slice(0, 4, 0), [[1], [1, 2]], {}, ["a"]])
def test_rows_of_a_column_and_of_a_trajectory_are_asked_for_by_numbers(run, key):
    column, trajectory = run["betas", 0], run.row(0).trajectory(0)
    with pytest.raises(ArgumentError) as error:
        column[key]
    assert isinstance(error.value, IndexError) and "\n" not in str(error.value)
    if not isinstance(key, slice):
        with pytest.raises(ArgumentError, match="needs an int or a slice"):
            trajectory[key]
    with pytest.raises(ArgumentError, match="row 1 of a trajectory of 1 rows"):
        trajectory[1]


def test_errors_say_what_there_is(run, tmp_path):
    with pytest.raises(ArgumentError, match=r"value: 'decays' was not captured; there is linear_attn.state_output, "):
        run["decays", 0]
    with pytest.raises(ArgumentError, match=r"needs \(value, layer\)"):
        run["decays"]
    with pytest.raises(ArgumentError, match="row: 14 is outside of the run's 14 documents"):
        run.row(14)
    with pytest.raises(ArgumentError, match="value: 'decays' was not captured"):
        run.row(0)["decays", 0]
    with pytest.raises(CaptureError, match=r"manifest\.json does not exist"):
        statetap.open(tmp_path / "none")
    (run.path / "shards" / "00001.safetensors").unlink()
    with pytest.raises(CaptureError, match=r"00001\.safetensors is missing"):
        statetap.open(run.path)


def test_a_unit_of_bad_lines_only(monkeypatch, corpus, sweep):
    monkeypatch.setattr("statetap.sweeps.units.UNIT_LINES", 2)
    run = sweep(corpus(["", "", "abc", "", "", "", "de"]), on_error="skip", values="state_output,betas")
    assert [row.text for row in run.rows()] == ["abc", "de"]
    assert run["betas", 0].shape == (5, 4) and run["state_output", 0][:].shape[0] == 2
    assert statetap.sweeps.verify(run.path) == []


def test_a_corpus_of_nothing(corpus, sweep):
    for lines in ([], ["", " "]):
        run = sweep(corpus(lines), f"run{len(lines)}", on_error="skip")
        assert run.finished and len(run) == 0 and run["state_output", 0][:].shape == (0, 4, 16, 24)
        assert statetap.sweeps.verify(run.path) == []
