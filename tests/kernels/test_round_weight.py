"""Weights rounded as a checkpoint stores them, without going through its bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from finback.base.formats import FORMATS, Format
from finback.kernels.torch.quant import dequantize, quantize_weight, round_weight

SCALED = [fmt for fmt in FORMATS.values() if fmt.block is not None]
FLOATS = [FORMATS[name] for name in ("f32", "bf16", "f16")]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("fmt", [*SCALED, *FLOATS], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(70, 96), (3, 64, 64), (64,)])
def test_rounding_is_writing_and_reading(fmt: Format, shape: tuple[int, ...], rng: torch.Generator) -> None:
    """To the bit, signs of zero included: training would otherwise run on other weights than those that are served.
    Wide exponents reach subnormal numbers and scales, ties, blocks of zeros and partial blocks."""
    if fmt.block is not None and fmt.block[0] > 1 and len(shape) == 1:
        shape = (1, *shape)
    w = torch.randn(shape, generator=rng) * 2.0 ** torch.randint(-12, 9, shape, generator=rng)
    w.view(-1)[::7] = (w.view(-1)[::7] * 4).round() / 4  # ties of FP4 and FP8
    w[..., :16] = 0
    w[..., 20:22] *= -1e-9
    for scale in (1.0, 2.0**-110, 2.0**-9):
        expected = dequantize(*quantize_weight(w * scale, fmt), fmt)
        assert torch.equal(bits(round_weight(w * scale, fmt)), bits(expected))
        assert torch.equal(bits(round_weight((w * scale).double(), fmt)), bits(expected))


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.name)
def test_a_weight_that_is_not_a_number_stays_so(fmt: Format, rng: torch.Generator) -> None:
    """A run that diverged must be seen as such, not go on from a plausible number."""
    w = torch.randn(64, 64, generator=rng)
    w[40, 40] = float("nan")
    assert round_weight(w, fmt)[40, 40].isnan()
