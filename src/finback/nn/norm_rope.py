"""RMSNorm, LayerNorm and rotary tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from finback import kernels


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, in float32 (float64), rounded once."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=kernels.accumulator(torch.get_default_dtype())))

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim, in float32 (float64), rounded once."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        acc = kernels.accumulator(torch.get_default_dtype())
        self.weight = nn.Parameter(torch.empty(dim, dtype=acc))
        self.bias = nn.Parameter(torch.empty(dim, dtype=acc))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.weight.dtype)
        return nn.functional.layer_norm(wide, wide.shape[-1:], self.weight, self.bias, self.eps).to(x.dtype)


@dataclass(frozen=True)
class Yarn:
    """Context extension by YaRN: frequencies that turn less than beta_slow times over `original` positions are
    divided by `factor`, those that turn more than beta_fast times are kept, a linear ramp lies between."""

    factor: float
    original: int
    beta_fast: float = 32
    beta_slow: float = 1


def inverse_frequencies(dim: int, theta: float, yarn: Yarn | None = None) -> Tensor:
    """[dim / 2] float32 angles per position, computed in float32 as the released models do."""
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))
    if yarn is None:
        return freqs

    def dim_of(turns: float) -> float:
        """The (fractional) dim whose wave makes `turns` turns over the original context."""
        return dim * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dim_of(yarn.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 1e-3)
    keep = 1 - ramp.clamp(0, 1)
    return freqs / yarn.factor * (1 - keep) + freqs * keep


def turns_at(positions: Tensor, freqs: Tensor, dtype: torch.dtype) -> Tensor:
    """Unit complex numbers [T, r] for positions [T] int64 and frequencies [r]: complex64, complex128 for float64
    models.

    REF: the angle is a float32 product at every position, as in the released models; at positions near a million that
    angle carries an error of some hundredths, and the weights were trained with it.
    """
    freqs = freqs if freqs.device == positions.device else freqs.to(positions.device)
    angles = kernels.cast(torch.outer(positions.float(), freqs), kernels.accumulator(dtype))
    return torch.polar(torch.ones_like(angles), angles)
