import pytest
from hypothesis import given
from hypothesis import strategies as st

from statetap import ArgumentError, CaptureError
from statetap.sweeps.select import chosen, recurrent_layers, token_positions


@pytest.mark.parametrize(
    "choice, expected",
    [
        (None, list(range(14))),
        ("0-8,12,-1", [*range(9), 12, 13]),
        ("3", [3]),
        (3, [3]),
        ([5, 1, -14], [0, 1, 5]),
        ("-3--1", [11, 12, 13]),
        (" 1 , 2 ", [1, 2]),
    ],
)
def test_numbers_and_ranges(choice, expected):
    assert chosen("layers", choice, 14) == expected


@pytest.mark.parametrize("choice", ["", "a", "1,,2", "1.5", "0-", "1:3", "8-3", "14", "-15", "0-14"])
def test_other_numbers_are_refused(choice):
    with pytest.raises(ArgumentError, match=r"^layers: "):
        chosen("layers", choice, 14)


@pytest.mark.parametrize(
    "choice, twice", [("1,1", "1"), ([5, 5], "5"), ("0-3,2", "2"), ("13,-1", "13"), ("0-3,1-2,-14", "0-2")]
)
def test_a_number_that_is_there_twice_is_refused(choice, twice):
    for name in ("layers", "heads"):
        with pytest.raises(ArgumentError, match=f"^{name}: '.*' has {twice} twice; each is captured once$"):
            chosen(name, choice, 14)


def test_a_layer_without_a_recurrent_mixer_is_named():
    assert recurrent_layers(None, [0, 1, 2, 4], 6) == (0, 1, 2, 4)
    with pytest.raises(ArgumentError, match=r"no recurrent mixer in 3, 5; the layers that have one are 0-2, 4$"):
        recurrent_layers("2-5", [0, 1, 2, 4], 6)


@pytest.mark.parametrize(
    "tokens, length, expected",
    [
        ("last", 5, [4]),
        ("all", 3, [0, 1, 2]),
        ("every:4", 12, [3, 7, 11]),
        ("every:4", 3, []),
        ("every:4,last", 10, [3, 7, 9]),
        ("-1,0,-1", 4, [0, 3]),
        ("1-2,-2--1", 6, [1, 2, 4, 5]),
        ("-3:", 2, [0, 1]),
        ("-3:", 9, [6, 7, 8]),
        (":2", 9, [0, 1]),
    ],
)
def test_positions(tokens, length, expected):
    assert token_positions(tokens, length) == expected


@pytest.mark.parametrize("tokens", ["", "first", "every:0", "every:", "every:-2", "1.5", "1;2"])
def test_other_tokens_are_refused(tokens):
    with pytest.raises(ArgumentError, match=r"^tokens: got "):
        token_positions(tokens, 8)


@pytest.mark.parametrize("tokens, n", [("8", 8), ("-9", -9), ("0-8", 8)])
def test_a_token_outside_of_a_document_is_named(tokens, n):
    with pytest.raises(CaptureError, match=f"token {n} is outside of its 8 tokens"):
        token_positions(tokens, 8)


@given(st.integers(1, 50), st.integers(1, 60))
def test_every_n_are_the_states_after_n_2n_and_so_on(step, length):
    assert token_positions(f"every:{step}", length) == [n * step - 1 for n in range(1, length // step + 1)]
