"""Memory does not grow with the corpus."""

import os
import resource
import threading

import pytest

from sweeping import texts


def peak(work):
    """MiB that the process of `work` came to, at most."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            work()
            os.write(writing, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).encode())
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return int(told) / 1024


@pytest.mark.parametrize("piped", [False, True])
def test_a_long_corpus_takes_no_more_than_a_short_one(sweep, tmp_path, piped, monkeypatch):
    monkeypatch.setattr("statetap.sweeps.units.UNIT_DOCUMENTS", 100)

    def work(count):
        lines = texts(100)
        blob = "".join(f"{line}\n" for line in lines) * (count // 100)
        if piped:
            os.mkfifo(tmp_path / f"{count}.txt")
            threading.Thread(target=(tmp_path / f"{count}.txt").write_text, args=(blob,), daemon=True).start()
        else:
            (tmp_path / f"{count}.txt").write_text(blob)
        options = {"values": "trajectory", "layers": "0", "shard_bytes": 1 << 20}
        assert len(sweep(tmp_path / f"{count}.txt", f"run{count}", **options)) == count

    work(100)
    small, large = peak(lambda: work(200)), peak(lambda: work(2000))
    size = sum(p.stat().st_size for p in (tmp_path / "run2000" / "shards").iterdir()) / 2**20
    assert size > 100
    assert large - small < 25, (small, large)


def test_a_huge_file_is_not_read_when_few_lines_are_wanted(sweep, tmp_path):
    path = tmp_path / "corpus.txt"
    with open(path, "wb") as file:
        file.write(b"one line\n" * 1000)
        file.truncate(1 << 30)  # a hole: a line of zeros
    assert peak(lambda: sweep(path, limit=20)) - peak(lambda: sweep(path, "again", limit=10)) < 25
