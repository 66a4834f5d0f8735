"""Model families: one small module of names per `config.model_type`.

`statetap.families.qwen3_5_text` is the module of that family, with its `Family` as `FAMILY`; `model.family` is the
same module.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from ..errors import ArgumentError, UnsupportedFamily
from ..mixers import missing
from .spec import Family as Family


def names() -> tuple[str, ...]:
    """The families that are supported, by `model_type`."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "spec"))


def __getattr__(name: str) -> Any:
    if name in names():
        return importlib.import_module(f"{__name__}.{name}")
    try:
        return module_of(name)  # a wrapper's name
    except UnsupportedFamily:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; families: {', '.join(names())}") from None


def module_of(target: str | ModuleType | Family | Any) -> ModuleType:
    """The family's module, from its name, itself, its `Family`, or a transformers configuration.

    Raises:
        UnsupportedFamily: no family of that name, or for that configuration; lists those there are.
    """
    if isinstance(target, ModuleType):
        if isinstance(getattr(target, "FAMILY", None), Family):
            return target
        raise ArgumentError(f"family: module {target.__name__} is not a family; families: {', '.join(names())}")
    if isinstance(target, Family):
        target = target.model_type
    wanted = [target] if isinstance(target, str) else _model_types(target)
    for name in names():
        module = importlib.import_module(f"{__name__}.{name}")
        if any(kind == name or kind in module.FAMILY.wrappers for kind in wanted):
            return module
    raise UnsupportedFamily(
        f"model_type {' / '.join(map(repr, wanted)) or 'unknown'} is not supported; families: {', '.join(names())}"
    )


def family_of(config: Any) -> Family:
    """The `Family` of a transformers configuration: its text model's, if it is a multimodal wrapper's."""
    return module_of(config).FAMILY


def auto_class(config: Any) -> Any:
    """The transformers class that loads a checkpoint for text: its text model's, or the wrapper's where that is all."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText


def check(name: str) -> list[tuple[str, bool, str | None]]:
    """Each kernel of a family as found in the installed transformers: (name, found, what is wrong)."""
    mixer = module_of(name).FAMILY.mixer
    try:
        modeling = importlib.import_module(mixer.modeling)
    except Exception as error:  # an old transformers, or a modeling file whose own imports fail
        return [(kernel, False, f"{mixer.modeling}: {error}") for kernel in mixer.kernels]
    found = missing(modeling, mixer.mixer, mixer.kernels)
    return [(kernel, reason is None, reason) for kernel, reason in found.items()]


def _model_types(config: Any) -> list[str]:
    configs = [getattr(config, "text_config", None), config]
    return [kind for c in configs if (kind := getattr(c, "model_type", None))]
