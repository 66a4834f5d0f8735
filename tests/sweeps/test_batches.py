import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statetap import CaptureError
from statetap.sweeps.batches import batches
from statetap.sweeps.data import Corpus
from statetap.sweeps.spec import Spec
from statetap.sweeps.units import Document, Units


def units_of(lines, context=None, **options):
    """A corpus of lines of text, a token a byte."""
    path = Path(tempfile.mkdtemp()) / "a.txt"
    path.write_text("".join(line + "\n" for line in lines))
    return Units(Corpus(path), Spec(**options), lambda text: list(text.encode()), context, lambda document: 8)


def every(units):
    found = []
    while (unit := units.next()) is not None:
        found.append(unit)
    return found


@given(st.lists(st.integers(1, 90), max_size=40), st.integers(1, 200))
def test_batches_hold_every_document_once_within_the_budget(lengths, budget):
    documents = [Document(n, "", [0] * length) for n, length in enumerate(lengths)]
    found = list(batches(documents, budget))
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(1, 40), st.integers(1, 20))
def test_units_are_the_corpus_in_order_and_resuming_between_any_two_gives_the_same(lengths, batch_tokens, shard):
    lines = ["x" * length for length in lengths]
    options = {"batch_tokens": batch_tokens, "shard_bytes": 8 * shard}
    whole = every(units_of(lines, **options))
    assert [len(d) for unit in whole for d in unit.documents] == lengths
    assert [d.line for unit in whole for d in unit.documents] == list(range(1, len(lines) + 1))
    records = [unit.record(0) for unit in whole]
    for done in range(len(records) + 1):
        rest = units_of(lines, **options)
        for record in records[:done]:
            rest.pass_over(record)
        assert [unit.record(0) for unit in every(rest)] == records[done:]


def test_a_changed_line_or_a_longer_corpus_is_noticed_when_resuming():
    record = units_of(["one", "two"]).next().record(0)
    with pytest.raises(CaptureError, match=r"lines 1-2 of .* are not those of this run: their checksum was"):
        units_of(["one", "twO"]).pass_over(record)
    with pytest.raises(CaptureError, match="are not those of this run"):
        units_of(["one"]).pass_over(record)
    longer = units_of(["one", "two", "three"])
    longer.pass_over(record)
    with pytest.raises(CaptureError, match="has more lines than the 2 of this run"):
        longer.next()


def test_bad_lines_are_named_with_file_number_and_reason():
    with pytest.raises(CaptureError, match=r"a\.txt, line 2: empty\. Pass --on-error skip"):
        units_of(["one", "", "three"]).next()
    unit = units_of(["one", "", "three", "  "], on_error="skip").next()
    assert unit.skipped == [(2, "empty"), (4, "only white space")]
    assert [d.line for d in unit.documents] == [1, 3]


def test_a_corpus_of_nothing_but_bad_lines_does_not_become_one_unit():
    found = every(units_of([""] * 20_000, on_error="skip"))
    assert [unit.lines for unit in found] == [8192, 8192, 3616]
    assert sum(len(unit.skipped) for unit in found) == 20_000


@pytest.mark.parametrize(
    "long, lengths, starts", [("split", [4, 4, 2], [0, 4, 8]), ("truncate", [4], [0]), ("skip", [], [])]
)
def test_what_is_done_with_a_long_text(long, lengths, starts):
    unit = units_of(["0123456789"], context=4, long=long).next()
    assert [len(d) for d in unit.documents] == lengths
    assert [d.first_token for d in unit.documents] == starts
    assert unit.long == ([] if long == "skip" else [(1, 10)])
    assert unit.skipped == ([(1, "10 tokens, and the model takes 4")] if long == "skip" else [])


def test_a_long_text_is_an_error_unless_something_is_said():
    with pytest.raises(CaptureError, match=r"line 1: 10 tokens, and the model takes 4 \(or --long split"):
        units_of(["0123456789"], context=4).next()


def test_a_token_outside_of_a_document_is_a_bad_line():
    with pytest.raises(CaptureError, match="line 2: token 3 is outside of its 2 tokens"):
        units_of(["long", "no"], values=("states",), tokens="3").next()


def test_a_limit_reads_no_further():
    unit = units_of(["one", "two", ""], limit=2).next()
    assert len(unit.documents) == 2
