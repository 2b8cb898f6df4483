"""V3.2's attention: one latent row a position for all heads (MLA), read only where the lightning indexer points.

For each token, with x rounded to FP8 before every quantised product where the rounding policy says so:
1. qr = q_norm(wq_a x); q = wq_b qr per head, its last `qk_rope_head_dim` values rotated.
2. The row is [round_fp8(kv_norm(latent)) | rotated rope part] of wkv_a x.
3. The indexer scores all earlier rows with small heads of its own and picks `index_topk` of them.
4. The key half of wkv_b is folded into the query, so that q and rows meet in the latent space; one softmax over the
   picked rows; the value half of wkv_b turns the latent that comes out into each head's values; wo projects.

Folding (the *absorbed* form) gives the same product as expanding keys and values of every position, and makes one
decoded token, a chunk and a whole prompt the same code. DIFF: the released code expands in a prefill and folds when it
decodes, so that its two paths round differently; here a prompt rounds as its decoding does, except that attention
weights stay float32.

Two layouts of rotation, both as trained: attention rotates adjacent pairs at the end of a head, the indexer rotates
halves at the start of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from finback import kernels
from finback.models.deepseek_v32.config import BLOCK, DeepseekV32Config
from finback.nn.linear import ActRound, Linear, Prepared, Weight
from finback.nn.norm_rope import LayerNorm, RMSNorm
from finback.nn.rows import ForwardBatch, RowView
from finback.nn.teacher import selection_kl

LATENT, INDEX_KEY = "latent", "index_key"  # row groups
_INDEX_NORM_EPS = 1e-6  # not a key of config.json


@dataclass(frozen=True)
class Step:
    """One forward's view of the row store, and the rotations [T, r] complex of its tokens."""

    view: RowView
    turns: Tensor

    @property
    def batch(self) -> ForwardBatch:
        return self.view.batch


class LatentHeads(Prepared):
    """wkv_b [H (n + v), c]: for each head a key half [n, c] and a value half [v, c], applied on the head's own side."""

    def __init__(self, heads: int, nope: int, value: int, rank: int):
        super().__init__()
        self.heads, self.nope = heads, nope
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(heads * (nope + value), rank))
        self.packed: list[tuple[kernels.PackedWeight, kernels.PackedWeight]] | None = None

    def prepare(self) -> None:
        if self.weight is None:
            return
        packed = []
        for head in self.weight.unflatten(0, (self.heads, -1)):
            keys = kernels.pack_linear(head[: self.nope].t().contiguous())
            values = kernels.pack_linear(head[self.nope :])
            if keys is None or values is None:
                return
            packed.append((keys, values))
        self.packed, self.weight = packed, None

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [T, H, n] -> queries [T, H, c] that meet latents."""
        if self.packed is not None:
            return self._each(q, 0)
        assert self.weight is not None
        keys = self.weight.unflatten(0, (self.heads, -1))[:, : self.nope]
        if kernels.is_deterministic():
            return torch.stack([kernels.linear(q[:, h], keys[h].t()) for h in range(self.heads)], dim=1)
        return torch.bmm(q.transpose(0, 1), keys).transpose(0, 1)

    def expand(self, latent: Tensor) -> Tensor:
        """Attended latents [T, H, c] -> values [T, H, v]."""
        if self.packed is not None:
            return self._each(latent, 1)
        assert self.weight is not None
        values = self.weight.unflatten(0, (self.heads, -1))[:, self.nope :]
        if kernels.is_deterministic():
            return torch.stack([kernels.linear(latent[:, h], values[h]) for h in range(self.heads)], dim=1)
        return torch.bmm(latent.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)

    def _each(self, x: Tensor, half: int) -> Tensor:
        assert self.packed is not None
        return torch.stack(
            [kernels.packed_linear(part, pair[half]) for part, pair in zip(x.unbind(1), self.packed, strict=True)],
            dim=1,
        )


class Indexer(nn.Module):
    """Scores positions with many small heads against one key a position, and picks the best of them per token.

    score = sum over heads of w relu(q . k), w = weights_proj x / sqrt(heads * width), in float32. q and k are rotated
    by position, mixed by a Hadamard transform (which leaves q . k as it is and spreads outliers) and rounded to FP8
    where the policy says so. A pick has no gradient: these weights learn from `Attention.indexer_kl` alone.
    """

    def __init__(self, c: DeepseekV32Config, layer: int, rounds: ActRound | None):
        super().__init__()
        self.c, self.layer, self.rounds = c, layer, rounds
        self.scale = c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        self.wq_b = Linear(c.index_n_heads * c.index_head_dim, c.q_lora_rank, rounds=rounds)
        self.wk = Linear(c.index_head_dim, c.hidden_size, rounds=rounds)
        self.k_norm = LayerNorm(c.index_head_dim, _INDEX_NORM_EPS)
        self.weights_proj = Weight(c.index_n_heads, c.hidden_size)

    def _place(self, heads: Tensor, turns: Tensor) -> Tensor:
        """Queries [T, H, h] or keys [T, h] as they are compared."""
        heads = kernels.hadamard(kernels.rotate_halves(heads, turns))
        return heads if self.rounds is None else self.rounds(heads)

    def store_keys(self, rounded: Tensor, step: Step) -> Tensor:
        """Append the keys of rounded inputs [T, D]; returns the table of keys."""
        keys = self._place(self.k_norm(self.wk.multiply(rounded.detach())), step.turns)
        return step.view.append(INDEX_KEY, self.layer, keys)

    def queries(self, x: Tensor, qr: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D], rounded qr [T, q_lora_rank] -> queries [T, heads, width] and weights of the heads [T, heads]."""
        q = self.wq_b.multiply(qr).unflatten(-1, (self.c.index_n_heads, self.c.index_head_dim))
        return self._place(q, turns), self.weights_proj.multiply(x, kernels.accumulator(x.dtype)) * self.scale

    @torch.no_grad()
    def forward(self, x: Tensor, qr: Tensor, keys: Tensor, step: Step) -> Tensor:
        """x [T, D], rounded qr [T, q_lora_rank], table of keys -> positions [T, k] of each token's sequence that it
        attends to, ascending, -1 = none. A sequence of at most index_topk tokens is attended to whole, unscored."""
        batch, limit = step.batch, self.c.index_topk
        visible = batch.positions + 1
        longest = max(batch.ends, default=0)
        # Under `deterministic` the width must not depend on the longest sequence.
        rows = torch.arange(limit if kernels.is_deterministic() else min(longest, limit), device=x.device)
        picked = torch.where(rows < visible.unsqueeze(1), rows, -1)
        if longest <= limit:
            return picked
        q, weights = self.queries(x, qr, step.turns)
        for b, (start, end) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
            if start == end or batch.ends[b] <= limit:
                continue
            scores = kernels.index_scores(q[start:end], weights[start:end], step.view.sequence(INDEX_KEY, keys, b))
            picked[start:end] = kernels.top_rows(scores, limit, visible[start:end])
        return picked


