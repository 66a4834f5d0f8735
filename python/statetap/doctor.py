"""What is here, which backend serves and why, and what is missing."""

from __future__ import annotations

import importlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("statetap", "torch", "triton", "transformers", "nnsight", "numpy", "safetensors")


def report() -> dict[str, Any]:
    """Versions, devices, the C++ library, each backend's reason, each family's kernels; `problems` if any is broken."""
    problems: list[str] = []
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "C++ library": _library(),
        "backends": _backends(),
        "families": _families(problems),
    }
    return {**found, "problems": problems}


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


def _devices() -> list[str]:
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


def _library() -> dict[str, str]:
    from .ops import native

    reason = native.why_not()
    if reason is not None:
        return {"missing": reason}
    return {"instruction set": native.instruction_set() or "", "compiler": native.compiler() or ""}


def _backends() -> dict[str, str]:
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


def _families(problems: list[str]) -> dict[str, str]:
    if _version("transformers") == "not installed":
        return {"none": "transformers is not installed: pip install 'statetap[all]'"}
    families = importlib.import_module("statetap.families")
    lines = {}
    for name in families.names():
        kernels = families.check(name)
        missing = [f"{kernel}: {reason}" for kernel, ok, reason in kernels if not ok]
        lines[name] = "; ".join(missing) or "kernels found: " + ", ".join(kernel for kernel, _, _ in kernels)
        problems += [f"family {name}: {line}" for line in missing]
    return lines


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
