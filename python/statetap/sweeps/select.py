"""Layers, heads and tokens by short expressions: "0-8,12,-1", "every:64,last"."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Callable, Iterable

from ..errors import ArgumentError, CaptureError

_SPAN = re.compile(r"(-?\d+)(?:-(-?\d+))?")
_SLICE = re.compile(r"(-?\d*):(-?\d*)")
_EVERY = re.compile(r"every:(\d+)")

Choice = str | int | Iterable[int] | None


def expression(choice: Choice) -> str | None:
    """A choice as text: ints and lists of ints are written with commas; None stays None."""
    if choice is None:
        return None
    if isinstance(choice, (str, int)):
        return re.sub(r"\s", "", str(choice))
    return ",".join(str(int(n)) for n in choice)


def chosen(name: str, choice: Choice, count: int) -> list[int]:
    """The numbers below `count` that `choice` means, in order; None means all.

    Args:
        name: "layers" or "heads", for the message.
        choice: numbers and ranges like "0-8,12,-1", or ints; negative ones count from the end.
        count: how many there are.

    Raises:
        ArgumentError: not such an expression, a number outside of `count`, or one that is there twice.
    """
    text = expression(choice)
    if text is None:
        return list(range(count))
    numbers: list[int] = []
    for part in text.split(","):
        ends = _ends(name, part)
        for n in ends:
            if not -count <= n < count:
                raise ArgumentError(f"{name}: {name.rstrip('s')} {n} does not exist; there are {count}")
        first, last = (n % count for n in ends)
        if last < first:
            raise ArgumentError(f"{name}: {part!r} runs backwards")
        numbers += range(first, last + 1)
    twice = sorted({n for n in numbers if numbers.count(n) > 1})
    if twice:
        raise ArgumentError(f"{name}: {text!r} has {ranges(twice)} twice; each is captured once")
    return sorted(numbers)


def check_syntax(name: str, choice: Choice) -> None:
    """Raise `ArgumentError` if `chosen` could never take this choice."""
    text = expression(choice)
    for part in () if text is None else text.split(","):
        _ends(name, part)


def _ends(name: str, part: str) -> tuple[int, int]:
    span = _SPAN.fullmatch(part)
    if span is None:
        raise ArgumentError(f"{name}: got {part!r}, needs numbers and ranges like 0-8,12,-1")
    return int(span[1]), int(span[2] or span[1])


def recurrent_layers(choice: Choice, have: Iterable[int], blocks: int) -> tuple[int, ...]:
    """The recurrent blocks that `choice` means; None means all of them.

    Raises:
        ArgumentError: a block does not exist or has no recurrent mixer; names it and those that have one.
    """
    recurrent = sorted(have)
    if choice is None:
        return tuple(recurrent)
    layers = chosen("layers", choice, blocks)
    without = [n for n in layers if n not in recurrent]
    if without:
        raise ArgumentError(
            f"layers: no recurrent mixer in {ranges(without)}; the layers that have one are {ranges(recurrent)}"
        )
    return tuple(layers)


def ranges(numbers: Iterable[int]) -> str:
    """`0-2, 4` for 0, 1, 2, 4."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def token_positions(tokens: str, length: int) -> list[int]:
    """Positions in a document of `length` tokens that `tokens` means, in order, none twice.

    Args:
        tokens: by commas: "last", "all", "every:N" (the tokens N-1, 2N-1, ...: after N tokens, after 2N, ...), numbers,
            ranges like "0-8", and slices like "-8:", which take what there is. Negative numbers count from the end.

    Raises:
        ArgumentError: not such an expression.
        CaptureError: a number or range is outside of the document.
    """
    positions: set[int] = set()
    for term in _terms(tokens):
        positions.update(term(length))
    return sorted(positions)


@lru_cache(maxsize=64)
def _terms(tokens: str) -> tuple[Callable[[int], Iterable[int]], ...]:
    return tuple(_term(part) for part in tokens.split(","))


def _term(part: str) -> Callable[[int], Iterable[int]]:
    """One part of the expression, as a function of the length."""
    every, cut, span = _EVERY.fullmatch(part), _SLICE.fullmatch(part), _SPAN.fullmatch(part)
    if part == "all":
        return range
    if part == "last":
        return lambda length: [length - 1]
    if every and int(every[1]):
        step = int(every[1])
        return lambda length: range(step - 1, length, step)
    if cut:
        bounds = slice(*(int(n) if n else None for n in cut.groups()))
        return lambda length: range(*bounds.indices(length))
    if span:
        first, last = int(span[1]), int(span[2] or span[1])
        return lambda length: _span(part, first, last, length)
    raise ArgumentError(
        f"tokens: got {part!r}, needs last, all, every:N with N of at least 1, positions like 0,5,-1, ranges like 0-8 "
        "or slices like -8:"
    )


def _span(part: str, first: int, last: int, length: int) -> range:
    for n in (first, last):
        if not -length <= n < length:
            raise CaptureError(f"token {n} is outside of its {length} token{'s' * (length != 1)} (--tokens {part})")
    if last % length < first % length:
        raise CaptureError(f"--tokens {part} runs backwards in its {length} tokens")
    return range(first % length, last % length + 1)
