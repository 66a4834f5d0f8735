"""Kernel names of a modeling module, bound once to a dispatcher.

A modeling file calls its kernel through a module-level name. `bind` puts a dispatcher there, once per
module and name, however many models are instrumented. The dispatcher asks `current` who is calling:
nobody instrumented, and the original runs, untouched.
"""

from __future__ import annotations

import functools
import inspect
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Callable

from ..errors import UnsupportedFamily
from . import current

_ORIGINAL = "__statetap_original__"
_bound: dict[tuple[str, str], int] = {}  # (module, name) -> how many instrumented models need it


def bind(module: ModuleType, names: tuple[str, ...]) -> None:
    """Put a dispatcher in the place of each kernel name of `module`; counted, so `unbind` can undo it."""
    for name in names:
        key = module.__name__, name
        function = getattr(module, name)
        if not is_bound(function):
            setattr(module, name, _dispatcher(name, function))
            _bound[key] = 0
        _bound[key] = _bound.get(key, 0) + 1


def unbind(module: ModuleType, names: tuple[str, ...]) -> None:
    """Take back one `bind`; the last one puts the original function back."""
    for name in names:
        key = module.__name__, name
        if key not in _bound:
            continue
        _bound[key] -= 1
        if _bound[key] == 0:
            del _bound[key]
            setattr(module, name, original(getattr(module, name)))


def is_bound(function: Callable) -> bool:
    """Whether `function` is one of our dispatchers."""
    return hasattr(function, _ORIGINAL)


def original(function: Callable) -> Callable:
    """What stood under the name before `bind`."""
    return getattr(function, _ORIGINAL, function)


def _dispatcher(name: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        mixer = current.mixer()
        if mixer is None:
            return function(*args, **kwargs)
        return mixer.call_kernel(name, function, args, kwargs)

    setattr(dispatch, _ORIGINAL, function)
    return dispatch


def check(module: ModuleType, mixer_class: str, names: tuple[str, ...], versions: str) -> None:
    """Raise `UnsupportedFamily` unless every kernel name exists in `module` and the mixer's forward calls it.

    `versions`: the transformers versions that are known to work, for the message.
    """
    for name, reason in missing(module, mixer_class, names).items():
        if reason is not None:
            raise UnsupportedFamily(
                f"kernel {name!r} of {mixer_class}: {reason} in {module.__name__} "
                f"(transformers {transformers_version()}). Works with transformers {versions}: install one of these."
            )


def missing(module: ModuleType, mixer_class: str, names: tuple[str, ...]) -> dict[str, str | None]:
    """For each kernel name None, or what is wrong with it in the modeling module that is installed."""
    cls = getattr(module, mixer_class, None)
    if cls is None:
        return dict.fromkeys(names, f"the class {mixer_class} does not exist")
    called = _names_in_forward(cls)
    reasons: dict[str, str | None] = {}
    for name in names:
        if not callable(getattr(module, name, None)):
            reasons[name] = "no function of this name exists"
        elif name not in called:
            reasons[name] = f"{mixer_class}.forward does not call it"
        else:
            reasons[name] = None
    return reasons


def _names_in_forward(cls: type) -> set[str]:
    code = inspect.unwrap(cls.forward).__code__  # type: ignore[attr-defined]
    return set(code.co_names)


def transformers_version() -> str:
    """Of the transformers that is installed."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return "not installed"
