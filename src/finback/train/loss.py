"""Losses of packed tokens: next tokens without the whole of their logits, multi-token heads, router balance.

Labels stand beside the ids and are already shifted: `labels[i]` is the token after `ids[i]`, or `IGNORE`. Sums and
counts are kept apart, so that a step of several forwards divides once, by the targets of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from finback import kernels
from finback.nn.moe import Router
from finback.nn.rows import ForwardBatch

IGNORE = -100
_CHUNK_ELEMENTS, _GPU_CHUNK_ELEMENTS = 1 << 22, 1 << 27  # logits held at once


@dataclass(frozen=True)
class TokenLoss:
    """total: scalar with gradient, cross entropy + z-loss summed over targets. nats: the cross entropy alone, detached.
    targets: how many."""

    total: Tensor
    nats: Tensor
    targets: int


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over blocks of rows: [T, V] never exists."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, z: float, rows: int) -> tuple[Tensor, Tensor]:
        acc = kernels.accumulator(hidden.dtype)
        narrow = hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16
        operands = hidden.dtype if narrow else acc
        wide = weight.to(operands)
        wants = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden, dtype=acc) if wants else None
        grad_weight = torch.zeros_like(wide, dtype=acc) if wants else None
        total = nats = torch.zeros((), dtype=acc, device=hidden.device)
        for at in range(0, len(hidden), rows):
            x, y = hidden[at : at + rows].to(operands), labels[at : at + rows]
            logits = torch.mm(x, wide.t(), out_dtype=acc) if narrow else F.linear(x, wide)
            norm = logits.logsumexp(dim=1)
            loss = (norm - logits.gather(1, y.unsqueeze(1)).squeeze(1)).sum()
            nats = nats + loss
            total = total + loss + z * norm.square().sum()
            if grad_hidden is not None and grad_weight is not None:
                slope = logits.sub_(norm.unsqueeze(1)).exp_().mul_((1 + 2 * z * norm).unsqueeze(1))
                slope.scatter_add_(1, y.unsqueeze(1), slope.new_full((len(y), 1), -1.0))
                slope = slope.to(operands)
                grad_hidden[at : at + rows] = slope @ wide
                if narrow:
                    grad_weight += torch.mm(slope.t(), x, out_dtype=acc)
                else:
                    grad_weight.addmm_(slope.t(), x)
        if wants:
            ctx.save_for_backward(grad_hidden, grad_weight)
            ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(nats)
        return total, nats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]  (the decorator hides the names)
        up = grad_outputs[0]
        grad_hidden, grad_weight = ctx.saved_tensors
        return (grad_hidden * up).to(ctx.dtypes[0]), (grad_weight * up).to(ctx.dtypes[1]), None, None, None


def token_loss(hidden: Tensor, weight: Tensor, labels: Tensor, *, z: float = 0.0, rows: int | None = None) -> TokenLoss:
    """Cross entropy of softmax(hidden . weight) plus z * (log of its denominator)^2, summed over targets.

    hidden: [T, D]; weight: [V, D]; labels: [T] int64, `IGNORE` = no target. rows: tokens whose logits exist at once
    (None: about 4 million logits, on a GPU 128 million). All sums are float32 (float64); on a GPU, bf16 operands are
    multiplied as they are, for which the logits' slopes are rounded to bf16. The gradient is made together with the
    loss, in blocks, and takes one copy of `weight` and of the rows with a target in that type.
    """
    picked = (labels != IGNORE).nonzero().squeeze(1)
    if rows is None:
        rows = max(1, (_GPU_CHUNK_ELEMENTS if hidden.is_cuda else _CHUNK_ELEMENTS) // len(weight))
    total, nats = _ChunkedCrossEntropy.apply(hidden[picked], weight, labels[picked], z, rows)
    return TokenLoss(total, nats, len(picked))


def shifted_labels(batch: ForwardBatch, labels: Tensor, places: int) -> Tensor:
    """[T]: the label `places` further on in the same sequence, `IGNORE` past its end."""
    ends = batch.tensor(batch.offsets[1:])[batch.seq]
    index = torch.arange(len(batch), device=labels.device) + places
    return labels[index.clamp(max=max(len(batch) - 1, 0))].masked_fill(index >= ends, IGNORE)


def balance_loss(scores: Tensor, experts: Tensor, batch: ForwardBatch) -> Tensor:
    """Sequence-wise balance of one router: mean over sequences of E / K * sum over experts of (share of picks) * (mean
    normalised score). 1 for an even router. scores: [T, E] with gradient; experts: [T, K]. A scalar.
    """
    n_experts, k, count = scores.shape[1], experts.shape[1], len(batch.chunks)
    lengths = torch.tensor(batch.lengths, dtype=scores.dtype, device=scores.device).clamp(min=1).unsqueeze(1)
    picks = scores.new_zeros(count, n_experts)
    places = (batch.seq.unsqueeze(1) * n_experts + experts).flatten()
    picks.view(-1).index_add_(0, places, torch.ones_like(places, dtype=scores.dtype))
    share = scores / scores.sum(dim=1, keepdim=True).clamp(min=1e-20)
    mean = scores.new_zeros(count, n_experts).index_add(0, batch.seq, share) / lengths
    return ((picks / (k * lengths)) * mean).sum() * n_experts / count


def expert_counts(experts: Tensor, n_experts: int, is_image: Tensor | None) -> Tensor:
    """[2, E] int64: how often each expert was picked, by text tokens and by image tokens."""
    picked = (experts.unsqueeze(2) == torch.arange(n_experts, device=experts.device)).sum(dim=1)  # [T, E]
    image = picked.new_zeros(len(picked)) if is_image is None else is_image.to(picked.dtype)
    kinds = torch.stack([1 - image, image]).unsqueeze(2)
    return (kinds * picked).sum(dim=1)


@torch.no_grad()
def update_router_bias(router: Router, counts: Tensor, rate: float) -> None:
    """Move each expert's bias by `rate` towards an even load: up where it was picked less than the mean, down where
    more. counts: [2, E] of `expert_counts`, summed over a step; image tokens move `bias_vl` where the router has one,
    else they count as text. Rate 0 (the last phase of a run) changes nothing.
    """
    if router.bias is None:
        return
    if router.bias_vl is None:
        counts = counts.sum(dim=0, keepdim=True)
    for bias, count in zip((router.bias, router.bias_vl), counts.to(router.bias.dtype), strict=False):
        if bias is not None:
            bias.add_(torch.sign(count.mean() - count), alpha=rate)
