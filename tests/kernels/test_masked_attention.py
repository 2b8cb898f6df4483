"""The dense form of sparse attention that training takes, and the attention mass that teaches indexers."""

from __future__ import annotations

import pytest
import torch

from finback import kernels
from finback.kernels.torch import attention, training


def scopes_of(rng: torch.Generator, tokens: int, width: int = 6):
    """A window of 5 and picks of 4 from 20 far rows, with -1, an empty token and a row picked twice."""
    near, far = (torch.randn(n, width, dtype=torch.float64, generator=rng) for n in (tokens, 20))
    window = torch.arange(tokens).unsqueeze(1) + torch.arange(-4, 1)
    picks = torch.randint(-1, 20, (tokens, 4), generator=rng)
    picks[2], picks[3] = -1, 7
    return [(near.requires_grad_(), window.clamp(min=-1)), (far.requires_grad_(), picks)]


@pytest.mark.parametrize("tokens", [1, 9, 300])
@pytest.mark.parametrize("with_sink", [True, False])
def test_masked_form_equals_the_sparse_one(rng: torch.Generator, tokens: int, with_sink: bool):
    """Results and all gradients; runs of 128 tokens, a row picked twice and tokens without rows must not differ."""
    q = torch.randn(tokens, 3, 6, dtype=torch.float64, generator=rng, requires_grad=True)
    sink = torch.randn(3, dtype=torch.float64, generator=rng, requires_grad=True) if with_sink else None
    scopes = scopes_of(rng, max(tokens, 4))
    scopes = [(rows, index[:tokens]) for rows, index in scopes]
    leaves = [q, *(rows for rows, _ in scopes), *([sink] if with_sink else [])]
    results = []
    for form in (attention.sparse_attention, training.masked_attention):
        y = form(q, scopes, sink, 0.4, value_width=5)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for sparse, dense in zip(*results, strict=True):
        assert torch.allclose(sparse, dense, atol=1e-9, rtol=0)


