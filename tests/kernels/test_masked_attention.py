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
