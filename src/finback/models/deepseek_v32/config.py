"""DeepSeek-V3.2's configuration: the keys of the released config.json (or of one that transformers wrote), checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finback.base.runtime import ConfigError
from finback.models.base import read_fields

BLOCK = 128  # side of a weight's scale block, and activations that share a scale


@dataclass(frozen=True)
class RopeScaling:
    """YaRN: `factor` stretches `original_max_position_embeddings`; beta_fast/beta_slow bound the blended band; `mscale`
    sharpens the softmax (see `DeepseekV32Config.softmax_scale`)."""

    type: str
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True)
class QuantConfig:
    """Keys of `quantization_config`. scale_fmt "ue8m0": activations are rounded with power-of-two scales, None: with
    float32 ones. Both weight scale types are read, whatever it says."""

    quant_method: str
    weight_block_size: tuple[int, ...]
    fmt: str = "e4m3"
    scale_fmt: str | None = None
    activation_scheme: str = "dynamic"


@dataclass(frozen=True)
class DeepseekV32Config:
    """config.json as a whole. `quantization_config` None: weights are plain and nothing is rounded by default.

    The first `first_k_dense_replace` layers have a plain SwiGLU of `intermediate_size`. topk_method "noaux_tc" routes
    with a correction bias, "greedy" and "group_limited_greedy" without. The `num_nextn_predict_layers` layers after the
    last are a draft model that is left out.
    """

    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    num_experts_per_tok: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    vocab_size: int
    max_position_embeddings: int
    first_k_dense_replace: int = 0
    num_key_value_heads: int | None = None
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    moe_layer_freq: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 1
    quantization_config: QuantConfig | None = None
    dtype: str = "bfloat16"
    model_type: str = "deepseek_v32"
    architectures: tuple[str, ...] = ("DeepseekV32ForCausalLM",)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> DeepseekV32Config:
        """Read and check the parsed config.json. Raises ConfigError naming the key, its value and what is allowed."""
        config = read_fields(cls, _released_keys(given), "config.json", _UNUSED_KEYS)
        _check(config)
        return config

    @property
    def yarn(self) -> RopeScaling | None:
        """YaRN where it applies: a context no longer than the original one is not stretched."""
        scaling = self.rope_scaling
        stretched = scaling and self.max_position_embeddings > scaling.original_max_position_embeddings
        return scaling if stretched else None

    @property
    def softmax_scale(self) -> float:
        """(nope + rope)^-1/2, times m^2 under YaRN, m = 0.1 mscale ln(factor) + 1."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if self.yarn is None:
            return scale
        return scale * (0.1 * self.yarn.mscale * math.log(self.yarn.factor) + 1.0) ** 2

    @property
    def router_bias(self) -> bool:
        return self.topk_method == "noaux_tc"

    def check_rounding(self) -> None:
        """ConfigError unless every width that is rounded is a whole number of blocks."""
        widths = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size if self.first_k_dense_replace else 0,
            "moe_intermediate_size": self.moe_intermediate_size,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "index_head_dim": self.index_head_dim,
            "num_attention_heads * v_head_dim": self.num_attention_heads * self.v_head_dim,
        }
        odd = ", ".join(f"{name} {width}" for name, width in widths.items() if width % BLOCK)
        if odd:
            raise ConfigError(
                f"config.json: {odd}: rounding as released shares a scale among {BLOCK} values, so these must be "
                f"multiples of {BLOCK}; use rounding='off'"
            )


# What plays no part in a forward, and what transformers derives from other keys and writes beside them.
_UNUSED_KEYS = (
    "attention_dropout", "aux_loss_alpha", "bos_token_id", "eos_token_id", "ep_size", "head_dim", "initializer_range",
    "output_router_logits", "pad_token_id", "pretraining_tp", "qk_head_dim", "seq_aux", "use_cache",
)  # fmt: skip


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ConfigError(f"config.json: {text}")


