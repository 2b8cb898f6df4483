"""Expert parallelism: every process of a group holds an equal run of the experts, and tokens travel to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from finback.parallel.exchange import exchange, exchange_counts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Run = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def run_elsewhere(
    run: Run, count: int, group: ProcessGroup, x: Tensor, weights: Tensor, experts: Tensor, out: Tensor
) -> Tensor:
    """out [T, D] plus each token's experts, wherever in `group` they are.

    run(x, weights, experts, out): the same for the `count` experts that this process holds. x [T, D]; weights, experts
    [T, K]. One row is sent for each token and expert, and one comes back; the K results of a token are summed in the
    order of its choices, as in one process. All processes of `group` must take part, each with tokens of its own.
    """
    tokens, k = experts.shape
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    picked = flat.index_select(0, order)
    owners = torch.arange(dist.get_world_size(group), device=flat.device)
    counts = (torch.div(picked, count, rounding_mode="floor").unsqueeze(1) == owners).sum(dim=0)
    sent, received = exchange_counts(counts, group)
    copies = x.unsqueeze(1).expand(-1, k, -1).reshape(tokens * k, -1)  # backwards, a sum over K in a fixed order
    rows = exchange(copies.index_select(0, order), sent, received, group)
    shares = exchange(weights.reshape(-1, 1).index_select(0, order), sent, received, group)
    local = exchange((picked % count).unsqueeze(1), sent, received, group)
    y = exchange(_run_some(run, rows, shares, local, out.dtype), received, sent, group)
    return out + y.index_select(0, back).view(tokens, k, -1).sum(dim=1)


def _run_some(run: Run, rows: Tensor, shares: Tensor, local: Tensor, dtype: torch.dtype) -> Tensor:
    """`run` on rows [n, D], each for one expert -> [n, D]. Without any, on one row of zeros that is dropped again: the
    weights still get a gradient, so that all processes reduce the same ones."""
    n = len(rows)
    if not n:
        rows, shares, local = (F.pad(part, (0, 0, 0, 1)) for part in (rows, shares, local))
    return run(rows, shares, local, rows.new_zeros(rows.shape, dtype=dtype))[:n]
