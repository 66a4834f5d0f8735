"""A tiny model, corpora, and sweeps over them."""

from __future__ import annotations

import json

import pytest
import transformers

import statetap
import tiny


@pytest.fixture(autouse=True)
def on_one_thread(one_thread):
    """A process that is forked may not use its parent's threads."""


@pytest.fixture(scope="session")
def checkpoint(checkpoints):
    return checkpoints("qwen3_5_text", num_hidden_layers=3, layer_types=["linear_attention"] * 2 + ["full_attention"])


@pytest.fixture(scope="session")
def model(checkpoint):
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="session")
def tokenizer():
    return tiny.tokenizer(pad=False)


@pytest.fixture
def corpus(tmp_path):
    """`corpus(texts)`: a file of JSON lines."""

    def write(lines, name="corpus.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in lines), "utf-8")
        return path

    return write


@pytest.fixture
def sweep(model, tokenizer, tmp_path):
    """`sweep(data, output="run", **options)` with small batches over the tiny model."""

    def run(data, output="run", **options):
        options = {"batch_tokens": 512, "progress": False, **options}
        return statetap.capture(model, data, tmp_path / output, tokenizer=tokenizer, **options)

    return run


@pytest.fixture
def small_units(monkeypatch):
    """Units of at most four documents, so that a short corpus has many shards."""
    monkeypatch.setattr("statetap.sweeps.units.UNIT_DOCUMENTS", 4)
