"""Instrumenting a loaded transformers model: whose kernels are dispatched, and who looks at the calls."""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, Callable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..errors import Error, UnsupportedFamily
from . import binding, current, packing, routing
from .attention import AttentionCall
from .call import MixerCall
from .held import HeldCall
from .rules import RULES
from .slots import Served
from .spec import MixerSpec

Observer = Callable[[Any], None]
_instrumented: WeakKeyDictionary[nn.Module, Instrumented] = WeakKeyDictionary()


def instrument(model: nn.Module, spec: MixerSpec, *, backend: str | None = None) -> Instrumented:
    """Mark the mixers of `model` and dispatch their kernels; a model that is instrumented already is returned as it is.

    Args:
        model: a loaded transformers model of the family.
        spec: the family's mixer, `family.mixer`.
        backend: "auto", "torch", ..., or "default" for the modeling file's own kernels; None follows the family.

    Raises:
        UnsupportedFamily: a kernel name of the table is missing from the installed modeling file, or not called.
    """
    found = _instrumented.get(model)
    if found is None:
        found = _instrumented[model] = Instrumented(model, spec)
    if backend is not None:
        found.route(backend)
    return found


class Instrumented:
    """A model whose kernel calls can be watched.

    Attributes:
        layers: block index -> its recurrent `Mixer`.
        attentions: block index -> its softmax `Mixer`.
    """

    def __init__(self, model: nn.Module, spec: MixerSpec) -> None:
        self.spec = spec
        self.backend: str | None = None
        self.observers: list[Observer] = []
        self.served: list[Served] | None = None  # by the calls that closed, where somebody put a list here
        self.layers: dict[int, Mixer] = {}
        self.attentions: dict[int, Mixer] = {}
        self._handles: list[Any] = []
        self._bound: list[tuple[ModuleType, tuple[str, ...]]] = []
        self._unbind = weakref.finalize(model, _unbind, self._bound)
        try:
            path = self._mark(model)
        except BaseException:
            self.remove()
            raise
        self._text_model = weakref.ref(model.get_submodule(path))  # it may be the model, which is not ours to keep
        self._handles.append(self.text_model.register_forward_pre_hook(packing.refuse, with_kwargs=True))

    @property
    def text_model(self) -> nn.Module:
        """The module that runs the blocks; takes `input_ids`, has no language-model head."""
        module = self._text_model()
        if module is None:
            raise Error("the instrumented model is gone: keep a reference to it")
        return module

    def _mark(self, model: nn.Module) -> str:
        """Mark every mixer, bind what they call; the path of the module that holds the blocks."""
        spec, path = self.spec, ""
        for name, module in model.named_modules():
            kind = type(module).__name__
            if kind not in (spec.mixer, spec.attention):
                continue
            block = re.match(r"(?:(.*)\.)?[^.\d]+\.(\d+)\.", name + ".")
            if block is None:
                continue
            path, index = block.group(1) or "", int(block.group(2))
            recurrent = kind == spec.mixer
            mixer = Mixer(self, module, name, index, recurrent)
            (self.layers if recurrent else self.attentions)[index] = mixer
            self._handles += mixer.handles
        if not self.layers:
            raise UnsupportedFamily(
                f"{type(model).__name__} has no {spec.mixer}: it is not of the family of {spec.modeling}"
            )
        self._bind(next(iter(self.layers.values())).module, spec.mixer, spec.kernels + spec.convolutions)
        if self.attentions and spec.attention is not None:
            self._bind(next(iter(self.attentions.values())).module, spec.attention, (spec.attention_kernel,))
        return path

    def _bind(self, mixer: nn.Module, name: str, kernels: tuple[str, ...]) -> None:
        module = sys.modules[type(mixer).__module__]
        binding.check(module, name, kernels, self.spec.versions)
        binding.bind(module, kernels)
        self._bound.append((module, kernels))

    def route(self, backend: str | None) -> None:
        """Choose the backend of this model: "auto", a name, "default" (the original kernels), None (the family's)."""
        self.backend = None if backend is None else routing.checked(backend)

    @contextmanager
    def watching(self, observer: Observer) -> Iterator[None]:
        """Call `observer(call)` with every kernel call of the model, before the call closes."""
        self.observers.append(observer)
        try:
            yield
        finally:
            self.observers.remove(observer)

    def remove(self) -> None:
        """Put everything back."""
        for handle in self._handles:
            handle.remove()
        self._unbind()
        self._handles = []
        for model, instrumented in list(_instrumented.items()):
            if instrumented is self:
                del _instrumented[model]


