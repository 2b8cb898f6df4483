"""Dense causal attention of packed sequences against plain formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from finback import kernels
from finback.kernels.torch import dense_attention


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, derf: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    """One sequence, query by query and head by head."""
    m, heads, _ = q.shape
    n, groups, width = v.shape
    out = torch.zeros(m, heads, width, dtype=torch.float64)
    for i in range(m):
        seen = n - m + i + 1
        for h in range(heads):
            g = h // (heads // groups)
            z = k[:seen, g] @ q[i, h] * scale
            if derf is None:
                weights = (z - z.max()).exp()
                weights = weights / weights.sum()
            else:
                alpha, bias, gamma = (p[h] for p in derf)
                weights = gamma * (torch.erf(alpha * z + bias) + 1) / 2
                weights = weights / (weights.sum() + 1e-8)
            out[i, h] = weights @ v[:seen, g]
    return out


@pytest.mark.parametrize("block", [1 << 22, 40])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("with_derf", [False, True])
def test_equals_the_formula(groups: int, with_derf: bool, block: int, rng: torch.Generator, monkeypatch):
    """Would catch heads on the wrong key head, a causal mask aligned to the first row instead of the last, and query
    blocks that see too few or too many rows; sequences of 0, 1 and several new tokens with and without a past."""
    monkeypatch.setattr(dense_attention, "_BLOCK", block)
    lengths, totals = [3, 0, 1, 4, 1], [3, 2, 6, 9, 1]
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    q = draw(sum(lengths), 4, 6)
    keys, values = [draw(n, groups, 6) for n in totals], [draw(n, groups, 5) for n in totals]
    derf = (draw(4), draw(4), draw(4)) if with_derf else None
    got = kernels.causal_attention(q, keys, values, lengths, 0.4, derf=derf)
    wanted = [plain(*part, 0.4, derf) for part in zip(q.split(lengths), keys, values, strict=True)]
    torch.testing.assert_close(got, torch.cat(wanted), atol=1e-12, rtol=0)


def test_dropout_zeroes_weights_and_keeps_the_mean(rng: torch.Generator):
    """Would catch a dropout that is never applied, or applied without scaling the weights that are left."""
    q = torch.zeros(64, 1, 4)
    ones = torch.ones(64, 1, 4)
    for derf in (None, tuple(torch.ones(1) for _ in range(3))):
        out = kernels.causal_attention(q, [ones], [ones], [64], 1.0, derf=derf, dropout=0.5)
        assert float(out.std()) > 0.05
        assert abs(float(out[32:].mean()) - 1) < 0.2


def test_exclude_self_leaves_nothing_along_the_own_value(rng: torch.Generator):
    """Would catch a projection on another head's value, and one that is not normalised."""
    y = torch.randn(5, 6, 8, generator=rng, dtype=torch.float64)
    own = torch.randn(5, 2, 8, generator=rng, dtype=torch.float64)
    out = kernels.exclude_self(y, own)
    values = own.repeat_interleave(3, dim=1)
    torch.testing.assert_close((out * values).sum(-1), torch.zeros(5, 6, dtype=torch.float64), atol=1e-6, rtol=0)
    along = ((y - out) * values).sum(-1).abs() / values.norm(dim=-1)
    torch.testing.assert_close((y - out).norm(dim=-1), along)
