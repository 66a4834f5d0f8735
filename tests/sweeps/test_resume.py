"""A sweep that is stopped in any way and gone on with is the sweep that was not stopped."""

import errno
import os
import random
import signal
import sys
import threading
import time

import pytest
import torch
import transformers

import statetap
import tiny
from statetap import CaptureError
from statetap.sweeps import Interrupted, files, store, verify
from sweeping import begun, contents, texts

LINES = [*texts(13, seed=4), "", *texts(8, seed=5)]
OPTIONS = {"values": "state_output,states,betas", "batch_tokens": 256, "on_error": "skip"}


@pytest.fixture
def whole(small_units, corpus, sweep):
    """An uninterrupted run: `(data, its contents)`."""
    data = corpus(LINES)
    run = sweep(data, "whole", **OPTIONS)
    assert len(list((run.path / "shards").iterdir())) == 6
    return data, contents(run.path)


def in_a_child(work, kill_after=None):
    """Run `work` in a forked process; kill it after so many seconds. Whether it came to its end."""
    child = begun(work)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFEXITED(status)


def kill_at(step, folder):
    """Kill this process before its `step`-th change to a folder; for the tests, in a forked process."""
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        writes = event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wa"
        if (writes or event in ("os.rename", "os.remove", "os.mkdir")) and str(folder) in str(arguments[0]):
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_killed_before_any_change_to_the_disk(whole, sweep, tmp_path):
    data, expected = whole
    for step in range(1, 200):
        folder = tmp_path / f"killed{step}"

        def work(step=step, folder=folder):
            kill_at(step, folder)
            sweep(data, folder.name, **OPTIONS)

        ended = in_a_child(work)
        if not ended and (folder / "manifest.json").exists():
            assert verify(folder) == []
            for row in statetap.open(folder).rows():
                assert row.text == LINES[row.line - 1]
        sweep(data, folder.name, **OPTIONS)
        assert contents(folder) == expected
        if ended:
            break
    assert step > 40


def test_killed_at_random_moments_again_and_again(whole, sweep, tmp_path):
    data, expected = whole
    chance, started = random.Random(0), time.perf_counter()
    in_a_child(lambda: sweep(data, "timed", **OPTIONS))
    took = time.perf_counter() - started
    kills = 0
    for attempt in range(8):
        name = f"random{attempt}"
        while not in_a_child(lambda name=name: sweep(data, name, **OPTIONS), chance.uniform(0, took)):
            kills += 1
            if (tmp_path / name / "manifest.json").exists():
                assert verify(tmp_path / name) == []
            assert kills < 200
        sweep(data, name, **OPTIONS)
        assert contents(tmp_path / name) == expected
    assert kills > 5


def test_asked_to_stop_before_every_batch_and_line(whole, sweep, tmp_path):
    data, expected = whole
    for patience in range(1, 100):
        asked = iter(range(patience))
        try:
            sweep(data, should_stop=lambda asked=asked: next(asked, None) is None, **OPTIONS)
            break
        except Interrupted:
            if (tmp_path / "run" / "manifest.json").exists():
                assert verify(tmp_path / "run") == []
            assert not list(tmp_path.rglob("*.part"))
    assert 10 < patience < 99
    assert contents(tmp_path / "run") == expected


def test_a_disk_that_is_full_at_any_write(whole, sweep, tmp_path, monkeypatch):
    data, expected = whole

    class Full:
        """A file on a disk that is full at the `left`-th write from now."""

        left = 0

        def __init__(self, file):
            self._file, self.name = file, file.name

        def write(self, piece):
            Full.left -= 1
            if Full.left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._file.write(piece)

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            self._file.close()

        def __getattr__(self, name):
            return getattr(self._file, name)

    def opens(path, mode="r", **kw):
        file = open(path, mode, **kw)  # noqa: SIM115
        return Full(file) if mode in ("wb", "w") and not str(path).endswith(".lock") else file

    for module in (files, store):
        monkeypatch.setattr(module, "open", opens, raising=False)
    failures = 0
    for left in (*range(1, 20), 30, 50, 70, 90):
        Full.left = left
        try:
            sweep(data, f"full{left}", **OPTIONS)
        except CaptureError as error:
            failures += 1
            assert "the disk is full" in str(error) and "same command again" in str(error)
            assert not list((tmp_path / f"full{left}").rglob("*.part"))
            if (tmp_path / f"full{left}" / "manifest.json").exists():
                assert verify(tmp_path / f"full{left}") == []
        Full.left = 0
        sweep(data, f"full{left}", **OPTIONS)
        assert contents(tmp_path / f"full{left}") == expected
    assert failures >= 20


