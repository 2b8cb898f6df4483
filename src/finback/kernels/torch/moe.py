"""Mixture-of-experts routing and the expert products in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from finback.kernels.torch import fixed
from finback.kernels.torch.attention import accumulator, cast


def router_scores(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return logits.softmax(dim=-1)
    assert score in ("sigmoid", "sqrtsoftplus"), score
    run = torch.sigmoid if score == "sigmoid" else _sqrt_softplus
    return fixed.elementwise(logits, run) if fixed.deterministic.get() else run(logits)


def _sqrt_softplus(z: Tensor) -> Tensor:
    if not (z.requires_grad and torch.is_grad_enabled()):
        return F.softplus(z).sqrt()
    # Far below zero it is exp(z / 2), whose derivative is finite; that of sqrt at an underflowed 0 is not.
    return torch.where(z < -30, (z / 2).exp(), F.softplus(z.clamp(min=-30)).sqrt())


def top_experts(scores: Tensor, k: int) -> Tensor:
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]


def swiglu(gate_up: Tensor, limit: float = 0.0) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def weighed_swiglu(gate_up: Tensor, weights: Tensor | None, limit: float) -> Tensor:
    hidden = swiglu(cast(gate_up, accumulator(gate_up.dtype)), limit)
    return cast(hidden if weights is None else hidden * weights, gate_up.dtype)


def for_each_expert(
    x: Tensor, weights: Tensor, experts: Tensor, run: Callable[[int, Tensor, Tensor], Tensor], out: Tensor
) -> Tensor:
    if len(x) == 1:  # a decode step: nothing to sort, gather or scatter
        parts = weights.split(1, dim=1)
        for expert, place in sorted((e, i) for i, e in enumerate(experts.tolist()[0])):
            out = out + cast(run(expert, x, parts[place]), out.dtype)
        return out
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    rows = order // experts.shape[1]
    sorted_weights = weights.reshape(-1, 1).index_select(0, order)
    out, start = out.clone(), 0
    for expert, count in enumerate(flat.bincount().tolist()):
        if count:
            picks = slice(start, start + count)
            y = run(expert, x.index_select(0, rows[picks]), sorted_weights[picks])
            out.index_add_(0, rows[picks], y.to(out.dtype))
            start += count
    return out
