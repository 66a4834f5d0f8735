"""`StandardizedTransformer`: a transformers checkpoint under standard names, its recurrent states included."""

from __future__ import annotations

import logging
import re
import warnings
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Iterator

import torch
from nnsight.intervention.batching import Batcher as NnsightBatcher
from nnsight.intervention.interleaver import Interleaver as NnsightInterleaver
from nnsight.modeling.tp import TPFragments
from nnsight.modeling.transformers import TransformersModel
from torch import Tensor, nn

from .. import families
from ..errors import ArgumentError, Error, UnsupportedFamily
from ..mixers import Hook, current, fitting, instrument, route_family
from ..mixers.routing import checked
from ..ops import checks
from .envoys import CALL, PARTS, CallEnvoy, Layer, LinearAttention, Mlp, Module, SelfAttention
from .loops import Tracer
from .methods import Methods
from .order import Forwards, check_in_time, location


class Interleaver(NnsightInterleaver):
    """nnsight's. A block of the trace that runs in the middle of a mixer's forward is nobody's mixer."""

    def handle(self, provider: str, value: Any) -> Any:
        if provider not in self.parked:
            return super().handle(provider, value)
        with current.standing_aside():
            return super().handle(provider, value)


class Batcher(NnsightBatcher):
    """nnsight's. Where no mask is given it makes one of this call's tokens, which would hide those in a cache."""

    def assemble(self, fn: Any) -> tuple:
        args, kwargs = super().assemble(fn)
        cached = any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))
        given = any("attention_mask" in options for options in (self.extra_kwargs, *(o for _, o in self.invokes)))
        if cached and not given:
            mask = kwargs.pop("attention_mask", None)
            if mask is not None and not bool(mask.all()):
                raise ArgumentError("attention_mask: padded rows on a filled cache need the mask of all tokens so far")
        return args, kwargs


