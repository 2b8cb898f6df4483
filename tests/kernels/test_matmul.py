"""Products with plain and packed weights against float64."""

from __future__ import annotations

import pytest
import torch

from finback import kernels
from finback.kernels.torch import matmul as twin

needs_packing = pytest.mark.skipif(not twin.can_pack(), reason="this build of torch has no FBGEMM")


def test_linear_computes_in_the_type_asked_for():
    """Catches a product in bf16 that is widened afterwards."""
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    bias = torch.randn(5).bfloat16()
    expected = x.double() @ weight.double().t() + bias.double()
    found = kernels.linear(x, weight, bias, torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@needs_packing
@pytest.mark.parametrize("shape", [(33, 48), (520, 512)])  # below and above the size that is packed to float16
@pytest.mark.parametrize("size", [1.0, 2.0**-20, 2.0**20])
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_packed_linear(size, tokens, shape):
    """Catches a lost or twice applied scale: weights that float16 holds, and far too small and large ones."""
    weight, x = (size * torch.randn(*shape)).bfloat16(), torch.randn(tokens, shape[1]).bfloat16()
    packed = kernels.pack_linear(weight)
    assert packed is not None and packed.shape == shape
    expected = x.double() @ weight.double().t()
    wide = kernels.packed_linear(x, packed, torch.float32)
    torch.testing.assert_close(wide.double() / size, expected / size, rtol=1e-5, atol=1e-4)
    rounded = kernels.packed_linear(x, packed)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, wide.bfloat16())
    again = kernels.packed_linear(x.float(), packed)
    assert again.dtype == torch.float32 and torch.equal(again, wide)


@needs_packing
@pytest.mark.parametrize("shape", [(33, 48), (520, 512)])
def test_packing_is_exact_or_refused(shape):
    """Catches values that float16 cannot hold and that come back rounded: numbers 2^40 apart in one matrix."""
    weight = torch.zeros(*shape, dtype=torch.bfloat16)
    weight[0, 0], weight[1, 1] = 1.0, 1.0078125 * 2.0**-40
    assert kernels.pack_linear(weight) is None
    weight[1, 1] = 1.0078125 * 2.0**-24
    packed = kernels.pack_linear(weight)
    assert packed is not None
    columns = kernels.packed_linear(torch.eye(shape[1]), packed)
    assert torch.equal(columns.t().bfloat16(), weight)


def test_only_bf16_weights_are_packed():
    """Catches float32 and float64 weights that are cut down to half precision."""
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert kernels.pack_linear(torch.randn(4, 4).to(dtype)) is None


@needs_packing
def test_zero_weights_can_be_packed():
    """Catches a logarithm of a peak of 0."""
    packed = kernels.pack_linear(torch.zeros(520, 512, dtype=torch.bfloat16))
    assert packed is not None
    assert torch.equal(kernels.packed_linear(torch.ones(2, 512), packed), torch.zeros(2, 520))
