"""`statetap doctor` where things are missing or broken: it says what, and never ends in a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from statetap import doctor
from statetap.ops import native

RAISES_ON_IMPORT = "raise RuntimeError('broken on import')\n"
RAISES_ON_USE = "def __getattr__(name):\n    raise RuntimeError(f'this stand-in has no {name}')\n"
# As much of triton as torch looks at when it is imported, on a machine whose driver is not there.
TRITON_WITHOUT_DRIVER = {
    "__init__": "__version__ = '3.9.0'\nfrom . import language, runtime\n",
    "language": "class dtype: pass\n",
    "backends/__init__": "",
    "backends/compiler": "",
    "compiler/__init__": "",
    "compiler/compiler": "",
    "runtime": """class Driver:
    def __getattr__(self, name):
        raise RuntimeError("0 active drivers ([]). There should only be one.")
driver = Driver()
""",
}


@pytest.fixture
def run(tmp_path):
    """`run(packages)`: the command's JSON where these packages stand before the installed ones."""

    def call(packages):
        for package, files in packages.items():
            for name, text in files.items():
                path = tmp_path / package / f"{name}.py"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        command = [sys.executable, "-m", "statetap.cli", "doctor", "--json"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return call


def read(done):
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return json.loads(done.stdout)


BROKEN = {
    "triton without a driver": {"triton": TRITON_WITHOUT_DRIVER},
    "peers that raise on use": {name: {"__init__": RAISES_ON_USE} for name in ("fla", "causal_conv1d", "mamba_ssm")},
    "peers that raise on import": {name: {"__init__": RAISES_ON_IMPORT} for name in ("fla", "causal_conv1d")},
}


@pytest.mark.parametrize("packages", BROKEN.values(), ids=BROKEN)
def test_broken_packages_that_are_not_asked_for_are_not_touched(run, packages):
    done = run(packages)
    found = read(done)
    assert (done.returncode, done.stderr, found["problems"]) == (0, "", [])
    assert found["backends"]["auto on cpu"] in ("cpp", "torch")
    assert all("\n" not in line for line in found["backends"].values())
    assert found["tracing"] == "can be used"
    assert "torch_chunk_gated_delta_rule" in found["families"]["qwen3_5_text"]


@pytest.mark.parametrize("package", ["transformers", "nnsight", "triton"])
def test_what_does_not_import_and_is_needed_is_a_problem(run, package):
    """With a triton that raises on import torch.compile does not import either, and transformers with it."""
    done = run({package: {"__init__": RAISES_ON_IMPORT}})
    found = read(done)
    assert done.returncode == 1 and found["problems"]
    assert found["backends"]["torch on cpu"] == "can be taken"


def test_packages_that_are_not_installed_are_no_problem(monkeypatch):
    version = doctor._version
    gone = ("transformers", "nnsight")
    monkeypatch.setattr(doctor, "_version", lambda name: "not installed" if name in gone else version(name))
    found = doctor.report()
    assert found["problems"] == []
    assert "pip install" in found["tracing"] and "pip install" in found["families"]["none"]


@pytest.fixture
def library(monkeypatch, tmp_path):
    """The place of the library, empty, and nothing loaded from elsewhere."""
    path = tmp_path / "libstatetap.so"
    monkeypatch.setattr(native, "PATH", path)
    native.load.cache_clear()
    yield path
    native.load.cache_clear()


def test_no_library_has_a_reason_and_is_no_problem(library):
    found = doctor.report()
    assert "built without a C++ compiler" in found["C++ library"]["missing"]
    assert found["problems"] == []
    assert native.instruction_set() is None and native.compiler() is None


def test_a_library_that_does_not_load_is_a_problem(library):
    library.write_bytes(b"not a library")
    found = doctor.report()
    assert "does not load" in found["C++ library"]["missing"]
    assert found["problems"] == [f"C++ library: {found['C++ library']['missing']}"]


@pytest.mark.skipif(native.why_not() is not None, reason="the library was not built")
def test_a_library_of_another_abi_is_refused(library, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    native.load.cache_clear()
    assert "ABI version" in native.why_not()


@pytest.mark.skipif(native.why_not() is not None, reason="the library was not built")
def test_the_library_answers():
    assert native.instruction_set() in ("avx512", "avx2", "neon", "baseline")
    assert native.compiler().split()[0] in ("gcc", "clang", "unknown")


def test_a_driver_that_does_not_answer_is_told(monkeypatch):
    def fails():
        raise RuntimeError("CUDA driver initialization failed\nmore lines")

    monkeypatch.setattr(torch.cuda, "device_count", fails)
    assert doctor.report()["devices"][1:] == ["cuda: CUDA driver initialization failed"]


def test_the_text_says_what_the_json_says(capsys):
    assert doctor.main() == 0
    text = capsys.readouterr().out
    for line in (
        "python: ",
        "  torch: ",
        "devices: ",
        "C++ library:",
        "  auto on cpu: ",
        "tracing: ",
        "problems: none",
    ):
        assert line in text


def test_a_missing_kernel_is_a_problem_and_named(monkeypatch):
    from statetap import families

    reason = "not in transformers.models.qwen3_next.modeling_qwen3_next"
    monkeypatch.setattr(families, "check", lambda name: [("torch_chunk_gated_delta_rule", False, reason)])
    found = doctor.report()
    assert f"torch_chunk_gated_delta_rule: {reason}" in found["families"]["qwen3_next"]
    assert f"family qwen3_next: torch_chunk_gated_delta_rule: {reason}" in found["problems"]
