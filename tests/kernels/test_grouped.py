"""Experts without a loop against the loop, which knows nothing of sorting, padding or groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from finback import kernels
from finback.kernels.torch import grouped
from finback.nn.moe import Experts


def picks_of(tokens: int, n_experts: int, k: int) -> Tensor:
    """K of all experts but the second, which stays without a token."""
    allowed = torch.tensor([e for e in range(n_experts) if e != 1])
    return torch.stack([allowed[torch.randperm(len(allowed))[:k]] for _ in range(tokens)])


def filled(experts: Experts) -> Experts:
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    return experts


def both_forms(module: Experts, x: Tensor, weights: Tensor, experts: Tensor, out: Tensor) -> list[list[Tensor]]:
    """Result and gradients by the loop (as under `deterministic`) and by groups."""
    leaves = [x, weights, out, *module.parameters()]
    results = []
    for looped in (True, False):
        y = kernels.for_each_expert(x, weights, experts, module._run, out) if looped else module(
            x, weights, experts, out
        )  # fmt: skip
        results.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)])
    return results


@pytest.mark.parametrize("weigh_output", [False, True])
@pytest.mark.parametrize("tokens", [1, 13])
def test_groups_equal_the_loop(tokens: int, weigh_output: bool):
    """Catches rows of a wrong expert, weights of another place, and an expert without tokens whose gradient is whatever
    the memory held: results and all gradients in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        module = filled(Experts(5, 6, 4, limit=2.0, weigh_output=weigh_output))
    finally:
        torch.set_default_dtype(torch.float32)
    x, weights, out = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((tokens, 6), (tokens, 3), (tokens, 6))
    )
    for loop, groups in zip(*both_forms(module, x, weights, picks_of(tokens, 5, 3), out), strict=True):
        torch.testing.assert_close(groups, loop, rtol=1e-12, atol=1e-12)


def test_padded_groups_equal_the_loop(monkeypatch: pytest.MonkeyPatch):
    """The GPU's form, which a CPU can run too: grouped products in bf16 over padded groups. Padding must reach neither
    results nor gradients, although it repeats a real token, and no row may be left unwritten."""
    monkeypatch.setattr(grouped, "has_grouped_products", lambda device, dtype: True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = filled(Experts(4, 16, 8))
    finally:
        torch.set_default_dtype(torch.float32)
    x = torch.randn(21, 16).bfloat16().requires_grad_()
    weights, out = torch.rand(21, 2, requires_grad=True), torch.randn(21, 16, requires_grad=True)
    experts = picks_of(21, 4, 2)
    found = kernels.group_rows(experts, module.w13)
    assert found.padded and int(found.ends[-1]) == len(found.token) == 21 * 2 + 4 * 15
    assert not (found.ends[:-1] % 16).any() and not kernels.spread_weights(weights, found).isnan().any()
    for loop, groups in zip(*both_forms(module, x, weights, experts, out), strict=True):
        scale = loop.float().abs().max()
        assert (groups.float() - loop.float()).abs().max() <= 0.02 * scale


def test_gradients_of_a_grouped_product():
    """gradcheck of the product and of the two moves, also where a token's experts are neighbours in the sorted rows."""
    experts = torch.tensor([[2, 0], [0, 2], [2, 3]])
    stack = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    x, out = torch.randn(3, 2, dtype=torch.float64, requires_grad=True), torch.randn(3, 3, dtype=torch.float64)
    groups = kernels.group_rows(experts, stack)

    def run(x: Tensor, stack: Tensor) -> Tensor:
        return kernels.collect_rows(
            kernels.grouped_linear(kernels.spread_rows(x, groups), stack, groups).tanh(), groups, out
        )

    assert torch.autograd.gradcheck(run, (x, stack))
