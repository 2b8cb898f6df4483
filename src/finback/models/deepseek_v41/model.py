"""DeepSeek-V4.1 on packed tokens.

Forward of T tokens (any number of sequences, any cut of each):
1. embed [T, D]; image spans take their features instead; copy to M residual streams [T, M, D].
2. Each layer: Engram memory (a few layers) -> attention -> mixture of experts. Around each sublayer a hyper-connection
   collapses the streams to one input and expands the output back. The collapse weights (`pre`) that a sublayer computes
   are used by the *next* sublayer; the first takes stream 0, the last collapse is before the final norm.
3. Final norm; logits of the rows that are wanted.

Unusual: KV and index sources (attention.py), a router bias of its own for image tokens, draft stages that read the
streams of target layers (dspark.py), tables looked up by n-gram hash (engram.py). State lives in the row store only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finback import kernels
from finback.base.runtime import ConfigError
from finback.models.base import Model, TensorSpec
from finback.models.deepseek_v41.attention import (
    Attention,
    LayerShare,
    Narrowed,
    Step,
    compressed_group,
    key_group,
    raw_group,
)
from finback.models.deepseek_v41.config import DeepseekV41Config, TextConfig
from finback.models.deepseek_v41.dspark import DSpark
from finback.models.deepseek_v41.engram import Engram, EngramTable
from finback.models.deepseek_v41.ngram import NgramLayout, NgramTables, hash_rows, ngram_history
from finback.models.deepseek_v41.vision import Aligner, ViT
from finback.nn.linear import ActRound, Embedding, Head
from finback.nn.moe import MoE, Router
from finback.nn.norm_rope import RMSNorm, Yarn, inverse_frequencies, turns_at
from finback.nn.rows import ForwardBatch, RowGroup, RowView


class HyperConnection(nn.Module):
    """Coefficients around one sublayer, from the streams: pre [T, M], post [T, M], comb [T, M, M]."""

    def __init__(self, c: TextConfig):
        super().__init__()
        acc = kernels.accumulator(torch.get_default_dtype())
        mixes = (2 + c.hc_mult) * c.hc_mult
        self.c = c
        self.fn = nn.Parameter(torch.empty(mixes, c.hc_mult * c.hidden_size, dtype=acc))
        self.base = nn.Parameter(torch.empty(mixes, dtype=acc))
        self.scale = nn.Parameter(torch.empty(3, dtype=acc))

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.c
        return kernels.hc_mixes(
            streams,
            self.fn,
            self.scale,
            self.base,
            iterations=c.hc_sinkhorn_iters,
            norm_eps=c.rms_norm_eps,
            eps=c.hc_eps,
        )


class Block(nn.Module):
    """Attention and experts, each inside a hyper-connection. Draft stages are Blocks with another attention input."""

    def __init__(self, c: TextConfig, layer: int, rounds: ActRound | None, rounding: bool, image_bias: bool):
        super().__init__()
        draft = layer >= c.num_hidden_layers
        experts = (draft and c.dspark_n_routed_experts) or c.n_routed_experts
        active = (draft and c.dspark_num_experts_per_tok) or c.num_experts_per_tok
        self.layer = layer
        self.hc_attn, self.hc_ffn = HyperConnection(c), HyperConnection(c)
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(c, layer, rounds, rounding)
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        gate = Router(
            c.hidden_size, experts, active,
            score=c.scoring_func, scale=c.routed_scaling_factor, normalise=c.norm_topk_prob and active > 1,
            bias=True, image_bias=image_bias,
        )  # fmt: skip
        inter = c.moe_intermediate_size
        self.ffn = MoE(gate, c.hidden_size, inter, inter, limit=c.swiglu_limit, rounds=rounds)

    def enter(self, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        """Streams as `hc_...` kernels take them [T, M, D], and the attention's input [T, D]."""
        wide = kernels.widen_streams(streams)
        return wide, self.attn_norm(kernels.cast(kernels.hc_collapse(wide, pre), streams.dtype))

    def leave(self, y: Tensor, wide: Tensor, batch: ForwardBatch, is_image: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attention output [T, D] and the streams before it -> streams after the experts, and the next `pre`."""
        dtype, acc = y.dtype, wide.dtype
        pre, post, comb = self.hc_attn(wide)
        wide = kernels.cast(kernels.cast(kernels.hc_expand(kernels.cast(y, acc), wide, post, comb), dtype), acc)
        next_pre, post, comb = self.hc_ffn(wide)
        x = self.ffn_norm(kernels.cast(kernels.hc_collapse(wide, pre), dtype))
        y = self.ffn(x, is_image, batch.tape, f"layer{self.layer}")
        return kernels.cast(kernels.hc_expand(kernels.cast(y, acc), wide, post, comb), dtype), next_pre

    def forward(
        self, streams: Tensor, pre: Tensor, step: Step, share: LayerShare, narrowed: Narrowed | None = None
    ) -> tuple[Tensor, Tensor, LayerShare]:
        """streams [T, M, D], pre [T, M] -> streams, the next pre, and the share for the layers above; with `narrowed`,
        of the kept tokens."""
        wide, x = self.enter(streams, pre)
        y, share = self.attn(x, step, share, narrowed)
        if narrowed is not None:
            wide, pre, step = wide[narrowed.kept], pre[narrowed.kept], narrowed.step
            if not len(wide):
                return wide.to(streams.dtype), pre, share
        streams, pre = self.leave(y, wide, step.batch, step.batch.is_image)
        step.batch.tape.note(f"layer{self.layer}.stream", streams)
        step.batch.tape.note(f"layer{self.layer}.next_pre", pre)
        return streams, pre, share


@dataclass(frozen=True)
class Backbone:
    """A forward's results. hidden: [T', D] of the wanted tokens. main: [T'', D] input of the draft stages, of every
    token whose draft rows a wanted position can read (None: no such token, or no draft stages); `main_view`: their row
    view. targets: [T'', D] each, what `main` is made of (`DSpark.combine`)."""

    hidden: Tensor
    main: Tensor | None
    main_view: RowView
    targets: tuple[Tensor, ...] = ()


class DeepseekV41(Model):
    """The model: backbone, image encoder and draft stages. Build it through `from_config`, fill it through `weights`.

    rounding: round activations, window rows, compressed rows and index keys as the released kernels do.
    token_map: [vocab] int64, token id -> compressed id of the Engram hash (models with Engram layers need it).
    """

    def __init__(self, config: DeepseekV41Config, *, rounding: bool, trainable: bool = False):
        super().__init__()
        c = config.text_config
        rounds = ActRound(32) if rounding else None
        self.config, self.rounding = config, rounding
        self.vocab_size, self.max_positions = c.vocab_size, c.max_position_embeddings
        self.lookback = c.engram_max_ngram_size - 1 if c.engram_layer_ids else 0
        self.dtype = torch.get_default_dtype()
        image_bias = config.vision_config is not None
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, i, rounds, rounding, image_bias) for i in range(c.num_hidden_layers))
        self.engrams = nn.ModuleDict(
            {
                str(layer): Engram(c, rows, rounds, trainable=trainable)
                for layer, rows in zip(c.engram_layer_ids, c.engram_num_embeddings, strict=True)
            }
        )
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = Head(c.vocab_size, c.hidden_size)
        self.layout = _ngram_layout(c)
        self.token_map: Tensor | None = None
        self._tables: NgramTables | None = None
        yarn = c.rope_scaling and Yarn(
            c.rope_scaling.factor,
            c.rope_scaling.original_max_position_embeddings,
            c.rope_scaling.beta_fast,
            c.rope_scaling.beta_slow,
        )
        # YaRN belongs to compressed layers only: window layers never look far.
        self.window_freqs = inverse_frequencies(c.qk_rope_head_dim, c.rope_theta)
        self.compressed_freqs = inverse_frequencies(c.qk_rope_head_dim, c.compress_rope_theta, yarn or None)
        if (v := config.vision_config) is not None:
            self.vision = ViT(
                n_layers=v.num_hidden_layers, dim=v.hidden_size, n_heads=v.num_attention_heads,
                inter_dim=v.intermediate_size, patch_size=v.patch_size, rope_theta=v.rope_theta,
            )  # fmt: skip
            self.aligner = Aligner(vision_dim=v.hidden_size, dim=c.hidden_size, downsample_ratio=v.downsample_ratio)
            for name in ("image_start", "image_end", "image_newline"):
                self.register_parameter(name, nn.Parameter(torch.empty(c.hidden_size)))
        make_draft = partial(Block, c, rounds=rounds, rounding=rounding, image_bias=image_bias)
        self.mtp = DSpark(config, rounds, rounding, make_draft) if c.draft_layers else None

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, dtype: torch.dtype, rounding: bool | None = None, trainable: bool = False
    ) -> DeepseekV41:
        """An uninitialised model for a parsed config.json, on torch's current default device.

        rounding None: as released where the config has a quantization_config, else off. Raises ConfigError.
        """
        parsed = DeepseekV41Config.from_dict(config)
        if rounding is None:
            rounding = parsed.quantization_config is not None
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return cls(parsed, rounding=rounding, trainable=trainable)
        finally:
            torch.set_default_dtype(previous)

    def row_groups(self) -> list[RowGroup]:
        c = self.config.text_config
        n = c.num_hidden_layers
        groups = [RowGroup("window", tuple(range(n)), c.head_dim, window=c.sliding_window)]
        for ratio in sorted({r for r in c.compress_ratios if r}):
            sources = tuple(s for s in c.kv_source_layer_ids if c.compress_ratios[s] == ratio)
            keyed = tuple(s for s in sources if s in c.index_source_layer_ids)
            groups.append(RowGroup(compressed_group(ratio), sources, c.head_dim, stride=ratio))
            groups.append(RowGroup(key_group(ratio), keyed, c.index_head_dim, stride=ratio))
            if ratio > 1:
                groups.append(RowGroup(raw_group(ratio), sources, 2 * c.head_dim, window=ratio, full_precision=True))
        if c.draft_layers:
            drafts = tuple(range(n, n + c.draft_layers))
            groups.append(RowGroup("draft_window", drafts, c.head_dim, window=c.sliding_window))
        return groups

    def choice_names(self) -> list[str]:
        c = self.config.text_config
        layers = range(c.num_hidden_layers)
        return [f"layer{i}.selected" for i in layers if c.compress_ratios[i]] + [f"layer{i}.experts" for i in layers]

    def image_facts(self) -> dict[str, int] | None:
        v, token = self.config.vision_config, self.config.image_token_id
        if v is None or token is None:
            return None
        return {"patch": v.patch_size, "downsample": v.downsample_ratio, "image_token_id": token}

    def token_map_sizes(self) -> tuple[int, int] | None:
        """(compressed ids, vocabulary) of the token map that the Engram hash needs, None for a model without Engram."""
        c = self.config.text_config
        return (c.engram_compressed_vocab_size, c.vocab_size) if self.layout is not None else None

    def file_table(self, name: str) -> EngramTable:
        """The table that the checkpoint tensor "layers.L.engram.embed.weight" fills."""
        return self.engrams[name.split(".")[1]].embed

    def set_token_map(self, token_map: Sequence[int] | Tensor) -> None:
        """Compressed id of each token id, for the Engram hash. Raises ConfigError where sizes disagree with the
        config."""
        c = self.config.text_config
        tensor = torch.as_tensor(token_map, dtype=torch.int64)
        if len(tensor) < c.vocab_size or int(tensor.max()) >= c.engram_compressed_vocab_size or int(tensor.min()) < 0:
            raise ConfigError(
                f"the token map has {len(tensor)} entries up to {int(tensor.max())}; the config needs {c.vocab_size} "
                f"entries below engram_compressed_vocab_size {c.engram_compressed_vocab_size}"
            )
        self.token_map = tensor.to(self.embed.weight.device)

    def engram_rows(self, batch: ForwardBatch) -> Tensor | None:
        """[T, L, C] int64 table rows of every Engram layer, or None without such layers."""
        if self.layout is None:
            return None
        if self.token_map is None:
            raise ConfigError("this model hashes n-grams of compressed ids: call set_token_map first")
        if self._tables is None:
            self._tables = self.layout.tables(self.token_map.device)
        own = self.token_map[batch.ids]
        if batch.is_image is not None:
            own = own.masked_fill(batch.is_image, -1)
        previous = batch.previous_ids(self.lookback)
        previous = torch.where(previous < 0, -1, self.token_map[previous.clamp(min=0)])
        pad = int(self.token_map[self.config.text_config.engram_pad_token_id])
        rows = hash_rows(ngram_history(own, previous, pad), self._tables)
        batch.tape.note("engram_hashes", rows)
        return rows

    def forward(self, batch: ForwardBatch, view: RowView) -> Tensor:
        """Hidden states [T', D] after the final norm, of the tokens at or after their chunk's `exact_from`."""
        return self.backbone(batch, view).hidden

    def forward_with_targets(self, batch: ForwardBatch, view: RowView) -> tuple[Tensor, Tensor | None]:
        result = self.backbone(batch, view)
        return result.hidden, result.main

    def backbone(self, batch: ForwardBatch, view: RowView) -> Backbone:
        """The whole forward, with what the draft stages need of it."""
        c = self.config.text_config
        turns = turns_at(batch.positions, torch.cat([self.window_freqs, self.compressed_freqs]), self.dtype)
        window_turns, compressed_turns = turns.chunk(2, dim=1)
        step = Step(view, window_turns, compressed_turns, self.compressed_freqs, self.dtype)
        hashed = self.engram_rows(batch)
        streams = self.embed_tokens(batch).unsqueeze(1).expand(-1, c.hc_mult, -1)
        pre = torch.zeros(len(batch), c.hc_mult, dtype=kernels.accumulator(self.dtype), device=streams.device)
        pre[:, 0] = 1
        share, narrowed = LayerShare(), None
        targets: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            if narrowed is not None:
                step, targets = narrowed.step, [t[narrowed.kept] for t in targets]
                hashed = None if hashed is None else hashed[narrowed.kept]
            narrowed = step.narrow(self.needed_from(i, batch)) if i >= self.last_source else None
            if hashed is not None and i in c.engram_layer_ids:
                rows = hashed[:, c.engram_layer_ids.index(i)]
                streams = self.engrams[str(i)](streams, rows, step.batch.is_image)
            if self.mtp is not None and i in c.dspark_target_layer_ids:
                targets.append(streams.mean(dim=1))
            streams, pre, share = layer(streams, pre, step, share, narrowed)
            if not len(streams):  # the layers above have nothing to do either
                break
        hidden = self.norm(kernels.cast(kernels.hc_collapse(kernels.cast(streams, pre.dtype), pre), self.compute))
        main = self.mtp.combine(targets) if self.mtp is not None and i == len(self.layers) - 1 else None
        return Backbone(hidden, main, step.view, tuple(targets))

    @property
    def compute(self) -> torch.dtype:
        """The type of activations. Packed weights give float32 sums and take float32 inputs: where nothing has to be
        rounded as released, rounding to bf16 between them would cost time and digits. DIFF: so it is left out."""
        widened = self.head.packed is not None and not self.rounding
        return kernels.accumulator(self.dtype) if widened else self.dtype

    @property
    def last_source(self) -> int:
        """The last layer that owns compressed rows; layers from it on may run on a tail of a prompt (0 without any)."""
        return max(self.config.text_config.kv_source_layer_ids, default=0)

    def needed_from(self, layer: int, batch: ForwardBatch) -> list[int]:
        """First position of each sequence whose output of `layer` something wanted depends on: every layer above reads
        a window, so each reaches window - 1 positions further back."""
        above = self.config.text_config.num_hidden_layers - 1 - layer
        if self.window_tail:
            above = min(above, 1)
        reach = above * (self.config.text_config.sliding_window - 1)
        return [c.exact_from - reach for c in batch.chunks]

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        """[T, D] embeddings, image spans replaced by their features."""
        h = kernels.cast(self.embed(batch.ids), self.compute)
        if batch.inserted is not None:
            index, rows = batch.inserted
            h = h.index_copy(0, index, rows.to(h.dtype))
        return h

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def encode_image(self, patches: Tensor, grid_h: int, grid_w: int) -> Tensor:
        """Features [n, D] of one image's patches [grid_h * grid_w, 3, p, p], n image tokens in reading order."""
        patches = patches.to(self.embed.weight)
        return self.aligner(self.vision(patches, grid_h, grid_w), grid_h, grid_w)

    def image_rows(self, patches: Tensor, grid_h: int, grid_w: int) -> Tensor:
        """Embedding rows of a whole image span: start, then each grid row of features and a newline, then end."""
        assert self.config.vision_config is not None
        features = self.encode_image(patches, grid_h, grid_w)
        width = -(-grid_w // self.config.vision_config.downsample_ratio)
        lines = features.view(-1, width, features.shape[1])
        newline = self.image_newline.expand(len(lines), 1, -1)
        body = torch.cat([lines, newline], dim=1).flatten(0, 1)
        return torch.cat([self.image_start[None], body, self.image_end[None]])

    def weights(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        from finback.models.deepseek_v41.weights import weight_table

        return weight_table(self)


def _ngram_layout(c: TextConfig) -> NgramLayout | None:
    if not c.engram_layer_ids:
        return None
    return NgramLayout.build(
        c.engram_layer_ids, c.engram_num_embeddings, c.engram_max_ngram_size, c.engram_vocab_size,
        c.engram_n_heads, c.engram_head_dim, c.engram_compressed_vocab_size,
    )  # fmt: skip
