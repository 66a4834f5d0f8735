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
        self._matmul = torch.get_float32_matmul_precision()
        if self._matmul != "highest":
            torch.set_float32_matmul_precision("highest")

    def __exit__(self, *exc: Any) -> None:
        if self._matmul != "highest":
            torch.set_float32_matmul_precision(self._matmul)
        for context in reversed(self._autocast):
            context.__exit__(*exc)


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
