"""The command line: what it prints where, its exit codes, and that it stops when asked."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

import statetap
from statetap import cli

LINES = [f"document {n}: " + "the state of a head. " * (n % 7 + 1) for n in range(12)]


@pytest.fixture(autouse=True)
def as_before():
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    return path


@pytest.fixture
def command(monkeypatch, capsys):
    """`command(*arguments)`: exit code, standard output, standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["statetap", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return (code, *capsys.readouterr())

    return run


def test_capture_prints_the_path_and_goes_on_when_repeated(command, checkpoints, data, tmp_path):
    run = tmp_path / "runs" / "x"
    words = ("capture", checkpoints(), "--data", data, "--values", "state_output,trajectory", "--layers", "0-1")
    words = (*words, "--dtype", "bfloat16", "--batch-tokens", "512", "-o", run)
    code, out, err = command(*words)
    assert (code, out) == (0, f"{run}\n") and "tok" in err
    assert command(*words)[:2] == (0, f"{run}\n")

    code, out, err = command("info", run)
    assert code == 0 and err == ""
    for said in ("documents: 12", "layers: [0, 1]", "bfloat16 [12, 4, 16, 24]: document, heads, key_dim, value_dim"):
        assert said in out
    told = json.loads(command("info", run, "--json")[1])
    assert told["documents"] == 12
    said = f"{run}: 12 documents, {told['tokens']} tokens, finished, every checksum right\n"
    assert command("verify", run)[:2] == (0, said)

    code, out, err = command(*words[:-4], "--batch-tokens", "513", "-o", run)
    assert (
        code == 1 and out == "" and "batch_tokens: was 512, now 513" in err and err.count("\n") == err.count("tok") + 1
    )

    shard = run / "shards" / "00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    code, out, err = command("verify", run, "--json")
    assert code == 1 and str(shard) in json.loads(out)["problems"][0]
    code, out, err = command("verify", run)
    assert code == 1 and str(shard) in out


def test_json_and_dry_run(command, checkpoints, data, tmp_path):
    options = ("capture", checkpoints(), "--data", data, "-o", tmp_path / "run", "--limit", 5)
    code, out, _ = command(*options, "--dry-run", "--json")
    plan = json.loads(out)
    assert code == 0 and plan["documents"] == 5 and plan["bytes"] == 5 * 3 * 4 * 16 * 24 * 4
    code, out, _ = command(*options, "--dry-run")
    assert code == 0 and re.search(r"state_output: 5 rows a layer, 30,720 bytes a layer, 92,160 bytes", out)
    assert not (tmp_path / "run").exists()
    code, out, _ = command(*options, "--json")
    assert code == 0 and json.loads(out)["documents"] == 5


def test_families_are_listed_with_their_kernels_as_found(command, monkeypatch):
    from statetap import families
    from statetap.tracing.envoys import LinearAttention

    code, out, _ = command("families", "--json")
    found = json.loads(out)
    assert code == 0 and tuple(found) == families.names()
    kimi = found["kimi_linear"]
    assert kimi["kernels"] == dict.fromkeys(families.kimi_linear.FAMILY.mixer.kernels, "found")
    assert kimi["traced"]["linear_attn"] == list(LinearAttention.VALUES) and "trajectory" in kimi["captured"]
    assert found["qwen3_5_text"]["wrappers"] == ["qwen3_5"] and "Kimi" in kimi["about"]
    monkeypatch.delattr(families.modeling(families.qwen3_next.FAMILY), "torch_chunk_gated_delta_rule")
    monkeypatch.setattr(families, "absent", lambda family: "not here" if family.model_type == "kimi_linear" else None)
    code, out, _ = command("families")
    assert code == 0 and "torch_chunk_gated_delta_rule: no function of this name exists" in out
    assert "transformers: not here" in out and "linear_attn: attention_output, " in out
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_a_manifest_reruns_a_run(command, checkpoints, data, tmp_path):
    first = ("capture", checkpoints(), "--data", data, "--values", "betas", "--layers", "1", "-o", tmp_path / "a")
    assert command(*first)[0] == 0
    assert command("capture", "--config", tmp_path / "a" / "manifest.json", "-o", tmp_path / "b")[0] == 0
    for name in ("shards/00000.safetensors", "tokens/00000.safetensors", "index.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    other = ("capture", "--config", tmp_path / "a" / "manifest.json", "--values", "decays", "-o", tmp_path / "c")
    assert command(*other)[0] == 0 and "linear_attn.decays" in command("info", tmp_path / "c")[1]


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        ((), 2, "Usage:"),
        (("frobnicate",), 2, "No such command"),
        (("capture",), 2, "is missing"),
        (("capture", "m", "--batch-tokens", "x", "--data", "d", "-o", "o"), 2, "--batch-tokens"),
        (("capture", "m", "--nonsense"), 2, "No such option"),
        (("capture", "m", "--data", "none.jsonl", "-o", "o"), 1, "statetap: data: none.jsonl does not exist"),
        (("capture", "m", "--data", "d", "-o", "o", "--dtype", "int8"), 2, "statetap: dtype: got 'int8'"),
        (("capture", "m", "--data", "d", "-o", "o", "--tokens", "some"), 2, "statetap: tokens: got 'some'"),
        (
            ("capture", "--config", "none.json", "-o", "o"),
            1,
            "config: none.json does not exist; give the manifest.json",
        ),
        (("capture", "--config", __file__, "-o", "o"), 1, "test_cli.py is not the manifest.json of a run"),
        (("verify", __file__), 1, "test_cli.py is a file; give the folder of a run"),
        (("info", __file__), 1, "test_cli.py is a file; give the folder of a run"),
        (("info", "none"), 1, "manifest.json does not exist"),
        (("verify",), 2, "Missing argument"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(command, arguments, code, message):
    found, out, err = command(*arguments)
    assert found == code and message in err + out and "Traceback" not in err
    if err.startswith("statetap: "):
        assert err.count("\n") == 1 and out == ""


def test_a_bad_line_and_a_layer_without_a_mixer(command, checkpoints, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a"}\n{"body": "b"}\n')
    code, out, err = command("capture", checkpoints(), "--data", path, "-o", tmp_path / "run")
    assert code == 1 and out == "" and f"{path}, line 2: no field 'text' (it has 'body')" in err
    code, out, err = command("capture", checkpoints(), "--data", path, "-o", tmp_path / "run", "--on-error", "skip")
    assert code == 0 and "1 lines were left out" in err
    code, out, err = command("capture", checkpoints(), "--data", path, "-o", tmp_path / "r", "--layers", "-1")
    assert code == 2 and "no recurrent mixer in 3; the layers that have one are 0-2" in err


def test_overflow_in_float16_is_the_exit_status(command, checkpoints, data, tmp_path, monkeypatch):
    from statetap.sweeps.runner import Sweep

    real = Sweep.forward

    def loud(self, collector, batch):
        with torch.no_grad():
            kernel = self.ready.instrumented.layers[1].module.conv1d.weight
            before = kernel.clone()
            kernel[-24:] *= 3e6  # the last head's values
            real(self, collector, batch)
            kernel.copy_(before)

    monkeypatch.setattr(Sweep, "forward", loud)
    code, out, err = command("capture", checkpoints(), "--data", data, "--dtype", "float16", "-o", tmp_path / "run")
    assert code == 1 and out == f"{tmp_path / 'run'}\n"
    assert re.search(r"overflow in float16: layer 1, state_output, head 3: \d+ values are infinite", err)
    assert re.search(r"overflowed in float16: [1-9]", command("info", tmp_path / "run")[1])


def test_an_error_of_ours_is_a_sentence_and_shown_whole_on_request(command, data, monkeypatch):
    def broken(path):
        raise ZeroDivisionError("one over nothing")

    monkeypatch.setattr("statetap.sweeps.reader.open", broken)
    code, out, err = command("info", data)
    assert (code, out) == (1, "") and err.startswith("statetap: unexpected ZeroDivisionError: one over nothing (")
    monkeypatch.setenv("STATETAP_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        command("info", data)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_sweep_and_the_same_command_goes_on(checkpoints, tmp_path, number):
    """The input is a pipe, so that the sweep is where we know it to be: waiting, with the first units done."""
    pipe, run = tmp_path / "pipe.txt", tmp_path / "run"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "statetap.cli", "capture", checkpoints(), "--data", pipe, "-o", run]
    command = [*map(str, command), "--batch-tokens", "16"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    lines = "".join(f"line {n:03d}\n" for n in range(100))  # 900 tokens: one unit of 32 batches, and a part of another

    sweep = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    with open(pipe, "w") as writing:
        writing.write(lines)
        writing.flush()
        until = time.monotonic() + 60
        while not (run / "shards").exists() or not any((run / "shards").iterdir()):
            assert time.monotonic() < until and sweep.poll() is None
            time.sleep(0.02)
        sweep.send_signal(number)
        out, err = sweep.communicate(timeout=60)
    assert (sweep.returncode, out) == (130, "") and "Traceback" not in err
    assert err.rstrip().endswith("The same command goes on.")
    assert not list(run.rglob("*.part")) and 0 < len(statetap.open(run)) < 100

    if number == signal.SIGINT:
        return
    sweep = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    pipe.write_text(lines)
    out, err = sweep.communicate(timeout=60)
    assert (sweep.returncode, out) == (0, f"{run}\n"), err
    assert [row.text for row in statetap.open(run).rows()] == lines.splitlines()


def test_a_signal_during_the_imports_ends_it_too(tmp_path):
    code = """
import os, signal, sys
from statetap import cli
class Late:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Late())
sys.argv = ["statetap", "capture", "none", "--data", sys.argv[1], "-o", sys.argv[2]]
cli.main()
"""
    (tmp_path / "a.txt").write_text("a\n")
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.txt"), str(tmp_path / "run")], capture_output=True, text=True
    )
    assert "stopping after this batch" in result.stderr and "Traceback" not in result.stderr
    assert result.returncode == 130, result
    assert not (tmp_path / "run").exists()
