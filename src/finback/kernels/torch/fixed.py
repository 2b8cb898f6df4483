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
_TAIL = 16  # rows of at least four values: a whole number of vectors of any width


def in_row_blocks(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """run(x) for x [..., k] -> [..., n], computed on blocks of `ROWS` rows."""
    flat = x.reshape(-1, x.shape[-1])
    padded = pad_rows(flat, ROWS)
    parts = [run(block) for block in padded.split(ROWS)]
    out = torch.cat(parts) if len(parts) != 1 else parts[0]
    return out[: len(flat)].view(*x.shape[:-1], out.shape[1])


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """x [n, ...] with rows of zeros up to a multiple, at least one block."""
    short = -len(x) % multiple if len(x) else multiple
    return x if not short else F.pad(x, (0, 0) * (x.ndim - 1) + (0, short))


def elementwise(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """run(x) for an elementwise function with a slower path for the last few values, which rounds differently."""
    return run(pad_rows(x, _TAIL))[: len(x)]


def packed_rows(wide: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """run(wide) for a packed product, with rows of zeros up to a number that it treats alike."""
    flat = wide.reshape(-1, wide.shape[-1])
    y = run(pad_rows(flat, packed_multiple(torch.get_num_threads())))
    return y[: len(flat)].view(*wide.shape[:-1], y.shape[1])


@lru_cache
def packed_multiple(threads: int) -> int:
    """A number of rows such that FBGEMM sums every row of products with any multiple of it in the same order.

    FBGEMM cuts rows into runs and has a function for each length of a run; those for the shortest ones sum in another
    order. Which lengths occur depends on the processor, so it is tried out: equal rows have to give equal results,
    whatever their place and number. `threads` is there because they share the work. Raises KernelUnavailable.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 384, generator=generator).half().float()
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    line = torch.randn(1, 384, generator=generator)
    for multiple in (6, 12, 14, 16, 24, 28, 48, 84):
        counts = [*range(multiple, 200, multiple), 1344, 2016]  # the last two are multiples of all of them
        results = (torch.ops.quantized.linear_dynamic_fp16(line.repeat(n, 1), packed) for n in counts)
        first = torch.ops.quantized.linear_dynamic_fp16(line.repeat(multiple, 1), packed)[:1]
        if all(bool((y == first).all()) for y in results):
            return multiple
    raise KernelUnavailable(
        "packed bfloat16 products round differently for different numbers of rows on this machine, so "
        "deterministic=True cannot be kept; use dtype='float32'"
    )
