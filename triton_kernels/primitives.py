"""What every kernel is made of: where a chunk lies, products of bf16 pieces, decays as sums, the inverse of a triangle.

A *slot* is a chunk's number; a *piece* one of the bf16 numbers that an fp32 number is the sum of.
"""

import triton
import triton.language as tl

from . import launch

C = tl.constexpr(launch.CHUNK)
PLAIN = tl.constexpr(launch.PLAIN)  # chunk positions are computed
CUT = tl.constexpr(launch.CUT)  # a chunk's start and length are read for every chunk; between the two, once a sequence


@triton.jit
def program(TILES, HEADS):
    """This program's tile, head, and slot (or sequence): the tile is fastest, so that programs side by side share keys."""
    n = tl.program_id(0)
    return n % TILES, n // TILES % HEADS, n // (TILES * HEADS)


@triton.jit
def load_or_one(base, first, offsets, mask, GIVEN: tl.constexpr):
    """A number a token in fp32, zero outside; ones where the call has none, and `base` is None."""
    if GIVEN:
        return tl.load(base + first + offsets, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.full([C], 1.0, tl.float32)


@triton.jit
def chunk_at(slot, starts, lengths, tokens, per_row, LAYOUT: tl.constexpr):
    """First token (flat, 64 bits) and length of a chunk."""
    if LAYOUT == PLAIN:
        row = slot // per_row
        first = (slot - row * per_row) * C
        start = row.to(tl.int64) * tokens + first
        length = tl.minimum(tokens - first, C)
    else:
        start = tl.load(starts + slot)
        length = tl.load(lengths + slot)
    return start, length


@triton.jit
def split(x, PIECES: tl.constexpr):
    """x in fp32 as bf16 pieces, largest first; the unused ones repeat the first and cost nothing."""
    first = x.to(tl.bfloat16)
    second = first
    third = first
    if PIECES > 1:
        rest = x - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        if PIECES > 2:
            third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    return first, second, third


@triton.jit
def load_pieces(base, plane, offsets, mask, PIECES: tl.constexpr):
    """The same for a matrix that is stored as planes of pieces, `plane` elements apart."""
    first = tl.load(base + offsets, mask=mask, other=0.0)
    second = first
    third = first
    if PIECES > 1:
        second = tl.load(base + plane + offsets, mask=mask, other=0.0)
        if PIECES > 2:
            third = tl.load(base + plane + plane + offsets, mask=mask, other=0.0)
    return first, second, third


@triton.jit
def store_pieces(base, plane, offsets, x, mask, PIECES: tl.constexpr):
    first, second, third = split(x, PIECES)
    tl.store(base + offsets, first, mask=mask)
    if PIECES > 1:
        tl.store(base + plane + offsets, second, mask=mask)
        if PIECES > 2:
            tl.store(base + plane + plane + offsets, third, mask=mask)


@triton.jit
def dot(a0, a1, a2, b0, b1, b2, acc, A: tl.constexpr, B: tl.constexpr, ORDER: tl.constexpr):
    """acc + a @ b in fp32, from A and B pieces; products of pieces i and j with i + j >= ORDER are left out."""
    acc = tl.dot(a0, b0, acc)
    if B > 1 and ORDER > 1:
        acc = tl.dot(a0, b1, acc)
    if A > 1 and ORDER > 1:
        acc = tl.dot(a1, b0, acc)
    if A > 1 and B > 1 and ORDER > 2:
        acc = tl.dot(a1, b1, acc)
    if B > 2 and ORDER > 2:
        acc = tl.dot(a0, b2, acc)
    if A > 2 and ORDER > 2:
        acc = tl.dot(a2, b0, acc)
    return acc


@triton.jit
def matmul(a, b, PIECES: tl.constexpr):
    """a @ b for two fp32 matrices in registers."""
    a0, a1, a2 = split(a, PIECES)
    b0, b1, b2 = split(b, PIECES)
    acc = tl.zeros([a.shape[0], b.shape[1]], dtype=tl.float32)
    return dot(a0, a1, a2, b0, b1, b2, acc, PIECES, PIECES, PIECES)


@triton.jit
def decay_to_each(g):
    """Gamma_ij = exp(g_{j+1} + .. + g_i) for j <= i, else 0: sums, so that no wipe costs precision; g: [C]."""
    i = tl.arange(0, C)
    sums = tl.cumsum(tl.where(i[:, None] > i[None, :], g[:, None], 0.0), 0)
    return tl.where(i[:, None] >= i[None, :], tl.exp(sums), 0.0)


@triton.jit
def merge(inverse, lower, SIZE: tl.constexpr, PIECES: tl.constexpr):
    """Inverses of the diagonal blocks of SIZE to those of 2 SIZE: [[A, 0], [N, B]]^-1 = [[A', 0], [-B' N A', B']]."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    below = tl.where((i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE != j // SIZE), lower, 0.0)
    return inverse - matmul(inverse, matmul(below, inverse, PIECES), PIECES)


@triton.jit
def unit_lower_inverse(lower, PIECES: tl.constexpr):
    """(I + lower)^-1, lower strictly lower [C, C]: blocks of 16 by substitution, all at once, then merged by products."""
    N: tl.constexpr = C // 16
    block = tl.arange(0, N)
    row = tl.arange(0, 16)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    inverse = -tl.sum(tl.where(same, tl.reshape(lower, [N, 16, N, 16]), 0.0), 2)  # [N, 16, 16]
    for i in range(2, 16):
        here = (row == i)[None, :, None]
        x = tl.sum(tl.where(here, inverse, 0.0), 1)
        x = x + tl.sum(x[:, :, None] * inverse, 1)
        inverse = tl.where(here, x[:, None, :], inverse)
    inverse = tl.where((row[:, None] == row[None, :])[None, :, :], 1.0, inverse)
    spread = tl.broadcast_to(inverse[:, :, None, :], [N, 16, N, 16])
    inverse = tl.reshape(tl.where(same, spread, 0.0), [C, C])
    # products of inverses multiply errors where beta nears 2: one piece more than the rest
    MORE: tl.constexpr = 3 if PIECES > 1 else 1
    inverse = merge(inverse, lower, 16, MORE)
    return merge(inverse, lower, 32, MORE)
