"""Routing with groups against loops over a few numbers."""

from __future__ import annotations

import pytest
import torch

from finback.nn.moe import Router
from finback.nn.tape import Tape


def loop_pick(scores: list[float], groups: int, kept: int, k: int, best: int) -> list[int]:
    """Experts of the `kept` groups with the largest sum of `best` scores; ties to the lowest index everywhere."""
    size = len(scores) // groups
    parts = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
    worth = [sum(sorted((scores[e] for e in part), reverse=True)[:best]) for part in parts]
    chosen = sorted(range(groups), key=lambda g: (-worth[g], g))[:kept]
    allowed = [e for g in sorted(chosen) for e in parts[g]]
    return sorted(allowed, key=lambda e: (-scores[e], e))[:k]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_groups_are_ranked_as_released(bias: bool, score: str, rng: torch.Generator):
    """Groups ranked by their best score where the two best count or the other way round, by scores without bias, or
    dropped experts that come back when kept ones have a negative biased score."""
    router = Router(12, 12, 3, score=score, scale=2.0, normalise=True, bias=bias, groups=4, kept_groups=2)
    with torch.no_grad():
        router.weight.copy_(torch.eye(12))
        if router.bias is not None:
            router.bias.copy_(torch.randn(12, generator=rng) - 1)
    logits = torch.randn(40, 12, generator=rng).mul(2).round() / 2  # in halves: ties happen
    weights, experts = router(logits, None, Tape(), "layer0")
    plain = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    biased = plain if router.bias is None else plain + router.bias
    for line, found, weight, raw in zip(biased, experts, weights, plain, strict=True):
        wanted = loop_pick(line.tolist(), 4, 2, 3, 2 if bias else 1)
        assert found.tolist() == wanted
        assert torch.allclose(weight, 2.0 * raw[wanted] / raw[wanted].sum())


def test_equal_groups_and_experts_go_to_the_lowest():
    """An unstable top-k, which picks differently on every device and batch size."""
    router = Router(4, 16, 4, score="sigmoid", scale=1.0, normalise=True, bias=True, groups=8, kept_groups=3)
    with torch.no_grad():
        router.weight.zero_()
        assert router.bias is not None
        router.bias.zero_()
    _, experts = router(torch.ones(5, 4), None, Tape(), "layer0")
    assert experts.tolist() == [[0, 1, 2, 3]] * 5
