"""`sparse_attention` without a sink and with values narrower than keys, as latent attention needs it."""

from __future__ import annotations

import pytest
import torch

from finback import kernels
from finback.kernels.torch import attention


@pytest.mark.parametrize("block", [1 << 22, 40])
def test_values_are_the_first_part_of_a_row(block: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch):
    """Values cut from the wrong side, or scores over the value's width only; also when tokens are cut into blocks."""
    monkeypatch.setattr(attention, "_BLOCK", block)
    q = torch.randn(5, 3, 10, generator=rng, dtype=torch.float64)
    rows = torch.randn(7, 10, generator=rng, dtype=torch.float64)
    index = torch.tensor([[0, -1, 3], [6, 5, -1], [2, 2, 1], [-1, -1, 4], [0, 1, 2]])
    out = kernels.sparse_attention(q, [(rows, index)], None, 0.3, value_width=6)
    for t, picks in enumerate(index.tolist()):
        chosen = rows[[row for row in picks if row >= 0]]
        weights = (q[t] @ chosen.T * 0.3).softmax(-1)
        assert torch.allclose(out[t], weights @ chosen[:, :6], atol=1e-12)


def test_a_token_without_rows_gives_zero_without_a_sink(rng: torch.Generator):
    """0 / 0: a softmax over nothing is NaN, in the result or, where that is masked, in the gradient."""
    q = torch.randn(2, 3, 8, generator=rng, requires_grad=True)
    rows = torch.randn(4, 8, generator=rng, requires_grad=True)
    out = kernels.sparse_attention(q, [(rows, torch.tensor([[-1, -1], [1, 2]]))], None, 1.0, value_width=4)
    assert not out[0].any() and out[1].all()
    out.sum().backward()
    assert q.grad is not None and rows.grad is not None
    assert not q.grad[0].any() and bool(q.grad.isfinite().all()) and bool(rows.grad.isfinite().all())
