"""The states are computed in full precision whatever the caller's settings are."""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


class full_precision:
    """Autocast off, and fp32 matrix products in fp32 (neither TF32 nor bf16 pieces), for the time of the block."""

    def __enter__(self) -> None:
        self._autocast = [torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda") if _autocasting(kind)]
        for context in self._autocast:
            context.__enter__()
        self._changed = [(setting, was) for setting in _SETTINGS if (was := setting.fp32_precision) != "ieee"]
        for setting, _ in self._changed:
            setting.fp32_precision = "ieee"

    def __exit__(self, *exc: Any) -> None:
        for setting, was in self._changed:
            setting.fp32_precision = was
        for context in reversed(self._autocast):
            context.__exit__(*exc)


class _Legacy:
    """The one setting of torch before 2.9, under the name of the later ones."""

    @property
    def fp32_precision(self) -> str:
        precision = torch.get_float32_matmul_precision()
        return "ieee" if precision == "highest" else precision

    @fp32_precision.setter
    def fp32_precision(self, precision: str) -> None:
        torch.set_float32_matmul_precision("highest" if precision == "ieee" else precision)


def _settings() -> list[Any]:
    own = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    return own if all(hasattr(setting, "fp32_precision") for setting in own) else [_Legacy()]


_SETTINGS = _settings()


def exact(function: F) -> F:
    """Run `function` in full precision."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # dynamo cannot trace the settings; the ops themselves are opaque to it
            return function(*args, **kwargs)
        with full_precision():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _autocasting(kind: str) -> bool:
    return torch.is_autocast_enabled(kind)
