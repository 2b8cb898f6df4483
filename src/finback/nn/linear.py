"""Products with weights, in the form that the machine multiplies fastest.

Parameters hold decoded weights in the model's dtype (power-of-two scales make that exact in bf16). `Linear.prepare()`
replaces the parameter by a packed form for inference where the backend has one. A linear whose stored weight is
quantised rounds its input as the released kernels do, when the model's rounding policy says so (`ActRound`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from finback import kernels
from finback.base.runtime import release_freed_memory


@dataclass(frozen=True)
class ActRound:
    """FP8 rounding of a linear's input: one scale per `block` values of the last dim; pow2: power-of-two scales."""

    block: int = 32
    pow2: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.round_e4m3(x, self.block, self.pow2)


class Prepared(nn.Module):
    """A module whose weights have an inference form."""

    def prepare(self) -> None:
        """Switch to the packed form for inference where this machine has one; the parameters are given up."""
        raise AssertionError("every Prepared module has its own form")


class Weight(Prepared):
    """A matrix [n, k] that multiplies: a parameter `weight`, or after `prepare()` a packed form of it."""

    def __init__(self, n: int, k: int, *, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(n, k, dtype=dtype))
        self.packed: kernels.PackedWeight | None = None

    def prepare(self) -> None:
        if self.weight is not None and (packed := kernels.pack_linear(self.weight)) is not None:
            self.packed, self.weight = packed, None

    def multiply(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [..., k] -> [..., n], in `dtype` (default: x's)."""
        if self.packed is not None:
            return kernels.packed_linear(x, self.packed, dtype)
        assert self.weight is not None
        return kernels.linear(x, self.weight, dtype=dtype)


class Linear(Weight):
    """y = x W^T with x rounded first where the policy asks for it.

    Several linears of one input share the rounding: `a.multiply(xr)`, `b.multiply(xr)` with `xr = a.round(x)`.
    """

    def __init__(self, n: int, k: int, *, rounds: ActRound | None = None, dtype: torch.dtype | None = None):
        super().__init__(n, k, dtype=dtype)
        self.rounds = rounds

    def round(self, x: Tensor) -> Tensor:
        return x if self.rounds is None else self.rounds(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(self.round(x))


class GroupedLinear(Prepared):
    """G independent products: x [T, G, k] -> [T, G, n], weight [G n, k] as stored (group-major rows)."""

    def __init__(self, groups: int, n: int, k: int):
        super().__init__()
        self.groups, self.width = groups, k
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(groups * n, k))
        self.packed: list[kernels.PackedWeight] | None = None
        self.stacked: Tensor | None = None  # [G, k, n] of small groups: one product instead of G

    def prepare(self) -> None:
        if self.weight is not None:
            packed = [kernels.pack_linear(w) for w in self.weight.chunk(self.groups)]
            if all(packed):
                self.packed, self.weight = [p for p in packed if p is not None], None
                if all(isinstance(p.data, Tensor) for p in self.packed):
                    self.stacked = torch.stack([p.data for p in self.packed]).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.stacked is not None and not kernels.is_deterministic():
            return torch.bmm(kernels.cast(x, torch.float32).transpose(0, 1), self.stacked).transpose(0, 1)
        if self.packed is not None:
            parts = [kernels.packed_linear(part, w) for part, w in zip(x.unbind(1), self.packed, strict=True)]
            return torch.stack(parts, dim=1)
        assert self.weight is not None
        weight = self.weight.unflatten(0, (self.groups, -1))
        if kernels.is_deterministic():
            return torch.stack([kernels.linear(x[:, g], weight[g]) for g in range(self.groups)], dim=1)
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


class Embedding(nn.Module):
    """Rows of a table by id: [T] int64 -> [T, D]."""

    def __init__(self, n: int, dim: int, *, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, dim, dtype=dtype))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


class Head(Weight):
    """Vocabulary logits [n, V] in float32 (float64) from hidden states [n, D]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.multiply(hidden, kernels.accumulator(hidden.dtype))


def prepare(module: nn.Module) -> None:
    """Put every weight in `module` into its inference form.

    Packing frees wide copies between blocks that stay; without giving those holes back, twice the weights are resident.
    """
    for part in module.modules():
        if isinstance(part, Prepared):
            part.prepare()
            release_freed_memory()