def packed_scopes(lengths: list[int], width: int, window: int, ratio: int):
    """Sequences one after another: a window of raw rows, and every finished group of `ratio` tokens."""
    near, far, raw, groups = [], [], 0, 0
    columns = max(lengths) // ratio
    for length in lengths:
        place = torch.arange(length).unsqueeze(1)
        back = place + torch.arange(1 - window, 1)
        near.append(torch.where(back < 0, -1, back + raw))
        group = torch.arange(columns).expand(length, -1)
        far.append(torch.where(group < (place + 1) // ratio, group + groups, -1))
        raw, groups = raw + length, groups + length // ratio
    tables = [torch.randn(n, width, dtype=torch.float64, requires_grad=True) for n in (raw, groups)]
    return list(zip(tables, (torch.cat(near), torch.cat(far)), strict=True))


@pytest.mark.parametrize(("fused", "dtype", "bound"), [
    (False, torch.float64, 1e-9), (True, torch.float64, 1e-9), (True, torch.bfloat16, 2**-5)
])  # fmt: skip
def test_runs_of_unequal_ranges(monkeypatch: pytest.MonkeyPatch, fused: bool, dtype: torch.dtype, bound: float):
    """Runs that see little are computed apart from those that see much, and each token gets its own result back: also
    by fused attention, which a CPU has too, with its filled-up widths and masks. bf16 products are within 2^-5 of the
    largest value of each gradient."""
    monkeypatch.setattr(training, "has_fused_attention", lambda q: fused)
    scopes = packed_scopes([700, 30, 330], 6, 40, 2)
    q = torch.randn(1060, 2, 6, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert len(training.layout_of(scopes).buckets) > 2
    leaves, results = [q, sink, *(rows for rows, _ in scopes)], []
    up = torch.randn(1060, 2, 6, dtype=torch.float64)
    for form, kind in ((attention.sparse_attention, torch.float64), (training.masked_attention, dtype)):
        y = form(q.to(kind), [(rows.to(kind), index) for rows, index in scopes], sink, 0.4)
        results.append([y, *torch.autograd.grad(y, leaves, up.to(kind))])
    for sparse, dense in zip(*results, strict=True):
        assert (sparse - dense).abs().max() <= bound * sparse.abs().max()


def test_picks_that_layers_share_are_sorted_and_masked_once():
    """Sorting them makes the host wait for a GPU, and masks are as large as scores: not in every layer, and not again
    for another type or window. What no layer uses any more is let go."""
    scopes = packed_scopes([300], 6, 40, 2)
    first = training.layout_of(scopes)
    again = training.layout_of([(rows + 1, index) for rows, index in scopes])
    q = torch.randn(300, 2, 6, dtype=torch.float64, requires_grad=True)
    training.masked_attention(q, scopes, None, 1.0)
    masks = dict(first.masks)
    training.masked_attention(q, scopes, None, 1.0)
    assert again is first and masks and all(first.masks[key] is mask for key, mask in masks.items())
    other = [(rows, index.clone()) for rows, index in scopes[:1]] + scopes[1:]
    assert training.layout_of(other) is not first
    before = len(training._layouts)
    del scopes, other
    assert len(training._layouts) < before


def test_a_scope_without_columns(rng: torch.Generator):
    """A sequence that is shorter than a compression group has no compressed row to pick: an index of width 0."""
    q = torch.randn(3, 2, 6, dtype=torch.float64, generator=rng, requires_grad=True)
    near = torch.randn(3, 6, dtype=torch.float64, generator=rng, requires_grad=True)
    window, none = torch.tensor([[-1, 0], [0, 1], [1, 2]]), torch.empty(3, 0, dtype=torch.int64)
    with_it = kernels.sparse_attention(q, [(near, window), (near[:0], none)], None, 0.4)
    assert torch.allclose(with_it, attention.sparse_attention(q, [(near, window)], None, 0.4), atol=1e-12)
    empty = training.masked_attention(q, [(near[:0], none)], None, 0.4)
    assert empty.shape == q.shape and not empty.any()


def test_masked_attention_gradients(rng: torch.Generator):
    """A mask that is applied after the softmax has the right values for one shape and wrong gradients for all."""
    q = torch.randn(5, 2, 6, dtype=torch.float64, generator=rng, requires_grad=True)
    scopes = [(rows, index[:5]) for rows, index in scopes_of(rng, 5)]
    sink = torch.randn(2, dtype=torch.float64, generator=rng, requires_grad=True)
    (near, window), (far, picks) = scopes
    assert torch.autograd.gradcheck(
        lambda q, a, b, s: training.masked_attention(q, [(a, window), (b, picks)], s, 0.4), (q, near, far, sink)
    )


def test_gradients_take_the_dense_form_and_inference_does_not(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch):
    """Gathered keys would fill the memory of a training step; dense scores would slow down a decode step."""
    used = []
    dense = training.masked_attention
    monkeypatch.setattr(training, "masked_attention", lambda *a, **k: used.append(1) or dense(*a, **k))
    q = torch.randn(12, 3, 32, dtype=torch.float64, generator=rng, requires_grad=True)
    scopes = scopes_of(rng, 12, width=32)
    kernels.sparse_attention(q, scopes, None, 1.0)
    assert used == [1]
    with torch.no_grad():
        kernels.sparse_attention(q, scopes, None, 1.0)
    spread = torch.arange(12).unsqueeze(1) * 1000  # one far row each: the dense range would be enormous
    kernels.sparse_attention(q, [(torch.randn(12_000, 32, dtype=torch.float64), spread)], None, 1.0)
    assert used == [1]


def test_attention_mass_is_the_joint_softmax_summed_over_heads(rng: torch.Generator):
    """A softmax per scope, or one that forgets the sink, would teach the indexer another distribution."""
    q = torch.randn(12, 3, 6, dtype=torch.float64, generator=rng)
    scopes = [(rows.detach(), index) for rows, index in scopes_of(rng, 12)]
    sink = torch.randn(3, dtype=torch.float64, generator=rng)
    masses = kernels.attention_mass(q, scopes, sink, 0.4)
    for t in range(12):
        logits = [0.4 * q[t] @ rows[index[t].clamp(min=0)].T for rows, index in scopes]
        weights = [torch.where(i[t] < 0, 0.0, z.exp()) for z, (_, i) in zip(logits, scopes, strict=True)]
        total = sum(w.sum(1) for w in weights) + sink.exp()
        for w, mass in zip(weights, masses, strict=True):
            assert torch.allclose((w / total.unsqueeze(1)).sum(0), mass[t], atol=1e-12)
