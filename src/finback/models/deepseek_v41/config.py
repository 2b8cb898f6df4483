"""DeepSeek-V4.1's configuration: the keys of the released config.json, checked when read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finback.base.runtime import ConfigError
from finback.models.base import read_fields


@dataclass(frozen=True)
class RopeScaling:
    """YaRN: `factor` stretches `original_max_position_embeddings`; beta_fast/beta_slow bound the blended band."""

    type: str
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    beta_slow: float = 1


@dataclass(frozen=True)
class TextConfig:
    """Keys of `text_config`. One entry a layer in `compress_ratios`, draft stages included: 0 = window only, r =
    every r tokens share one compressed row."""

    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    num_experts_per_tok: int
    q_lora_rank: int
    head_dim: int
    qk_rope_head_dim: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    vocab_size: int
    max_position_embeddings: int
    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    num_key_value_heads: int = 1
    n_shared_experts: int = 1
    num_nextn_predict_layers: int = 0
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    swiglu_limit: float = 0.0
    rms_norm_eps: float = 1e-20
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling | None = None
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 1
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0

    @property
    def draft_layers(self) -> int:
        """Number of DSpark stages; 0 without a draft block size."""
        return self.num_nextn_predict_layers if self.dspark_block_size else 0

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed rows `layer` reads."""
        return max(s for s in self.kv_source_layer_ids if s <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selection `layer` uses."""
        return max(s for s in self.index_source_layer_ids if s <= layer)


@dataclass(frozen=True)
class VisionConfig:
    """Keys of `vision_config`. patch_size in pixels; downsample_ratio: patches a side per image token."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int
    rope_theta: float = 10000.0
    max_image_tokens: int = 1024
    min_pixels: int = 544 * 544
    max_wh_ratio: float | None = None


@dataclass(frozen=True)
class QuantConfig:
    """Keys of `quantization_config`: FP8 in 32x32 blocks with power-of-two scales, routed experts FP4 or FP8."""

    quant_method: str
    weight_block_size: tuple[int, ...]
    scale_fmt: str
    activation_scheme: str = "dynamic"
    expert_dtype: str | None = None


@dataclass(frozen=True)
class DeepseekV41Config:
    """config.json as a whole. `quantization_config` None: weights are plain and nothing is rounded by default."""

    text_config: TextConfig
    vision_config: VisionConfig | None = None
    quantization_config: QuantConfig | None = None
    image_token_id: int | None = None
    dtype: str = "bfloat16"
    model_type: str = "deepseek_v41"
    architectures: tuple[str, ...] = ("DeepseekV41ForCausalLM",)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> DeepseekV41Config:
        """Read and check the parsed config.json. Raises ConfigError naming the key, its value and what is allowed."""
        config = read_fields(
            cls, {("dtype" if k == "torch_dtype" else k): v for k, v in given.items()}, "config.json", _TOKEN_KEYS
        )
        _check_text(config.text_config)
        _check_whole(config)
        return config


_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "use_cache")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ConfigError(f"config.json: {text}")


def _check_whole(config: DeepseekV41Config) -> None:
    quant, text = config.quantization_config, config.text_config
    if quant is not None:
        _require(quant.quant_method == "fp8", f"quant_method {quant.quant_method!r}; V4.1 checkpoints use 'fp8'")
        _require(
            quant.weight_block_size == (32, 32), f"weight_block_size {quant.weight_block_size}; V4.1 uses [32, 32]"
        )
        _require(quant.scale_fmt == "ue8m0", f"scale_fmt {quant.scale_fmt!r}; V4.1 uses 'ue8m0'")
        _require(quant.expert_dtype in (None, "fp4", "fp8"), f"expert_dtype {quant.expert_dtype!r}; use 'fp4' or 'fp8'")
        widths = (text.hidden_size, text.moe_intermediate_size, text.q_lora_rank, text.head_dim, text.index_head_dim)
        _require(all(w % 32 == 0 for w in widths), f"quantised widths must be multiples of 32, got {widths}")
    if config.vision_config is not None:
        _require(config.image_token_id is not None, "vision_config is given but image_token_id is missing")
        _require(
            0 <= (config.image_token_id or 0) < text.vocab_size,
            f"image_token_id {config.image_token_id} is outside the vocabulary of {text.vocab_size}",
        )


