"""The kernels compiled for chips that are not here, and held to `budget.json`.

python tests/kernels/test_binaries.py            prints the table
python tests/kernels/test_binaries.py --write    and commits it as the budget of this version of triton
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import triton

import binaries
from binaries import CALLS, SHARED, Binary, Launched
from statetap.triton_kernels import configs

BUDGET = Path(__file__).with_name("budget.json")
VERSION = triton.__version__
NEWER = tuple(map(int, VERSION.split(".")[:2])) >= (3, 7)
ARCHS = configs.ARCHS if NEWER else ("sm_80", "sm_90")  # what 3.6.0 makes for sm_100 races, and is not used there
MATRIX = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
WITHOUT_PRODUCTS = ("prepare", "decay", "replay", "step")
SMALL_PRODUCTS = ("product",)  # sixteen rows: too few for a warp group
FIELDS = ("registers", "spills", "shared", "loop", "barriers", "matrix")

MAY_SPILL = {
    **{
        ("sm_80", label, "invert"): "three pieces of three matrices, once a program"
        for label in ("bf16", "bf16 exact", "fp32", "Kimi")
    },
    ("sm_90", "Kimi exact", "scan"): "three pieces of the decayed copies; two stages would not fit in shared memory",
    **{
        (arch, label, "scan"): "a state of 256 x 16 and keys in pieces"
        for arch in ARCHS
        for label in ("wide fp32", "wide Kimi", "wide norms")
    },
}
"""(chip, call, kernel) that may have spills, and why; all others have none."""


def complaints(arch: str, label: str, name: str, binary: Binary, committed: dict) -> list[str]:
    """What is wrong with a binary, held to its committed figures."""
    kernel = name.split(" ")[0]
    found = []
    allowed = committed["spills"] if (arch, label, kernel) in MAY_SPILL else 0
    if binary.spills > allowed:
        found.append(f"{binary.spills} spill stores, may have {allowed}")
    if binary.shared > SHARED[arch] * 1024:
        found.append(f"{binary.shared} bytes of shared memory, a program has {SHARED[arch]} KiB")
    if binary.registers > committed["registers"] + 8:
        found.append(f"{binary.registers} registers, had {committed['registers']}")
    for field in ("loop", "barriers"):
        if getattr(binary, field) > 1.1 * committed[field] + 1:
            found.append(f"{field}: {getattr(binary, field)}, had {committed[field]}")
    if kernel not in WITHOUT_PRODUCTS:
        wanted = "mma" if arch.startswith("sm") and kernel in SMALL_PRODUCTS else MATRIX[arch]
        if wanted not in binary.matrix:
            found.append(f"no {wanted} instruction (found {binary.matrix or 'none'})")
    return found


def _one(job: tuple[str, str]) -> dict[str, Binary]:
    arch, label = job
    return {f"{arch}/{label}/{name}": binaries.compile(launch, arch) for name, launch in binaries.compiled(arch, label)}


def compile_all() -> dict[str, Binary]:
    jobs = [(arch, label) for label in CALLS for arch in ARCHS]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        return {key: binary for found in pool.map(_one, jobs) for key, binary in found.items()}


def table(found: dict[str, Binary]) -> str:
    lines = [
        f"triton {VERSION}",
        f"{'chip':8s}{'call':13s}{'kernel':11s}{'regs':>5s}{'spills':>8s}{'shared':>9s}{'loop':>7s}{'barriers':>10s}  matrix",
    ]
    for key, b in sorted(found.items()):
        arch, label, name = key.split("/")
        lines.append(
            f"{arch:8s}{label:13s}{name:11s}{b.registers:5d}{b.spills:8d}{b.shared / 1024:8.0f}K{b.loop:7d}{b.barriers:10d}  {b.matrix}"
        )
    return "\n".join(lines)


@pytest.fixture(scope="module")
def found():
    return compile_all()


@pytest.fixture(scope="module")
def budget():
    return json.loads(BUDGET.read_text())[VERSION]


def test_every_binary_keeps_its_budget(found, budget, capsys):
    with capsys.disabled():
        print("\n" + table(found))
    wrong = {}
    for key, binary in found.items():
        assert key in budget, f"{key} has no budget: run `python {__file__} --write` and look at what it says"
        if why := complaints(*key.split("/"), binary, budget[key]):
            wrong[key] = why
    assert not wrong, "\n".join(f"{key}: {'; '.join(why)}" for key, why in wrong.items())
    assert set(budget) == set(found), "the budget has binaries that are not made any more"


def test_every_row_of_the_table_is_compiled(monkeypatch):
    used = set()
    stock = configs.lookup

    def spy(kernel, arch, *rest):
        row = stock(kernel, arch, *rest)
        used.update(i for i, r in enumerate(configs.TABLE) if r.kernel == kernel and r.config is row)
        return row

    monkeypatch.setattr("statetap.triton_kernels.launch.lookup", spy)
    for arch in configs.ARCHS:
        for arguments, _ in CALLS.values():
            binaries.launches(binaries.call(**arguments), arch)
    assert used == set(range(len(configs.TABLE))), [configs.TABLE[i] for i in set(range(len(configs.TABLE))) - used]


# -- taps that are off -----------------------------------------------------------------------------


def stores(launch: Launched) -> int:
    """16-byte stores of a thread that the scan needs: its tile of the outputs, of the final state, and of its taps."""
    threads, BV, a = 32 * launch.config.warps, launch.config.BV, launch.args
    outputs = 64 * BV * 2 * a["OUTPUT"]
    states, updates = 128 * BV * 4, 64 * BV * 4 * a["UPDATES"]
    return (outputs + states * (1 + a["STATES"]) + updates) // threads // 16


@pytest.mark.parametrize("arch", ["sm_90"])
def test_taps_that_are_off_leave_nothing(arch):
    (plain,) = (x for x in binaries.launches(binaries.call(), arch) if x.name == "scan")
    (tapped,) = (x for x in binaries.launches(binaries.call(trajectory=True), arch) if x.name == "scan")
    assert binaries.compile(plain, arch).stores == stores(plain) == 10
    assert binaries.compile(tapped, arch).stores == stores(tapped) == 22
    for tap in ("states", "updates", "norms", "doubtful", "squares", "write_of", "write_heads", "write_values"):
        assert plain.args[tap] is None, f"{tap} is handed to a kernel that does not need it"


def test_taps_that_are_off_launch_nothing():
    names = lambda **taps: [x.name for x in binaries.launches(binaries.call(**taps), "sm_90")]
    assert names() == names(trajectory=True) == ["prepare", "prepare", "solve", "scan"]
    assert names(states="all") == [*names(), "replay"] == names(norms=True)
    assert names(probes=binaries.PROBES) == [*names(), "probe"]


# -- that the gates can fail -----------------------------------------------------------------------


def _scan(**arguments):
    (launch,) = (x for x in binaries.launches(binaries.call(**arguments), "sm_90") if x.name == "scan")
    return launch


def test_a_spill_is_found(budget):
    launch = _scan()
    wider = Launched(launch.kernel, replace(launch.config, BV=128), 1, {**launch.args, "BV": 128})
    why = complaints("sm_90", "bf16", "scan", binaries.compile(wider, "sm_90"), budget["sm_90/bf16/scan"])
    assert any("spill" in line for line in why)


def test_a_slower_loop_is_found(budget):
    why = complaints("sm_90", "bf16 fast", "scan", binaries.compile(_scan(), "sm_90"), budget["sm_90/bf16 fast/scan"])
    assert any("loop" in line for line in why) and any("registers" in line for line in why)


def test_a_store_that_nobody_asked_for_is_found():
    launch = _scan(trajectory=True)
    assert binaries.compile(launch, "sm_90").stores != stores(_scan())


def test_products_without_tensor_cores_are_found(budget):
    (replay,) = (x for x in binaries.launches(binaries.call(states="all"), "sm_90") if x.name == "replay")
    why = complaints("sm_90", "bf16", "scan", binaries.compile(replay, "sm_90"), budget["sm_90/bf16/scan"])
    assert any("no wgmma" in line for line in why)


if __name__ == "__main__":
    made = compile_all()
    print(table(made))
    if "--write" in sys.argv:
        every = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
        every[VERSION] = {key: {f: getattr(b, f) for f in FIELDS} for key, b in sorted(made.items())}
        BUDGET.write_text(json.dumps(every, indent=0, sort_keys=True) + "\n")
