"""Sparse attention, index scores and selection against float64 loops written here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from finback import kernels
from finback.base.runtime import NonFiniteError
from finback.kernels.torch import attention as twin

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors_v41.json").read_text("utf-8"))
DTYPES = [torch.float64, torch.float32]


def attend(q: Tensor, scopes: list[tuple[Tensor, Tensor]], sink: Tensor, scale: float) -> Tensor:
    """The formula of `kernels.sparse_attention`, one token, head and row at a time."""
    out = torch.zeros_like(q, dtype=torch.float64)
    for t in range(q.shape[0]):
        picked = [rows[i].double() for rows, index in scopes for i in index[t].tolist() if i >= 0]
        for h in range(q.shape[1]):
            masses = [math.exp(scale * float(q[t, h].double() @ row)) for row in picked]
            total = sum(masses) + math.exp(float(sink[h]))
            for mass, row in zip(masses, picked, strict=True):
                out[t, h] += mass / total * row
    return out


def scores_of(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """The formula of `kernels.index_scores`."""
    out = torch.zeros(len(q), len(keys), dtype=torch.float64)
    for t in range(len(q)):
        for n in range(len(keys)):
            out[t, n] = sum(
                float(weights[t, h]) * max(0.0, float(q[t, h].double() @ keys[n].double())) for h in range(q.shape[1])
            )
    return out


def best(line: list[float], k: int, visible: int) -> list[int]:
    """The k best of the first `visible` values, ties to the lowest place, ascending, -1 filled."""
    order = sorted(range(visible), key=lambda i: (-line[i], i))[:k]
    return sorted(order) + [-1] * (min(k, len(line)) - len(order))


def test_released_kernels_vector():
    """Catches a sink that is scaled or has a value row: numbers of the released kernel, in bf16."""
    v = VECTORS["sparse_attn"]
    q = torch.tensor([[math.sin(1 + i + 7 * h) for i in range(16)] for h in range(2)]).bfloat16()[None]
    kv = torch.tensor([[math.cos(0.5 * i + 3 * n) for i in range(16)] for n in range(5)]).bfloat16()
    out = kernels.sparse_attention(q, [(kv, torch.tensor([v["idx"]]))], torch.tensor(v["sink"]), v["scale"])
    torch.testing.assert_close(out[0].float(), torch.tensor(v["out"]), rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 100, 1 << 22])
def test_sparse_attention(dtype, block, monkeypatch):
    """Catches a scope gathered with another scope's index, and a wrong seam where tokens are cut into blocks: two
    scopes of different tables, -1 among them, duplicates, a token without any row."""
    monkeypatch.setattr(twin, "_BLOCK", block)
    q, sink = torch.randn(5, 3, 8, dtype=dtype), torch.randn(3, dtype=dtype)
    window, compressed = torch.randn(9, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)
    first, second = torch.randint(-1, 9, (5, 6)), torch.randint(-1, 4, (5, 2))
    first[1], second[1] = -1, -1
    first[2] = 7
    scopes = [(window, first), (compressed, second)]
    out = kernels.sparse_attention(q, scopes, sink, 0.3)
    torch.testing.assert_close(out.double(), attend(q, scopes, sink, 0.3), rtol=1e-5, atol=1e-5)
    assert torch.equal(out[1], torch.zeros(3, 8, dtype=dtype))


def test_a_row_picked_twice_counts_twice():
    """Catches deduplication, which the released kernel does not do."""
    q, rows = torch.zeros(1, 1, 2), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    out = kernels.sparse_attention(q, [(rows, torch.tensor([[0, 0, 1]]))], torch.full((1,), -1e9), 1.0)
    torch.testing.assert_close(out[0, 0], torch.tensor([2 / 3, 1 / 3]))


def test_large_logits_do_not_overflow():
    """Catches a softmax without its maximum: logits near 1000, and a sink that outweighs all rows."""
    q, rows = torch.full((1, 2, 1), 1000.0), torch.tensor([[1.0], [1.001]])
    out = kernels.sparse_attention(q, [(rows, torch.tensor([[0, 1]]))], torch.tensor([0.0, 3000.0]), 1.0)
    weight = 1 / (1 + math.exp(-1000 * (1.001 - 1.0)))
    torch.testing.assert_close(out[0, 0], torch.tensor([1 - weight + 1.001 * weight]), rtol=1e-4, atol=0)
    assert out[0, 1].item() == 0.0


def test_empty_table():
    """Catches a gather from a table without rows: a source whose first group is not finished."""
    q, window = torch.randn(2, 1, 4), torch.randn(3, 4)
    scopes = [(window, torch.tensor([[0, -1], [0, 1]])), (window[:0], torch.full((2, 3), -1))]
    out = kernels.sparse_attention(q, scopes, torch.zeros(1), 1.0)
    torch.testing.assert_close(out.double(), attend(q, scopes, torch.zeros(1), 1.0), rtol=1e-5, atol=1e-6)


def test_sparse_attention_gradients():
    """Catches a detached operand and an in-place step that spoils a saved one: queries, rows of both scopes, sink."""
    q, sink = torch.randn(2, 2, 3, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    a, b = torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    first, second = torch.tensor([[0, 2, 2], [3, -1, 1]]), torch.tensor([[-1], [1]])

    def run(q: Tensor, a: Tensor, b: Tensor, sink: Tensor) -> Tensor:
        return kernels.sparse_attention(q, [(a, first), (b, second)], sink, 0.7)

    assert torch.autograd.gradcheck(run, tuple(x.requires_grad_() for x in (q, a, b, sink)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 1 << 22])
def test_index_scores(dtype, block, monkeypatch):
    """Catches a rectifier after the sum over heads instead of before it, and wrong seams between blocks."""
    monkeypatch.setattr(twin, "_BLOCK", block)
    q, weights, keys = (torch.randn(*shape, dtype=dtype) for shape in ((3, 4, 6), (3, 4), (7, 6)))
    expected = scores_of(q, weights, keys)
    torch.testing.assert_close(kernels.index_scores(q, weights, keys).double(), expected, rtol=1e-5, atol=1e-5)
    index = torch.tensor([[0, -1, 6], [5, 5, 1], [-1, -1, -1]])
    at = kernels.index_scores_at(q, weights, keys, index).double()
    chosen = expected.gather(1, index.clamp(min=0)).masked_fill(index < 0, float("-inf"))
    torch.testing.assert_close(at, chosen, rtol=1e-5, atol=1e-5)


def test_index_scores_are_float32_for_bf16_operands():
    """Catches scores rounded to bf16, whose ties would then decide the selection: 1 and 1 + 2^-10 must differ."""
    q = torch.ones(1, 1, 2, dtype=torch.bfloat16)
    keys = torch.tensor([[1.0, 0.0], [1.0, 2.0**-10]], dtype=torch.bfloat16)
    scores = kernels.index_scores(q, torch.ones(1, 1), keys)
    assert scores.dtype == torch.float32 and scores[0, 1] > scores[0, 0]


@pytest.mark.parametrize("k", [1, 4, 9, 10, 20])
def test_top_rows_with_ties(k):
    """Catches picks that depend on torch.topk's order among equals: few distinct scores, most of them exact zeros."""
    scores = torch.tensor([0.0, 0.0, 0.0, -1.0, 2.0]).repeat(2)[torch.stack([torch.randperm(10) for _ in range(40)])]
    visible = torch.randint(0, 11, (40,))
    found = kernels.top_rows(scores, k, visible)
    expected = [best(line, k, n) for line, n in zip(scores.tolist(), visible.tolist(), strict=True)]
    if k >= 10:  # everything visible, in place
        expected = [[i if i < n else -1 for i in range(10)] for n in visible.tolist()]
    assert found.tolist() == expected