def test_the_sweep_stops_while_the_disk_can_still_hold_the_next_shard(whole, sweep, tmp_path, monkeypatch):
    data, expected = whole
    real = files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: real._replace(free=files.MARGIN + 1))
    with pytest.raises(CaptureError, match=r"the disk is nearly full: .* 262,145 bytes free and the next shard needs"):
        sweep(data, **OPTIONS)
    monkeypatch.undo()
    monkeypatch.setattr("statetap.sweeps.units.UNIT_DOCUMENTS", 4)
    sweep(data, **OPTIONS)
    assert contents(tmp_path / "run") == expected


def test_a_shard_that_was_deleted_is_captured_anew(whole, sweep, tmp_path):
    data, expected = whole
    for name in (
        "shards/00002.safetensors",
        "tokens/00001.safetensors",
        "shards/00005.safetensors",
        "index.safetensors",
    ):
        (tmp_path / "whole" / name).unlink()
        assert any(name in problem for problem in verify(tmp_path / "whole"))
        sweep(data, "whole", **OPTIONS)
        assert contents(tmp_path / "whole") == expected


def test_a_finished_run_is_not_touched(whole, sweep, tmp_path):
    data, _ = whole
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "whole").rglob("*.*") if p.name != ".lock" and p.is_file()}
    manifest = (tmp_path / "whole" / "manifest.json").read_bytes()
    sweep(data, "whole", **OPTIONS)
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    assert (tmp_path / "whole" / "manifest.json").read_bytes() == manifest


CHANGES = [
    ({"values": "state_output"}, "values: was state_output,states,betas, now state_output"),
    ({"layers": "0"}, "layers: was 0,1, now 0"),
    ({"heads": "1"}, "heads: was None, now 1"),
    ({"dtype": "bfloat16"}, "dtype: was float32, now bfloat16"),
    ({"tokens": "all"}, "tokens: was last, now all"),
    ({"batch_tokens": 300}, "batch_tokens: was 256, now 300"),
    ({"limit": 3}, "limit: was None, now 3"),
    ({"special_tokens": False}, "special_tokens: was True, now False"),
    ({"shard_bytes": 10_000}, "shard_bytes: was 1073741824, now 10000"),
    ({"backend": "reference"}, ", now reference)"),
    ({"revision": "other"}, "model.revision: was None, now other"),
    ({"on_error": "raise"}, "on_error: was skip, now raise"),
]


