"""A training step of DeepSeek-V4.1 written the plain way: the yardstick of `train_cpu.py`, not a part of finback.

It computes the loss of finback's dense stage (every visible row is attended to, indexers rest) from the very parameters
of a finback model, in the form in which such training code is written: a batch [B, S] of equally long sequences; all
scores of all pairs of positions and a mask over them; a loop over experts that looks for each one's tokens; Sinkhorn
step by step, left to autograd; hyper-connections as they stand in the formulas; all logits at once. `tests/benchmarks`
holds its loss and gradients to finback's. Text only; quantisers off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from finback.models.deepseek_v41.model import DeepseekV41
from finback.nn.norm_rope import turns_at
from finback.nn.rows import ForwardBatch


class PlainTraining:
    """The loss over `model`'s own parameters, whose gradients its backward pass fills."""

    def __init__(self, model: DeepseekV41, *, z: float, balance: float):
        c = model.config.text_config
        assert c.scoring_func == "sqrtsoftplus" and not model.rounding, "the released router, quantisers off"
        self.model, self.c, self.z, self.balance = model, c, z, balance

    def loss(self, batch: ForwardBatch, labels: Tensor) -> Tensor:
        """batch: B sequences of S tokens; labels: [B S], -100 = none. Mean nats, z-loss and router balance."""
        c, m = self.c, self.model
        ids = batch.ids.view(len(batch.lengths), -1)
        tokens = ids.shape[1]
        h = F.embedding(ids, m.embed.weight).unsqueeze(2).repeat(1, 1, c.hc_mult, 1)
        pre = torch.zeros(*h.shape[:3])
        pre[:, :, 0] = 1
        positions = torch.arange(tokens)
        window_turns = turns_at(positions, m.window_freqs, m.dtype)
        compressed_turns = turns_at(positions, m.compressed_freqs, m.dtype)
        hashed = m.engram_rows(batch)
        compressed, balances = None, []
        for i, layer in enumerate(m.layers):
            block: Any = layer
            if i in c.engram_layer_ids:
                assert hashed is not None
                rows = hashed[:, c.engram_layer_ids.index(i)].view(*ids.shape, -1)
                h = self._engram(m.engrams[str(i)], h, rows)
            next_pre, post, comb = self._mixes(h, block.hc_attn)
            x = self._norm((pre.unsqueeze(-1) * h).sum(2), block.attn_norm)
            turns = compressed_turns if c.compress_ratios[i] else window_turns
            if block.attn.compressor is not None:
                compressed = self._compress(block.attn.compressor, x, compressed_turns)
            y = self._attention(block.attn, x, turns, compressed if c.compress_ratios[i] else None)
            h = self._expand(y, h, post, comb)
            last_pre, post, comb = self._mixes(h, block.hc_ffn)
            x = self._norm((next_pre.unsqueeze(-1) * h).sum(2), block.ffn_norm)
            y, balance = self._experts(block.ffn, x)
            balances.append(balance)
            h, pre = self._expand(y, h, post, comb), last_pre
        x = self._norm((pre.unsqueeze(-1) * h).sum(2), m.norm)
        logits = F.linear(x, m.head.weight).flatten(0, 1)
        nats = F.cross_entropy(logits, labels, ignore_index=-100)
        norms = logits.logsumexp(-1)[labels != -100]
        return nats + self.z * norms.square().mean() + self.balance * torch.stack(balances).sum()

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return norm.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c.rms_norm_eps))

    def _rotate(self, x: Tensor, turns: Tensor, inverse: bool = False) -> Tensor:
        """Turn the last values of x [B, S, ..., h]; turns [S, r]."""
        r = 2 * turns.shape[1]
        rest, tail = x[..., :-r], x[..., -r:]
        z = torch.view_as_complex(tail.unflatten(-1, (-1, 2)).contiguous())
        turns = turns.conj() if inverse else turns
        z = z * turns.view(1, len(turns), *[1] * (x.ndim - 3), -1)
        return torch.cat([rest, torch.view_as_real(z).flatten(-2)], dim=-1)

    # -- hyper-connections and n-gram memory ---------------------------------------------------------------------------

    def _mixes(self, h: Tensor, hc: Any) -> tuple[Tensor, Tensor, Tensor]:
        c, m = self.c, self.c.hc_mult
        flat = h.flatten(2)
        mixes = F.linear(flat, hc.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + c.rms_norm_eps)
        pre = torch.sigmoid(mixes[..., :m] * hc.scale[0] + hc.base[:m]) + c.hc_eps
        post = 2 * torch.sigmoid(mixes[..., m : 2 * m] * hc.scale[1] + hc.base[m : 2 * m])
        comb = (mixes[..., 2 * m :] * hc.scale[2] + hc.base[2 * m :]).unflatten(-1, (m, m)).softmax(-1) + c.hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        for _ in range(c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + c.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        return pre, post, comb

    def _expand(self, y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        mixed = (comb.unsqueeze(-1) * h.unsqueeze(-2)).sum(2)
        return post.unsqueeze(-1) * y.unsqueeze(-2) + mixed

    def _engram(self, engram: Any, h: Tensor, rows: Tensor) -> Tensor:
        c, m = self.c, self.c.hc_mult
        memory = F.linear(F.embedding(rows, engram.embed.weight).flatten(2), engram.wkv.weight).unflatten(
            2, (m + 1, -1)
        )
        key, value = memory[:, :, :m], memory[:, :, m:]
        h_rms = torch.rsqrt(h.square().mean(-1, keepdim=True) + c.rms_norm_eps)
        key_rms = torch.rsqrt(key.square().mean(-1, keepdim=True) + c.rms_norm_eps)
        dot = ((h * h_rms * engram.q_weight) * (key * key_rms * engram.k_weight)).sum(-1) * c.hidden_size**-0.5
        gate = torch.sigmoid(dot.abs().clamp_min(1e-6).sqrt() * dot.sign())
        return h + gate.unsqueeze(-1) * value

    # -- attention -----------------------------------------------------------------------------------------------------

    def _compress(self, compressor: Any, x: Tensor, turns: Tensor) -> Tensor:
        """[B, S, D] -> compressed rows [B, S // ratio, h]."""
        ratio = compressor.ratio
        count = x.shape[1] // ratio
        latent = F.linear(x, compressor.wkv.weight)
        if ratio > 1:
            groups = latent[:, : count * ratio].unflatten(1, (count, ratio))
            gates = F.linear(x, compressor.wgate.weight)[:, : count * ratio].unflatten(1, (count, ratio))
            latent = (groups * gates.softmax(2)).sum(2)
        return self._rotate(self._norm(latent, compressor.norm), turns[: count * ratio : ratio])

    def _attention(self, attn: Any, x: Tensor, turns: Tensor, compressed: Tensor | None) -> Tensor:
        c, tokens = self.c, x.shape[1]
        qr = self._norm(F.linear(x, attn.wq_a.weight), attn.q_norm)
        q = F.linear(qr, attn.wq_b.weight).unflatten(-1, (c.num_attention_heads, c.head_dim))
        q = self._rotate(q, turns)
        rows = self._rotate(self._norm(F.linear(x, attn.wkv.weight), attn.kv_norm), turns)
        query, key = torch.arange(tokens).unsqueeze(1), torch.arange(tokens)
        mask = (key <= query) & (key > query - c.sliding_window)
        if compressed is not None:
            rows = torch.cat([rows, compressed], dim=1)
            mask = torch.cat([mask, torch.arange(compressed.shape[1]) < (query + 1) // attn.ratio], dim=1)
        scores = torch.einsum("bshd,btd->bhst", q, rows) * c.head_dim**-0.5
        scores = scores.masked_fill(~mask, float("-inf"))
        sink = attn.attn_sink.view(1, -1, 1, 1).expand(len(x), -1, tokens, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        o = self._rotate(torch.einsum("bhst,btd->bshd", weights, rows), turns, inverse=True)
        o = o.reshape(*x.shape[:2], c.o_groups, -1)
        wo_a = attn.wo_a.weight.view(c.o_groups, c.o_lora_rank, -1)
        return F.linear(torch.einsum("bsgk,gnk->bsgn", o, wo_a).flatten(2), attn.wo_b.weight)

    # -- experts -------------------------------------------------------------------------------------------------------

    def _swiglu(self, x: Tensor, w13: Tensor) -> Tensor:
        gate, up = F.linear(x, w13).chunk(2, dim=-1)
        limit = self.c.swiglu_limit
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

    def _experts(self, ffn: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> [B, S, D], and how uneven the router is, by sequence."""
        flat, k, gate = x.flatten(0, 1), self.c.num_experts_per_tok, ffn.gate
        scores = F.softplus(F.linear(flat, gate.weight)).sqrt()
        picks = (scores if gate.bias is None else scores + gate.bias).topk(k, dim=-1).indices
        weights = scores.gather(1, picks)
        if self.c.norm_topk_prob and k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.c.routed_scaling_factor
        shared = ffn.shared_experts
        y = F.linear(self._swiglu(flat, shared.w13.weight), shared.w2.weight)
        n_experts = scores.shape[1]
        for expert in range(n_experts):
            token, place = torch.where(picks == expert)
            if len(token):
                hidden = self._swiglu(flat[token], ffn.experts.w13[expert]) * weights[token, place].unsqueeze(-1)
                y = y.index_add(0, token, F.linear(hidden, ffn.experts.w2[expert]))
        load = F.one_hot(picks, n_experts).float().view(len(x), -1, n_experts).mean(1) * n_experts
        share = (scores / scores.sum(-1, keepdim=True)).view(len(x), -1, n_experts).mean(1)
        return y.view_as(x), (load * share).sum(1).mean()
