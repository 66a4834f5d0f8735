"""A run read by docs/format.md alone: json, numpy and safetensors, nothing of this package."""

import hashlib
import json

import numpy as np
import pytest
from safetensors import safe_open

from sweeping import texts


def blake(*pieces):
    found = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def digest(content):
    return blake(json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


def tensors(path):
    """Every tensor of a file as numpy, by the layout of safetensors; bfloat16 widened to float32. And the metadata."""
    blob = path.read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header, data = json.loads(blob[8 : 8 + size]), blob[8 + size :]
    about, found = header.pop("__metadata__", {}), {}
    kinds = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "U8": "u1", "BF16": "<u2"}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        array = np.frombuffer(data[start:stop], kinds[entry["dtype"]]).reshape(entry["shape"])
        if about:
            shape = f"{entry['dtype']}[{','.join(map(str, entry['shape']))}]"
            assert json.loads(about["statetap"])["checksums"][name] == blake(shape.encode(), data[start:stop])
        found[name] = (array.astype(np.uint32) << 16).view(np.float32) if entry["dtype"] == "BF16" else array
    return found, about


@pytest.fixture(params=["float32", "bfloat16"])
def run(request, small_units, corpus, sweep):
    options = {"values": "state_output,states,trajectory,betas", "tokens": "every:16,last", "dtype": request.param}
    return sweep(corpus([*texts(9, seed=8), "", "é" * 100]), on_error="skip", **options)


def test_states_from_a_shard_by_the_text_alone(run):
    folder = run.path
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["program"], manifest["format"]) == ("statetap", 1)
    assert digest({k: v for k, v in manifest.items() if k != "checksum"}) == manifest["checksum"]
    precision = 2**-7 if manifest["identity"]["dtype"] == "bfloat16" else 1e-5
    seen = []
    for unit in range(manifest["totals"]["units"]):
        values, about = tensors(folder / "shards" / f"{unit:05d}.safetensors")
        tokens, _ = tensors(folder / "tokens" / f"{unit:05d}.safetensors")
        assert blake(about["statetap"].encode()) == about["checksum"]
        record = json.loads(about["statetap"])
        assert record["identity"] == digest(manifest["identity"]) and record["unit"] == unit
        for name, x in values.items():
            layout = manifest["layouts"][name.split(".", 1)[1]]
            assert list(x.shape) == [record["rows"][layout["row"]], *layout["shape"]]
        for i, (start, stop) in enumerate(zip(tokens["offsets"], tokens["offsets"][1:])):
            first, end = tokens["text_span"][i]
            seen.append((int(tokens["line"][i]), tokens["text"][first:end].tobytes().decode()))
            states = replay(values, tokens["offsets"], i, manifest["chunk"], layer=1)
            largest = np.abs(states).max()
            a, b = tokens["position_offsets"][i : i + 2]
            chosen = states[tokens["positions"][a:b]]
            assert np.abs(chosen - values["1.states"][a:b]).max() <= precision * largest
            assert np.abs(states[-1] - values["1.state_output"][i]).max() <= precision * largest
            assert stop - start == len(states)
    assert seen == [(n + 1, t) for n, t in enumerate(texts(9, seed=8))] + [(11, "é" * 100)]


def replay(values, offsets, document, chunk, layer):
    """`S_t = exp(decay_t) S_{t-1} + k_t u_t^T` from the entering states: `[tokens, heads, key_dim, value_dim]`."""
    get = lambda field: values[f"{layer}.trajectory.{field}"]
    before = sum(-(-int(length) // chunk) for length in np.diff(offsets[: document + 1]))
    start, stop = offsets[document], offsets[document + 1]
    heads, states = get("updates").shape[1], []
    for t in range(int(stop - start)):
        state = get("chunk_states")[before + t // chunk] if t % chunk == 0 else states[-1]
        keys = np.repeat(get("keys")[start + t], heads // get("keys").shape[1], axis=0)
        decay = np.exp(get("decays")[start + t])[:, None, None]
        states.append(decay * state + keys[:, :, None] * get("updates")[start + t][:, None, :])
    return np.stack(states)


def test_index_and_events(run):
    index, about = tensors(run.path / "index.safetensors")
    assert about == {} and all(x.dtype == np.int64 for x in index.values())
    lengths = [len(row) for row in run.rows()]
    ends = np.cumsum(lengths)
    assert index["document"].tolist() == list(range(10)) and index["shard"].tolist() == [0] * 4 + [1] * 4 + [2] * 2
    assert index["row"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert index["length"].tolist() == lengths and index["last_token"].tolist() == (ends - 1).tolist()
    assert index["first_token"].tolist() == (ends - lengths).tolist()
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events] == ["shard", "shard", "skipped", "shard"]
    assert events[2] == {"event": "skipped", "line": 10, "reason": "empty"}
    assert events[3] | {"tokens": 0} == {
        "event": "shard",
        "unit": 2,
        "first_line": 9,
        "lines": 3,
        "first_document": 8,
        "documents": 2,
        "tokens": 0,
    }


def test_the_library_opens_every_file(run):
    for path in run.path.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert all(file.get_tensor(name) is not None for name in file.keys())  # noqa: SIM118
