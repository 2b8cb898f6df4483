"""SpikeWhale's feed-forward layers: a dense SwiGLU, or routed experts beside one fused shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finback import kernels
from finback.models.spikewhale.config import SpikeWhaleConfig
from finback.nn.linear import Linear, Weight
from finback.nn.rows import ForwardBatch

_EPS = 1e-8


class DenseFFN(nn.Module):
    """down(silu(gate x) * up x): [n, D] -> [n, D]. The matrices stay apart, as the published checkpoints name them."""

    def __init__(self, dim: int, inter: int):
        super().__init__()
        self.gate_proj, self.up_proj = Linear(inter, dim), Linear(inter, dim)
        self.down_proj = Linear(dim, inter)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """weights: [n, 1], multiplied onto each row's result, None for 1."""
        acc = kernels.accumulator(x.dtype)
        hidden = F.silu(self.gate_proj(x).to(acc)) * self.up_proj(x)
        hidden = hidden if weights is None else hidden * weights
        return self.down_proj(hidden.to(x.dtype))


class SparseFFN(nn.Module):
    """K of E experts a token, plus the mean of the shared ones, fused to one SwiGLU of their joint width.

    Hash layers (the first `num_hash_layers`) take experts (position + j) mod E with weights 1 / K and have no routing
    loss; their router is part of the checkpoint but unused. Other layers take the top K of softmax(logits) or
    sqrt(softplus(logits) + 1e-8); the weights are those scores, over their sum if `norm_topk_prob`, times
    `routed_scaling_factor`. Routing loss: coef * E * sum over experts of (picks per token) * (mean softmax).
    """

    def __init__(self, c: SpikeWhaleConfig, layer: int):
        super().__init__()
        self.c, self.layer, self.hashes = c, layer, layer < c.num_hash_layers
        self.router = Weight(c.n_routed_experts, c.hidden_size)
        self.experts = nn.ModuleList(
            DenseFFN(c.hidden_size, c.moe_intermediate_size) for _ in range(c.n_routed_experts)
        )
        shared = c.n_shared_experts
        self.shared_expert = DenseFFN(c.hidden_size, shared * c.moe_intermediate_size) if shared else None

    def forward(self, x: Tensor, batch: ForwardBatch, wants_aux: bool) -> tuple[Tensor, Tensor | None]:
        """x [T, D] -> [T, D], and the routing loss (a scalar; None for hash layers or when not wanted)."""
        acc = kernels.accumulator(x.dtype)
        aux = None
        if self.hashes:
            weights, experts = self.hash_experts(batch.positions, acc)
        else:
            logits = self.router.multiply(x, acc)
            weights, experts = self.pick(logits, batch)
            aux = self.routing_loss(logits, experts) if wants_aux and len(x) else None
        batch.tape.note(f"layer{self.layer}.expert_weights", weights)
        out = torch.zeros_like(x, dtype=acc)
        if self.shared_expert is not None:
            out = self.shared_expert(x).to(acc) / self.c.n_shared_experts
        out = kernels.for_each_expert(x, weights, experts, lambda e, rows, w: self.experts[e](rows, w), out)
        return out.to(x.dtype), aux

    def hash_experts(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [T] -> weights [T, K], experts [T, K]."""
        k = self.c.num_experts_per_tok
        experts = (positions.unsqueeze(1) + torch.arange(k, device=positions.device)) % self.c.n_routed_experts
        return torch.full(experts.shape, 1 / k, dtype=dtype, device=positions.device), experts

    def pick(self, logits: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> weights [T, K], experts [T, K] (best first, ties to the lowest)."""
        c = self.c
        scores = logits.softmax(dim=1) if c.scoring_func == "softmax" else (F.softplus(logits) + _EPS).sqrt()
        k = c.num_experts_per_tok
        experts = batch.tape.choose(f"layer{self.layer}.experts", lambda: kernels.top_experts(scores, k))
        weights = scores.gather(1, experts)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(dim=1, keepdim=True) + _EPS)
        return weights * c.routed_scaling_factor, experts

    def routing_loss(self, logits: Tensor, experts: Tensor) -> Tensor:
        """The load-balancing loss of this layer over the tokens of this forward."""
        c = self.c
        picks = torch.bincount(experts.flatten(), minlength=c.n_routed_experts).to(logits.dtype) / len(logits)
        return c.moe_aux_loss_coef * c.n_routed_experts * (picks * logits.softmax(dim=1).mean(dim=0)).sum()
