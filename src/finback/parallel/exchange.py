"""Rows that travel between processes, with gradients that travel back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def exchange_counts(counts: Tensor, group: ProcessGroup) -> tuple[list[int], list[int]]:
    """counts: [n] int64, how many rows this process has for each of the n in `group`. Returns those, and how many each
    of them has for this one. The host waits for them."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    both = torch.stack([counts, received]).tolist()
    return both[0], both[1]


def exchange(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """rows [sum(sent), ...], sorted by the process that they are for -> [sum(received), ...], sorted by the process
    that they come from. Gradients go the other way. All processes of `group` must take part."""
    return _Exchange.apply(rows, sent, received, group)


def _travel(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.way_back = received, sent, group
        return _travel(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]  (the decorator hides the names)
        return _travel(grad_outputs[0], *ctx.way_back), None, None, None