class StandardizedTransformer(Methods, Module, TransformersModel):
    """A hybrid language model for tracing and editing, on nnsight's `TransformersModel`.

    Args:
        model: a Hugging Face id, a folder, or a loaded transformers module.
        device: "cpu", "cuda", "cuda:1", ...; default what transformers chooses.
        dtype: e.g. `torch.bfloat16`; default the checkpoint's.
        backend: "auto", "cpp", "triton", "torch", "reference", or "default" for transformers' own kernels.
        family: a family's name or module, where it cannot be told from the configuration.
        **kwargs: nnsight's and `from_pretrained`'s: `attn_implementation`, `revision`, `tokenizer`,
            `task="image-text-to-text"` for the multimodal wrapper, ...

    Raises:
        UnsupportedFamily: no family for this checkpoint, or the installed transformers lacks its kernels.
        ArgumentError: a backend or device that does not exist.

    Example:
        >>> model = StandardizedTransformer("Qwen/Qwen3.5-0.8B")
        >>> with model.trace("The Eiffel Tower is in the city of"):
        ...     states = model.layers[0].linear_attn.states.save()
    """

    _batcher_class = Batcher

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        backend: str = "auto",
        family: str | ModuleType | None = None,
        **kwargs: Any,
    ) -> None:
        checked(backend)
        loaded = isinstance(model, nn.Module)
        if not loaded:
            kwargs.setdefault("task", "text-generation")
        # in __dict__ at once: an envoy looks up an attribute that it lacks on its module
        self.__dict__["family"] = families.module_of(family or _configuration(model, kwargs))
        head = self.family.FAMILY.head
        if loaded and not hasattr(model, head):
            raise UnsupportedFamily(
                f"{type(model).__name__} has no {head}: pass the model with its language-model head"
            )
        if device is not None:
            kwargs["device"] = checks.device(device)
        if dtype is not None:
            kwargs["dtype"] = _dtype(dtype)
        kwargs["envoys"] = _envoys(self.family.FAMILY)
        kwargs["interleaver"] = Interleaver(fragments=TPFragments())
        self._forwards = Forwards(kwargs["interleaver"])
        with _for_text(), _plain_errors(model):
            super().__init__(str(model) if not loaded else model, dispatch=True, **kwargs)
        self._instrument(backend)

    def _instrument(self, backend: str) -> None:
        """Mark the mixers, give every block its standard names, and listen to the kernel calls."""
        family = self.family.FAMILY
        self._instrumented = instrument(self._module, family.mixer, backend=None if backend == "auto" else backend)
        this = weakref.ref(self)  # the module outlives its wrapper, and must not keep it

        def deliver(call: Any) -> None:
            if (model := this()) is not None:
                model._deliver(call)

        def count() -> None:
            if (model := this()) is not None:
                model._count_forward()

        self._instrumented.observers.append(deliver)
        self._module.register_forward_pre_hook(Hook(count))
        path = next(n for n, m in self._module.named_modules() if m is self._instrumented.text_model)
        self._text = self.get(path) if path else self
        self._blocks = self._text.get("layers")
        self._calls: dict[tuple[int, bool], CallEnvoy] = {}
        for index, layer in enumerate(self._blocks):
            children = list(layer._child_map.values())
            for part, kind in PARTS.items():
                child = next((c for c in children if isinstance(c, kind)), None)
                object.__setattr__(layer, part, child)
                if child is not None:
                    object.__setattr__(child, "standard_name", f"layers[{index}].{part}")
                if isinstance(child, CallEnvoy):
                    self._calls[index, part == "linear_attn"] = child
                norm = layer._child_map.get(family.post_norms.get(part, ""))
                if child is not None and norm is not None:
                    object.__setattr__(child, "post_norm", norm)

    # -- running -----------------------------------------------------------------------------

    def trace(self, *inputs: Any, **kwargs: Any) -> Any:
        """nnsight's `trace`, with a `tracer.iter` that also walks tokens."""
        kwargs.setdefault("tracer_cls", Tracer)
        return super().trace(*inputs, **kwargs)

    def interleave(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """nnsight's driver of a run."""
        self._forwards.reset()
        served: list[Any] = []
        outer, self._instrumented.served = self._instrumented.served, served
        try:
            return super().interleave(fn, *args, **kwargs)
        finally:
            self._instrumented.served = outer
            for name in dict.fromkeys(name for call in served for name in call.edited()):
                warnings.warn(
                    f"{name} was edited in place after the model had passed it: the edit has no effect on the model. "
                    "Edit it before the block waits for a later module, or clone() it to work on it.",
                    stacklevel=2,
                )

    def _count_forward(self) -> None:
        if self.interleaver.interleaving:
            self._forwards.begin()

    def _deliver(self, call: Any) -> None:
        """Serve a mixer's kernel call to the blocks of the trace that wait for it."""
        if self.interleaver.interleaving and self.interleaver.busy:
            envoy = self._calls.get((call.layer, call.recurrent))
            if envoy is not None:
                self.interleaver.handle(location(envoy, CALL), call)

    # -- names -------------------------------------------------------------------------------

    @property
    def layers(self) -> Any:
        """The blocks: `layers[i].linear_attn` or `.self_attn` (the other is None), `.mlp`, `.layer_output`."""
        return self._blocks

    @property
    def config(self) -> Any:
        """The text model's configuration."""
        return self._instrumented.text_model.config

    @property
    def logits(self) -> Tensor:
        """`[batch, seq, vocabulary]`: the language-model head's output."""
        check_in_time(self._head, "output", "logits")
        return self._head.output

    @logits.setter
    def logits(self, value: Tensor) -> None:
        like = self.logits
        self._head.output = fitting("logits", value, like.shape, like.dtype, like.device)

    @property
    def next_token_probs(self) -> Tensor:
        """`[batch, vocabulary]`: probabilities of the token after the last."""
        return self.logits[:, -1].softmax(-1)

    @property
    def _head(self) -> Any:
        return self.get(self.family.FAMILY.head)

    # -- what there is -----------------------------------------------------------------------

    def support(self, layer: int | None = None) -> dict[str, Any]:
        """Which values there are: `{"linear_attn.states": None}` where available, else the reason.

        Args:
            layer: a block's index, negative from the end. Without it each value maps to None, or to `{layer: reason}`.
        """
        if layer is None:
            per_layer = {i: self.support(i) for i in range(len(self.layers))}
            merged: dict[str, Any] = {}
            for name in per_layer[0]:
                reasons = {i: support[name] for i, support in per_layer.items() if support[name] is not None}
                merged[name] = reasons or None
            return merged
        block = self.layers[self._block(layer)]
        values: dict[str, Any] = dict.fromkeys(Layer.VALUES)
        for part, cls in PARTS.items():
            values |= _part_support(part, cls, getattr(block, part))
        return values


def _envoys(family: families.Family) -> dict[Any, type]:
    """Which envoy a module gets. A mixer is told by its class: Kimi-Linear keeps both kinds under one name."""
    kinds = {family.mixer.mixer: LinearAttention, family.mixer.attention: SelfAttention}
    modeling = families.modeling(family)
    classes = {getattr(modeling, name): envoy for name, envoy in kinds.items() if name and hasattr(modeling, name)}
    return {**classes, family.mlp: Mlp, "layers.*": Layer}


@contextmanager
def _for_text() -> Iterator[None]:
    """The pipeline need not say that a multimodal model is not one of its own: text goes in all the same."""

    def wanted(record: logging.LogRecord) -> bool:
        return "is not supported for text-generation" not in record.getMessage()

    logger = logging.getLogger("transformers.pipelines.base")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


@contextmanager
def _plain_errors(model: Any) -> Iterator[None]:
    """Why a checkpoint cannot be loaded: the pipeline prints the traceback of every class that it tries."""
    try:
        yield
    except (OSError, ValueError) as error:
        said = re.findall(r"^(?:\w+Error|\w+Exception): (.+)$", str(error), re.MULTILINE)
        reason = said[-1] if said else str(error).strip().splitlines()[0]
        name = type(model).__name__ if isinstance(model, nn.Module) else str(model)
        raise Error(f"model: cannot load {name!r}: {reason}") from error


def _part_support(part: str, cls: Any, envoy: Any) -> dict[str, str | None]:
    if envoy is None:
        return {f"{part}.{name}": f"no {part} module on this block" for name in cls.VALUES}
    reason = envoy._unavailable() if isinstance(envoy, CallEnvoy) else None
    return {f"{part}.{name}": None if name == cls.VALUES[0] else reason for name in cls.VALUES}


def route_kernels(target: Any, backend: str) -> None:
    """Choose the backend that runs the recurrent kernels, before or after tracing.

    Args:
        target: a `StandardizedTransformer`, or a family (module, name) for all its models in this process that
            have no backend of their own.
        backend: "auto", "cpp", "triton", "torch", "reference", or "default" for what transformers runs itself.
    """
    if isinstance(target, StandardizedTransformer):
        target._instrumented.route(checked(backend))
    else:
        route_family(families.module_of(target).FAMILY.mixer, backend)


def _dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if found != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ArgumentError(f"dtype: got {dtype!r}, needs a floating-point dtype like 'bfloat16' or torch.float32")
    return found


def _configuration(model: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(model, nn.Module):
        if not hasattr(model, "config"):
            raise UnsupportedFamily(f"{type(model).__name__} has no config: pass a transformers model")
        return model.config
    if not isinstance(model, (str, Path)):
        raise ArgumentError(f"model: got {type(model).__name__}, needs an id, a folder, or a loaded transformers model")
    from transformers import AutoConfig

    options = {k: kwargs[k] for k in ("revision", "trust_remote_code", "token") if k in kwargs}
    try:
        return kwargs.get("config") or AutoConfig.from_pretrained(model, **options)
    except (OSError, ValueError) as error:
        raise Error(f"model: cannot load {str(model)!r}: {str(error).strip().splitlines()[0]}") from None
