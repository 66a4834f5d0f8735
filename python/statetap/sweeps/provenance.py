"""What the manifest says of a run besides its choices."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .data import Corpus
from .model import Loaded
from .spec import CHUNK, FIELDS, Spec
from .store import FORMAT


def manifest(spec: Spec, corpus: Corpus, loaded: Loaded, sizes: dict[str, int]) -> dict[str, Any]:
    """The manifest of a run that begins."""
    data = {"fingerprint": corpus.fingerprint, "format": corpus.kind}
    choices = {k: v for k, v in spec.identity().items() if k != "data_format"}
    return {
        "program": "statetap",
        "format": FORMAT,
        "identity": {**choices, "data": data, **loaded.identity},
        "policies": spec.policies(),
        "model": {**loaded.about, "blocks": loaded.config.num_hidden_layers, "context": loaded.context},
        "data": corpus.name,
        "layouts": {field: layout(field, spec, sizes) for field in spec.fields},
        "chunk": CHUNK,
        "versions": versions(),
        "device": device_name(loaded.device),
        "started": now(),
        "finished": None,
    }


def layout(field: str, spec: Spec, sizes: dict[str, int]) -> dict[str, Any]:
    """Dtype of a field, what a row is, and the row's axes."""
    return {
        "dtype": spec.dtype_of(field),
        "row": FIELDS[field].rows,
        "axes": spec.axes_of(field, sizes),
        "shape": spec.shape_of(field, sizes),
    }


def versions() -> dict[str, str]:
    """Of the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for package in ("statetap", "torch", "transformers", "tokenizers", "safetensors", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} {device.type}"


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
