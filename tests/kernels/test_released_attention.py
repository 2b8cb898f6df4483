"""Softmax weights rounded as the released attention kernel rounds them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from finback import kernels

HEADS, WIDTH, SCALE = 4, 16, 0.25


def released_walk(q: Tensor, listed: list[Tensor | None], sink: Tensor) -> Tensor:
    """One token's output [H, h] by the kernel's loop in float64. q: [H, h]; listed: rows [h] in order, None = none."""
    out = torch.zeros(HEADS, WIDTH, dtype=torch.float64)
    for head in range(HEADS):
        top, total, acc = -1e30, 0.0, torch.zeros(WIDTH, dtype=torch.float64)
        for at in range(0, len(listed), 64):
            rows = [row.double() for row in listed[at : at + 64] if row is not None]
            logits = [SCALE * float(q[head].double() @ row) for row in rows]
            new = max([top, *logits])
            acc, total = acc * math.exp(top - new), total * math.exp(top - new)
            for row, logit in zip(rows, logits, strict=True):
                weight = math.exp(logit - new)
                total += weight
                acc += float(torch.tensor(weight).bfloat16()) * row
            top = new
        gap = float(sink[head]) - top
        total += math.exp(gap) if gap < 700 else math.inf
        out[head] = acc / total
    return out


def case(
    rng: torch.Generator, tokens: int, widths: tuple[int, int]
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    """Queries, two scopes with some empty places, and a sink."""
    q = torch.randn(tokens, HEADS, WIDTH, generator=rng)
    scopes = []
    for k in widths:
        rows = torch.randn(200, WIDTH, generator=rng)
        index = torch.randint(200, (tokens, k), generator=rng)
        scopes.append((rows, index.masked_fill(torch.rand(tokens, k, generator=rng) < 0.2, -1)))
    return q, scopes, torch.randn(HEADS, generator=rng)


@pytest.mark.parametrize(("first", "widths"), [((0, 12), (12, 9)), ((28, 100), (72, 70)), ((0, 128), (40, 10))])
def test_weights_round_relative_to_the_peak_so_far(
    rng: torch.Generator, first: tuple[int, int], widths: tuple[int, int]
) -> None:
    """Exact weights, weights rounded relative to the row's final peak, a sum of rounded weights, or runs that end
    elsewhere: each moves the result by 1e-3 of its size. Lists shorter than a run, longer, and with a gap inside."""
    q, scopes, sink = case(rng, 6, widths)
    own = kernels.sparse_attention(q, scopes, sink, SCALE, released_columns=first)
    want = torch.zeros(len(q), HEADS, WIDTH, dtype=torch.float64)
    for t in range(len(q)):
        listed: list[Tensor | None] = [None] * (first[1] + widths[1])
        for at, (rows, index) in zip(first, scopes, strict=True):
            for j, i in enumerate(index[t].tolist()):
                listed[at + j] = rows[i] if i >= 0 else None
        want[t] = released_walk(q[t], listed, sink)
    error = ((own - want).norm() / want.norm()).item()
    exact = kernels.sparse_attention(q, scopes, sink, SCALE)
    assert error <= 1e-4
    assert ((exact - want).norm() / want.norm()).item() >= 5e-4  # else this test would see nothing


@pytest.mark.parametrize("width", [8, 100])
def test_a_token_without_rows_gives_zero(rng: torch.Generator, width: int) -> None:
    """0 / 0 or -inf minus -inf where every place is empty."""
    q, scopes, sink = case(rng, 3, (width, 8))
    empty = [(rows, torch.full_like(index, -1)) for rows, index in scopes]
    for logit in (sink, None):
        out = kernels.sparse_attention(q, empty, logit, SCALE, released_columns=(0, width))
        assert torch.equal(out, torch.zeros_like(out))


def test_places_beyond_the_batch_change_nothing(rng: torch.Generator) -> None:
    """A token's result that depends on how many columns longer sequences of its batch need."""
    q, [(rows, index), (other, picks)], sink = case(rng, 4, (30, 50))
    alone = kernels.sparse_attention(q, [(rows, index), (other, picks)], sink, SCALE, released_columns=(98, 128))
    left = torch.nn.functional.pad(index, (98, 0), value=-1)
    right = torch.nn.functional.pad(picks, (0, 90), value=-1)
    batched = kernels.sparse_attention(q, [(rows, left), (other, right)], sink, SCALE, released_columns=(0, 128))
    assert (alone - batched).abs().max() <= 1e-6


def test_gradient_is_that_of_exact_weights(rng: torch.Generator) -> None:
    """A gradient through the rounding or the peaks. Rounding passes gradients on, so it is close to the exact one."""
    values, scopes, sink = case(rng, 4, (100, 30))
    grads = []
    for columns in (None, (0, 100)):
        q = values.clone().requires_grad_()
        kernels.sparse_attention(q, scopes, sink, SCALE, released_columns=columns).square().sum().backward()
        assert q.grad is not None
        grads.append(q.grad)
    assert (grads[0] - grads[1]).norm() <= 1e-2 * grads[0].norm()