def _check_text(c: TextConfig) -> None:
    layers, ratios = c.num_hidden_layers, c.compress_ratios
    _require(
        len(ratios) in (layers, layers + c.num_nextn_predict_layers),
        f"compress_ratios has {len(ratios)} entries for {layers} layers and {c.num_nextn_predict_layers} draft stages",
    )
    _require(all(r == 0 for r in ratios[layers:]), "draft stages must have compress_ratio 0")
    _require(c.n_shared_experts == 1, f"n_shared_experts {c.n_shared_experts}; the V4.1 layout has exactly 1")
    _require(c.num_key_value_heads == 1, f"num_key_value_heads {c.num_key_value_heads}; V4.1 shares one key-value head")
    _require(c.scoring_func in ("softmax", "sigmoid", "sqrtsoftplus"), f"scoring_func {c.scoring_func!r} is unknown")
    _require(c.topk_method == "noaux_tc", f"topk_method {c.topk_method!r}; V4.1 uses 'noaux_tc'")
    _require(1 <= c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok must be 1..n_routed_experts")
    _require(c.num_attention_heads % c.o_groups == 0, "o_groups must divide num_attention_heads")
    _require(c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim must be even")
    _require(c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim), "qk_rope_head_dim exceeds a head's width")
    _require(c.sliding_window >= 1 and c.hc_mult >= 1 and c.hc_sinkhorn_iters >= 1, "sizes must be at least 1")
    if c.rope_scaling is not None:
        _require(c.rope_scaling.type == "yarn", f"rope_scaling type {c.rope_scaling.type!r}; V4.1 uses 'yarn'")
    _check_sources(c)
    _require(
        len(c.engram_layer_ids) == len(c.engram_num_embeddings),
        f"{len(c.engram_layer_ids)} engram_layer_ids but {len(c.engram_num_embeddings)} engram_num_embeddings",
    )
    if c.draft_layers:
        _require(bool(c.dspark_target_layer_ids), "DSpark needs dspark_target_layer_ids")
        _require(all(0 <= i < layers for i in c.dspark_target_layer_ids), "dspark_target_layer_ids name missing layers")
        _require(0 <= c.dspark_noise_token_id < c.vocab_size, "dspark_noise_token_id is outside the vocabulary")


def _check_sources(c: TextConfig) -> None:
    """Every compressed layer must find its rows and its selection in a layer before it (or itself) with its own
    ratio."""
    for layer, ratio in enumerate(c.compress_ratios[: c.num_hidden_layers]):
        if not ratio:
            continue
        for kind, ids in (
            ("kv_source_layer_ids", c.kv_source_layer_ids),
            ("index_source_layer_ids", c.index_source_layer_ids),
        ):
            sources = [s for s in ids if s <= layer]
            _require(bool(sources), f"layer {layer} compresses {ratio}:1 but {kind} has no entry up to it")
            found = c.compress_ratios[sources[-1]]
            _require(found == ratio, f"layer {layer} has ratio {ratio} but its source {sources[-1]} has ratio {found}")
        _require(
            c.kv_source(layer) <= c.index_source(layer),
            f"layer {layer} reads rows of layer {c.kv_source(layer)} with an older selection, of layer "
            f"{c.index_source(layer)}",
        )
    for ids in (c.kv_source_layer_ids, c.index_source_layer_ids):
        _require(list(ids) == sorted(set(ids)), f"source layers must ascend, got {list(ids)}")
        _require(
            all(0 <= s < c.num_hidden_layers and c.compress_ratios[s] for s in ids),
            f"{list(ids)} names a layer without compression",
        )
    source = c.candidate_source_layer_id
    if source >= 0:
        _require(source in c.index_source_layer_ids, f"candidate_source_layer_id {source} is no index source")
        rows = c.candidate_topk_blocks * c.candidate_block_size
        _require(rows >= c.index_topk, f"{rows} candidate rows are fewer than index_topk {c.index_topk}")
        later = [i for i in c.index_source_layer_ids if i > source]
        _require(
            all(c.kv_source(i) == c.kv_source(source) for i in later),
            f"index sources {later} after candidate source {source} must read the same compressed rows",
        )
