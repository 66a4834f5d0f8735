import json
import random

import pytest

import statetap
from statetap import CaptureError
from statetap.sweeps import verify
from sweeping import contents, texts


@pytest.fixture
def run(small_units, corpus, sweep):
    run = sweep(
        corpus([*texts(11, seed=6), ""]), values="state_output,states,betas", tokens="every:8", on_error="skip"
    ).path
    assert verify(run) == []
    return run


@pytest.mark.parametrize("folder", ["shards", "tokens"])
@pytest.mark.parametrize("unit", [0, 2])
def test_a_flipped_bit_is_found_and_its_file_named(run, folder, unit):
    path = run / folder / f"{unit:05d}.safetensors"
    whole = path.read_bytes()
    chance = random.Random(unit)
    for n in [0, 7, 8, 40, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(60))]:
        path.write_bytes(bytes([*whole[:n], whole[n] ^ 1 << chance.randrange(8), *whole[n + 1 :]]))
        problems = verify(run)
        assert problems and all(str(path) in problem for problem in problems), (n, problems)
    path.write_bytes(whole)
    assert verify(run) == []


@pytest.mark.parametrize("folder", ["shards", "tokens"])
@pytest.mark.parametrize("unit", [0, 1, 2])
def test_a_cut_or_missing_file_is_named(run, folder, unit):
    path = run / folder / f"{unit:05d}.safetensors"
    whole = path.read_bytes()
    for size in (0, 5, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert [str(path) in problem for problem in verify(run)] == [True]
    path.unlink()
    assert verify(run) == [f"{path} is missing"]


def test_a_shard_in_another_place_or_of_another_run_is_named(run, corpus, sweep):
    first, second = run / "shards" / "00000.safetensors", run / "shards" / "00001.safetensors"
    mine = first.read_bytes()
    first.write_bytes(second.read_bytes())
    assert any(f"{first} is of another run or another place" in problem for problem in verify(run))
    other = sweep(corpus([*texts(11, seed=6), ""], "other.jsonl"), "other", on_error="skip").path
    first.write_bytes((other / "shards" / "00000.safetensors").read_bytes())
    assert any(f"{first} is of another run" in problem for problem in verify(run))
    first.write_bytes(mine)
    (run / "shards" / "00003.safetensors").write_bytes(second.read_bytes())
    assert any("00003.safetensors" in problem for problem in verify(run))


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m["identity"].update(dtype="float16"),
        lambda m: m["totals"].update(documents=12),
        lambda m: m["totals"].update(units=2),
        lambda m: m["layouts"].pop("betas"),
        lambda m: m["totals"].pop("units"),
        lambda m: m.pop("totals"),
        lambda m: m.pop("finished"),
        lambda m: m.pop("checksum"),
        lambda m: m.update(format=2),
        lambda m: m.pop("identity"),
    ],
)
def test_an_edited_manifest_is_found(run, edit):
    manifest = json.loads((run / "manifest.json").read_text())
    edit(manifest)
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert any(str(run / "manifest.json") in problem for problem in verify(run))


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m["totals"].update(documents=12),
        lambda m: m["identity"].update(layers=[0]),
        lambda m: m.update(finished=None),
        lambda m: m.update(finished="2020-01-01T00:00:00+00:00"),
        lambda m: m["layouts"]["betas"].update(dtype="float16"),
        lambda m: m.update(data="elsewhere.jsonl"),
        lambda m: m.update(checksum="0" * 32),
    ],
)
def test_an_edited_manifest_is_not_opened_and_the_capture_command_makes_it_anew(run, corpus, sweep, edit):
    whole = contents(run)
    manifest = json.loads((run / "manifest.json").read_text())
    edit(manifest)
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CaptureError, match=r"manifest\.json was edited: .*Put back .* the same capture command"):
        statetap.open(run)
    sweep(corpus([*texts(11, seed=6), ""]), values="state_output,states,betas", tokens="every:8", on_error="skip")
    assert verify(run) == [] and contents(run) == whole


@pytest.mark.parametrize("number", [3, 7, 500, 123456])
@pytest.mark.parametrize("folder", ["shards", "tokens"])
@pytest.mark.parametrize("content", ["another", "another place", "no safetensors"])
def test_a_foreign_file_is_named_and_nothing_else_is(run, corpus, sweep, number, folder, content):
    place = run / folder / f"{number:05d}.safetensors"
    if content == "another":
        other = sweep(corpus(["x"], "other.jsonl"), "other").path
        place.write_bytes((other / folder / "00000.safetensors").read_bytes())
    else:
        first = (run / folder / "00001.safetensors").read_bytes()
        place.write_bytes(first if content == "another place" else b"what is this")
    (problem,) = verify(run)
    assert str(place) in problem


def test_what_is_damaged_is_said_in_words(run):
    """Not in those of a codec or a parser."""
    for name in (
        "shards/00000.safetensors",
        "tokens/00001.safetensors",
        "index.safetensors",
        "manifest.json",
        "events.jsonl",
    ):
        whole = (run / name).read_bytes()
        damages = [
            b"\xff" * 80,
            b"\x10" + b"\0" * 7 + b"\xff" * 16,
            b"\x02" + b"\0" * 7 + b"[]",
            b"\x10" + b"\0" * 7 + b"{" * 16,
        ]
        for damage in (*damages, whole.replace(b"{", b"{\xff", 1), b"[" * 200_000, b"9" * 5000):
            (run / name).write_bytes(damage)
            problems = verify(run)
            assert problems
            for word in (
                "codec",
                "Expecting",
                "NoneType",
                "invalid start",
                "Errno",
                "object",
                "recursion",
                "int string",
            ):
                assert word not in " ".join(problems), (word, problems)
        (run / name).write_bytes(whole)


def test_a_file_is_not_a_run(tmp_path, run):
    for path in (run / "events.jsonl", run / "manifest.json"):
        assert verify(path) == [f"{path} is a file; give the folder of a run"]
        with pytest.raises(CaptureError, match="is a file; give the folder of a run"):
            statetap.open(path)


@pytest.mark.parametrize("name", ["manifest.json", "index.safetensors", "events.jsonl"])
def test_other_files_damaged_or_missing_are_named(run, name):
    path = run / name
    whole = path.read_bytes()
    for damage in (whole[:-20], whole.replace(b"1", b"2"), whole + whole, b"", b"{}", b"\xff" * 50):
        path.write_bytes(damage)
        problems = verify(run)
        assert problems and all(str(path) in problem or name == "manifest.json" for problem in problems), damage
    path.unlink()
    assert any(str(path) in problem for problem in verify(run))


def test_an_unfinished_run_is_sound_and_its_last_shard_missed(small_units, corpus, sweep, tmp_path):
    asked = iter(range(12))
    with pytest.raises(statetap.sweeps.Interrupted):
        sweep(corpus(texts(16)), should_stop=lambda: next(asked, None) is None)
    run = statetap.open(tmp_path / "run")
    assert verify(run.path) == [] and not run.finished and 0 < len(run) < 16
    last = sorted((run.path / "shards").iterdir())[-1]
    last.unlink()
    assert verify(run.path) == [f"{last} is missing"]


def test_what_is_not_a_run(tmp_path):
    assert verify(tmp_path / "none") == [f"{tmp_path / 'none' / 'manifest.json'} does not exist"]
