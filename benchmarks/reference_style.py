"""DeepSeek-V4.1 written the plain way: the yardstick of `cpu_model.py`, not a part of finback.

It does what the released reference does, in the form in which such references are written: a batch [B, S] of equally
long sequences at one start position, either whole prompts (start 0) or one token each; fixed caches a sequence, a ring
for the window; window and compressed rows concatenated for every layer; index scores of all heads and all positions
stored and then summed; a loop over experts with `.tolist()`; separate gate and up products; hyper-connections and
Sinkhorn as they stand in the formulas; a head in float32. Quantisers are off. One thing is put right: a layer that owns
index keys always hands down its own, also on the steps that finish no group.

Text only, no Engram, no candidates, no draft stages. `tests/benchmarks` holds it to finback's logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from finback.models.deepseek_v41.config import TextConfig
from finback.models.deepseek_v41.model import DeepseekV41
from finback.nn.norm_rope import turns_at


@dataclass
class Caches:
    """What layers remember, by layer: ring [B, window, h], compressed rows and index keys [B, rows, .] of the sources,
    and the raw (values, scores) [B, ratio, h] of unfinished groups."""

    window: dict[int, Tensor] = field(default_factory=dict)
    compressed: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    raw: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass
class Shared:
    """What sources hand to the layers above within one forward."""

    compressed: Tensor | None = None
    keys: Tensor | None = None
    picked: Tensor | None = None


class ReferenceStyle:
    """The forward pass over `model`'s weights.

    The tensors are the model's own (build this before the model is packed for inference), except float32 copies of the
    head and of the pooling projections, which the reference holds in float32 too. `copied_bytes` says how much that is.
    """

    def __init__(self, model: DeepseekV41, *, batch: int, max_len: int):
        self.c: TextConfig = model.config.text_config
        c = self.c
        assert not c.engram_layer_ids and c.candidate_source_layer_id < 0, "plain text models only"
        assert c.scoring_func == "sqrtsoftplus" and not model.rounding, "the released router, quantisers off"
        self.dtype = model.dtype
        self.wide = torch.promote_types(model.dtype, torch.float32)
        self.weights = {spec.name: tensor.detach() for spec, tensor in model.weights()}
        self.copied_bytes = 0
        for name in self.weights:
            if name == "head.weight" or (".compressor.w" in name and self._ratio_of(name) > 1):
                self._widen(name)
        positions = torch.arange(max_len)
        self.window_turns = turns_at(positions, model.window_freqs, model.dtype)
        self.compressed_turns = turns_at(positions, model.compressed_freqs, model.dtype)
        self.caches = self._empty_caches(batch, max_len)

    def _ratio_of(self, name: str) -> int:
        return self.c.compress_ratios[int(name.split(".")[1])]

    def _widen(self, name: str) -> None:
        wide = self.weights[name].to(self.wide)
        if wide is not self.weights[name]:
            self.copied_bytes += wide.numel() * wide.element_size()
        self.weights[name] = wide

    def _empty_caches(self, batch: int, max_len: int) -> Caches:
        c, caches = self.c, Caches()
        for layer in range(c.num_hidden_layers):
            caches.window[layer] = torch.zeros(batch, c.sliding_window, c.head_dim, dtype=self.dtype)
            if layer in c.kv_source_layer_ids:
                ratio = c.compress_ratios[layer]
                caches.compressed[layer] = torch.zeros(batch, max_len // ratio, c.head_dim, dtype=self.dtype)
                caches.keys[layer] = torch.zeros(batch, max_len // ratio, c.index_head_dim, dtype=self.dtype)
                raw = torch.zeros(batch, ratio, c.head_dim, dtype=self.wide)
                caches.raw[layer] = raw, torch.full_like(raw, float("-inf"))
        return caches

    def forward(self, ids: Tensor, start: int, *, every: bool = False) -> Tensor:
        """ids [B, S] at positions start..start + S - 1 -> float32 (float64) logits of the last position [B, V], or of
        every position [B, S, V]. S > 1 only at start 0."""
        c = self.c
        assert start == 0 or ids.shape[1] == 1, "whole prompts or one token"
        h = F.embedding(ids, self.weights["embed.weight"]).unsqueeze(2).repeat(1, 1, c.hc_mult, 1)
        pre = h.new_zeros(*h.shape[:3], dtype=self.wide)
        pre[:, :, 0] = 1
        window_index = self._window_index(ids.shape[0], ids.shape[1], start)
        shared = Shared()
        for layer in range(c.num_hidden_layers):
            h, pre = self._block(layer, h, pre, start, window_index, shared)
        x = self._norm(self._collapse(h, pre), "norm")
        x = x if every else x[:, -1]
        return F.linear(x.to(self.wide), self.weights["head.weight"])

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.to(self.wide)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.c.rms_norm_eps)
        return (self.weights[f"{name}.weight"] * wide).to(x.dtype)

    def _rotate_(self, x: Tensor, turns: Tensor, inverse: bool = False) -> Tensor:
        """Turn the last values of x [B, S, ..., h] in place; turns [S, r]."""
        tail = x[..., -self.c.qk_rope_head_dim :]
        z = torch.view_as_complex(tail.to(self.wide).unflatten(-1, (-1, 2)).contiguous())
        turns = turns.conj() if inverse else turns
        shape = (1, turns.shape[0], turns.shape[1]) if x.ndim == 3 else (1, turns.shape[0], 1, turns.shape[1])
        tail.copy_(torch.view_as_real(z * turns.view(shape)).flatten(-2))
        return x

    # -- hyper-connections ---------------------------------------------------------------------------------------------

    def _block(
        self, layer: int, h: Tensor, pre: Tensor, start: int, window_index: Tensor, shared: Shared
    ) -> tuple[Tensor, Tensor]:
        name = f"layers.{layer}"
        next_pre, post, comb = self._mixes(h, f"{name}.hc_attn")
        x = self._norm(self._collapse(h, pre), f"{name}.attn_norm")
        h = self._expand(self._attention(layer, x, start, window_index, shared), h, post, comb)
        last_pre, post, comb = self._mixes(h, f"{name}.hc_ffn")
        x = self._norm(self._collapse(h, next_pre), f"{name}.ffn_norm")
        return self._expand(self._moe(f"{name}.ffn", x), h, post, comb), last_pre

    def _mixes(self, h: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        c, m = self.c, self.c.hc_mult
        flat = h.flatten(2).to(self.wide)
        rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + c.rms_norm_eps)
        mixes = F.linear(flat, self.weights[f"{name}_fn"]) * rms
        scale, base = self.weights[f"{name}_scale"], self.weights[f"{name}_base"]
        pre = torch.sigmoid(mixes[..., :m] * scale[0] + base[:m]) + c.hc_eps
        post = 2 * torch.sigmoid(mixes[..., m : 2 * m] * scale[1] + base[m : 2 * m])
        comb = (mixes[..., 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m)).softmax(-1) + c.hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        for _ in range(c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + c.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        return pre, post, comb

    def _collapse(self, h: Tensor, pre: Tensor) -> Tensor:
        return (pre.unsqueeze(-1) * h.to(self.wide)).sum(2).to(h.dtype)

    def _expand(self, y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        mixed = (comb.unsqueeze(-1) * h.unsqueeze(-2)).sum(2)
        return (post.unsqueeze(-1) * y.unsqueeze(-2) + mixed).to(y.dtype)

    # -- attention -----------------------------------------------------------------------------------------------------

    def _window_index(self, batch: int, tokens: int, start: int) -> Tensor:
        """[B, S, k] places of each token's window in the rows it attends to, -1 = none: at start 0 the prompt's own
        rows, afterwards the ring."""
        w = self.c.sliding_window
        if start == 0:
            query = torch.arange(tokens).unsqueeze(1)
            index = (query - w + 1).clamp(min=0) + torch.arange(min(tokens, w))
            index = torch.where(index > query, -1, index)
        else:
            index = torch.arange(w).unsqueeze(0)
            index = torch.where(index > start, -1, index)
        return index.unsqueeze(0).expand(batch, -1, -1).contiguous()

    def _attention(self, layer: int, x: Tensor, start: int, window_index: Tensor, shared: Shared) -> Tensor:
        c, name = self.c, f"layers.{layer}.attn"
        batch, tokens, _ = x.shape
        turns = self.compressed_turns if c.compress_ratios[layer] else self.window_turns
        turns = turns[start : start + tokens]
        qr = self._norm(self._linear(x, f"{name}.wq_a"), f"{name}.q_norm")
        q = self._linear(qr, f"{name}.wq_b").unflatten(-1, (c.num_attention_heads, c.head_dim))
        self._rotate_(q, turns)
        rows, index = self._window(layer, x, turns, start), window_index
        if c.compress_ratios[layer]:
            compressed, picked = self._compressed(layer, x, qr, start, shared)
            index = torch.cat([index, torch.where(picked < 0, -1, picked + rows.shape[1])], dim=-1)
            rows = torch.cat([rows, compressed], dim=1)
        o = self._attend(q, rows, self.weights[f"{name}.attn_sink"], index)
        self._rotate_(o, turns, inverse=True)
        o = o.view(batch, tokens, c.o_groups, -1)
        wo_a = self.weights[f"{name}.wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1)
        o = torch.einsum("bsgk,gnk->bsgn", o, wo_a)
        return self._linear(o.flatten(2), f"{name}.wo_b")

    def _attend(self, q: Tensor, rows: Tensor, sink: Tensor, index: Tensor) -> Tensor:
        picked = rows[torch.arange(len(rows)).view(-1, 1, 1), index.clamp(min=0)].to(self.wide)  # [B, S, k, h]
        logits = torch.einsum("bshd,bskd->bshk", q.to(self.wide), picked) * self.c.head_dim**-0.5
        logits = logits.masked_fill((index < 0).unsqueeze(2), float("-inf"))
        sink = sink.view(1, 1, -1, 1).expand(*logits.shape[:3], 1)
        weights = torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
        return torch.einsum("bshk,bskd->bshd", weights, picked).to(q.dtype)

    def _window(self, layer: int, x: Tensor, turns: Tensor, start: int) -> Tensor:
        """[B, n, h] window rows to attend to; the ring takes the new ones."""
        name, w = f"layers.{layer}.attn", self.c.sliding_window
        kv = self._rotate_(self._norm(self._linear(x, f"{name}.wkv"), f"{name}.kv_norm"), turns)
        batch, tokens = kv.shape[:2]
        ring = self.caches.window[layer]
        if start:
            ring[:batch, start % w] = kv[:, 0]
            return ring[:batch]
        kept = min(tokens, w)
        ring[:batch, torch.arange(tokens - kept, tokens) % w] = kv[:, -kept:]
        return kv

    def _compressed(self, layer: int, x: Tensor, qr: Tensor, start: int, shared: Shared) -> tuple[Tensor, Tensor]:
        """Compressed rows [B, n, h] and each token's picks among them [B, S, k]."""
        c, batch, tokens = self.c, len(x), x.shape[1]
        ratio = c.compress_ratios[layer]
        count = (start + tokens) // ratio
        if layer in c.kv_source_layer_ids:
            latent, first = self._pool(layer, x, start), start // ratio
            shared.compressed, shared.keys = self.caches.compressed[layer], self.caches.keys[layer]
            if latent is not None:
                turns = self.compressed_turns[first * ratio : (first + latent.shape[1]) * ratio : ratio]
                if layer in c.index_source_layer_ids:
                    name = f"layers.{layer}.attn.indexer"
                    key = self._rotate_(self._norm(self._linear(latent, f"{name}.wk"), f"{name}.k_norm"), turns)
                    shared.keys[:batch, first : first + key.shape[1]] = key
                shared.compressed[:batch, first : first + latent.shape[1]] = self._rotate_(latent, turns)
        assert shared.compressed is not None
        if layer in c.index_source_layer_ids:
            shared.picked = self._pick(layer, x, qr, start, shared, count)
        assert shared.picked is not None
        return shared.compressed[:batch, :count], shared.picked

    def _pool(self, layer: int, x: Tensor, start: int) -> Tensor | None:
        """Latents [B, n, h] of the groups that these tokens finish, None if there are none."""
        name, ratio = f"layers.{layer}.attn.compressor", self.c.compress_ratios[layer]
        batch, tokens, _ = x.shape
        if ratio == 1:
            return self._norm(self._linear(x, f"{name}.wkv"), f"{name}.norm")
        values, scores = self._linear(x.to(self.wide), f"{name}.wkv"), self._linear(x.to(self.wide), f"{name}.wgate")
        kept_values, kept_scores = self.caches.raw[layer]
        if start:
            kept_values[:batch, start % ratio], kept_scores[:batch, start % ratio] = values[:, 0], scores[:, 0]
            if (start + 1) % ratio:
                return None
            values, scores = kept_values[:batch].unsqueeze(1), kept_scores[:batch].unsqueeze(1)
        else:
            whole = tokens - tokens % ratio
            kept_values[:batch, : tokens - whole], kept_scores[:batch, : tokens - whole] = (
                values[:, whole:],
                scores[:, whole:],
            )
            if not whole:
                return None
            values, scores = (t[:, :whole].unflatten(1, (-1, ratio)) for t in (values, scores))
        return self._norm((values * scores.softmax(2)).sum(2).to(x.dtype), f"{name}.norm")

    def _pick(self, layer: int, x: Tensor, qr: Tensor, start: int, shared: Shared, count: int) -> Tensor:
        """[B, S, min(topk, count)] picked compressed rows, ascending, -1 = not visible."""
        c, name = self.c, f"layers.{layer}.attn.indexer"
        batch, tokens, _ = x.shape
        if not count:
            return torch.empty(batch, tokens, 0, dtype=torch.int64)
        assert shared.keys is not None
        q = self._linear(qr, f"{name}.wq_b").unflatten(-1, (c.index_n_heads, c.index_head_dim))
        self._rotate_(q, self.compressed_turns[start : start + tokens])
        weights = self._linear(x, f"{name}.weights_proj") * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        scores = torch.einsum("bshd,btd->bsht", q, shared.keys[:batch, :count]).relu_()
        scores = (scores * weights.unsqueeze(-1)).sum(2)
        visible = ((torch.arange(start, start + tokens) + 1) // c.compress_ratios[layer]).unsqueeze(-1)
        scores = scores.masked_fill(torch.arange(count) >= visible, float("-inf"))
        index = scores.topk(min(c.index_topk, count), dim=-1, sorted=False).indices.sort(dim=-1).values
        return torch.where(index < visible, index, -1)

    # -- experts -------------------------------------------------------------------------------------------------------

    def _moe(self, name: str, x: Tensor) -> Tensor:
        c, shape = self.c, x.shape
        x = x.view(-1, shape[-1])
        weights, experts = self._route(f"{name}.gate", x)
        y = torch.zeros_like(x, dtype=self.wide)
        counts = torch.bincount(experts.flatten(), minlength=c.n_routed_experts).tolist()
        for expert in range(c.n_routed_experts):
            if counts[expert]:
                token, place = torch.where(experts == expert)
                y[token] += self._expert(f"{name}.experts.{expert}", x[token], weights[token, place, None])
        y += self._expert(f"{name}.shared_experts", x)
        return y.to(x.dtype).view(shape)

    def _route(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.c
        logits = F.linear(x.to(self.wide), self.weights[f"{name}.weight"].to(self.wide))
        scores = F.softplus(logits).sqrt()
        experts = (scores + self.weights[f"{name}.bias"]).topk(c.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, experts)
        if c.norm_topk_prob and c.num_experts_per_tok > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * c.routed_scaling_factor, experts

    def _expert(self, name: str, x: Tensor, weights: Tensor | None = None) -> Tensor:
        limit = self.c.swiglu_limit
        gate, up = self._linear(x, f"{name}.w1").to(self.wide), self._linear(x, f"{name}.w3").to(self.wide)
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = F.silu(gate) * up
        hidden = hidden if weights is None else weights * hidden
        return self._linear(hidden.to(x.dtype), f"{name}.w2")
