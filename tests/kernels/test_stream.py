"""Norms, rotation, hyper-connections and the Engram gate against float64 loops written here."""

from __future__ import annotations

import cmath
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from finback import kernels

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors_v41.json").read_text("utf-8"))
EPS = 1e-6


def sinkhorn_loop(logits: list[list[float]], iterations: int, eps: float) -> list[list[float]]:
    """The released rule, one number at a time: row softmax + eps, columns, then rows and columns in turns."""
    m = range(len(logits))
    peaks = [max(row) for row in logits]
    z = [[math.exp(x - peak) for x in row] for row, peak in zip(logits, peaks, strict=True)]
    z = [[x / sum(row) + eps for x in row] for row in z]
    for half in range(2 * iterations - 1):
        if half % 2:
            z = [[x / (sum(row) + eps) for x in row] for row in z]
        else:
            totals = [sum(z[i][k] for i in m) + eps for k in m]
            z = [[z[i][k] / totals[k] for k in m] for i in m]
    return z


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mixes_loop(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int) -> tuple[Tensor, ...]:
    """The formulas of `kernels.hc_mixes`, one token at a time."""
    copies = streams.shape[1]
    pre, post, comb = [], [], []
    for x in streams.double().flatten(1):
        rms = math.sqrt((x * x).mean().item() + 1e-20)
        z = [(row.double() @ x).item() / rms for row in fn]
        part = [0] * copies + [1] * copies + [2] * copies * copies
        z = [v * float(scale[p]) + float(b) for v, p, b in zip(z, part, base, strict=True)]
        pre.append([sigmoid(v) + EPS for v in z[:copies]])
        post.append([2 * sigmoid(v) for v in z[copies : 2 * copies]])
        square = [z[2 * copies + i * copies : 2 * copies + (i + 1) * copies] for i in range(copies)]
        comb.append(sinkhorn_loop(square, iterations, EPS))
    return tuple(torch.tensor(part, dtype=torch.float64) for part in (pre, post, comb))


