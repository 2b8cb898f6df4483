"""Whole matrices for whoever needs them whole: rows go to one owner, are worked on there, and come back.

An iteration on a part of a matrix is not that part of the iteration on the matrix. So of several matrices each is given
to one process, in turn, and all of them are worked on at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from finback.parallel.exchange import exchange
from finback.parallel.world import chunks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def on_whole_matrices(
    work: Callable[[Tensor], Tensor],
    parts: Sequence[Tensor],
    rows: Sequence[int],
    shape: tuple[int, int],
    group: ProcessGroup,
) -> list[Tensor]:
    """What `work` makes of stacks of matrices whose rows are divided among `group`.

    parts: [r, c] each, this process's rows of a [R, c] tensor as `chunk_of` divides them; rows: R of each. shape: (n,
    c) of one matrix; n divides every R. work: [m, n, c] -> [m, n, c]. Returns the new parts. The same tensors in the
    same order in all processes.
    """
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    lengths = [chunks_of(count, ranks) for count in rows]  # by tensor, then by process
    owned = [range(owner, len(parts), ranks) for owner in range(ranks)]
    width = shape[1]

    away = _joined([parts[i] for mine in owned for i in mine], width, parts[0])
    sent = [sum(lengths[i][me] for i in mine) for mine in owned]
    received = [sum(lengths[i][rank] for i in owned[me]) for rank in range(ranks)]
    arrived = exchange(away, sent, received, group)

    pieces = arrived.split([lengths[i][rank] for rank in range(ranks) for i in owned[me]])
    count = len(owned[me])
    stacked = _joined([piece for at in range(count) for piece in pieces[at::count]], width, parts[0])
    done = work(stacked.view(-1, *shape)).view(-1, width) if count else stacked

    pieces = done.split([lengths[i][rank] for i in owned[me] for rank in range(ranks)])
    home = _joined([piece for rank in range(ranks) for piece in pieces[rank::ranks]], width, parts[0])
    returned = exchange(home, received, sent, group).split([lengths[i][me] for mine in owned for i in mine])
    order = [i for mine in owned for i in mine]
    return [piece for _, piece in sorted(zip(order, returned, strict=True), key=lambda pair: pair[0])]


def _joined(pieces: Sequence[Tensor], width: int, like: Tensor) -> Tensor:
    return torch.cat([piece.reshape(-1, width) for piece in pieces]) if pieces else like.new_empty(0, width)