class Hook:
    """A module's hook that stays behind when the module is pickled or copied: what comes out is a plain model."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act

    def __call__(self, *_: Any) -> None:
        self._act()

    def __reduce__(self) -> tuple:
        return Hook, (int,)  # one that does nothing


class Mixer:
    """One marked mixer: stands as current while its forward runs, and opens its kernel calls."""

    def __init__(self, owner: Instrumented, module: nn.Module, path: str, layer: int, recurrent: bool) -> None:
        self.owner = owner
        self.module = module
        self.path = path
        self.layer = layer
        self.recurrent = recurrent
        self._edited = False  # whether the last call was
        self.handles = [
            module.register_forward_pre_hook(Hook(lambda: current.enter(self))),
            module.register_forward_hook(Hook(current.leave), always_call=True),
        ]

    def call_kernel(self, name: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one kernel call for the mixer's forward: open it, show it, close it."""
        if name in self.owner.spec.convolutions:
            return _convolve(original, args, kwargs)
        with current.standing_aside(), _keeping_own_tensors():
            call, close = self._open(original, args, kwargs)
            if _recomputing():
                if self._edited:
                    raise Error(
                        f"layer {self.layer}: gradient checkpointing recomputes a call that was edited in the trace; "
                        "switch it off with gradient_checkpointing_disable()"
                    )
                return close()
            for observer in list(self.owner.observers):
                observer(call)
            self._edited = call.edited
            if self.owner.served is not None:
                self.owner.served.append(call.served())
            return close()

    def _open(self, original: Callable, args: tuple, kwargs: dict) -> tuple[Any, Callable[[], Any]]:
        if not self.recurrent:
            attention = AttentionCall(original, self.layer, args, kwargs)
            return attention, attention.close
        backend = self.owner.backend or routing.of_family(self.owner.spec)
        kernel = RULES[self.owner.spec.rule](original, *args, **kwargs)
        held = HeldCall(kernel, f"layers[{self.layer}].linear_attn", self.layer, backend)
        return MixerCall(held), held.close


def _unbind(bound: list[tuple[ModuleType, tuple[str, ...]]]) -> None:
    """Take back what one model needed: when it is asked for, or when the model is gone."""
    for module, names in bound:
        binding.unbind(module, names)
    bound.clear()


def _convolve(original: Callable, args: tuple, kwargs: dict) -> Any:
    """The short convolution. A package that stands in for it has no CPU kernel; transformers' own is underneath."""
    on_cpu = any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in args)
    return (inspect.unwrap(original) if on_cpu else original)(*args, **kwargs)


def _keeping_own_tensors() -> Any:
    """Under gradient checkpointing: what is saved for backward while a call is open is kept, and not counted.

    Checkpointing recomputes a layer and expects to save as many tensors as the first time; what was looked at or
    edited in a trace is not looked at again.
    """
    if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    # detached: a node that keeps its own result through a hook would keep itself
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x)


def _recomputing() -> bool:
    """Whether we are inside a backward pass: gradient checkpointing runs a layer's forward again there."""
    return torch._C._current_graph_task_id() != -1


def is_instrumented(model: nn.Module) -> bool:
    """Whether `instrument` has marked this model, and nothing has taken it back."""
    return model in _instrumented
