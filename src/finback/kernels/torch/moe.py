"""Mixture-of-experts routing and the expert products in torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F


def router_scores(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return logits.softmax(dim=-1)
    if score == "sigmoid":
        return logits.sigmoid()
    assert score == "sqrtsoftplus", score
    return F.softplus(logits).sqrt()


def top_experts(scores: Tensor, k: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def swiglu(gate_up: Tensor, limit: float = 0.0) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def for_each_expert(
    x: Tensor, weights: Tensor, experts: Tensor, run: Callable[[int, Tensor, Tensor], Tensor], out: Tensor
) -> Tensor:
    k = experts.shape[1]
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    used, counts = flat[order].unique_consecutive(return_counts=True)
    start = 0
    for expert, count in zip(used.tolist(), counts.tolist(), strict=True):
        picks = order[start : start + count]
        start += count
        rows = picks // k
        out = out.index_add(0, rows, run(expert, x[rows], weights.reshape(-1, 1)[picks]).to(out.dtype))
    return out
