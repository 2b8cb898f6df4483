"""The KL that teaches indexers."""

from __future__ import annotations

import torch

from finback.nn.teacher import selection_kl


def test_kl_is_that_of_the_mass_normalised_once(rng: torch.Generator):
    """Against the textbook formula; a teacher that is normalised per head before the sum gives another number."""
    scores = torch.randn(6, 5, dtype=torch.float64, generator=rng)
    mass = torch.rand(6, 5, dtype=torch.float64, generator=rng) * 3
    index = torch.arange(5).expand(6, 5).clone()
    index[:, 3:] = -1
    p = mass[:, :3] / mass[:, :3].sum(1, keepdim=True)
    expected = (p * (p.log() - scores[:, :3].log_softmax(1))).sum(1).mean()
    assert torch.allclose(selection_kl(scores, mass, index), expected, atol=1e-12)


def test_tokens_without_rows_are_left_out(rng: torch.Generator):
    """The mean counts only tokens that have rows, and neither loss nor gradient is NaN or enormous for the others:
    taking the logarithm of an empty softmax gave losses of 1e29."""
    scores = torch.randn(4, 3, generator=rng).masked_fill(torch.tensor([[True], [False], [True], [False]]), -torch.inf)
    scores.requires_grad_()
    mass = torch.rand(4, 3, generator=rng)
    index = torch.tensor([[-1] * 3, [0, 1, 2], [-1] * 3, [0, -1, -1]])
    mass[1, 2] = 0  # attention that vanished: 0 log 0 is 0
    loss = selection_kl(scores, mass, index)
    alone = selection_kl(scores[1:2], mass[1:2], index[1:2])
    assert torch.allclose(loss, alone / 2)  # the token with one row has nothing to learn, but counts
    loss.backward()
    assert scores.grad is not None and torch.isfinite(scores.grad).all() and not scores.grad[::2].any()
    assert float(selection_kl(scores[::2], mass[::2], index[::2])) == 0