def test_top_rows_of_a_prefix_do_not_depend_on_what_is_hidden():
    """Catches ties broken by width: the same visible scores in a longer row give the same picks."""
    short = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 0.0]])
    long = torch.cat([short, torch.full((1, 30), 5.0)], dim=1)
    visible = torch.tensor([6])
    assert torch.equal(kernels.top_rows(short, 3, visible), kernels.top_rows(long, 3, visible))


@pytest.mark.parametrize("other", [[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
def test_top_rows_refuses_nan(other):
    """Catches NaN scores that select something: also beside a row whose ties make up for the picks that NaN loses."""
    scores = torch.tensor([[0.0, float("nan"), 1.0, 2.0], other])
    with pytest.raises(NonFiniteError):
        kernels.top_rows(scores, 2, torch.tensor([4, 4]))


def test_top_rows_ignores_nan_that_is_not_visible():
    """Catches an error for rows that another sequence's uninitialised memory fills."""
    scores = torch.tensor([[3.0, 1.0, 2.0, float("nan")]])
    assert kernels.top_rows(scores, 2, torch.tensor([3])).tolist() == [[0, 2]]


def test_top_blocks_pins_the_newest():
    """Catches a newest block that an older one outscores, and one pinned by the row's width instead of by what the
    token sees."""
    scores = torch.tensor([[9.0, 9.0, 8.0, 8.0, 7.0, 7.0, 0.0]]).repeat(4, 1)
    found = kernels.top_blocks(scores, 2, 2, torch.tensor([7, 5, 1, 0]))
    assert found.tolist() == [[0, 3], [0, 2], [0, -1], [-1, -1]]


@pytest.mark.parametrize("n", [5, 8, 11])
def test_top_blocks(n):
    """Catches wrong padding of the last block: the block maxima of a loop, ties to the lowest block."""
    scores = torch.randint(-2, 3, (30, n)).float()
    visible = torch.randint(0, n + 1, (30,))
    size, k = 3, 2
    for line, seen, found in zip(
        scores.tolist(), visible.tolist(), kernels.top_blocks(scores, k, size, visible).tolist(), strict=True
    ):
        blocks = [max(line[i : min(i + size, seen)]) for i in range(0, seen, size)]
        if blocks:
            blocks[-1] = float("inf")
        expected = sorted(sorted(range(len(blocks)), key=lambda i: (-blocks[i], i))[:k])
        assert found == expected + [-1] * (k - len(expected))


def test_pool_groups():
    """Catches a softmax over channels instead of over the group, in values and gradients."""
    values, scores = (torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = torch.zeros(3, 4, dtype=torch.float64)
    for n in range(3):
        for c in range(4):
            masses = [math.exp(scores[n, r, c].item()) for r in range(2)]
            expected[n, c] = sum(m * values[n, r, c].item() for r, m in enumerate(masses)) / sum(masses)
    torch.testing.assert_close(kernels.pool_groups(values, scores), expected)
    assert torch.autograd.gradcheck(kernels.pool_groups, (values, scores))