class Attention(nn.Module):
    """One layer's attention over picked latent rows."""

    def __init__(self, c: DeepseekV32Config, layer: int, rounds: ActRound | None):
        super().__init__()
        self.c, self.layer, self.rounds = c, layer, rounds
        heads, nope, rope, rank = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
        self.wq_a = Linear(c.q_lora_rank, c.hidden_size, rounds=rounds)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = Linear(heads * (nope + rope), c.q_lora_rank, rounds=rounds)
        self.wkv_a = Linear(rank + rope, c.hidden_size, rounds=rounds)
        self.kv_norm = RMSNorm(rank, c.rms_norm_eps)
        self.wkv_b = LatentHeads(heads, nope, c.v_head_dim, rank)
        self.wo = Linear(c.hidden_size, heads * c.v_head_dim, rounds=rounds)
        self.indexer = Indexer(c, layer, rounds)

    def queries(self, qr: Tensor, turns: Tensor) -> Tensor:
        """Rounded qr [T, q_lora_rank] -> queries [T, H, c + r] against latent rows."""
        q = kernels.rotate_pairs(self.wq_b.multiply(qr).unflatten(-1, (self.c.num_attention_heads, -1)), turns)
        nope, rope = q.split([self.c.qk_nope_head_dim, self.c.qk_rope_head_dim], dim=-1)
        return torch.cat([self.wkv_b.absorb(nope), rope], dim=-1)

    def rows(self, rounded: Tensor, turns: Tensor) -> Tensor:
        """Rounded input [T, D] -> rows [T, c + r] as stored: latent, then rope part."""
        latent, rope = self.wkv_a.multiply(rounded).split([self.c.kv_lora_rank, self.c.qk_rope_head_dim], dim=-1)
        latent = self.kv_norm(latent)
        if self.rounds is not None:
            latent = self.rounds(latent)
        return torch.cat([latent, kernels.rotate_pairs(rope, turns)], dim=-1)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """x [T, D] -> [T, D]."""
        view, batch, c = step.view, step.batch, self.c
        rounded = self.wq_a.round(x)
        qr = self.wq_b.round(self.q_norm(self.wq_a.multiply(rounded)))
        table = view.append(LATENT, self.layer, self.rows(rounded, step.turns))
        keys = self.indexer.store_keys(rounded, step)
        picked = batch.tape.choose(f"layer{self.layer}.selected", lambda: self.indexer(x, qr, keys, step))
        # Replayed picks of the reference fill up with positions that are still to come; it masks them afterwards.
        picked = torch.where(picked > batch.positions.unsqueeze(1), -1, picked)
        index = view.locate(LATENT, batch.seq.unsqueeze(1), picked)
        q = self.queries(qr, step.turns)
        batch.tape.keep(
            f"layer{self.layer}.indexer_kl", lambda: self.indexer_kl(x, q, qr, (table, index), keys, picked, step)
        )
        latent = kernels.sparse_attention(q, [(table, index)], None, c.softmax_scale, value_width=c.kv_lora_rank)
        return self.wo(self.wkv_b.expand(latent).flatten(1))

    def indexer_kl(
        self, x: Tensor, q: Tensor, qr: Tensor, scope: tuple[Tensor, Tensor], keys: Tensor, picked: Tensor, step: Step
    ) -> Tensor:
        """How far the indexer's scores are from the attention that this layer pays to the picked rows, summed over
        heads, for training: a scalar. Only the indexer's weights get a gradient from it."""
        batch = step.batch
        chosen = torch.arange(len(q), device=q.device) if batch.tape.queries is None else batch.tape.queries
        (mass,) = kernels.attention_mass(q[chosen], [(scope[0], scope[1][chosen])], None, self.c.softmax_scale)
        asking, weights = self.indexer.queries(x.detach()[chosen], qr.detach()[chosen], step.turns[chosen])
        index = step.view.locate(INDEX_KEY, batch.seq[chosen].unsqueeze(1), picked[chosen])
        return selection_kl(kernels.index_scores_at(asking, weights, keys, index), mass, index)


def rounding_of(c: DeepseekV32Config, rounding: bool) -> ActRound | None:
    """How activations, latents and index keys are rounded: in blocks of 128, with float32 scales only where the
    checkpoint is quantised without power-of-two scales."""
    quant = c.quantization_config
    return ActRound(BLOCK, pow2=quant is None or quant.scale_fmt == "ue8m0") if rounding else None
