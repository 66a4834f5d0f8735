"""Lines of every kind, from files of every kind."""

import gzip
import json
import os
import sys
import threading

import pytest
import zstandard

from statetap import ArgumentError, CaptureError
from statetap.sweeps.data import BadLine, Corpus
from statetap.sweeps.stopping import Interrupted

HOSTILE = [
    "a",
    "a",
    "nul \0 inside",
    "👩‍👩‍👧 emoji",
    "combining e\u0301 \u0300",
    "שלום مرحبا",
    "line\u2028separator \x85",
    " kept ",
]


def lines(path, **kw):
    corpus = Corpus(path, **kw)
    return [(number, corpus.text(raw)) for number, raw in corpus]


def test_json_lines_come_back_exactly(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in HOSTILE))
    assert lines(path) == list(enumerate(HOSTILE, 1))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_of_text_come_back_exactly(tmp_path, end):
    path = tmp_path / "a.txt"
    path.write_bytes((end.join(HOSTILE) + end).encode())
    assert lines(path) == list(enumerate(HOSTILE, 1))


def test_a_last_line_needs_no_end_and_a_byte_order_mark_is_not_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo\r")
    assert lines(path) == [(1, "one"), (2, "two\r")]


def _zst(content):
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def compressed(path, content):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else _zst(content))
    return path


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "a.jsonl.zst", "a.txt.zst", "A.TXT.ZST"])
def test_compressed(tmp_path, name):
    path = compressed(tmp_path / name, b'{"text": "one"}\n{"text": "two"}\n') if name.islower() else tmp_path / name
    path.write_bytes(compressed(tmp_path / name.lower(), b'{"text": "one"}\n{"text": "two"}\n').read_bytes())
    expected = ["one", "two"] if "json" in name else ['{"text": "one"}', '{"text": "two"}']
    assert [t for _, t in lines(path)] == expected


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:40] + b"\0\0\0\0" + b[44:]])
@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_damaged_compressed_file_is_one_sentence(tmp_path, damage, ending):
    path = compressed(tmp_path / f"a.txt.{ending}", b"".join(b"%x\n" % n**9 for n in range(5000)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CaptureError, match=rf"a\.txt\.{ending} cannot be read to its end: [^\n]+$"):
        list(Corpus(path))


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_members_that_follow_each_other_are_all_read(tmp_path, ending):
    path = compressed(tmp_path / f"a.txt.{ending}", b"one\n")
    path.write_bytes(path.read_bytes() + compressed(tmp_path / f"b.{ending}", b"two\nthree\n").read_bytes())
    assert [text for _, text in lines(path)] == ["one", "two", "three"]


@pytest.mark.parametrize("kind", ["auto", "text"])
def test_a_compressed_pipe(tmp_path, kind):
    content = compressed(tmp_path / "b.zst", b"one\ntwo\n" * 50_000).read_bytes()
    path = tmp_path / "pipe.zst"
    os.mkfifo(path)
    threading.Thread(target=path.write_bytes, args=(content,), daemon=True).start()
    assert [text for _, text in lines(path, kind=kind)] == ["one", "two"] * 50_000


def test_zstandard_is_asked_for_when_it_is_not_there(tmp_path, monkeypatch):
    path = compressed(tmp_path / "a.txt.zst", b"one\n")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(CaptureError, match=r'needs zstandard: pip install "statetap\[data\]"'):
        list(Corpus(path))


@pytest.mark.parametrize(
    "line, reason",
    [
        ("", "empty"),
        ("   \t", "only white space"),
        ("{", "not JSON"),
        ("[1, 2]", "not a JSON object but a list"),
        ("null", "not a JSON object but null"),
        ('{"body": "x"}', "no field 'text' (it has 'body')"),
        ('{"text": 3}', "field 'text' is a number, not text"),
        ('{"text": null}', "field 'text' is null, not text"),
        ('{"text": ""}', "empty"),
        ('{"text": " \\n"}', "only white space"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ('{"text": "a", "text": "b"}', "has the key 'text' twice"),
        ('{"text": "a", "meta": {"x": 1, "y": 2, "x": 1}}', "has the key 'x' twice"),
        ("[" * 100_000, "not JSON"),
        ('{"text": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_bad_json_lines(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(BadLine) as error:
        lines(path)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_bytes_that_are_not_utf8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"ab\xff\n")
    with pytest.raises(BadLine, match=r"not UTF-8 \(at byte 3\)"):
        lines(path)


def test_sources_that_cannot_be(tmp_path):
    with pytest.raises(CaptureError, match="does not exist"):
        Corpus(tmp_path / "none.txt")
    with pytest.raises(CaptureError, match="is a folder"):
        Corpus(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ArgumentError, match="of no known kind"):
        Corpus(tmp_path / "a.parquet")


@pytest.mark.parametrize("line, kind", [(b'{"text": "x"}\n', "jsonl"), (b"plain\n", "text"), (b"", "text")])
def test_a_pipe_says_what_it_is_by_its_first_line(tmp_path, line, kind):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(line * 3,))
    writer.start()
    corpus = Corpus(path)
    assert corpus.kind == kind and corpus.fingerprint is None
    assert [corpus.text(raw) for _, raw in corpus] == (["x" if kind == "jsonl" else "plain"] * 3 if line else [])
    writer.join()


def test_waiting_for_a_pipe_hears_that_it_should_stop(tmp_path):
    path = tmp_path / "pipe.txt"
    os.mkfifo(path)
    with pytest.raises(Interrupted):
        list(Corpus(path, should_stop=lambda: True))


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    reading = iter(Corpus(path))
    next(reading)
    path.write_text("one\ntwo\nthree\n")
    with pytest.raises(CaptureError, match="was changed while it was read"):
        list(reading)
