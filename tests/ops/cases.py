"""Inputs of the delta rule, by what is hard about them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from statetap.ops import StateWrite, Taps, gated_delta_rule


def inputs(
    seed=0,
    batch=1,
    tokens=100,
    key_heads=2,
    heads=2,
    key_dim=16,
    value_dim=16,
    channels=False,
    strength=0.1,
    state=False,
    sequences=None,
    dtype=torch.float32,
    normalise=True,
):
    """Keyword arguments of `gated_delta_rule`."""
    r = torch.Generator().manual_seed(seed)
    n = lambda *s: torch.randn(*s, generator=r)
    p = lambda *s: torch.rand(*s, generator=r)
    a = dict(
        q=n(batch, tokens, key_heads, key_dim).to(dtype),
        k=n(batch, tokens, key_heads, key_dim).to(dtype),
        v=n(batch, tokens, heads, value_dim).to(dtype),
        g=-p(batch, tokens, heads, *([key_dim] if channels else [])) * strength,
        beta=p(batch, tokens, heads).to(dtype),
        use_qk_l2norm_in_kernel=normalise,
    )
    if not normalise:
        a["k"] = F.normalize(a["k"].float(), dim=-1).to(dtype)
    if state:
        a["initial_state"] = n(sequences or batch, heads, key_dim, value_dim)
    return a


def with_gate(a, gate):
    """The same call with another gate; `gate(tokens) -> [tokens]`."""
    g = torch.zeros_like(a["g"]) + gate(a["g"].shape[1]).reshape(1, -1, *[1] * (a["g"].ndim - 2))
    return {**a, "g": g}


def wiping(value, every=37):
    def gate(tokens):
        g = torch.full((tokens,), -0.01)
        g[::every] = value
        return g

    return gate


def double(a):
    """The call in fp64."""
    return {k: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for k, x in a.items()}


def exact(a, taps=None, state_writes=None, **kw):
    """The call by the token loop in fp64, its probes and written values too: what every backend is judged against."""
    if taps is not None and taps.probes is not None:
        taps = Taps(**{**vars(taps), "probes": taps.probes.double()})
    if state_writes is not None:
        state_writes = [StateWrite(w.token, w.value.double(), w.rows, w.heads) for w in state_writes]
    return gated_delta_rule(**double(a), taps=taps, state_writes=state_writes, backend="reference", **kw)


def strided(a):
    """The call with no plain strides: zero ones in q and g, permuted ones in v and the initial state."""
    views = dict(a, q=a["q"][:, :1].expand_as(a["q"]), g=a["g"][:, :1, :1].expand_as(a["g"]))
    views["v"] = a["v"].permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    views["initial_state"] = a["initial_state"].transpose(-1, -2)
    return views


HARD = {
    "plain": lambda c: inputs(1, batch=2, tokens=130, heads=4, key_dim=24, value_dim=40, channels=c, state=True),
    "one token": lambda c: inputs(2, batch=2, tokens=1, heads=4, channels=c, state=True),
    "no tokens": lambda c: inputs(3, batch=2, tokens=0, channels=c, state=True),
    "no rows": lambda c: inputs(4, batch=0, tokens=70, channels=c, state=True),
    "65 tokens": lambda c: inputs(5, tokens=65, channels=c, state=True),
    "no decay": lambda c: with_gate(inputs(6, tokens=200, channels=c, state=True), lambda t: torch.zeros(t)),
    "wiped by -1e4": lambda c: with_gate(inputs(7, tokens=150, channels=c, state=True), wiping(-1e4)),
    "wiped by -1e6": lambda c: with_gate(inputs(8, tokens=150, channels=c, state=True), wiping(-1e6)),
    "wiped by -inf": lambda c: with_gate(inputs(9, tokens=150, channels=c, state=True), wiping(float("-inf"))),
    "every token forgets": lambda c: with_gate(
        inputs(10, tokens=130, channels=c, state=True), lambda t: torch.full((t,), -50.0)
    ),
    "beta up to two": lambda c: (lambda a: {**a, "beta": 1.9 + 0.1 * a["beta"]})(
        inputs(11, tokens=150, channels=c, strength=1e-3)
    ),
    "beta zero or one": lambda c: (lambda a: {**a, "beta": (a["beta"] > 0.5).float()})(
        inputs(12, tokens=130, channels=c, state=True)
    ),
    "zero keys": lambda c: (lambda a: {**a, "k": a["k"] * (torch.arange(90) > 20)[None, :, None, None]})(
        inputs(13, tokens=90, channels=c)
    ),
    "tiny keys": lambda c: (lambda a: {**a, "k": a["k"] * 2e-4})(inputs(14, tokens=80, channels=c)),
    "three value heads a key head": lambda c: inputs(15, tokens=70, heads=6, key_dim=8, value_dim=24, channels=c),
    "key_dim 256, value_dim 8": lambda c: inputs(
        16, tokens=66, key_heads=1, heads=1, key_dim=256, value_dim=8, channels=c
    ),
    "key_dim 8, value_dim 256": lambda c: inputs(
        17, tokens=66, key_heads=1, heads=1, key_dim=8, value_dim=256, channels=c
    ),
    "key_dim 60, value_dim 100": lambda c: inputs(18, tokens=66, key_dim=60, value_dim=100, channels=c),
    "no normalisation, own scale": lambda c: {**inputs(19, tokens=70, channels=c, normalise=False), "scale": 0.7},
}
