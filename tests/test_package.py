"""The package as it is built and installed: with a compiler, without one, from the sdist."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = "statetap/ops/libstatetap"
# The hook that pip calls, on a machine that has nothing but Python and setuptools.
HOOK = """
import sys
for name in ("torch", "numpy", "nnsight", "transformers"):
    sys.modules[name] = None
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""
WITHOUT_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
WITHOUT_PATH = {"PATH": "/nonexistent"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="the tests choose the compiler as it is done on Unix"),
]
compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


@pytest.fixture
def source(tmp_path):
    """What a checkout holds, and nothing that was built in ours."""
    folder = tmp_path / "source"
    built = shutil.ignore_patterns("__pycache__", "*.so", "*.dylib", "*.egg-info")
    folder.mkdir()
    for name in ("csrc", "triton_kernels", "python"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=built)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def call_hook(hook: str, source: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    out = source.parent / "out"
    out.mkdir(exist_ok=True)
    clean = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "STATETAP_REQUIRE_CPP")}
    command = [sys.executable, "-c", HOOK, hook, str(out)]
    return subprocess.run(command, cwd=source, env={**clean, **environment}, capture_output=True, text=True)


def build(hook: str, source: Path, **environment: str) -> Path:
    done = call_hook(hook, source, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return source.parent / "out" / done.stdout.splitlines()[-1]


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def instruction_set(wheel: Path) -> str:
    """What the wheel's own files say, unpacked."""
    folder = wheel.parent / "installed"
    zipfile.ZipFile(wheel).extractall(folder)
    code = "from statetap.ops import native; print(native.PATH); print(native.instruction_set() or native.why_not())"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    path, answer = out.stdout.splitlines()
    assert path.startswith(str(folder))
    return answer


@compiler
def test_wheel_with_a_compiler(source):
    wheel = build("build_wheel", source)
    assert wheel.name.startswith("statetap-") and "-py3-none-" in wheel.name
    assert len([name for name in names(wheel) if name.startswith(LIBRARY)]) == 1
    assert instruction_set(wheel) in ("avx512", "avx2", "neon", "baseline")


def test_wheel_holds_the_package_and_only_that(source):
    found = names(build("build_wheel", source, **WITHOUT_COMPILER))
    packaged = {str(p.relative_to(ROOT / "python")) for p in (ROOT / "python/statetap").rglob("*.py")}
    assert packaged | {"statetap/py.typed", "statetap/triton_kernels/README.md"} <= found
    assert "statetap/triton_kernels/__init__.py" in found
    assert {name.split("/")[0] for name in found if ".dist-info" not in name} == {"statetap"}


@pytest.mark.parametrize("environment", [WITHOUT_COMPILER, WITHOUT_PATH], ids=["compiler fails", "no compiler"])
def test_wheel_without_a_compiler_says_so_in_one_line(source, environment):
    done = call_hook("build_wheel", source, **environment)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("statetap: C++ kernels not built")]
    wheel = source.parent / "out" / done.stdout.splitlines()[-1]
    assert not [name for name in names(wheel) if name.startswith(LIBRARY)]
    assert "built without a C++ compiler" in instruction_set(wheel)


@pytest.mark.parametrize("environment", [WITHOUT_COMPILER, WITHOUT_PATH], ids=["compiler fails", "no compiler"])
def test_a_required_library_that_does_not_build_is_an_error(source, environment):
    done = call_hook("build_wheel", source, STATETAP_REQUIRE_CPP="1", **environment)
    assert done.returncode != 0


@compiler
def test_sdist_builds_where_there_are_no_links(source):
    sdist = build("build_sdist", source)
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        assert not [member.name for member in archive if member.name.endswith((".so", ".pyc"))]
        archive.extractall(source.parent, filter="data")
    unpacked = source.parent / sdist.name.removesuffix(".tar.gz")
    from_sdist = names(build("build_wheel", unpacked))
    assert from_sdist == names(build("build_wheel", source))
    assert any(name.startswith(LIBRARY) for name in from_sdist)


def test_the_build_needs_setuptools_alone():
    """An isolated build installs what pyproject.toml lists: torch there would cost gigabytes."""
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported - sys.stdlib_module_names == {"setuptools"}
    assert 'requires = ["setuptools>=77", "wheel"]' in (ROOT / "pyproject.toml").read_text()


def test_a_wheel_is_not_tied_to_this_machine():
    assert "march=native" not in (ROOT / "setup.py").read_text()
