"""Families are data: they are found by configuration, and their kernels are in the installed transformers."""

from __future__ import annotations

import pytest

import statetap
import tiny
from statetap import families


@pytest.mark.parametrize("name", families.names())
def test_kernels_are_found(name):
    found = families.check(name)
    assert found and all(ok and reason is None for _, ok, reason in found)


@pytest.mark.parametrize("model_type", tiny.CONFIGS)
def test_found_by_configuration(model_type):
    family = families.family_of(tiny.config(model_type))
    assert model_type == family.model_type or model_type in family.wrappers


def test_found_by_name_and_module():
    module = families.qwen3_5_text
    assert families.module_of("qwen3_5") is families.module_of("qwen3_5_text") is families.module_of(module) is module
    assert families.module_of(module.FAMILY) is module
    with pytest.raises(statetap.UnsupportedFamily, match="'gpt2'.*qwen3_next"):
        families.module_of("gpt2")
    with pytest.raises(statetap.ArgumentError, match="family"):
        families.module_of(pytest)
    with pytest.raises(AttributeError, match="nothing"):
        families.nothing  # noqa: B018


def test_a_family_whose_modeling_file_is_not_there(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, families.qwen3_next.FAMILY.mixer.modeling, None)
    assert all(not ok and reason for _, ok, reason in families.check("qwen3_next"))
