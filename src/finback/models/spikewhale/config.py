"""SpikeWhaleLM v2's configuration: the keys of the published config.json, checked when read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finback.base.runtime import ConfigError
from finback.models.base import read_fields

HASHES = ("released", "spread")
# Bookkeeping of Hugging Face's config files that changes nothing here.
IGNORED_KEYS = ("auto_map", "dtype", "torch_dtype", "pad_token_id", "use_cache", "return_dict", "output_attentions",
                "output_hidden_states", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
                "is_encoder_decoder")  # fmt: skip


@dataclass(frozen=True)
class SpikeWhaleConfig:
    """Keys of config.json. Sizes without a default have none that is published.

    nope_head_dim: None = head_dim - qk_rope_head_dim. moe_layers: layers with experts (only where `use_moe`); the
    others have one dense SwiGLU of the same width. num_hash_layers: the first layers take experts by position.
    hc_sinkhorn_iters, hc_eps: in every checkpoint, without effect in this family: its connections are static.
    engram_hash: "released" takes the whole part of a projection's magnitude, which is 0 for almost every n-gram at the
    usual initialisation; "spread" takes the signs of several projections, which do not depend on the embedding's scale:
    8 random n-grams per table row reach at least 90% of the rows of fresh tables.
    A config.json without the key was trained with "released"; a config made here has "spread".
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    moe_intermediate_size: int
    vocab_size: int = 16512
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    num_key_value_heads: int = 1
    nope_head_dim: int | None = None
    rope_theta: float = 10000.0
    use_derf: bool = False
    use_xsa: bool = False
    use_qk_norm: bool = True
    use_moe: bool = False
    moe_layers: tuple[int, ...] = ()
    n_routed_experts: int = 0
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    scoring_func: str = "sqrtsoftplus"
    routed_scaling_factor: float = 1.0
    num_hash_layers: int = 0
    moe_aux_loss_coef: float = 0.01
    use_hyper_connections: bool = False
    hc_mult: int = 2
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    use_engram: bool = False
    engram_compress_dim: int = 32
    engram_num_heads: int = 2
    engram_table_size: int = 4096
    engram_max_ngram: int = 3
    engram_gate_init_bias: float = -1.0
    engram_hash: str = "spread"
    use_hrm_refine: bool = False
    hrm_refine_dim: int = 128
    hrm_refine_steps: int = 1
    num_nextn_predict_layers: int = 0
    zloss_coef: float = 1e-4
    mtp_loss_weight: float = 0.3
    use_value_embed: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    model_type: str = "spikewhale"
    architectures: tuple[str, ...] = ("SpikeWhaleLM",)

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> SpikeWhaleConfig:
        """Read and check the parsed config.json. Raises ConfigError naming the key, its value and what is allowed."""
        return read_fields(cls, {"engram_hash": "released", **given}, "config.json", IGNORED_KEYS)

    def to_dict(self) -> dict[str, Any]:
        """The keys and values of a config.json that `from_dict` reads back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    def has_experts(self, layer: int) -> bool:
        """Whether `layer` has routed experts."""
        return self.use_moe and layer in self.moe_layers

    @property
    def hash_bits(self) -> int:
        """Sign bits of one "spread" hash: the table has 2 to that power rows."""
        return self.engram_table_size.bit_length() - 1


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ConfigError(f"config.json: {text}")


def _check(c: SpikeWhaleConfig) -> None:
    rope, heads = c.qk_rope_head_dim, c.num_attention_heads
    _require(rope % 2 == 0 and 0 < rope <= c.head_dim, f"qk_rope_head_dim {rope} must be even and 2..head_dim")
    _require(
        c.nope_head_dim in (None, c.head_dim - rope),
        f"nope_head_dim {c.nope_head_dim} must be head_dim - qk_rope_head_dim = {c.head_dim - rope}",
    )
    groups = c.num_key_value_heads
    _require(groups >= 1 and heads % groups == 0, f"num_key_value_heads {groups} must divide {heads} attention heads")
    for name in ("hidden_dropout", "attention_dropout"):
        _require(0 <= getattr(c, name) < 1, f"{name} {getattr(c, name)} must be at least 0 and below 1")
    missing = [i for i in c.moe_layers if not 0 <= i < c.num_hidden_layers]
    _require(not missing, f"moe_layers names layers {missing}; there are {c.num_hidden_layers}")
    if c.use_moe and c.moe_layers:
        _require(
            c.scoring_func in ("softmax", "sqrtsoftplus"),
            f"scoring_func {c.scoring_func!r} is unknown; use 'softmax' or 'sqrtsoftplus'",
        )
        _require(1 <= c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok must be 1..n_routed_experts")
        _require(c.n_shared_experts >= 0, f"n_shared_experts {c.n_shared_experts} must be at least 0")
    if c.use_hyper_connections:
        _require(c.hc_mult >= 1, f"hc_mult {c.hc_mult} must be at least 1")
    _require(c.engram_hash in HASHES, f"engram_hash {c.engram_hash!r} is unknown; use 'released' or 'spread'")
    if c.use_engram:
        sizes = (c.engram_compress_dim, c.engram_num_heads, c.engram_table_size, c.engram_max_ngram)
        _require(min(sizes) >= 1, f"engram sizes {sizes} must be at least 1")
        _require(
            c.engram_hash == "released" or c.engram_table_size == 1 << c.hash_bits,
            f"engram_table_size {c.engram_table_size} must be a power of two for engram_hash 'spread'",
        )
