"""What may import what, and that a light import stays light; and that these tests would notice."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("nnsight", "transformers", "triton", "datasets", "ray", "matplotlib", "plotly")


def loaded_by(code: str, names: tuple[str, ...], folder: Path | None = None) -> set[str]:
    """Which of `names` are loaded after running `code` in a new process."""
    script = f"import sys\n{code}\nprint(*sorted({set(names)!r} & set(sys.modules)))"
    path = f"import sys; sys.path.insert(0, {str(folder)!r})\n" if folder else ""
    done = subprocess.run([sys.executable, "-c", path + script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.fixture
def stand_ins(tmp_path):
    """A folder with an empty module for each heavy package that is not installed, so that importing it shows."""
    for name in HEAVY:
        if importlib.util.find_spec(name) is None:
            (tmp_path / f"{name}.py").write_text("")
    return tmp_path


def test_layers():
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_import_statetap_loads_no_torch(stand_ins):
    assert loaded_by("import statetap", (*HEAVY, "torch", "numpy"), stand_ins) == set()


@pytest.mark.parametrize("module", ["ops", "triton_kernels", "errors", "analysis"])
def test_light_modules(module, stand_ins):
    assert loaded_by(f"import statetap.{module}", HEAVY, stand_ins) == set()


def test_mixers_and_families_need_no_nnsight():
    assert "nnsight" not in loaded_by("import statetap; statetap.families.qwen3_5_text; statetap.mixers", HEAVY)


def test_sweeps_need_no_nnsight():
    assert "nnsight" not in loaded_by("import statetap; statetap.capture", HEAVY)


@pytest.mark.parametrize("name", ["triton", "nnsight"])
def test_the_test_would_notice(name, stand_ins):
    (stand_ins / f"{name}.py").write_text("")
    (stand_ins / "heavy_after_all.py").write_text(f"import statetap.ops\nimport {name}\n")
    assert loaded_by("import heavy_after_all", HEAVY, stand_ins) == {name}


def test_a_broken_layer_would_be_noticed(tmp_path):
    """The contracts of pyproject.toml over a package of our name whose `ops` imports upwards."""
    package = tmp_path / "statetap"
    for name in ("analysis", "sweeps", "tracing", "families", "mixers", "ops", "triton_kernels"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text("")
    for name in ("__init__", "cli", "doctor", "errors"):
        (package / f"{name}.py").write_text("")
    (package / "ops" / "__init__.py").write_text("from .. import mixers\n")
    command = Path(sys.executable).with_name("lint-imports")
    arguments = ["--no-cache", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run([command, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "statetap.ops -> statetap.mixers" in done.stdout


def test_every_public_name_loads():
    import statetap

    for name in dir(statetap):
        getattr(statetap, name)
    assert statetap.OutOfOrderError is statetap.tracing.OutOfOrderError
    assert issubclass(statetap.OutOfOrderError, statetap.Error)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        statetap.nothing  # noqa: B018


def test_a_family_is_reached_by_attributes():
    code = "import statetap; assert statetap.families.qwen3_5_text.FAMILY.model_type == 'qwen3_5_text'"
    assert "nnsight" not in loaded_by(code, HEAVY)
