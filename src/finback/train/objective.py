"""The whole loss of a batch, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from finback.models.base import Model
from finback.nn.rows import BatchRows
from finback.nn.tape import Tape
from finback.train.data import Batch
from finback.train.families import blocks, family_of, head_weight, routers
from finback.train.loss import balance_loss, expert_counts, shifted_labels, token_loss
from finback.train.recipe import LossConfig, Stage


@dataclass(frozen=True)
class Result:
    """total: scalar to differentiate. nats: summed cross entropy of the batch, targets: of how many tokens. terms: the
    other parts, detached and not weighted. counts: [2, E] picks of each router by text and image tokens."""

    total: Tensor
    nats: Tensor
    targets: int
    terms: dict[str, Tensor]
    counts: dict[str, Tensor]


def recompute_blocks(model: Model) -> None:
    """Run every block again in the backward pass instead of keeping what it computed. What a block hands to others
    (rows, selections) are arguments and results, so the second run is the same as the first."""
    for block in blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class Objective:
    """Computes losses of batches under the weights of `config`."""

    def __init__(self, model: Any, config: LossConfig):
        self.model, self.config = model, config
        self.rows = BatchRows(model.row_groups())
        self.routers = routers(model)
        self.everything = family_of(model.config.model_type).everything
        self.device = next(model.parameters()).device

    def targets(self, batch: Batch) -> int:
        """How many tokens of `batch` are learned."""
        return batch.targets()

    def __call__(
        self, batch: Batch, stage: Stage, targets: int, forwards: int = 1, seed: Sequence[int] = (0,)
    ) -> Result:
        """One forward. targets: of the whole step, which the cross entropy's sum is divided by; forwards: of the step,
        which the other terms are divided by. seed: of the draw of the tokens that indexers are taught on."""
        c = self.config
        packed = batch.forward_batch(self.device, model=self.model)
        packed.tape = self._tape(packed, stage, seed)
        labels = batch.labels.to(self.device)
        aux = None
        if hasattr(self.model, "forward_with_aux"):
            hidden, aux = self.model.forward_with_aux(packed, self.rows.view(packed))
        else:
            hidden = self.model(packed, self.rows.view(packed))
        weight = head_weight(self.model)
        found = token_loss(hidden, weight, labels, z=c.z)
        total = found.total / max(targets, 1)
        terms: dict[str, Tensor] = {}
        counts = {}
        for name, router in self.routers.items():
            experts = packed.tape.seen[f"{name}.experts"]
            counts[name] = expert_counts(experts, router.weight.shape[0], packed.is_image)
            _add(terms, "balance", balance_loss(packed.tape.kept[f"{name}.router_scores"], experts, packed))
        for name, value in packed.tape.kept.items():
            if name.endswith(".indexer_kl"):
                _add(terms, "indexer", value)
        if aux is not None:
            _add(terms, "aux", aux)
        if c.mtp and getattr(self.model, "mtp_heads", None):
            terms["mtp"] = self._multi_token(hidden, weight, packed, labels)
        weights = {"balance": c.balance, "indexer": c.indexer, "mtp": c.mtp, "aux": 1.0}
        for name, value in terms.items():
            total = total + weights[name] * value / forwards
        return Result(total, found.nats, found.targets, {k: v.detach() for k, v in terms.items()}, counts)

    def _tape(self, packed: Any, stage: Stage, seed: Sequence[int]) -> Tape:
        c = self.config
        teaches = stage.indexer and c.indexer > 0
        queries = None
        if teaches and 0 < c.indexer_queries < len(packed):
            generator = torch.Generator().manual_seed(hash(tuple(seed)) % 2**63)
            queries = (
                torch.randperm(len(packed), generator=generator)[: c.indexer_queries].sort().values.to(self.device)
            )
        replay = None if stage.select else self.everything(self.model, packed)
        terms = ["router_scores"] + ["indexer_kl"] * teaches
        return Tape(replay, terms=terms, queries=queries, once=True)

    def _multi_token(self, hidden: Tensor, weight: Tensor, packed: Any, labels: Tensor) -> Tensor:
        """Mean over the multi-token heads that have targets of their mean cross entropy."""
        parts = []
        for k, head in enumerate(self.model.mtp_heads, start=1):
            part = token_loss(head(hidden), weight, shifted_labels(packed, labels, k))
            if part.targets:
                parts.append(part.total / part.targets)
        return torch.stack(parts).mean() if parts else hidden.sum() * 0.0


def _add(terms: dict[str, Tensor], name: str, value: Tensor) -> None:
    terms[name] = terms[name] + value if name in terms else value
