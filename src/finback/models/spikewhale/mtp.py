"""Multi-token heads as a drafter.

Let p be the last position that the model has run, and the anchor its known next token (position p + 1). Head k adds a
projection of the hidden state at p to it and reads the shared vocabulary head: its logits are for position p + 1 + k.
So slot i of a draft is for position p + 2 + i, and no head sees the anchor or another draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from finback.models.base import Proposal
from finback.nn.linear import Linear
from finback.nn.rows import ForwardBatch, RowView

if TYPE_CHECKING:
    from finback.models.spikewhale.model import SpikeWhale

DRAFT_HIDDEN = "draft_hidden"


class ZeroLinear(Linear):
    """A linear whose fresh weight is 0, so that the residual branch that it ends begins as nothing."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class MTPHead(nn.Module):
    """hidden + proj(hidden): [n, D] -> [n, D], to be read by the shared vocabulary head."""

    def __init__(self, dim: int):
        super().__init__()
        self.proj = ZeroLinear(dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.proj(hidden)


class MTPDrafter:
    """See `finback.models.base.Drafter`. It remembers the hidden state of each token in rows "draft_hidden"."""

    lookback = 0

    def __init__(self, model: SpikeWhale, heads: nn.ModuleList):
        self.model, self.heads = model, heads
        self.block_size = len(heads)

    def block_chunk(self, anchor: int) -> list[int]:
        return [anchor]

    def observe(self, batch: ForwardBatch, view: RowView, targets: Tensor) -> None:
        assert view.batch is batch
        view.append(DRAFT_HIDDEN, 0, targets)

    def propose(
        self, batch: ForwardBatch, view: RowView, choose: Callable[[Tensor, int], Tensor] | None = None
    ) -> Proposal:
        rows = view.locate(DRAFT_HIDDEN, batch.seq, batch.positions - 1)
        hidden = view.table(DRAFT_HIDDEN, 0)[rows]
        lines = (self.model.logits(head(hidden)) for head in self.heads)
        tokens = [line.argmax(dim=1) if choose is None else choose(line, i) for i, line in enumerate(lines)]
        return Proposal(torch.stack(tokens, dim=1))
