"""Products with weights: packed and plain forms agree, inputs are rounded once, sums are wide where it matters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from finback import kernels
from finback.nn.linear import ActRound, Embedding, GroupedLinear, Head, Linear, Weight, prepare


@pytest.fixture
def bf16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def filled(module: Any, rng: torch.Generator) -> Any:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=rng))
    return module.requires_grad_(False)


def test_rounding_happens_once_and_before_the_product(rng: torch.Generator) -> None:
    """Linears that share an input share its rounding; rounding the result, or twice, gives other numbers."""
    linear = filled(Linear(5, 64, rounds=ActRound(32)), rng)
    x = torch.randn(3, 64, generator=rng)
    rounded = kernels.round_e4m3(x, 32, True)
    assert not rounded.equal(x)
    assert linear(x).equal(rounded @ linear.weight.T)
    assert linear.multiply(linear.round(x)).equal(linear(x))
    assert linear.multiply(x).equal(x @ linear.weight.T)
    assert filled(Linear(5, 64), rng).round(x) is x


def test_grouped_weights_are_stored_group_after_group(rng: torch.Generator) -> None:
    """Rows of another group, or heads dealt out in turns, still have the right shape."""
    grouped = filled(GroupedLinear(3, 4, 5), rng)
    x = torch.randn(7, 3, 5, generator=rng)
    expected = torch.stack([x[:, g] @ grouped.weight[4 * g : 4 * g + 4].T for g in range(3)], dim=1)
    assert torch.allclose(grouped(x), expected, atol=1e-6)


@pytest.mark.usefixtures("bf16")
def test_logits_are_summed_and_kept_in_float32(rng: torch.Generator) -> None:
    """bfloat16 logits tie: the likeliest of 129k tokens would often be the one with the lowest id."""
    head = filled(Head(50, 64), rng)
    x = torch.randn(2, 64, generator=rng).bfloat16()
    exact = x.double() @ head.weight.double().T
    assert head(x).dtype == torch.float32
    assert (head(x) - exact).abs().max() < 1e-4
    wide = x.double()
    assert Head(2, 64, dtype=torch.float64)(wide).dtype == torch.float64


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize("shape", [(48, 64), (544, 512)], ids=["small", "large"])
def test_packed_weights_multiply_like_plain_ones(shape: tuple[int, int], rng: torch.Generator) -> None:
    """The inference form holds other bytes of the same values: the sums must be float32 and rounded once. Small weights
    and large ones have forms of their own, and float16 alone would flush or overflow the values of two of these."""
    if kernels.pack_linear(torch.ones(4, 4, dtype=torch.bfloat16)) is None:
        pytest.skip("this torch has no packed products")
    n, k = shape
    model = nn.ModuleDict({name: Linear(n, k) for name in ("linear", "tiny", "huge")})
    model["grouped"] = GroupedLinear(2, n, k)
    filled(model, rng)
    model["tiny"].weight.mul_(2.0**-40)
    model["huge"].weight.mul_(2.0**40)
    x = torch.randn(9, k, generator=rng).bfloat16()
    exact = {name: part.weight.double() for name, part in model.items()}
    prepare(model)
    assert all(part.weight is None and part.packed is not None for part in model.values())
    for name in ("linear", "tiny", "huge"):
        y, wide = x.double() @ exact[name].T, model[name].multiply(x, torch.float32)
        assert wide.dtype == torch.float32 and (wide - y).abs().max() < 1e-5 * y.abs().max()
        assert model[name](x).equal(wide.bfloat16())
    pair = torch.stack([x, -x], dim=1)
    y = torch.stack([x.double() @ exact["grouped"][:n].T, -x.double() @ exact["grouped"][n:].T], dim=1)
    assert (model["grouped"](pair) - y).abs().max() < 2**-7 * y.abs().max()


def test_values_that_float16_cannot_hold_are_kept(rng: torch.Generator) -> None:
    """A matrix with both tiny and large values loses the tiny ones in float16, whatever the scale."""
    weight = filled(Weight(520, 512, dtype=torch.bfloat16), rng)
    weight.weight[0, 0], weight.weight[2, 3] = 2.0**-60, 2.0**20
    values = weight.weight.clone()
    prepare(weight)
    one = torch.eye(512, dtype=torch.bfloat16)
    assert weight.multiply(one).T.equal(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_models_are_not_packed(dtype: torch.dtype, rng: torch.Generator) -> None:
    """float16 products in a float32 or float64 model would end all comparisons at 1e-3."""
    weight = filled(Weight(3, 4, dtype=dtype), rng)
    prepare(weight)
    assert weight.weight is not None and weight.weight.dtype == dtype


def test_embedding_rows_by_id(rng: torch.Generator) -> None:
    """Packing must leave tables alone that are looked up."""
    table = filled(Embedding(6, 3, dtype=torch.bfloat16), rng)
    prepare(table)
    ids = torch.tensor([5, 0, 5])
    assert table(ids).equal(table.weight[ids])