def random_mixes(copies: int, dtype: torch.dtype, tokens: int = 3) -> tuple[Tensor, ...]:
    counts = (2 + copies) * copies
    shapes = ((tokens, copies, 5), (counts, copies * 5), (3,), (counts,))
    return tuple(torch.randn(*shape, dtype=dtype) for shape in shapes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("iterations", [1, 20])
@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize("grad", [False, True])
def test_hc_mixes(copies, iterations, dtype, grad):
    """Catches the order pre / post / comb, statistics per copy instead of over all, the Sinkhorn's start and its eps:
    on the path with gradients and on the one without."""
    streams, fn, scale, base = random_mixes(copies, dtype)
    streams.requires_grad_(grad)
    found = kernels.hc_mixes(streams, fn, scale, base, iterations=iterations, norm_eps=1e-20, eps=EPS)
    for ours, expected in zip(found, mixes_loop(streams, fn, scale, base, iterations), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=2e-5, atol=2e-6)


def test_released_kernels_vector():
    """Catches a transposed comb: numbers of the released kernel, whose comb is far from symmetric."""
    v = VECTORS["sinkhorn"]
    mixes = torch.tensor([3 * math.sin(1.7 * i + 0.4) for i in range(24)])
    fn = (mixes / 4).unsqueeze(1).expand(24, 4).contiguous()  # four copies of one value 1: fn . flat / rms = mixes
    scale, base = torch.tensor(v["scale"], dtype=torch.float32), torch.linspace(0.3, -0.3, 24)
    found = kernels.hc_mixes(torch.ones(1, 4, 1), fn, scale, base, iterations=20, norm_eps=0.0, eps=EPS)
    for ours, name in zip(found, ("pre", "post", "comb"), strict=True):
        torch.testing.assert_close(ours[0], torch.tensor(v[name]), rtol=1e-5, atol=1e-6)


def test_extreme_mixes_stay_finite():
    """Catches an exp that overflows: gates saturate, and the Sinkhorn subtracts its maximum."""
    base = torch.tensor([200.0, -200.0, 200.0, -200.0, 300.0, -300.0, -300.0, 300.0])
    streams, fn = torch.ones(1, 2, 1), torch.zeros(8, 2)
    pre, post, comb = kernels.hc_mixes(streams, fn, torch.ones(3), base, iterations=20, norm_eps=1e-20, eps=EPS)
    torch.testing.assert_close(pre, torch.tensor([[1 + EPS, EPS]]))
    torch.testing.assert_close(post, torch.tensor([[2.0, 0.0]]))
    torch.testing.assert_close(comb, torch.eye(2)[None], rtol=0, atol=1e-5)


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_hc_expand_reads_comb_by_source_copy(copies):
    """Catches comb used untransposed: rows are source copies, and this comb is not symmetric."""
    y, streams = torch.randn(3, 5), torch.randn(3, copies, 5)
    post, comb = torch.rand(3, copies), torch.rand(3, copies, copies)
    expected = torch.zeros(3, copies, 5, dtype=torch.float64)
    for t in range(3):
        for k in range(copies):
            expected[t, k] = float(post[t, k]) * y[t].double()
            for i in range(copies):
                expected[t, k] += float(comb[t, i, k]) * streams[t, i].double()
    torch.testing.assert_close(kernels.hc_expand(y, streams, post, comb).double(), expected, rtol=1e-5, atol=1e-6)
    weighted = sum(post[:, i, None].double() * streams[:, i].double() for i in range(copies))
    torch.testing.assert_close(kernels.hc_collapse(streams, post).double(), weighted, rtol=1e-5, atol=1e-6)


def test_sinkhorn_is_doubly_stochastic():
    """Catches a normalisation that is left out: sums over sources and over targets are 1 after 20 iterations."""
    comb = kernels.sinkhorn(torch.randn(50, 4, 4), 20, EPS)
    for dim in (1, 2):
        torch.testing.assert_close(comb.sum(dim), torch.ones(50, 4), rtol=0, atol=1e-4)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_is_the_same_with_and_without_gradients(iterations):
    """Catches twins that drift apart: the path that records gradients and the one that does not are separate code."""
    logits = 3 * torch.randn(6, 4, 4, dtype=torch.float64)
    plain = kernels.sinkhorn(logits, iterations, EPS)
    recorded = kernels.sinkhorn(logits.clone().requires_grad_(), iterations, EPS)
    torch.testing.assert_close(plain, recorded.detach(), rtol=1e-13, atol=1e-15)
    expected = [sinkhorn_loop(z, iterations, EPS) for z in logits.tolist()]
    torch.testing.assert_close(plain, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_inference_before_training_leaves_gradients_usable():
    """Catches a cached tensor that was made under inference mode, which a later backward pass could not use."""
    streams, fn, scale, base = random_mixes(3, torch.float64)
    with torch.inference_mode():
        kernels.hc_mixes(streams, fn, scale, base, iterations=2, norm_eps=1e-20, eps=EPS)
    scale.requires_grad_()
    kernels.hc_mixes(streams, fn, scale, base, iterations=2, norm_eps=1e-20, eps=EPS)[0].sum().backward()
    assert scale.grad is not None and float(scale.grad[0]) != 0


def test_hyper_connection_gradients():
    """Catches a detached coefficient: gradients of every input of mixes, expand and collapse."""
    streams, fn, scale, base = (x.requires_grad_() for x in random_mixes(2, torch.float64, tokens=2))

    def mixes(*inputs: Tensor) -> tuple[Tensor, ...]:
        return kernels.hc_mixes(*inputs, iterations=3, norm_eps=1e-20, eps=EPS)

    assert torch.autograd.gradcheck(mixes, (streams, fn, scale, base))
    shapes = ((2, 3), (2, 2, 3), (2, 2), (2, 2, 2))
    y, wide, post, comb = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    assert torch.autograd.gradcheck(kernels.hc_expand, (y, wide, post, comb))
    assert torch.autograd.gradcheck(kernels.hc_collapse, (wide, post))


def test_engram_gate():
    """Catches a norm over all copies together, a lost sign, and sigmoid before the root, in values and gradients."""
    streams, key = (torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.zeros(2, 3, dtype=torch.float64)
    for t in range(2):
        for m in range(3):
            a, b, w = (x.tolist() for x in (streams[t, m], key[t, m], weight[m]))
            norms = math.sqrt(sum(x * x for x in a) / 4) * math.sqrt(sum(x * x for x in b) / 4)
            dot = sum(x * y * z for x, y, z in zip(a, w, b, strict=True)) / norms / 2
            expected[t, m] = sigmoid(math.copysign(math.sqrt(abs(dot)), dot))
    torch.testing.assert_close(kernels.engram_gate(streams, key, weight, 1e-20), expected)
    assert torch.autograd.gradcheck(lambda *x: kernels.engram_gate(*x, 1e-20), (streams, key, weight))


def test_rms_norm_rounds_once():
    """Catches a product with the weight after rounding to bf16: the result is the float64 one, rounded once."""
    x, weight = torch.randn(20, 64).bfloat16(), torch.randn(64)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    found = kernels.rms_norm(x, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    assert (found != expected.float().bfloat16()).sum() <= 2  # float32 sums may move a number over a rounding border


@pytest.mark.parametrize("shape", [(3, 10), (3, 2, 10)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotate_pairs(shape, dtype):
    """Catches half-split instead of adjacent pairs, the head rotated instead of the tail, a wrong inverse, and an input
    changed in place."""
    x = torch.randn(*shape, dtype=dtype)
    before = x.clone()
    angles = torch.randn(3, 2, dtype=torch.float64)
    acc = kernels.accumulator(dtype)
    turns = torch.polar(torch.ones(3, 2, dtype=acc), angles.to(acc))
    expected = x.double().clone()
    for t in range(3):
        for row in expected[t].view(-1, 10):
            for j in range(2):
                z = complex(row[6 + 2 * j], row[7 + 2 * j]) * cmath.exp(1j * float(angles[t, j]))
                row[6 + 2 * j], row[7 + 2 * j] = z.real, z.imag
    found = kernels.rotate_pairs(x, turns)
    assert found.dtype == dtype and torch.equal(x, before)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    back = kernels.rotate_pairs(found, turns, inverse=True)
    torch.testing.assert_close(back, before, rtol=2 * tolerance, atol=2 * tolerance)


def test_rotate_pairs_of_a_view_and_its_gradient():
    """Catches a product in place that reaches the caller's memory or breaks autograd: a strided view of a leaf."""
    leaf = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    turns = torch.polar(torch.ones(2, 1, dtype=torch.float64), torch.randn(2, 1, dtype=torch.float64))
    for inverse in (False, True):
        assert torch.autograd.gradcheck(
            lambda x, inverse=inverse: kernels.rotate_pairs(x.transpose(1, 2), turns, inverse=inverse), (leaf,)
        )


def test_rotate_halves():
    """Catches adjacent pairs instead of halves, and the tail rotated instead of the head."""
    x, angles = torch.randn(3, 2, 7, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    expected = x.clone()
    for t in range(3):
        for row in expected[t]:
            for j in range(2):
                z = complex(row[j], row[j + 2]) * cmath.exp(1j * float(angles[t, j]))
                row[j], row[j + 2] = z.real, z.imag
    turns = torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(kernels.rotate_halves(x, turns), expected)