@pytest.mark.parametrize("change, message", CHANGES, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_a_changed_option_is_refused_with_both_values(corpus, sweep, tmp_path, change, message):
    data = corpus(LINES)
    sweep(data, **OPTIONS)
    before = contents(tmp_path / "run")
    with pytest.raises(CaptureError) as error:
        sweep(data, **{**OPTIONS, **change})
    assert message in str(error.value)
    assert contents(tmp_path / "run") == before


def test_a_changed_corpus_model_or_tokenizer_is_refused(checkpoint, tokenizer, model, corpus, sweep, tmp_path):
    sweep(corpus(LINES), **OPTIONS)
    before = contents(tmp_path / "run")
    with pytest.raises(CaptureError, match=r"data\.fingerprint: was [0-9a-f]{32}, now [0-9a-f]{32}\)"):
        sweep(corpus([*LINES[:-1], "other"]), **OPTIONS)
    moved = corpus(LINES, "elsewhere.jsonl")
    sweep(moved, **OPTIONS)

    other = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with torch.no_grad():  # one weight, the smallest change there is
        weight = other.model.layers[0].mlp.up_proj.weight
        weight[17, 5] = torch.nextafter(weight[17, 5], torch.tensor(9.0))
    options = {**OPTIONS, "tokenizer": tokenizer, "progress": False}
    with pytest.raises(CaptureError, match=r"\(model\.weights: was [0-9a-f]{32}, now [0-9a-f]{32}\)"):
        statetap.capture(other, moved, tmp_path / "run", **options)
    with pytest.raises(CaptureError, match=r"model\.dtype: was float32, now bfloat16"):
        statetap.capture(checkpoint, moved, tmp_path / "run", model_dtype="bfloat16", **options)

    changed = tiny.tokenizer(pad=False)
    changed.add_tokens(["state"])
    with pytest.raises(CaptureError, match="tokenizer: was "):
        statetap.capture(model, moved, tmp_path / "run", **{**options, "tokenizer": changed})
    assert contents(tmp_path / "run") == before


def test_a_padded_call_of_the_tokenizer_before_is_no_change(model, corpus, tmp_path):
    data, used = corpus(["a", "bcd"]), tiny.tokenizer()
    options = {"tokenizer": used, "progress": False}
    statetap.capture(model, data, tmp_path / "run", **options)
    used(["a", "bcd"], padding=True)
    assert 'padding": null' not in used.backend_tokenizer.to_str()
    statetap.capture(model, data, tmp_path / "run", **options)


def test_what_is_done_with_bad_lines_may_be_said_when_one_is_met(small_units, corpus, sweep, tmp_path):
    data = corpus(LINES)
    options = {**OPTIONS, "on_error": "raise"}
    with pytest.raises(CaptureError, match="line 14: empty"):
        sweep(data, **options)
    assert len(statetap.open(tmp_path / "run")) == 12
    sweep(data, **OPTIONS)
    sweep(data, "whole", **OPTIONS)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_overwrite_deletes_our_files_only(small_units, corpus, sweep, tmp_path):
    run = sweep(corpus(LINES), **OPTIONS)
    mine = [
        run.path / "notes.md",
        run.path / "shards" / "mine.txt",
        run.path / "tokens" / "a.part",
        run.path / "x.part",
    ]
    for path in mine:
        path.write_text("mine")
    again = sweep(corpus(["short"]), overwrite=True, values="betas")
    assert len(again) == 1 and len(store.numbers_of(run.path, "shards")) == 1 and verify(run.path) == []
    assert [path.read_text() for path in mine] == ["mine"] * 4


@pytest.mark.parametrize("name", ["notes.txt", "README.md", "shards/00000.safetensors", "manifest.json"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_else_is_refused(corpus, sweep, tmp_path, name, overwrite):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"name": "mine"}')
    with pytest.raises(CaptureError, match=r"holds other files|is not the manifest of a run"):
        sweep(corpus(["a"]), overwrite=overwrite)
    assert [p for p in (tmp_path / "run").rglob("*") if p.is_file()] == [path]
    assert path.read_text() == '{"name": "mine"}'


def test_a_file_in_the_place_of_the_folder(corpus, sweep, tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(CaptureError, match="is a file; give a folder"):
        sweep(corpus(["a"]))
    with pytest.raises(CaptureError, match="cannot be made"):
        sweep(corpus(["a"]), "run/below")


def test_a_run_that_others_write_is_not_overwritten_and_a_pipe_is_for_one(corpus, sweep, tmp_path):
    data = corpus(["a"])
    sweep(data)
    other = store.Store(tmp_path / "run")
    other._take_lock(alone=False)
    sweep(data)  # beside it
    with pytest.raises(CaptureError, match="another process is writing"):
        sweep(data, overwrite=True)
    os.mkfifo(tmp_path / "pipe.txt")
    threading.Thread(target=(tmp_path / "pipe.txt").write_text, args=("a\n",), daemon=True).start()
    alone = store.Store(tmp_path / "piped")
    (tmp_path / "piped").mkdir()
    alone._take_lock(alone=False)
    with pytest.raises(CaptureError, match="another process is writing"):
        sweep(tmp_path / "pipe.txt", "piped")
    other.close()
    sweep(data, overwrite=True)


def test_a_pipe_is_gone_on_with_if_it_begins_the_same(small_units, sweep, tmp_path):
    lines = "".join(line + "\n" for line in LINES if line)
    (tmp_path / "whole.txt").write_text(lines)
    path = tmp_path / "pipe.txt"
    os.mkfifo(path)

    def through(text, **options):
        writer = threading.Thread(target=lambda: path.write_text(text), daemon=True)
        writer.start()
        try:
            return sweep(path, **options)
        finally:
            writer.join(5)

    with pytest.raises(Interrupted):
        asked = iter(range(20))
        through(lines, should_stop=lambda: next(asked, None) is None)
    assert 0 < len(statetap.open(tmp_path / "run")) < 21
    with pytest.raises(CaptureError, match=r"data: lines 1-4 of .*pipe\.txt are not those of this run"):
        through("other " + lines)
    run = through(lines)
    assert [row.text for row in run.rows()] == lines.splitlines()
    with pytest.raises(CaptureError, match="has more lines than the 21 of this run"):
        through(lines + "one more\n")
    expected = sweep(tmp_path / "whole.txt", "whole")
    for folder in ("shards", "tokens"):
        for mine, other in zip(sorted((run.path / folder).iterdir()), sorted((expected.path / folder).iterdir())):
            assert mine.name == other.name
    assert torch.equal(run["state_output", 1][:], expected["state_output", 1][:])
