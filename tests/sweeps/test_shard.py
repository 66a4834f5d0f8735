import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from statetap import CaptureError
from statetap.sweeps.shard import Entry, Shard, checksum_of, write


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "b.half": rng.normal(size=(3, 2)).astype(np.float16),
        "a.long": np.arange(5),
        "bytes": np.frombuffer(b"\0text", np.uint8),
        "none": np.zeros((0, 4), np.float32),
        "c": rng.normal(size=(2, 1, 3)).astype(np.float32),
    }


def test_safetensors_reads_what_is_written(tmp_path, arrays):
    path = tmp_path / "x.safetensors"
    write(path, {name: Entry.of(x) for name, x in arrays.items()}, {"unit": 3, "text": 'é "quoted"'})
    found = load_file(path)
    assert sorted(found) == sorted(arrays)
    assert all(np.array_equal(found[name].numpy(), x) for name, x in arrays.items())
    with safe_open(path, "np") as file:
        assert "é" in file.metadata()["statetap"]


def test_what_safetensors_writes_is_read(tmp_path, arrays):
    path = tmp_path / "x.safetensors"
    tensors = {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()}
    save_file({**tensors, "brain": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}, path)
    shard = Shard(path)
    assert all(np.array_equal(shard.array(name), x) for name, x in arrays.items())
    assert torch.from_numpy(np.array(shard.array("brain"))).view(torch.bfloat16).tolist() == [1.5, -2.0]


def test_pieces_are_written_one_after_the_other(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, {"x": Entry("int64", [6], (np.arange(n, n + 2) for n in (0, 2, 4)))})
    assert Shard(path).array("x").tolist() == [0, 1, 2, 3, 4, 5]
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_every_flipped_bit_and_every_cut_is_found(tmp_path):
    path = tmp_path / "x.safetensors"
    entries = {"x": Entry.of(np.arange(3)), "t": Entry.of(np.frombuffer(b"abc", np.uint8))}
    write(path, entries, {"unit": 0, "checksums": {name: checksum_of(x) for name, x in entries.items()}})
    assert Shard(path).check() == []
    whole = path.read_bytes()

    def sound(data):
        path.write_bytes(data)
        try:
            return not Shard(path).check()
        except CaptureError as error:
            assert str(path) in str(error)
            return False

    def flip(n, bit):
        return bytes([*whole[:n], whole[n] ^ 1 << bit, *whole[n + 1 :]])

    assert [(n, bit) for n in range(len(whole)) for bit in range(8) if sound(flip(n, bit))] == []
    assert not any(sound(whole[:n]) for n in range(len(whole)))
    assert not sound(whole + b"\0")
