"""From logits to tokens: the distribution that a request asks for, and draws that depend on the request alone.

Random numbers are counted, not consumed. A draw has a key, made of the request's seed, a purpose and one or two
counters (such as the position in the output); the key starts a splitmix64 stream, and token id i owns the stream's i-th
number. So a draw does not depend on what was drawn before, on neighbours, on the device, or on the order of work.

A token is drawn by a race: token x of probability p(x) arrives after -log(u(x)) / p(x), and the first one wins, which
is x with probability p(x). Two distributions that race with the same numbers mostly have the same winner; that is what
the "coupled" rule of speculative decoding uses (verify.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from finback.engine.request import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5  # a smaller temperature means 0: beyond it only ties are left to chance

TOKEN, ACCEPT, DRAFT = 1, 2, 3
"""Purposes of a draw: a token of the output, whether a draft is accepted, a draft."""

_LIKELIEST = 1024  # tokens that top-p looks at first
_CACHED = 2**17  # numbers that a CPU works on at once: a few such arrays stay in its cache
_WORD = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15  # splitmix64's increment and multipliers
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def is_greedy(params: SamplingParams) -> bool:
    """Whether the likeliest token is picked, without a draw."""
    return params.temperature < GREEDY_BELOW


def distribution(lines: Tensor, params: SamplingParams) -> Tensor:
    """Logits [..., V] -> float64 probabilities after temperature, min-p, top-k and top-p, in that order.

    top-p keeps a token while the likelier ones hold less than `top_p` of what min-p and top-k left. Ties at a border
    are all kept. Logits of -inf have probability 0; one at least must be finite. `params` must not be greedy.
    """
    probs = torch.softmax(lines.double() / params.temperature, dim=-1)
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), 0)
    if 0 < params.top_k < probs.shape[-1]:
        border = probs.topk(params.top_k, dim=-1).values[..., -1:]
        probs = probs.masked_fill(probs < border, 0)
    if params.top_p < 1:
        probs = probs.masked_fill(probs < _top_p_border(probs, max(params.top_p, GREEDY_BELOW)), 0)
    return probs / probs.sum(-1, keepdim=True)


def _top_p_border(probs: Tensor, top_p: float) -> Tensor:
    """[..., 1]: the smallest probability that top-p keeps. Sorting all of a large vocabulary is what costs here, and
    the likeliest few tokens nearly always hold enough."""
    enough = top_p * probs.sum(-1, keepdim=True)
    border, found = _border_among(probs.topk(min(_LIKELIEST, probs.shape[-1]), dim=-1).values, enough)
    missing = ~found.squeeze(-1)
    if bool(missing.any()):
        ordered = probs[missing].sort(dim=-1, descending=True).values
        border[missing] = _border_among(ordered, enough[missing])[0]
    return border


def _border_among(ordered: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest of `ordered` (falling) before which less than `enough` lies, and whether there are smaller ones."""
    kept = ordered.cumsum(-1) - ordered < enough
    return ordered.masked_fill(~kept, float("inf")).amin(-1, keepdim=True), ~kept[..., -1:]


def draw_key(seed: int, purpose: int, first: int, second: int = 0) -> int:
    """The key of a draw: a signed 64-bit integer that depends on all of its arguments."""
    key = 0
    for part in (seed, purpose, first, second):
        key = _mix_int(key + _mix_int(part + _STEP))
    return key - 2**64 if key >= 2**63 else key


def uniform(keys: Tensor, ids: Tensor) -> Tensor:
    """Number `ids` of the streams `keys` (int64, broadcast against each other): float64 in (0, 1)."""
    bits = _mix((ids + 1) * _signed(_STEP) + keys)
    return (_shift(bits, 12).double() + 0.5) * 2.0**-52  # 52 bits: with one more, 1 - 2**-54 would round to 1


def race(probs: Tensor, keys: Tensor) -> Tensor:
    """One token of each distribution: probs [n, V] float64, keys [n] int64 -> [n] int64. Needs no normalisation."""
    ids = torch.arange(probs.shape[1], device=probs.device)
    at_once = max(1, _CACHED // len(ids)) if probs.device.type == "cpu" else len(probs)
    winners = []
    for part, key in zip(probs.split(at_once), keys.to(probs.device).split(at_once), strict=True):
        arrivals = -uniform(key.unsqueeze(1), ids).log() / part
        winners.append(arrivals.argmin(dim=1))  # a token of probability 0 arrives at infinity
    return torch.cat(winners)


def logprobs(lines: Tensor, token: int, count: int) -> TokenLogprobs:
    """The log probability of `token` and of the `count` likeliest ones. lines: [V] log probabilities."""
    top: list[tuple[int, float]] = []
    if count:
        border = lines.topk(min(count, len(lines))).values[-1]
        ids = (lines >= border).nonzero().squeeze(1)
        pairs = zip(ids.tolist(), lines[ids].tolist(), strict=True)
        top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]
    return TokenLogprobs(token, float(lines[token]), tuple(top))


def key_tensor(keys: Sequence[int]) -> Tensor:
    """[n] int64."""
    return torch.tensor(keys, dtype=torch.int64)


def _mix_int(value: int) -> int:
    """splitmix64's output function, on 64 bits."""
    value &= _WORD
    value = ((value ^ (value >> 30)) * _FIRST) & _WORD
    value = ((value ^ (value >> 27)) * _SECOND) & _WORD
    return value ^ (value >> 31)


def _mix(value: Tensor) -> Tensor:
    """`_mix_int` of int64 tensors, which multiply modulo 2**64."""
    value = (value ^ _shift(value, 30)) * _signed(_FIRST)
    value = (value ^ _shift(value, 27)) * _signed(_SECOND)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, count: int) -> Tensor:
    """Shift right, filling with zeros (torch's own shift keeps the sign)."""
    return (value >> count) & (2 ** (64 - count) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
