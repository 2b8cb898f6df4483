"""Router scores, expert choice and the expert loop against float64 formulas written here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from finback import kernels


def softplus(x: float) -> float:
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


@pytest.mark.parametrize("logit", [-90.0, -20.0, -16.6, 0.0, 20.5, 200.0])
def test_sqrtsoftplus_over_its_whole_range(logit):
    """Catches log(1 + exp(x)), which is 0 below -16.6 in float32 (and then 0 / 0 in the routing weights), and infinity
    above 88."""
    found = kernels.router_scores(torch.full((1, 8), logit), "sqrtsoftplus")
    torch.testing.assert_close(found, torch.full((1, 8), math.sqrt(softplus(logit))), rtol=1e-5, atol=0)


def test_other_router_scores():
    """Catches swapped names."""
    logits = torch.randn(3, 5, dtype=torch.float64)
    masses = logits.exp()
    torch.testing.assert_close(kernels.router_scores(logits, "softmax"), masses / masses.sum(1, keepdim=True))
    torch.testing.assert_close(kernels.router_scores(logits, "sigmoid"), 1 / (1 + (-logits).exp()))


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_router_weight_gradients(score):
    """Catches scores that gradients do not pass through: normalised weights of fixed picks."""
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    picks = torch.tensor([[0, 3], [4, 1], [2, 0]])

    def weights(logits: Tensor) -> Tensor:
        chosen = kernels.router_scores(logits, score).gather(1, picks)
        return chosen / chosen.sum(1, keepdim=True)

    assert torch.autograd.gradcheck(weights, (logits,))


def test_top_experts_breaks_ties_to_the_lowest():
    """Catches torch.topk's order among equals: best first, equal ones by number."""
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0], [0.0] * 6])
    assert kernels.top_experts(scores, 4).tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    many = torch.zeros(1, 300)
    assert kernels.top_experts(many, 8).tolist() == [list(range(8))]


def test_swiglu():
    """Catches gate and up swapped, and a gate that is clamped from below too."""
    gate, up = torch.tensor([-9.0, 0.5, 9.0]), torch.tensor([9.0, -9.0, 0.5])
    both = torch.cat([gate, up])
    silu = [g / (1 + math.exp(-g)) for g in gate.tolist()]
    torch.testing.assert_close(
        kernels.swiglu(both), torch.tensor([s * u for s, u in zip(silu, up.tolist(), strict=True)])
    )
    two = 2 / (1 + math.exp(-2.0))
    expected = torch.tensor([silu[0] * 2.0, silu[1] * -2.0, two * 0.5])
    torch.testing.assert_close(kernels.swiglu(both, 2.0), expected)


def run_of(stack: Tensor):
    """Expert e: weights * tanh(x A_e)."""
    return lambda expert, x, weights: weights * torch.tanh(x @ stack[expert])


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_for_each_expert(tokens):
    """Catches a token's weight of another place, an expert that is skipped, and an accumulator that is changed: against
    a loop over tokens and places, with one token (its own path) and more."""
    experts = torch.stack([torch.randperm(5)[:3] for _ in range(tokens)])
    x, weights = torch.randn(tokens, 4, dtype=torch.float64), torch.rand(tokens, 3, dtype=torch.float64)
    stack, out = torch.randn(5, 4, 4, dtype=torch.float64), torch.randn(tokens, 4, dtype=torch.float64)
    expected, before = out.clone(), out.clone()
    for t in range(tokens):
        for place, expert in enumerate(experts[t].tolist()):
            expected[t] += weights[t, place] * torch.tanh(x[t] @ stack[expert])
    found = kernels.for_each_expert(x, weights, experts, run_of(stack), out)
    torch.testing.assert_close(found, expected)
    assert torch.equal(out, before)


def test_a_tokens_sum_has_one_order():
    """Catches sums whose order depends on the batch: experts 1e8, 1, -1e8 give 0 in ascending order and 1 in others."""
    values = torch.tensor([1e8, 1.0, -1e8])

    def run(expert: int, x: Tensor, weights: Tensor) -> Tensor:
        return values[expert].expand(len(x), 1)

    def sum_of(experts: list[list[int]]) -> list[float]:
        n = len(experts)
        out = kernels.for_each_expert(torch.ones(n, 1), torch.ones(n, 3), torch.tensor(experts), run, torch.zeros(n, 1))
        return out.flatten().tolist()

    assert sum_of([[2, 0, 1]]) == [0.0]
    assert sum_of([[2, 0, 1], [1, 0, 2], [0, 1, 2]]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("tokens", [1, 3])
def test_for_each_expert_gradients(tokens):
    """Catches an accumulation in place that autograd does not see."""
    experts = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
    inputs = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((tokens, 3), (tokens, 2), (4, 3, 3))]

    def loop(x: Tensor, weights: Tensor, stack: Tensor) -> Tensor:
        return kernels.for_each_expert(x, weights, experts, run_of(stack), F.relu(x))

    assert torch.autograd.gradcheck(loop, inputs)


def test_gradients_of_scores_stay_finite_far_below_zero() -> None:
    """sqrt(softplus(z)) underflows to 0 near z = -104 in float32, where sqrt's derivative is infinite: 0 * inf =
    NaN."""
    logits = torch.tensor([[-400.0, -110.0, -31.0, -29.0, 0.0, 5.0]], requires_grad=True)
    scores = kernels.router_scores(logits, "sqrtsoftplus")
    scores.sum().backward()
    z = logits.detach().double()
    softplus = torch.log1p(z.exp())
    exact = torch.where(z < -30, (z / 2).exp() / 2, z.sigmoid() / (2 * softplus.sqrt()))
    torch.testing.assert_close(logits.grad.double(), exact, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(
        scores.detach().double(), torch.where(z < -30, (z / 2).exp(), softplus.sqrt()), rtol=1e-5, atol=1e-30
    )
