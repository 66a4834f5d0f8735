"""What the compiler makes of the kernels, for chips that are not here: registers, spills, shared memory, instructions.

A call is prepared as it would be on the chip, and its launches are recorded instead of run; each is compiled with the
types and constants that it would have there.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from statetap.ops import triton_backend
from statetap.ops.call import DeltaCall, Wanted
from statetap.triton_kernels.launch import Launch

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32",
    torch.uint8: "*u8",
}  # fmt: skip
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}
"""KiB of shared memory that a program may have."""


@dataclass(frozen=True)
class Launched:
    """One launch: the kernel, its row of the table, and its arguments by name."""

    kernel: Any
    config: Any
    programs: int
    args: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__.removesuffix("_kernel")


def launches(call: DeltaCall, arch: str) -> list[Launched]:
    """What `call` would launch on a chip, in order."""
    found: list[Launched] = []

    def record(self: Any, kernel: Any, programs: int, row: Any, *args: Any) -> None:
        if programs:
            found.append(Launched(kernel, row, programs, dict(zip(kernel.arg_names, args))))

    run, stock = Launch.__call__, triton_backend.architecture
    try:
        Launch.__call__ = record
        triton_backend.architecture = lambda device: arch
        triton_backend.Run(call).forward()
    finally:
        Launch.__call__, triton_backend.architecture = run, stock
    return found


# -- calls that reach every row of the table -------------------------------------------------------


def call(
    dtype: torch.dtype = torch.bfloat16,
    key_dim: int = 128,
    value_dim: int = 128,
    tokens: int = 128,
    channels: bool = False,
    precision: str = "high",
    **wanted: Any,
) -> DeltaCall:
    """Sixteen key heads and four times as many value heads, normalised, with an initial state."""
    empty = lambda *shape: torch.empty(1, tokens, *shape, dtype=dtype)
    gate = torch.zeros(1, tokens, 64, *([key_dim] if channels else []))
    state = torch.zeros(1, 64, key_dim, value_dim)
    q, k, v, beta = empty(16, key_dim), empty(16, key_dim), empty(64, value_dim), empty(64)
    return DeltaCall(q, k, v, gate, beta, 0.1, state, True, wanted=Wanted(**wanted), precision=precision)


WIDE = dict(key_dim=256, value_dim=256)
PROBES = torch.zeros(64, 2, 128)
CALLS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "bf16": (dict(), ("prepare", "solve", "invert", "scan")),
    "bf16 fast": (dict(precision="fast"), ("scan",)),
    "bf16 exact": (dict(precision="exact"), ("solve", "invert", "scan", "output")),
    "fp16": (dict(dtype=torch.float16), ("solve", "scan")),
    "fp32": (dict(dtype=torch.float32), ("prepare", "solve", "invert", "scan", "output")),
    "Kimi": (dict(channels=True), ("decay", "product", "invert", "scan", "output")),
    "Kimi fast": (dict(channels=True, precision="fast"), ("scan",)),
    "Kimi exact": (dict(channels=True, precision="exact"), ("product", "scan")),
    "taps": (dict(trajectory=True, states="all", norms=True, probes=PROBES), ("scan", "replay", "probe")),
    "Kimi taps": (dict(channels=True, states="all", norms=True), ("replay",)),
    "fp32 norms": (dict(dtype=torch.float32, norms=True), ("scan",)),
    "step": (dict(tokens=1), ("step",)),
    "Kimi step": (dict(tokens=1, channels=True), ("step",)),
    "wide": (WIDE, ("solve", "scan", "output")),
    "wide taps": (dict(**WIDE, states="all", probes=torch.zeros(64, 2, 256)), ("replay", "probe")),
    "wide norms": (dict(**WIDE, norms=True), ("scan",)),
    "wide fp32": (dict(**WIDE, dtype=torch.float32), ("scan",)),
    "wide Kimi": (dict(**WIDE, channels=True), ("product", "scan")),
}
"""By label: the call, and the kernels of it that are compiled (others are the same as in another call)."""


def compiled(arch: str, label: str) -> list[tuple[str, Launched]]:
    """(name, launch) of the kernels of a call that are compiled; the second launch of a kernel is numbered."""
    arguments, kernels = CALLS[label]
    found: dict[str, Launched] = {}
    for launch in launches(call(**arguments), arch):
        if launch.name in kernels:
            n = sum(name.split(" ")[0] == launch.name for name in found)
            found[launch.name if not n else f"{launch.name} {n + 1}"] = launch
    return list(found.items())


# -- what comes out --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Binary:
    """Of one compiled kernel. loop: instructions of its largest loop, barriers: those in it."""

    registers: int
    spills: int
    shared: int
    matrix: str
    stores: int
    loop: int
    barriers: int
    text: str
    pointers: int


def compile(launch: Launched, arch: str) -> Binary:
    """Compile a launch for `arch`."""
    signature, constants, attributes = {}, {}, {}
    params = {p.name: p for p in launch.kernel.params}
    for i, name in enumerate(launch.kernel.arg_names):
        value = launch.args[name]
        if params[name].is_constexpr or value is None or (isinstance(value, int) and value == 1):
            if params[name].do_not_specialize and isinstance(value, int) and not params[name].is_constexpr:
                signature[name] = "i32"
                continue
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0 and not params[name].do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = dict(num_warps=launch.config.warps, num_stages=launch.config.stages)
    compiled = triton.compile(source, target=target, options=options)
    return _amd(compiled) if arch.startswith("gfx") else _nvidia(compiled)


def _amd(compiled: Any) -> Binary:
    text = compiled.asm["amdgcn"]
    number = lambda name: int(re.search(rf"\.{name}:\s*(\d+)", text)[1])  # type: ignore[index]
    loop = _largest_loop(text.splitlines(), r"s_cbranch\w+ (\S+)", r"^(\.?\w+):")
    return Binary(
        number("vgpr_count"), number("vgpr_spill_count"), compiled.metadata.shared,
        "mfma" if "v_mfma" in text else "", len(re.findall(r"(?:global|buffer)_store", text)),
        len(loop), sum("s_barrier" in line for line in loop), text, 0,
    )  # fmt: skip


def _nvidia(compiled: Any) -> Binary:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    registers = int(re.search(r"REG:(\d+)", usage)[1])  # type: ignore[index]
    ptx = compiled.asm["ptx"]
    found = [name for name in ("wgmma.mma_async", "tcgen05.mma", "mma.sync") if name in ptx]
    loop = _largest_loop(sass.splitlines(), r"BRA\S* .*`\((\S+)\)", r"^(\.L\w+):")
    return Binary(
        registers, len(re.findall(r"\bSTL", sass)), compiled.metadata.shared, "+".join(x.split(".")[0] for x in found),
        len(re.findall(r"st\.global", ptx)), sum(bool(re.search(r"/\*[0-9a-f]{4,}\*/", line)) for line in loop),
        sum("BAR." in line for line in loop), ptx, len(re.findall(r"ld\.param\.b64", ptx)),
    )  # fmt: skip


def _tool(name: str, *args: str) -> str:
    return subprocess.run([TOOLS / name, *args], capture_output=True, text=True, check=True).stdout


def _largest_loop(lines: list[str], branch: str, label: str) -> list[str]:
    """The longest stretch between a label and a branch back to it."""
    where: dict[str, int] = {}
    best: tuple[int, int] = (0, 0)
    for n, line in enumerate(lines):
        if found := re.match(label, line.strip()):
            where[found[1]] = n
        elif (found := re.search(branch, line)) and found[1] in where:
            best = max(best, (where[found[1]], n), key=lambda span: span[1] - span[0])
    return lines[best[0] : best[1]]