def _released_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys as released: transformers 5 moves rotary settings to `rope_parameters` and lists every layer's type."""
    keys = {("dtype" if key == "torch_dtype" else key): value for key, value in given.items()}
    rope = keys.pop("rope_parameters", None)
    if rope is not None:
        rope = dict(rope)
        keys["rope_theta"] = rope.pop("rope_theta", keys.get("rope_theta", 10000.0))
        keys["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    if isinstance(scaling := keys.get("rope_scaling"), Mapping) and "rope_type" in scaling:
        kind = scaling["rope_type"]
        keys["rope_scaling"] = {k: v for k, v in scaling.items() if k != "rope_type"} | {"type": kind}
    for name, kinds in (("mlp_layer_types", _mlp_types(keys)), ("layer_types", {"indexed_attention"})):
        found = keys.pop(name, None)
        fits = found is None or (list(found) == kinds if isinstance(kinds, list) else set(found) <= kinds)
        _require(fits, f"{name} {found}; V3.2 has dense layers first, then sparse ones, and indexed attention in all")
    return keys


def _mlp_types(keys: Mapping[str, Any]) -> list[str]:
    layers, dense = keys.get("num_hidden_layers", 0), keys.get("first_k_dense_replace", 0)
    return ["dense" if i < dense else "sparse" for i in range(layers)]


def _check(c: DeepseekV32Config) -> None:
    fixed = {"moe_layer_freq": 1, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, only in {**fixed, "tie_word_embeddings": False}.items():
        _require(getattr(c, key) == only, f"{key} {getattr(c, key)!r}; V3.2 has {only!r}")
    _require(
        c.num_key_value_heads in (None, c.num_attention_heads),
        f"num_key_value_heads {c.num_key_value_heads}; latent attention has as many as num_attention_heads "
        f"{c.num_attention_heads}",
    )
    _require(c.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim {c.qk_rope_head_dim} must be even")
    _require(
        c.index_head_dim >= max(c.qk_rope_head_dim, 1) and c.index_head_dim & (c.index_head_dim - 1) == 0,
        f"index_head_dim {c.index_head_dim} must be a power of two, at least qk_rope_head_dim {c.qk_rope_head_dim}",
    )
    _require(c.index_topk >= 1, f"index_topk {c.index_topk} must be at least 1")
    _require(
        0 <= c.first_k_dense_replace <= c.num_hidden_layers,
        f"first_k_dense_replace {c.first_k_dense_replace} must be 0..num_hidden_layers {c.num_hidden_layers}",
    )
    _check_router(c)
    if (scaling := c.rope_scaling) is not None:
        _require(scaling.type == "yarn", f"rope_scaling type {scaling.type!r}; V3.2 uses 'yarn'")
        _require(scaling.factor >= 1, f"rope_scaling factor {scaling.factor} must be at least 1")
        _require(
            scaling.mscale == scaling.mscale_all_dim,
            f"rope_scaling has mscale {scaling.mscale} and mscale_all_dim {scaling.mscale_all_dim}; they must be equal",
        )
    if (quant := c.quantization_config) is not None:
        _require(quant.quant_method == "fp8", f"quant_method {quant.quant_method!r}; V3.2 checkpoints use 'fp8'")
        _require(quant.fmt == "e4m3", f"quantization fmt {quant.fmt!r}; V3.2 uses 'e4m3'")
        _require(
            quant.weight_block_size == (BLOCK, BLOCK),
            f"weight_block_size {list(quant.weight_block_size)}; V3.2 uses [{BLOCK}, {BLOCK}]",
        )
        _require(quant.scale_fmt in (None, "ue8m0"), f"scale_fmt {quant.scale_fmt!r}; use 'ue8m0' or null")


def _check_router(c: DeepseekV32Config) -> None:
    methods = ("noaux_tc", "greedy", "group_limited_greedy")
    _require(c.scoring_func in ("softmax", "sigmoid"), f"scoring_func {c.scoring_func!r}; use 'softmax' or 'sigmoid'")
    _require(c.topk_method in methods, f"topk_method {c.topk_method!r}; use one of {', '.join(methods)}")
    _require(c.n_shared_experts >= 1, f"n_shared_experts {c.n_shared_experts} must be at least 1")
    _require(
        c.n_group >= 1 and c.n_routed_experts % c.n_group == 0 and 1 <= c.topk_group <= c.n_group,
        f"{c.n_routed_experts} n_routed_experts in {c.n_group} n_group, of which {c.topk_group} topk_group are kept: "
        "groups must be equal, and 1..n_group of them kept",
    )
    size = c.n_routed_experts // c.n_group
    _require(
        1 <= c.num_experts_per_tok <= c.topk_group * size,
        f"num_experts_per_tok {c.num_experts_per_tok} must be 1..{c.topk_group * size}, the experts of the kept groups",
    )
    _require(
        c.topk_group == c.n_group or not c.router_bias or size >= 2,
        "groups are ranked by their two best experts, so n_routed_experts must be at least 2 n_group",
    )
