"""Measures the cases of the registry: `python benchmarks/run.py [NAME ...]`. See README.md."""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from registry import CASES, Case

AGREE = 1e-4  # relative to each head's largest value: what the tests allow transformers' kernels themselves
RESULTS = Path(__file__).parent / "results"
COLUMNS = [
    "date",
    "machine",
    "threads",
    "torch",
    "transformers",
    "case",
    "ratio",
    "low",
    "high",
    "target",
    "ours_ms",
    "other_ms",
    "error",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--peak", choices=["ours", "other"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = [case for case in CASES if not options.names or case.name in options.names]
    unknown = set(options.names) - {case.name for case in CASES}
    if unknown:
        print(
            f"no case {', '.join(sorted(unknown))}; there is {', '.join(case.name for case in CASES)}", file=sys.stderr
        )
        return 2
    if options.list:
        print("\n".join(f"{case.name:21} {case.what}" for case in CASES))
        return 0
    if options.peak:
        print(peak_bytes(chosen[0], options.peak))
        return 0
    print(f"{machine()}; {options.threads} threads; torch {version('torch')}, transformers {version('transformers')}\n")
    print(f"{'case':21} {'ratio':>7} {'quartiles':>15} {'target':>8}  {'ours ms':>9} {'other ms':>9}  what")
    rows = [measure(case, options.threads) for case in chosen]
    save([row for row in rows if row is not None])
    return int(any(row is None for row in rows))


def measure(case: Case, threads: int) -> dict | None:
    """One row; None, and no speed, if the two sides disagree."""
    with torch.no_grad():
        ours, other, agree = case.prepare()
        off = agree()
        if not off <= AGREE:
            print(f"{case.name:21} the results disagree by {off:.1e}: no speed is printed")
            return None
        ratios, mine, theirs = memory(case) if case.kind == "memory" else times(case, ours, other)
    low, middle, high = quartiles(ratios)
    met = middle <= case.target if case.kind == "cost" else middle >= case.target
    sign, unit = ("<=" if case.kind == "cost" else ">="), ("MB" if case.kind == "memory" else "  ")
    print(
        f"{case.name:21} {middle:7.2f} {f'{low:.2f} - {high:.2f}':>15} {sign}{case.target:5.2f} {'' if met else '!'}"
        f" {mine:9.2f} {theirs:9.2f} {unit} {case.what}",
        flush=True,
    )
    gc.collect()
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "threads": threads,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "case": case.name,
        "ratio": round(middle, 3),
        "low": round(low, 3),
        "high": round(high, 3),
        "target": f"{sign}{case.target}",
        "ours_ms": round(mine, 3),
        "other_ms": round(theirs, 3),
        "error": f"{off:.1e}",
    }


def times(case: Case, ours: Callable, other: Callable) -> tuple[list[float], float, float]:
    """Ratios of pairs that were run one after the other, and both medians in milliseconds."""
    mine, theirs = [], []
    for n in range(case.rounds + 1):
        for function, found in ((ours, mine), (other, theirs)):
            started = time.perf_counter()
            result = function()
            found.append(1e3 * (time.perf_counter() - started))
            del result
        if n == 0:  # warm-up
            mine.clear(), theirs.clear()
    pairs = [(a / b if case.kind == "cost" else b / a) for a, b in zip(mine, theirs)]
    return pairs, statistics.median(mine), statistics.median(theirs)


def memory(case: Case) -> tuple[list[float], float, float]:
    """Peak memory above what the inputs take, each side in a process of its own; megabytes."""
    found = {}
    for side in ("ours", "other"):
        command = [sys.executable, __file__, case.name, "--peak", side]
        found[side] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    return [found["other"] / found["ours"]], found["ours"] / 1e6, found["other"] / 1e6


def peak_bytes(case: Case, side: str) -> int:
    """How much the process grows at most while one side runs."""
    with torch.no_grad():
        function = case.prepare()[side == "other"]
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        function()
    return status("VmHWM") - before


def status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", text)[1])


def quartiles(x: list[float]) -> tuple[float, float, float]:
    if len(x) < 2:
        return x[0], x[0], x[0]
    return tuple(statistics.quantiles(x, n=4, method="inclusive"))


def machine() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
        name = re.search(r"model name\s*:\s*(.+)", text)[1]
    except (OSError, TypeError):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def save(rows: list[dict]) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / (re.sub(r"\W+", "-", machine()).strip("-").lower() + ".csv")
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
