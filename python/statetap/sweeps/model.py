"""The model and the tokenizer of a sweep, and what identifies them when it is resumed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import families
from ..errors import CaptureError
from ..mixers import Instrumented, MixerCall, instrument, is_instrumented
from .spec import digest


@dataclass
class Loaded:
    """A model ready for a sweep.

    Attributes:
        identity: what must not change when a run is resumed.
        about: what else the manifest says of it.
        ours: whether the instrumentation is this sweep's, to be taken away at its end.
    """

    model: nn.Module
    tokenizer: Any
    instrumented: Instrumented
    identity: dict[str, Any]
    about: dict[str, Any]
    ours: bool

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def config(self) -> Any:
        return self.instrumented.text_model.config

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"])

    @property
    def context(self) -> int | None:
        """The longest text, in tokens."""
        return getattr(self.config, "max_position_embeddings", None)

    def shapes(self) -> dict[str, int]:
        """Sizes of a layer's values, read off a forward of one token."""
        found: dict[str, int] = {}

        def look(call: Any) -> None:
            if isinstance(call, MixerCall) and not found:
                decays, values, keys = call.decays, call.values, call.queries
                found.update(
                    heads=values.shape[2],
                    value_dim=values.shape[3],
                    key_dim=keys.shape[3],
                    key_heads=call.trajectory.keys.shape[2],
                    channels=decays.shape[3] if decays.ndim == 4 else 1,
                )

        with self.instrumented.watching(look), torch.no_grad():
            self.instrumented.text_model(
                input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False
            )
        return found


def load(
    model: str | Path | nn.Module,
    tokenizer: Any = None,
    *,
    device: str | None = None,
    model_dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    backend: str = "auto",
) -> Loaded:
    """Load, instrument and identify a model.

    Raises:
        CaptureError: it cannot be loaded. UnsupportedFamily: it is of no supported family.
    """
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise CaptureError("tokenizer: a model that is loaded already needs its tokenizer beside it")
        module, name = model, getattr(model, "name_or_path", "") or type(model).__name__
    else:
        name = str(model)
        module, tokenizer = _from_pretrained(name, tokenizer, model_dtype, revision, trust_remote_code)
        module.to(_device(device))
    family = families.family_of(module.config)
    ours = not is_instrumented(module)
    instrumented = instrument(module, family.mixer, backend=backend)
    config = json.loads(module.config.to_json_string(use_diff=False))
    identity = {
        "model": {
            "config": digest({k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version")}),
            "weights": _weights_fingerprint(module),
            "dtype": str(next(module.parameters()).dtype).removeprefix("torch."),
        },
        "tokenizer": _tokenizer_fingerprint(tokenizer),
    }
    about = {
        "id": name,
        "family": family.model_type,
        "class": type(module).__name__,
        "commit": _commit(module),
        "revision": revision,
    }
    return Loaded(module.eval(), tokenizer, instrumented, identity, about, ours)


def _from_pretrained(
    name: str, tokenizer: Any, dtype: str | None, revision: str | None, trust: bool
) -> tuple[nn.Module, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options = {"revision": revision, "trust_remote_code": trust}
    try:
        families.family_of(AutoConfig.from_pretrained(name, **options))
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(name, **options)
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto", **options), tokenizer
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CaptureError(f"model: {name} cannot be loaded: {reason}") from None


def _device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise CaptureError(f"device: {device!r} cannot be used: {str(error).splitlines()[0]}") from None
    return chosen


def _commit(module: nn.Module) -> str | None:
    return getattr(module.config, "_commit_hash", None)


def _weights_fingerprint(module: nn.Module) -> str:
    """Of every parameter's name, shape, dtype, and of up to a thousand of its values, spread over it."""
    found = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(module.state_dict().items()):
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1000)][:1000].to("cpu", torch.float64)
        found.update(f"{name}{list(weight.shape)}{weight.dtype}".encode())
        found.update(sample.numpy().tobytes())
    return found.hexdigest()


def _tokenizer_fingerprint(tokenizer: Any) -> str:
    core = getattr(tokenizer, "backend_tokenizer", None)
    return digest(core.to_str()) if core is not None else digest(sorted(tokenizer.get_vocab().items()))
