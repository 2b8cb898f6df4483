"""Products with weights in torch.

On a CPU without native bf16 products, torch multiplies bf16 matrices an order of magnitude below the machine's rate, and
never returns the float32 sums. `pack_linear` therefore keeps a weight whose values are exact in float16 (every decoded
FP8/FP4 weight, and almost every bf16 one) in FBGEMM's packed float16 form: half the bytes of float32, float32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, k] for `packed_linear`: FBGEMM's opaque form of weight / scale, where scale is a power of two."""

    data: Any
    scale: float
    shape: tuple[int, int]


@lru_cache
def can_pack() -> bool:
    """Whether this machine's torch has FBGEMM's float16 products."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def pack_linear(weight: Tensor) -> PackedWeight | None:
    if not (can_pack() and weight.is_cpu and weight.dtype == torch.bfloat16 and weight.numel()):
        return None
    for scale in (1.0, _scale_for_half(weight)):
        wide = weight.detach().float() / scale
        if torch.equal(wide.half().float(), wide):
            return PackedWeight(torch.ops.quantized.linear_prepack_fp16(wide, None), scale, tuple(weight.shape))
    return None


def _scale_for_half(weight: Tensor) -> float:
    """The power of two that moves the largest magnitude to float16's top binade."""
    peak = max(abs(float(weight.min())), abs(float(weight.max())))
    return 2.0 ** (int(torch.tensor(peak).frexp().exponent) - 15)


def packed_linear(x: Tensor, weight: PackedWeight, dtype: torch.dtype | None = None) -> Tensor:
    y = torch.ops.quantized.linear_dynamic_fp16(x.float(), weight.data)
    if weight.scale != 1.0:
        y = y * weight.scale
    return y.to(x.dtype if dtype is None else dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is not None and dtype != x.dtype:
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return F.linear(x, weight, bias)
