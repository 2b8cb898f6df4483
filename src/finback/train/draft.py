"""Training DSpark's draft stages on a frozen backbone.

An *anchor* is a token from which a block of k drafts starts; slot i = 0 .. k - 1 is for the token i + 1 places after
it. What serving does with one known token, training does with many anchors of a packed batch at once:

1. The backbone runs without gradients, as it serves, and leaves the averaged streams of its target layers.
2. The draft stages make their window rows of those (`DSpark.combine`, `observe`), with gradients.
3. Every anchor's block [anchor, noise, ...] runs over the rows before the anchor (`DSpark.run_blocks`). True tokens
   enter a block in no other way than the Markov head's: in slot i it is given the true token before.
4. With p the draft's distribution, q the backbone's of the same token, and c the confidence, a slot's loss is

       0.1 * -log p(true token) + 0.9 * |p - q|_1 + BCE(c, 1 - |p - q|_1 / 2)

   where 1 - |p - q|_1 / 2 = sum min(p, q) is the chance that speculative sampling accepts a token drawn from p. Slots
   are weighed by exp(-i / k), since a draft counts only where all before it were accepted.

An anchor need not be a learned token, the one after it must be: so the first token of an answer is drafted too. A block
ends before the first token that is not learned. Source: DSpark (arXiv 2607.05147).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from finback.base.runtime import ConfigError
from finback.train.data import Batch
from finback.train.loss import IGNORE


@dataclass(frozen=True)
class DraftConfig:
    """The recipe's [draft] section: train only the draft stages of the model that `init_from` names.

    anchors: most anchors of one forward. ce, l1, confidence: weights of the three terms of the loss.
    """

    anchors: int = 256
    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0

    def __post_init__(self) -> None:
        if self.anchors < 1:
            raise ConfigError(f"draft.anchors {self.anchors} must be at least 1")


@dataclass(frozen=True)
class Anchors:
    """n anchors of a packed batch, in its order. places: [n, k] int64, the anchor's place among the batch's tokens and
    the k - 1 after it (past the end of its sequence: the batch's last). labels: [n, k] int64, the token after each;
    learned: [n, k] bool, True from the left."""

    places: Tensor
    labels: Tensor
    learned: Tensor

    def __len__(self) -> int:
        return len(self.places)

    def to(self, device: torch.device) -> Anchors:
        return Anchors(self.places.to(device), self.labels.to(device), self.learned.to(device))


def eligible(batch: Batch) -> Tensor:
    """[T] bool: the tokens that can be anchors. The token after one is learned, at least one stands before it in its
    sequence, and it is no part of an image."""
    good = batch.labels != IGNORE
    lengths = torch.tensor([len(c.ids) for c in batch.chunks])
    good[lengths.cumsum(0) - lengths] = False
    for one in batch.pictures:
        good[one.start : one.end] = False
    return good


def draw_anchors(batch: Batch, count: int, block: int, seed: Sequence[int]) -> Anchors:
    """At most `count` of the eligible tokens, drawn with equal chances. The same seed draws the same ones."""
    candidates = eligible(batch).nonzero().squeeze(1)
    generator = torch.Generator().manual_seed(hash(tuple(seed)) % 2**63)
    order = torch.randperm(len(candidates), generator=generator)[:count].sort().values
    lengths = torch.tensor([len(c.ids) for c in batch.chunks])
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    first = candidates[order].unsqueeze(1)
    places = first + torch.arange(block)
    inside = places < ends[first]
    places = places.clamp(max=len(batch) - 1)
    labels = batch.labels[places]
    learned = (inside & (labels != IGNORE)).cummin(dim=1).values
    return Anchors(places, labels.masked_fill(~learned, 0), learned)


@dataclass(frozen=True)
class Slots:
    """Of every slot of n anchors, each [n, k]: ce in nats, l1 of the two distributions (0 to 2) and bce of the
    confidence, with gradients; agree: bool, whether draft and backbone find the same token the likeliest."""

    ce: Tensor
    l1: Tensor
    bce: Tensor
    agree: Tensor

    def sums(self, anchors: Anchors, config: DraftConfig) -> dict[str, Tensor]:
        """Scalars, each a sum over anchors. "ce", "l1", "bce": averages over slots by weight, slots that are not
        learned counting 0; "loss": the three as `config` weighs them. Without gradient, of the anchors with a whole
        block: "whole", how many; "accepted", the drafts that speculative sampling accepts on average; "greedy", those
        that greedy decoding accepts; both where all tokens before a slot are the true ones.
        """
        weights = slot_weights(self.ce)
        weights = weights / weights.sum() * anchors.learned
        out = {name: (weights * getattr(self, name)).sum() for name in ("ce", "l1", "bce")}
        out["loss"] = config.ce * out["ce"] + config.l1 * out["l1"] + config.confidence * out["bce"]
        whole = anchors.learned[:, -1:].to(self.l1.dtype)
        out["whole"] = whole.sum()
        for name, chances in (("accepted", 1 - self.l1.detach() / 2), ("greedy", self.agree.to(self.l1.dtype))):
            out[name] = (chances.cumprod(dim=1) * whole).sum()
        return out


def compare(logits: Tensor, wanted: Tensor, labels: Tensor, confidence: Tensor) -> tuple[Tensor, ...]:
    """The fields of `Slots`. logits: [n, k, V] of drafts; wanted: the same of the backbone; labels: [n, k]; confidence:
    [n, k] logits."""
    mine = logits.log_softmax(dim=2)
    ce = -mine.gather(2, labels.unsqueeze(2)).squeeze(2)
    l1 = (mine.exp() - wanted.softmax(dim=2)).abs().sum(dim=2)
    label = 1 - l1.detach() / 2
    bce = F.binary_cross_entropy_with_logits(confidence, label, reduction="none")
    return ce, l1, bce, logits.argmax(dim=2) == wanted.argmax(dim=2)


def slot_weights(slots: Tensor) -> Tensor:
    """[k] exp(-i / k) for values [n, k], in their type and on their device."""
    block = slots.shape[1]
    return torch.exp(-torch.arange(block, dtype=slots.dtype, device=slots.device) / block)
