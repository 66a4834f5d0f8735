"""The model and the tokenizer of a sweep, and what identifies them when it is gone on with."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import torch
from torch import Tensor, nn

from .. import families
from ..errors import ArgumentError, CaptureError, Error, UnsupportedCall
from ..mixers import Instrumented, MixerCall, instrument, is_instrumented
from ..mixers.routing import checked
from ..ops import checks
from ..ops.backends import AUTO, BACKENDS
from . import worker
from .spec import digest

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass
class Loaded:
    """A model ready for a sweep.

    Attributes:
        identity: what must not change when a run is gone on with.
        about: what else the manifest says of it.
        device: where its tokens go.
    """

    tokenizer: Any
    instrumented: Instrumented
    identity: dict[str, Any]
    about: dict[str, Any]
    device: torch.device

    @property
    def config(self) -> Any:
        return self.instrumented.text_model.config

    @property
    def context(self) -> int | None:
        """The longest text, in tokens."""
        return getattr(self.config, "max_position_embeddings", None)

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"])

    def sizes(self) -> dict[str, int]:
        """Sizes of a call's axes, read off a forward of one token; `decay_dims` only where key channels have decays."""
        found: dict[str, int] = {}

        def look(call: Any) -> None:
            if isinstance(call, MixerCall) and not found:
                heads, value_dim = call.values.shape[2:]
                key_heads, key_dim = call.trajectory.keys.shape[2:]
                found.update(heads=heads, all_heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim)
                if call.decays.ndim == 4:
                    found["decay_dims"] = key_dim

        with self.instrumented.watching(look), torch.no_grad():
            ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            self.instrumented.text_model(input_ids=ids, use_cache=False)
        return found


@contextmanager
def loaded(
    model: str | Path | nn.Module,
    tokenizer: Any = None,
    *,
    device: str | None = None,
    model_dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    backend: str = "auto",
) -> Iterator[Loaded]:
    """A model loaded, instrumented and identified; one that was given loaded is put back as it was at the end.

    Raises:
        CaptureError: it cannot be loaded. UnsupportedFamily: it is of no supported family.
    """
    target = _device(device)
    if isinstance(model, nn.Module):
        target = next(model.parameters(), torch.empty(0)).device
    _check_backend(backend, target)  # before the weights are read, which takes minutes
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise ArgumentError("tokenizer: a model that is loaded already needs its tokenizer beside it")
        module, name = model, getattr(model, "name_or_path", "") or type(model).__name__
    else:
        name = str(model)
        module, tokenizer = _from_pretrained(name, tokenizer, model_dtype, revision, trust_remote_code)
        _move(module, name, target)
    family = families.family_of(module.config)
    ours, training = not is_instrumented(module), module.training
    before = None if ours else instrument(module, family.mixer).backend
    instrumented = instrument(module.eval(), family.mixer, backend=backend)
    where = next(module.parameters()).device
    about = {"id": name, "family": family.model_type, "class": type(module).__name__}
    try:
        yield Loaded(tokenizer, instrumented, _identity(module, tokenizer, revision, backend, where), about, where)
    finally:
        module.train(training)
        if ours:
            instrumented.remove()
        else:
            instrumented.route(before)


def _identity(
    module: nn.Module, tokenizer: Any, revision: str | None, backend: str, device: torch.device
) -> dict[str, Any]:
    config: Any = module.config
    fields = json.loads(config.to_json_string(use_diff=False))
    return {
        "model": {
            "revision": revision,
            "commit": getattr(config, "_commit_hash", None),
            "config": digest({k: v for k, v in fields.items() if k not in ("_name_or_path", "transformers_version")}),
            "weights": weights_checksum(module),
            "dtype": str(next(module.parameters()).dtype).removeprefix("torch."),
        },
        "tokenizer": tokenizer_checksum(tokenizer),
        "kernels": next(n for n in AUTO if BACKENDS[n].available(device) is None) if backend == "auto" else backend,
        "device": device.type,
    }


def _from_pretrained(
    name: str, tokenizer: Any, dtype: str | None, revision: str | None, trust: bool
) -> tuple[nn.Module, Any]:
    from transformers import AutoConfig, AutoTokenizer

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust}
    if dtype not in (None, *_DTYPES):
        raise ArgumentError(f"model_dtype: got {dtype!r}, needs one of {', '.join(_DTYPES)}")
    try:
        config = AutoConfig.from_pretrained(name, **options)
        families.family_of(config)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(name, **options)
        return families.auto_class(config).from_pretrained(name, dtype=dtype or "auto", **options), tokenizer
    except Error:
        raise
    except Exception as error:  # of many kinds: the hub's, the files', the model's own
        raise CaptureError(f"model: {name} cannot be loaded: {_line(error)}") from None


def _device(device: str | None) -> torch.device:
    if device is None:
        count = torch.cuda.device_count()  # one GPU for each of this machine's workers
        return torch.device("cuda", (worker.local_rank(os.environ) or 0) % count) if count else torch.device("cpu")
    return checks.device(device)


def _check_backend(backend: str, device: torch.device) -> None:
    """Raise if there is no such backend, or it cannot run on this device."""
    found = BACKENDS.get(checked(backend))
    why_not = None if found is None else found.available(device)
    if why_not:
        raise UnsupportedCall(f"backend: {backend!r} cannot run on {device}: {why_not}")


def _move(module: nn.Module, name: str, device: torch.device) -> None:
    try:
        module.to(device)
    except torch.OutOfMemoryError:
        raise CaptureError(f"model: {name} does not fit on {device}") from None


def weights_checksum(module: nn.Module) -> str:
    """Of every weight: its name, dtype, shape, and two sums over all of its bits, in whole numbers.

    Computed where the weights are, so it costs a pass over them and is the same on every device.
    """
    found = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(module.state_dict().items()):
        found.update(f"{name}:{weight.dtype}:{list(weight.shape)}:{_sums(weight.detach())};".encode())
    return found.hexdigest()


def _sums(weight: Tensor) -> list[int]:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = weight.contiguous().reshape(-1).view(kinds[weight.element_size()])
    sums = [0, 0]
    for piece in bits.split(1 << 22):
        places = torch.arange(1, len(piece) + 1, device=piece.device, dtype=torch.int64)
        sums = [sums[0] + int(piece.sum(dtype=torch.int64)), 3 * sums[1] + int((piece * places).sum())]
        sums = [n % (1 << 64) for n in sums]
    return sums


def tokenizer_checksum(tokenizer: Any) -> str:
    """Of what a tokenizer does, whatever padding and truncation it was last used with."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return digest([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map])
    fields = json.loads(core.to_str())
    return digest({k: v for k, v in fields.items() if k not in ("padding", "truncation")})


def _line(error: BaseException) -> str:
    """An error of another library, in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
