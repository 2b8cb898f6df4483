"""Index scores of many sequences at once, the form that keeps a GPU busy."""

from __future__ import annotations

import pytest
import torch

from finback import kernels
from finback.kernels.torch import attention


@pytest.mark.parametrize("block", [1, 200, 1 << 22])
def test_equal_to_one_sequence_at_a_time(block: int, monkeypatch: pytest.MonkeyPatch):
    """Catches filling that is handed out as tokens, keys of a neighbour, and tokens left out where sequences are
    empty, have no keys, or do not fit into one block."""
    monkeypatch.setattr(attention, "_BLOCK", block)
    lengths, counts = [5, 0, 9, 1, 9], [2, 0, 4, 0, 4]
    q = torch.randn(sum(lengths), 3, 4, dtype=torch.float64)
    weights = torch.randn(sum(lengths), 3, dtype=torch.float64)
    keys = [torch.randn(n, 4, dtype=torch.float64) for n in counts]
    found = torch.full((len(q), 4), torch.nan, dtype=torch.float64)
    for tokens, scores in kernels.index_scores_of_sequences(q, weights, keys, lengths):
        assert found[tokens].isnan().all()
        found[tokens, : scores.shape[1]] = scores
    start = 0
    for length, each in zip(lengths, keys, strict=True):
        part = slice(start, start + length)
        if length:
            alone = kernels.index_scores(q[part], weights[part], each)
            torch.testing.assert_close(found[part, : len(each)], alone, rtol=1e-12, atol=1e-12)
        start += length
