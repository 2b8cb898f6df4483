"""Products with weights in torch.

On a CPU without native bf16 products, torch multiplies bf16 matrices an order of magnitude below the machine's rate,
and never returns the float32 sums. `pack_linear` therefore keeps a weight whose values are exact in float16 (every
decoded FP8/FP4 weight, almost every bf16 one) in FBGEMM's packed float16 form: half the bytes of float32, float32 sums.
Weights so small that FBGEMM's cost per call outweighs their bytes become float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from finback.kernels.torch import fixed

_SMALL = 1 << 18  # values; measured: one row times 256 x 1024 takes as long in either form


@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, k] for `packed_linear`. data: a float32 matrix, or FBGEMM's opaque form of weight / scale.
    scale: [1] float32, a power of two; None means 1."""

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
    shape, wide = (weight.shape[0], weight.shape[1]), weight.detach().float()
    for scale in (1.0, _scale_for_half(weight)):
        scaled = wide if scale == 1.0 else wide / scale
        if torch.equal(scaled.half().float(), scaled):
            if weight.numel() <= _SMALL:
                return PackedWeight(wide, None, shape)
            data = torch.ops.quantized.linear_prepack_fp16(scaled, None)
            return PackedWeight(data, None if scale == 1.0 else torch.tensor([scale], dtype=torch.float32), shape)
    return None


def _scale_for_half(weight: Tensor) -> float:
    """The power of two that moves the largest magnitude to float16's top binade."""
    peak = max(abs(float(weight.min())), abs(float(weight.max())))
    return 2.0 ** (int(torch.tensor(peak).frexp().exponent) - 15)


def packed_linear(x: Tensor, weight: PackedWeight, dtype: torch.dtype | None = None) -> Tensor:
    if weight.scale is not None:
        wide = x * weight.scale  # exact, on the smaller side, and in the operation that widens
    else:
        wide = x if x.dtype == torch.float32 else x.float()
    if isinstance(weight.data, Tensor):
        y = linear(wide, weight.data)
    elif fixed.deterministic.get():
        y = fixed.packed_rows(wide, lambda rows: torch.ops.quantized.linear_dynamic_fp16(rows, weight.data))
    else:
        y = torch.ops.quantized.linear_dynamic_fp16(wide, weight.data)
    dtype = x.dtype if dtype is None else dtype
    return y if y.dtype == dtype else y.to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    dtype = x.dtype if dtype is None else dtype
    if not x.dtype == weight.dtype == dtype:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if fixed.deterministic.get():
        return fixed.in_row_blocks(x, lambda rows: F.linear(rows, weight, bias))
    return F.linear(x, weight, bias)
