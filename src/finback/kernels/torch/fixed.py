"""Products whose rows do not depend on what else is in the batch.

A matrix product may sum in another order when the number of its rows changes, so that a token's logits depend, in their
last bits, on its neighbours. Under `deterministic` every product is computed in blocks of one fixed shape instead, the
last block filled up with zeros. Then a row's result depends on that row alone: products of equal shape treat all rows
alike. Operations that work on one token at a time need none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from finback.base.runtime import KernelUnavailable

deterministic: ContextVar[bool] = ContextVar("finback_deterministic", default=False)

ROWS = 16
COLUMNS = 64
_PACKED_ROWS = 8  # FBGEMM sums the rows of every product with this many or more alike, see `check_packed`


def in_row_blocks(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """run(x) for x [..., k] -> [..., n], computed on blocks of `ROWS` rows."""
    flat = x.reshape(-1, x.shape[-1])
    padded = pad_rows(flat, ROWS)
    parts = [run(block) for block in padded.split(ROWS)]
    out = torch.cat(parts) if len(parts) != 1 else parts[0]
    return out[: len(flat)].view(*x.shape[:-1], -1)


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """x [n, ...] with rows of zeros up to a multiple, at least one block."""
    short = -len(x) % multiple if len(x) else multiple
    return x if not short else F.pad(x, (0, 0) * (x.ndim - 1) + (0, short))


def elementwise(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """run(x) for an elementwise function with a slower path for the last few values, which rounds differently."""
    return run(pad_rows(x, ROWS))[: len(x)]


def packed_rows(wide: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """run(wide) for a packed product, with at least as many rows as make it sum in the usual order."""
    check_packed()
    flat = wide.reshape(-1, wide.shape[-1])
    if len(flat) >= _PACKED_ROWS:
        return run(wide)
    return run(pad_rows(flat, _PACKED_ROWS))[: len(flat)].view(*wide.shape[:-1], -1)


@lru_cache
def check_packed() -> None:
    """Raise KernelUnavailable where this machine's packed products depend on the number of rows after all."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 320, generator=generator) for n in (64, 80))
    packed = torch.ops.quantized.linear_prepack_fp16(weight.half().float(), None)
    whole = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    for count in range(_PACKED_ROWS, len(x)):
        if not torch.equal(torch.ops.quantized.linear_dynamic_fp16(x[:count], packed), whole[:count]):
            raise KernelUnavailable(
                f"packed products of {count} rows round differently here, so deterministic=True cannot be kept with "
                "bfloat16 weights; use dtype='float32'"
            )
