"""Families are data: they are found by configuration, and their kernels are in the installed transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

import statetap
import tiny
from statetap import families


def test_every_family_is_tested_and_there_is_one_for_every_configuration():
    """Each has a configuration in `tiny`, and is named by a test file's suite."""
    assert set(families.names()) == set(tiny.CONFIGS)
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in families.names() if f'"{name}"' not in text] == []


@pytest.mark.parametrize("model_type", [name for name in [*tiny.CONFIGS, *tiny.WRAPPERS] if tiny.has(name)])
def test_found_by_configuration(model_type):
    family = families.family_of(tiny.config(model_type))
    assert model_type == family.model_type or model_type in family.wrappers


def test_found_by_name_and_module():
    module = families.qwen3_5_text
    assert families.module_of("qwen3_5") is families.module_of("qwen3_5_text") is families.module_of(module) is module
    assert families.module_of(module.FAMILY) is module is families.qwen3_5
    with pytest.raises(statetap.UnsupportedFamily, match="'gpt2'.*qwen3_next"):
        families.module_of("gpt2")
    with pytest.raises(statetap.ArgumentError, match="family"):
        families.module_of(pytest)
    with pytest.raises(AttributeError, match="nothing"):
        families.nothing  # noqa: B018


def test_the_cause_of_an_import_error_is_told(monkeypatch):
    """transformers wraps what goes wrong in its modeling files: the root is what helps."""
    load = families.importlib.import_module

    def fail(name):
        if not name.startswith("transformers"):
            return load(name)
        try:
            raise OSError("libcudart.so.13 is missing")
        except OSError as root:
            raise RuntimeError("Failed to import modeling_qwen3_next") from root

    monkeypatch.setattr(families.importlib, "import_module", fail)
    for _, found, reason in families.check("qwen3_next"):
        assert not found
        assert "RuntimeError: Failed to import modeling_qwen3_next; caused by OSError: libcudart.so.13" in reason


def test_a_family_whose_modeling_file_is_not_there(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, families.qwen3_next.FAMILY.mixer.modeling, None)
    assert all(not ok and reason for _, ok, reason in families.check("qwen3_next"))
