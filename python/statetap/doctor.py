"""What is here, which backend serves and why, and what is missing."""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("statetap", "torch", "triton", "transformers", "nnsight", "numpy", "safetensors")


def report() -> dict[str, Any]:
    """Versions, devices, the C++ library, each backend's reason, each family's kernels; `problems` if any is broken."""
    problems: list[str] = []
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
    }
    sections: dict[str, Callable[[list[str]], Any]] = {
        "devices": _devices,
        "C++ library": _library,
        "backends": _backends,
        "triton kernels": _triton,
        "families": _families,
        "tracing": _tracing,
    }
    for name, section in sections.items():
        found[name] = _guarded(name, section, problems)
    return {**found, "problems": problems}


def _guarded(name: str, section: Callable[[list[str]], Any], problems: list[str]) -> Any:
    """A section's facts; one that fails is itself a problem, so that the others are still told."""
    try:
        return section(problems)
    except Exception as error:
        if os.environ.get("STATETAP_DEBUG"):
            raise
        line = f"{type(error).__name__}: {_line(error)}"
        problems.append(f"{name}: {line}")
        return {"broken": line}


def main(as_json: bool = False) -> int:
    """Print the report; 1 if something that is installed is broken, else 0."""
    found = report()
    if as_json:
        print(json.dumps(found))
        return int(bool(found["problems"]))
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, x in value.items():
                print(f"  {key}: {x}")
        elif isinstance(value, list):
            print(f"{name}: {'; '.join(value) or 'none'}")
        else:
            print(f"{name}: {value}")
    return int(bool(found["problems"]))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices(problems: list[str]) -> list[str]:
    import torch

    cpu = f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
    try:
        count = torch.cuda.device_count()
        return [cpu, *(f"cuda:{n} ({torch.cuda.get_device_name(n)}, {_capability(n)})" for n in range(count))]
    except Exception as error:  # a driver that does not answer is a fact to report
        return [cpu, f"cuda: {_line(error)}"]


def _capability(device: int) -> str:
    import torch

    return "compute capability {}.{}".format(*torch.cuda.get_device_capability(device))


def _library(problems: list[str]) -> dict[str, str]:
    from .ops import native

    reason = native.why_not()
    if reason is not None:
        if native.PATH.exists():  # never built is a choice; built and of no use is a fault
            problems.append(f"C++ library: {reason}")
        return {"missing": reason}
    return {"instruction set": native.instruction_set() or "", "compiler": native.compiler() or ""}


def _backends(problems: list[str]) -> dict[str, str]:
    """For each device kind there is: which backend `auto` takes, and each one's reason."""
    import torch

    from .ops.backends import AUTO, BACKENDS

    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    lines = {}
    for kind in kinds:
        device = torch.device(kind)
        reasons = {name: backend.available(device) for name, backend in BACKENDS.items()}
        taken = next(name for name in AUTO if reasons[name] is None)
        lines[f"auto on {kind}"] = taken
        for name, reason in reasons.items():
            lines[f"{name} on {kind}"] = reason or "can be taken"
    return lines


def _triton(problems: list[str]) -> dict[str, str]:
    """For each GPU: the row of the table that its scans run with, and whether two runs of it are equal."""
    import torch

    from .ops import triton_backend

    lines = {}
    for n in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", n)
        reason = triton_backend.available(device)
        if reason is not None:
            lines[f"cuda:{n}"] = f"not taken: {reason}"
            continue
        arch = triton_backend.architecture(device)
        row = triton_backend.kernels().configs.lookup("scan", arch, 128, 2)
        lines[f"cuda:{n}"] = f"{arch}, scan at key_dim 128: {row}"
        if not _deterministic(device):
            problems.append(f"triton kernels: two runs on cuda:{n} differ")
    return lines or {"none": triton_backend.available(torch.device("cpu")) or "the interpreter runs them on the CPU"}


def _deterministic(device: Any) -> bool:
    """Whether two runs of 256 programs and more are equal, bit for bit: a race between their warps would show."""
    import torch

    from .ops import gated_delta_rule

    r = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(4, 512, 16, 128, generator=r, device=device).bfloat16() for _ in range(3))
    first, second = (gated_delta_rule(q, k, v, use_qk_l2norm_in_kernel=True, backend="triton") for _ in range(2))
    return bool(first.outputs.equal(second.outputs) and first.final_state.equal(second.final_state))


def _families(problems: list[str]) -> dict[str, str]:
    if _version("transformers") == "not installed":
        return {"none": "transformers is not installed: pip install 'statetap[all]'"}
    families = importlib.import_module("statetap.families")
    lines = {}
    for name in families.names():
        absent = families.absent(families.module_of(name).FAMILY)
        if absent is not None:  # a newer model, or an older transformers: nothing is broken
            lines[name] = absent
            continue
        kernels = families.check(name)
        missing: dict[str | None, list[str]] = {}
        for kernel, found, reason in kernels:
            if not found:
                missing.setdefault(reason, []).append(kernel)
        broken = [f"{', '.join(names)}: {reason}" for reason, names in missing.items()]
        lines[name] = "; ".join(broken) or "kernels found: " + ", ".join(kernel for kernel, _, _ in kernels)
        problems += [f"family {name}: {line}" for line in broken]
    return lines


def _tracing(problems: list[str]) -> str:
    for package in ("nnsight", "transformers"):
        if _version(package) == "not installed":
            return f"{package} is not installed: pip install 'statetap[trace]'"
    importlib.import_module("statetap.tracing")
    return "can be used"


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
