"""SpikeWhaleLM v2 on packed tokens: a small trainable research model.

Forward of T tokens (any number of sequences, any cut of each):
1. embed [T, D]; add the Engram memory (engram.py); with hyper-connections copy to M residual streams [T, M, D].
2. Each layer: attention, then a dense or sparse feed-forward. A static hyper-connection reads a softmax mix of the
   streams and adds the result to each of them with softmax weights; streams are never mixed with each other. A value
   embedding adds tanh(gate) * the token's embedding to the attention's input (without hyper-connections it stays in the
   residual, with them it does not).
3. Learned softmax mix of the streams, HRM refinement (a few small residual steps), final norm.
4. Logits of the rows that are wanted, from the head or the tied embedding. Multi-token heads add a small projection to
   the hidden state and share the head (mtp.py).

Module and parameter names are those of the published checkpoints. State lives in the row store only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from finback import kernels
from finback.models.base import Model, TensorSpec
from finback.models.spikewhale.attention import KV, Attention, Step
from finback.models.spikewhale.config import SpikeWhaleConfig
from finback.models.spikewhale.engram import HISTORY, Engram
from finback.models.spikewhale.ffn import DenseFFN, SparseFFN
from finback.models.spikewhale.loss import Losses, combined_loss
from finback.models.spikewhale.mtp import DRAFT_HIDDEN, MTPDrafter, MTPHead, ZeroLinear
from finback.models.spikewhale.weights import init_module, weight_table
from finback.nn.linear import Embedding, Head, Linear
from finback.nn.norm_rope import RMSNorm, inverse_frequencies, turns_at
from finback.nn.rows import ForwardBatch, RowGroup, RowView


class HyperConnection(nn.Module):
    """Static weights around one sublayer: what it reads, and where its result goes."""

    def __init__(self, copies: int):
        super().__init__()
        self.pre_weight = nn.Parameter(torch.empty(copies))
        self.post_weight = nn.Parameter(torch.empty(copies))

    def reset_parameters(self) -> None:
        """Reading and writing begin with opposite slopes over the copies, so that the copies can drift apart."""
        copies = len(self.pre_weight)
        slope = torch.linspace(0.5, -0.5, copies) / copies
        self.pre_weight.copy_(slope)
        self.post_weight.copy_(-slope)

    def collapse(self, streams: Tensor) -> Tensor:
        """[T, M, D] -> [T, D]."""
        return self.pre_weight.softmax(dim=0) @ streams

    def expand(self, streams: Tensor, y: Tensor) -> Tensor:
        """streams [T, M, D] plus y [T, D] by weight -> [T, M, D]."""
        return streams + self.post_weight.softmax(dim=0).unsqueeze(1) * y.unsqueeze(1)


class OutputMix(nn.Module):
    """Softmax mix of the streams: [T, M, D] -> [T, D]."""

    def __init__(self, copies: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(copies))

    def reset_parameters(self) -> None:
        """Begin as the mean."""
        nn.init.zeros_(self.weight)

    def forward(self, streams: Tensor) -> Tensor:
        return self.weight.softmax(dim=0) @ streams


class Block(nn.Module):
    """One layer."""

    def __init__(self, c: SpikeWhaleConfig, layer: int):
        super().__init__()
        self.layer, self.dropout = layer, c.hidden_dropout
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(c, layer)
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        sparse = c.has_experts(layer)
        self.ffn = SparseFFN(c, layer) if sparse else DenseFFN(c.hidden_size, c.moe_intermediate_size)
        self.hc_attn = HyperConnection(c.hc_mult) if c.use_hyper_connections else None
        self.hc_ffn = HyperConnection(c.hc_mult) if c.use_hyper_connections else None
        self.ve_gate = nn.Parameter(torch.empty(1)) if c.use_value_embed else None

    def reset_parameters(self) -> None:
        """The value embedding begins switched off."""
        if self.ve_gate is not None:
            nn.init.zeros_(self.ve_gate)

    def forward(self, x: Tensor, embedded: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """x: [T, M, D], or [T, D] without hyper-connections; embedded: [T, D] token embeddings -> x, routing loss."""
        h = x if self.hc_attn is None else self.hc_attn.collapse(x)
        if self.ve_gate is not None:
            h = h + self.ve_gate.tanh() * embedded
        y = F.dropout(self.attn(self.attn_norm(h), step), self.dropout, self.training)
        x = h + y if self.hc_attn is None else self.hc_attn.expand(x, y)
        h = x if self.hc_ffn is None else self.hc_ffn.collapse(x)
        h, aux = self.ffn_norm(h), None
        if isinstance(self.ffn, SparseFFN):
            y, aux = self.ffn(h, step.view.batch, step.wants_aux)
        else:
            y = self.ffn(h)
        y = F.dropout(y, self.dropout, self.training)
        x = x + y if self.hc_ffn is None else self.hc_ffn.expand(x, y)
        step.view.batch.tape.note(f"layer{self.layer}.stream", x)
        return x, aux


class HRMRefinement(nn.Module):
    """`steps` times h += tanh(gate) * up(silu(down(norm(h) | x))), beginning with h = x: [T, D] -> [T, D]."""

    def __init__(self, c: SpikeWhaleConfig):
        super().__init__()
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.down = Linear(c.hrm_refine_dim, 2 * c.hidden_size)
        self.up = ZeroLinear(c.hidden_size, c.hrm_refine_dim)
        self.gate = nn.Parameter(torch.empty(c.hrm_refine_steps))

    def reset_parameters(self) -> None:
        """`up` begins as 0; behind a closed gate it would never get a gradient."""
        nn.init.constant_(self.gate, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for gate in self.gate.tanh():
            h = h + gate * self.up(F.silu(self.down(torch.cat([self.norm(h), x], dim=1))))
        return h


class Backbone(nn.Module):
    """Everything but the head. gradient_checkpointing: recompute layers in the backward pass of training."""

    def __init__(self, c: SpikeWhaleConfig):
        super().__init__()
        self.c, self.gradient_checkpointing = c, False
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.engram = Engram(c) if c.use_engram else None
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hc_out_mix = OutputMix(c.hc_mult) if c.use_hyper_connections else None
        self.hrm_refine = HRMRefinement(c) if c.use_hrm_refine else None
        self.freqs = inverse_frequencies(c.qk_rope_head_dim, c.rope_theta)

    def forward(self, batch: ForwardBatch, view: RowView, wants_aux: bool) -> tuple[Tensor, Tensor]:
        """Hidden states [T, D] after the final norm, and the routing loss summed over layers (0 when not wanted)."""
        embedded = self.embed_tokens(batch.ids)
        step = Step(view, turns_at(batch.positions, self.freqs, embedded.dtype), wants_aux)
        x = embedded
        if self.engram is not None:
            memory = self.engram(embedded, view)
            batch.tape.note("engram", memory)
            x = x + memory
        if self.hc_out_mix is not None:
            x = x.unsqueeze(1).expand(-1, self.c.hc_mult, -1)
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        total = torch.zeros((), dtype=kernels.accumulator(embedded.dtype), device=embedded.device)
        for layer in self.layers:
            if recompute:
                x, aux = checkpoint(layer, x, embedded, step, use_reentrant=False)
            else:
                x, aux = layer(x, embedded, step)
            total = total if aux is None else total + aux
        x = x if self.hc_out_mix is None else self.hc_out_mix(x)
        x = x if self.hrm_refine is None else self.hrm_refine(x)
        return self.norm(x), total


class SpikeWhale(Model):
    """The model. Build it through `from_config` and fill it through `weights`, or start afresh with `init_weights`."""

    def __init__(self, config: SpikeWhaleConfig):
        super().__init__()
        self.config = config
        self.dtype = torch.get_default_dtype()
        self.vocab_size, self.max_positions = config.vocab_size, config.max_position_embeddings
        self.model = Backbone(config)
        self.lm_head = None if config.tie_word_embeddings else Head(config.vocab_size, config.hidden_size)
        heads = config.num_nextn_predict_layers
        self.mtp_heads = nn.ModuleList(MTPHead(config.hidden_size) for _ in range(heads)) if heads else None

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, dtype: torch.dtype, rounding: bool | None = None, trainable: bool = False
    ) -> SpikeWhale:
        """An uninitialised model for a parsed config.json, on torch's current default device. This family rounds
        nothing, so `rounding` changes nothing, and it keeps everything trainable. Raises ConfigError."""
        parsed = SpikeWhaleConfig.from_dict(config)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return cls(parsed)
        finally:
            torch.set_default_dtype(previous)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fresh weights from torch's global generator: see `weights.init_module`."""
        self.apply(lambda module: init_module(module, self.config))

    def row_groups(self) -> list[RowGroup]:
        c = self.config
        layers = tuple(range(c.num_hidden_layers))
        groups = [RowGroup(KV, layers, 2 * c.num_key_value_heads * c.head_dim)]
        if c.use_engram:
            width, window = c.engram_compress_dim, c.engram_max_ngram
            groups.append(RowGroup(HISTORY, (0,), width, window=window, full_precision=True))
        if self.mtp_heads is not None:
            groups.append(RowGroup(DRAFT_HIDDEN, (0,), c.hidden_size, window=2))
        return groups

    def forward(self, batch: ForwardBatch, view: RowView) -> Tensor:
        """Hidden states [T, D] after the final norm."""
        return self.model(batch, view, False)[0]

    def forward_with_aux(self, batch: ForwardBatch, view: RowView) -> tuple[Tensor, Tensor]:
        """Hidden states [T, D], and the experts' balance loss (a scalar, 0 without routed layers)."""
        return self.model(batch, view, True)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is not None:
            return self.lm_head(hidden)
        return kernels.linear(hidden, self.model.embed_tokens.weight, dtype=kernels.accumulator(hidden.dtype))

    def loss(self, batch: ForwardBatch, hidden: Tensor, aux: Tensor, labels: Tensor) -> Losses:
        """Training losses from what `forward_with_aux` returned. labels: [T] int64 beside the ids, -100 = no target."""
        c = self.config
        heads = list(self.mtp_heads) if self.mtp_heads is not None else []
        return combined_loss(
            self.logits, heads, hidden, batch, labels, aux, z_coef=c.zloss_coef, mtp_weight=c.mtp_loss_weight
        )

    def drafter(self) -> MTPDrafter | None:
        """The multi-token heads as a drafter, None for a model without them."""
        return MTPDrafter(self, self.mtp_heads) if self.mtp_heads is not None else None

    def weights(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        return weight_table(self)
