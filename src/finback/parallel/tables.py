"""Tables that are divided by rows: a process asks the others for the rows that it lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from finback.parallel.exchange import exchange, exchange_counts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def look_up(part: Tensor, rows: int, index: Tensor, group: ProcessGroup) -> Tensor:
    """Rows [n, d] of a table by index [n] int64.

    part: [r, d], this process's rows as `chunk_of(rows, ...)` divides them; rows: of the whole table. Each row travels
    once however often it is asked for, and its gradient back to where it lies, where those of all processes are summed.
    All processes of `group` must take part.
    """
    ranks = dist.get_world_size(group)
    size = -(-rows // ranks)
    wanted, place = index.unique(return_inverse=True)  # sorted, and so by owner too
    owner = torch.div(wanted, size, rounding_mode="floor")
    counts = (owner.unsqueeze(1) == torch.arange(ranks, device=owner.device)).sum(dim=0)
    sent, received = exchange_counts(counts, group)
    asked = exchange(wanted - owner * size, sent, received, group)
    found = exchange(F.embedding(asked, part), received, sent, group)
    return F.embedding(place, found)
