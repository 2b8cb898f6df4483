"""SpikeWhale's training loss: next token, z-loss, multi-token prediction and expert balance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from finback.nn.rows import ForwardBatch

IGNORE = -100


@dataclass(frozen=True)
class Losses:
    """Scalars, already weighted: total = next_token + z + mtp + aux. Cross entropies are in nats."""

    total: Tensor
    next_token: Tensor
    z: Tensor
    mtp: Tensor
    aux: Tensor


def targets_at(batch: ForwardBatch, labels: Tensor, offset: int) -> Tensor:
    """[T]: the label `offset` places after each token of the same sequence, -100 past its end."""
    ends = batch.tensor(batch.offsets[1:])[batch.seq]
    places = torch.arange(len(batch), device=labels.device) + offset
    return labels[places.clamp(max=max(len(batch) - 1, 0))].masked_fill(places >= ends, IGNORE)


def combined_loss(
    logits: Callable[[Tensor], Tensor],
    heads: list[Callable[[Tensor], Tensor]],
    hidden: Tensor,
    batch: ForwardBatch,
    labels: Tensor,
    aux: Tensor,
    *,
    z_coef: float,
    mtp_weight: float,
) -> Losses:
    """Losses of packed tokens.

    hidden: [T, D]. labels: [T] int64 beside the input ids (the shift happens here, inside each sequence), -100 = no
    target. logits: [n, D] -> [n, V]; it runs on tokens with a target only. heads: multi-token heads [n, D] -> [n, D];
    head k (from 1) predicts the token k + 1 places ahead. aux: the layers' routing loss.
    A term without any target is 0; the multi-token term is the mean over heads that have one.
    """
    zero = hidden.sum() * 0.0  # keeps the graph where there is no target at all
    rows, wanted = _targeted(hidden, targets_at(batch, labels, 1))
    next_token = z = zero
    if len(wanted):
        scores = logits(rows)
        next_token = F.cross_entropy(scores, wanted)
        z = z_coef * scores.logsumexp(dim=1).square().mean()
    terms = []
    for k, head in enumerate(heads if mtp_weight > 0 else [], start=1):
        rows, wanted = _targeted(hidden, targets_at(batch, labels, k + 1))
        if len(wanted):
            terms.append(F.cross_entropy(logits(head(rows)), wanted))
    mtp = mtp_weight * torch.stack(terms).mean() if terms else zero
    return Losses(next_token + z + mtp + aux, next_token, z, mtp, aux)


def _targeted(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that have a target, and their targets."""
    index = (targets != IGNORE).nonzero().squeeze(1)
    return hidden[index], targets[index]
