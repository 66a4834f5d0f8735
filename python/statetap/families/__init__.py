"""Model families: one small module of names per `config.model_type`.

`statetap.families.qwen3_5_text` is the module of that family, with its `Family` as `FAMILY`; `model.family` is the
same module.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from types import ModuleType
from typing import Any

from ..errors import ArgumentError, UnsupportedFamily
from ..mixers import missing, transformers_version
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


def modeling(family: Family) -> ModuleType:
    """A family's modeling file, imported.

    Raises:
        UnsupportedFamily: the installed transformers has none, or it cannot be imported; says why to the root.
    """
    spec = family.mixer
    try:
        return importlib.import_module(spec.modeling)
    except Exception as error:  # of any kind: a modeling file runs what it imports
        raise UnsupportedFamily(
            f"{spec.modeling} cannot be imported (transformers {transformers_version()}): {_causes(error)}. "
            f"Works with transformers {spec.versions}: install one of these."
        ) from error


def absent(family: Family) -> str | None:
    """None if the installed transformers has the family's modeling file, else which versions do."""
    try:
        if importlib.util.find_spec(family.mixer.modeling) is not None:
            return None
    except (ImportError, ValueError):  # a parent that is missing, or broken
        pass
    return f"not in transformers {transformers_version()}; works with {family.mixer.versions}"


def check(name: str) -> list[tuple[str, bool, str | None]]:
    """Each kernel of a family as found in the installed transformers: (name, found, what is wrong)."""
    family = module_of(name).FAMILY
    spec = family.mixer
    try:
        found = missing(modeling(family), spec.mixer, spec.kernels)
    except UnsupportedFamily as error:
        return [(kernel, False, str(error)) for kernel in spec.kernels]
    return [(kernel, reason is None, reason) for kernel, reason in found.items()]


def describe(name: str) -> dict[str, Any]:
    """What there is to say of a family: about, wrappers, transformers versions, and each kernel as found."""
    module = module_of(name)
    family = module.FAMILY
    return {
        "about": (module.__doc__ or "").strip(),
        "wrappers": list(family.wrappers),
        "transformers": absent(family) or f"{family.mixer.versions}; here {transformers_version()}",
        "kernels": {} if absent(family) else {kernel: reason or "found" for kernel, _, reason in check(name)},
    }


def _causes(error: BaseException) -> str:
    """An error and what it was raised from, in one line: transformers wraps what goes wrong in an import."""
    said = []
    cause: BaseException | None = error
    while cause is not None:
        said.append(f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "; caused by ".join(said)


def _model_types(config: Any) -> list[str]:
    configs = [getattr(config, "text_config", None), config]
    return [kind for c in configs if (kind := getattr(c, "model_type", None))]
