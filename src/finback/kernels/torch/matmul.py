"""Products with weights in torch.

On a CPU without native bf16 products, torch multiplies bf16 matrices an order of magnitude below the machine's rate,
and never returns the float32 sums. `pack_linear` therefore keeps a weight whose values are exact in float16 (every decoded
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
    """A weight [n, k] for `packed_linear`: FBGEMM's opaque form of weight / scale. scale: [1] float32, a power of two;
    None means 1."""

    data: Any
    scale: Tensor | None
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
            data = torch.ops.quantized.linear_prepack_fp16(wide, None)
            return PackedWeight(data, None if scale == 1.0 else torch.tensor([scale]), tuple(weight.shape))
    return None


def _scale_for_half(weight: Tensor) -> float:
    """The power of two that moves the largest magnitude to float16's top binade."""
    peak = max(abs(float(weight.min())), abs(float(weight.max())))
    return 2.0 ** (int(torch.tensor(peak).frexp().exponent) - 15)


def packed_linear(x: Tensor, weight: PackedWeight, dtype: torch.dtype | None = None) -> Tensor:
    # The scale goes into x, the smaller side, in the operation that widens it: exact, since it is a power of two.
    wide = x.float() if weight.scale is None else x * weight.scale
    y = torch.ops.quantized.linear_dynamic_fp16(wide, weight.data)
    dtype = x.dtype if dtype is None else dtype
    return y if y.dtype == dtype else y.to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is not None and dtype != x.dtype:
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return F.linear(x, weight, bias)
