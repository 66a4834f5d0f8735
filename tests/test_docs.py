"""Every code block of the README and of docs/ runs: Python blocks of a page one after the other, commands in a shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tiny

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CHECKPOINT = "Qwen/Qwen3.5-0.8B"
RUN = {"python", "bash"}
SHOWN = {"sh", "json", "text"}  # commands that make environments, and content to look at


def blocks(page):
    return BLOCK.findall(re.sub(r"^```\{.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """A folder with the checkpoint, a corpus, and a run, as the pages' commands expect them."""
    folder = tmp_path_factory.mktemp("docs")
    tiny.checkpoint(folder / "checkpoint", "qwen3_5_text")
    lines = [json.dumps({"text": f"document {n}: " + "the state of a head. " * (n + 1)}) for n in range(12)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "corpus.txt").write_text("one document\nanother document\n")
    return folder


@pytest.mark.parametrize("page", [p for p in PAGES if any(kind in RUN for kind, _ in blocks(p))], ids=lambda p: p.name)
def test_blocks_run(page, workplace):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = ["import faulthandler; faulthandler.enable()"]
    for kind, code in blocks(page):
        code = code.replace(CHECKPOINT, str(workplace / "checkpoint"))
        if kind == "python":
            script.append(code)
        elif kind == "bash":
            script.append(f"import subprocess; subprocess.run({['bash', '-euc', code]!r}, check=True)")
    file = workplace / f"{page.stem}.py"
    file.write_text("\n".join(script))
    result = subprocess.run([sys.executable, str(file)], cwd=workplace, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_blocks_are_of_a_kind_that_is_run_or_shown(page):
    assert {kind for kind, _ in blocks(page)} <= RUN | SHOWN


def test_the_readme_names_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)\b", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_table_of_values_is_whole():
    """Every value of a recurrent block stands in the README's table."""
    from statetap.tracing.envoys import LinearAttention

    text = (ROOT / "README.md").read_text()
    assert [name for name in LinearAttention.VALUES if f"`{name}" not in text] == []
