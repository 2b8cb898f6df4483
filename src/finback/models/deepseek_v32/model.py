"""DeepSeek-V3.2-Exp on packed tokens.

Forward of T tokens (any number of sequences, any cut of each):
1. embed [T, D].
2. Each layer: norm -> attention over picked latent rows (attention.py) -> add; norm -> SwiGLU (the first layers) or
   mixture of experts -> add.
3. Final norm; logits of the rows that are wanted.

Unusual: the residual is carried in the model's dtype, but each norm reads the sum before it is rounded; the router
keeps only the experts of the best groups. State lives in the row store only; no process group is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from finback import kernels
from finback.models.base import Model, TensorSpec
from finback.models.deepseek_v32.attention import INDEX_KEY, LATENT, Attention, Step, rounding_of
from finback.models.deepseek_v32.config import DeepseekV32Config
from finback.nn.linear import ActRound, Embedding, Head
from finback.nn.moe import MoE, Router, SwiGLU
from finback.nn.norm_rope import RMSNorm, Yarn, inverse_frequencies, turns_at
from finback.nn.rows import ForwardBatch, RowGroup, RowView


class Block(nn.Module):
    """Attention, then SwiGLU or experts, each on the normalised residual and added to it."""

    def __init__(self, c: DeepseekV32Config, layer: int, rounds: ActRound | None):
        super().__init__()
        self.layer, self.rounds = layer, rounds
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(c, layer, rounds)
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn = (
            SwiGLU(c.hidden_size, c.intermediate_size, rounds=rounds)
            if layer < c.first_k_dense_replace
            else _moe(c, rounds)
        )

    def feed(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, D] -> [T, D]."""
        if isinstance(self.ffn, MoE):
            return self.ffn(x, None, batch.tape, f"layer{self.layer}")
        return self.ffn(x if self.rounds is None else self.rounds(x))

    def forward(self, total: Tensor, step: Step, dtype: torch.dtype) -> Tensor:
        """total [T, D] float32 (float64), residual plus the last sublayer's output -> the same after this layer."""
        total = _add(total, self.attn(self.attn_norm(total).to(dtype), step))
        total = _add(total, self.feed(self.ffn_norm(total).to(dtype), step.batch))
        step.batch.tape.note(f"layer{self.layer}.out", total.to(dtype))
        return total


def _add(total: Tensor, y: Tensor) -> Tensor:
    """The residual is `total` rounded to y's dtype; the new total is not rounded yet."""
    return total.to(y.dtype).to(total.dtype) + y.to(total.dtype)


def _moe(c: DeepseekV32Config, rounds: ActRound | None) -> MoE:
    gate = Router(
        c.hidden_size, c.n_routed_experts, c.num_experts_per_tok,
        score=c.scoring_func, scale=c.routed_scaling_factor, normalise=c.norm_topk_prob, bias=c.router_bias,
        groups=c.n_group, kept_groups=c.topk_group,
    )  # fmt: skip
    inter = c.moe_intermediate_size
    return MoE(gate, c.hidden_size, inter, c.n_shared_experts * inter, rounds=rounds, weigh_output=True)


class DeepseekV32(Model):
    """The model without its draft layer. Build it through `from_config`, fill it through `weights`.

    rounding: round activations, latents, index queries and index keys as the released kernels do.
    """

    def __init__(self, config: DeepseekV32Config, *, rounding: bool):
        super().__init__()
        c = config
        rounds = rounding_of(c, rounding)
        self.config, self.rounding = c, rounding
        self.vocab_size, self.max_positions = c.vocab_size, c.max_position_embeddings
        self.dtype = torch.get_default_dtype()
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, i, rounds) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = Head(c.vocab_size, c.hidden_size)
        y = c.yarn
        yarn = y and Yarn(y.factor, y.original_max_position_embeddings, y.beta_fast, y.beta_slow)
        self.freqs = inverse_frequencies(c.qk_rope_head_dim, c.rope_theta, yarn)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, dtype: torch.dtype, rounding: bool | None = None, trainable: bool = False
    ) -> DeepseekV32:
        """An uninitialised model for a parsed config.json, on torch's current default device.

        rounding None: as released where the config has a quantization_config, else off. trainable makes no difference:
        every weight is a parameter. Raises ConfigError.
        """
        parsed = DeepseekV32Config.from_dict(config)
        if rounding is None:
            rounding = parsed.quantization_config is not None
        if rounding:
            parsed.check_rounding()
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return cls(parsed, rounding=rounding)
        finally:
            torch.set_default_dtype(previous)

    def row_groups(self) -> list[RowGroup]:
        c = self.config
        layers = tuple(range(c.num_hidden_layers))
        return [
            RowGroup(LATENT, layers, c.kv_lora_rank + c.qk_rope_head_dim),
            RowGroup(INDEX_KEY, layers, c.index_head_dim),
        ]

    def choice_names(self) -> list[str]:
        layers = range(self.config.num_hidden_layers)
        routed = layers[self.config.first_k_dense_replace :]
        return [f"layer{i}.selected" for i in layers] + [f"layer{i}.experts" for i in routed]

    def ignored(self, name: str) -> bool:
        """The draft layers behind the last one."""
        first = self.config.num_hidden_layers
        drafts = range(first, first + self.config.num_nextn_predict_layers)
        return any(name.startswith(f"model.layers.{i}.") for i in drafts)

    def forward(self, batch: ForwardBatch, view: RowView) -> Tensor:
        """Hidden states [T', D] after the final norm, of the tokens at or after their chunk's `exact_from`. Every layer
        reads all positions, so no layer but the last norm can be spared the others."""
        step = Step(view, turns_at(batch.positions, self.freqs, self.dtype))
        total = self.embed(batch.ids).to(kernels.accumulator(self.dtype))
        for layer in self.layers:
            total = layer(total, step, self.dtype)
        if any(c.exact_from > c.start for c in batch.chunks):
            total = total[batch.narrow([c.exact_from for c in batch.chunks])[1]]
        return self.norm(total).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def weights(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        from finback.models.deepseek_v32.weights import weight_table

        return weight_table(self)
