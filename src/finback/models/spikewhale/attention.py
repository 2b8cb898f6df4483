"""SpikeWhale's attention: low-rank queries and output, few key-value heads, partial rotation.

1. q = wide(norm(narrow(x))) [T, H, h]; k, v straight from x [T, G, h].
2. QK-norm over h; the last `qk_rope_head_dim` values of q and k are rotated (half-split pairs), the others are not.
3. Row "kv" of the token: k | v, rotated and normalised as they are read.
4. Causal attention over the sequence's rows, softmax or DERF (normalised error-function weights, no maximum).
5. XSA takes the part along the token's own value out of each head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from finback import kernels
from finback.models.spikewhale.config import SpikeWhaleConfig
from finback.nn.linear import Linear
from finback.nn.norm_rope import RMSNorm
from finback.nn.rows import RowView

KV = "kv"


@dataclass(frozen=True)
class Step:
    """What every layer of one forward shares. turns: [T, rope / 2] complex. wants_aux: compute the routing loss."""

    view: RowView
    turns: Tensor
    wants_aux: bool


class Attention(nn.Module):
    """One layer's attention. Source of the formulas: SpikeWhaleLM v2's MLA with DERF and XSA."""

    def __init__(self, c: SpikeWhaleConfig, layer: int):
        super().__init__()
        self.c, self.layer = c, layer
        heads, groups, h = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_a_proj = Linear(c.q_lora_rank, c.hidden_size)
        self.q_a_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = Linear(heads * h, c.q_lora_rank)
        self.k_proj = Linear(groups * h, c.hidden_size)
        self.v_proj = Linear(groups * h, c.hidden_size)
        self.o_a_proj = Linear(c.o_lora_rank, heads * h)
        self.o_b_proj = Linear(c.hidden_size, c.o_lora_rank)
        self.q_norm = RMSNorm(h, c.rms_norm_eps) if c.use_qk_norm else None
        self.k_norm = RMSNorm(h, c.rms_norm_eps) if c.use_qk_norm else None
        if c.use_derf:
            for name in ("derf_alpha", "derf_bias", "derf_gamma"):
                self.register_parameter(name, nn.Parameter(torch.empty(heads)))

    def reset_parameters(self) -> None:
        """DERF weights begin as (erf(z) + 1) / 2."""
        if self.c.use_derf:
            nn.init.ones_(self.derf_alpha)
            nn.init.zeros_(self.derf_bias)
            nn.init.ones_(self.derf_gamma)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """x [T, D] -> [T, D]. Stores the tokens' rows."""
        c, batch = self.c, step.view.batch
        heads, groups, h = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))).unflatten(1, (heads, h))
        k = self.k_proj(x).unflatten(1, (groups, h))
        v = self.v_proj(x).unflatten(1, (groups, h))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotate(q, step.turns), self.rotate(k, step.turns)
        table = step.view.append(KV, self.layer, torch.cat([k, v], dim=1).flatten(1))
        rows = [step.view.sequence(KV, table, b).unflatten(1, (2 * groups, h)) for b in range(len(batch.chunks))]
        y = kernels.causal_attention(
            q,
            [r[:, :groups] for r in rows],
            [r[:, groups:] for r in rows],
            batch.lengths,
            h**-0.5,
            derf=(self.derf_alpha, self.derf_bias, self.derf_gamma) if c.use_derf else None,
            dropout=c.attention_dropout if self.training else 0.0,
        )
        if c.use_xsa:
            y = kernels.exclude_self(y, v)
        return self.o_b_proj(self.o_a_proj(y.flatten(1)))

    def rotate(self, x: Tensor, turns: Tensor) -> Tensor:
        """Rotate the last `qk_rope_head_dim` values of every head."""
        plain, turned = x.split([self.c.head_dim - self.c.qk_rope_head_dim, self.c.qk_rope_head_dim], dim=2)
        return torch.cat([plain, kernels.rotate_halves(turned, turns)], dim=2)
