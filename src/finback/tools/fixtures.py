"""Random tiny checkpoints of the released layouts: everything runs on them without downloading weights.

Their text means nothing, but each exercises the real regimes: windows shorter than prompts, selections that bind,
candidate blocks that bind, unfinished groups, YaRN, Engram, images, drafts, FP8 and FP4 weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finback.base.formats import Format
from finback.base.runtime import ConfigError, nearest
from finback.io.checkpoint_write import save_checkpoint
from finback.io.text import Tokenizer, compression_map
from finback.kernels.torch.quant import quantize_weight
from finback.models.base import TensorSpec, family
from finback.models.deepseek_v41.ngram import table_rows
from finback.tools.tiny_tokenizer import byte_level_tokenizer, tokenizer_files

_QUANT = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def tiny_v41(tokenizer: Tokenizer) -> dict[str, Any]:
    """DeepSeek-V4.1 with every feature, about half a million parameters."""
    engram = {"engram_layer_ids": [1, 3], "engram_max_ngram_size": 4, "engram_vocab_size": 101, "engram_n_heads": 2}
    text = {
        "hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 5, "num_nextn_predict_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 1, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "q_lora_rank": 32, "head_dim": 32, "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-20, "o_groups": 2, "o_lora_rank": 32, "sliding_window": 8,
        "compress_ratios": [0, 2, 2, 1, 1, 0, 0], "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 4],
        "candidate_source_layer_id": 3, "candidate_topk_blocks": 2, "candidate_block_size": 2,
        "index_n_heads": 16, "index_head_dim": 32, "index_topk": 4, "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 32, "beta_fast": 32,
        "beta_slow": 1}, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        **engram,
        "engram_num_embeddings": list(table_rows(2, 4, engram["engram_vocab_size"], engram["engram_n_heads"])),
        "engram_head_dim": 32, "engram_pad_token_id": tokenizer.pad_id,
        "engram_compressed_vocab_size": int(compression_map(tokenizer).max()) + 1,
        "dspark_block_size": 5, "dspark_noise_token_id": tokenizer.token_to_id("<｜System｜>"),
        "dspark_target_layer_ids": [2, 3, 4], "dspark_markov_rank": 16, "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 1024,
    }  # fmt: skip
    vision = {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "patch_size": 4,
        "rope_theta": 10000.0, "downsample_ratio": 3, "max_image_tokens": 64, "min_pixels": 144, "max_wh_ratio": None,
    }  # fmt: skip
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": tokenizer.token_to_id("<｜deepseek_image｜>"),
        "quantization_config": dict(_QUANT),
    }


def tiny_v41_plain(tokenizer: Tokenizer) -> dict[str, Any]:
    """`tiny-v41` with float32 weights (Engram tables stay FP8, as in every layout): nothing is rounded, so comparisons
    can be exact."""
    config = {k: v for k, v in tiny_v41(tokenizer).items() if k != "quantization_config"}
    return {**config, "dtype": "float32"}


def tiny_v32(tokenizer: Tokenizer) -> dict[str, Any]:
    """DeepSeek-V3.2-Exp with a selective indexer, router groups, a dense first layer and YaRN, in float32."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "hidden_size": 64,
        "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4, "first_k_dense_replace": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_layer_freq": 1, "q_lora_rank": 32,
        "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "index_n_heads": 16, "index_head_dim": 32, "index_topk": 8, "vocab_size": len(tokenizer),
        "max_position_embeddings": 1024, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "dtype": "float32",
    }  # fmt: skip


def tiny_spikewhale(tokenizer: Tokenizer) -> dict[str, Any]:
    """SpikeWhaleLM v2 with every part on that goes together, two draft heads and the spread Engram hash, in float32."""
    return {
        "architectures": ["SpikeWhaleLM"], "model_type": "spikewhale", "vocab_size": len(tokenizer), "hidden_size": 64,
        "num_hidden_layers": 4, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "qk_rope_head_dim": 4, "nope_head_dim": 12,
        "q_lora_rank": 32, "o_lora_rank": 32, "rope_theta": 10000.0, "use_derf": False, "use_xsa": True,
        "use_qk_norm": True, "use_moe": True, "moe_layers": [1, 2, 3], "n_routed_experts": 6, "n_shared_experts": 2,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5, "num_hash_layers": 2, "use_hyper_connections": True, "hc_mult": 2,
        "use_engram": True, "engram_compress_dim": 16, "engram_num_heads": 2, "engram_table_size": 64,
        "engram_max_ngram": 3, "engram_hash": "spread", "use_hrm_refine": True, "hrm_refine_dim": 32,
        "hrm_refine_steps": 2, "num_nextn_predict_layers": 2, "use_value_embed": True,
        "bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_ids[0], "dtype": "float32",
    }  # fmt: skip


PRESETS: dict[str, Callable[[Tokenizer], dict[str, Any]]] = {
    "tiny-v41": tiny_v41,
    "tiny-v41-plain": tiny_v41_plain,
    "tiny-v32": tiny_v32,
    "tiny-spikewhale": tiny_spikewhale,
}


def preset_config(preset: str) -> dict[str, Any]:
    """config.json of a preset. Raises ConfigError for an unknown name."""
    if preset not in PRESETS:
        raise ConfigError(f"preset {preset!r}{nearest(preset, PRESETS)}; use one of {', '.join(PRESETS)}")
    return PRESETS[preset](_tokenizer())


def make(folder: str | Path, *, preset: str = "tiny-v41", seed: int = 0) -> None:
    """Write a preset's checkpoint, with a real byte-level tokenizer, into `folder`. A fixture that is there is
    replaced; anything else is refused with ConfigError and left as it is."""
    _refuse_others(Path(folder).expanduser())
    write(folder, preset_config(preset), seed=seed, extra_files=tokenizer_files(byte_level_tokenizer()))


def _refuse_others(folder: Path) -> None:
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        config = None
    if config is None or all(config != preset_config(preset) for preset in PRESETS):
        raise ConfigError(f"{folder} holds something that is no fixture, and it is not replaced; give a new folder")


def write(
    folder: str | Path, config: Mapping[str, Any], *, seed: int = 0, extra_files: Mapping[str, bytes] | None = None
) -> None:
    """Write a checkpoint of random weights for any config of a known family. Each tensor's values depend on its name,
    its shape and `seed` alone, so that two configs that share a tensor share its values."""
    with torch.device("meta"):
        model = family(config).from_config(config, dtype=torch.float32, trainable=True)
    save_checkpoint(folder, config, _tensors((spec for spec, _ in model.weights()), seed), extra_files=extra_files)


def _tensors(specs: Iterator[TensorSpec], seed: int) -> Iterator[tuple[str, Tensor]]:
    for spec in specs:
        fmt = storage_format(spec)
        data, scale = quantize_weight(random_tensor(spec, seed), fmt)
        yield spec.name, data
        if scale is not None:
            yield spec.scale, scale


def storage_format(spec: TensorSpec) -> Format:
    """The format a fixture stores a tensor in: the first one accepted, float32 where any plain type is."""
    plain = [f for f in spec.formats if f.block is None]
    return spec.formats[0] if not plain or spec.formats[0].block is not None else max(plain, key=lambda f: f.bits)


def random_tensor(spec: TensorSpec, seed: int) -> Tensor:
    """Plausible float32 values: matrices keep variance, norms are near 1, biases and mixing bases are small."""
    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    values = torch.randn(spec.shape, generator=generator)
    if "norm" in spec.name.split(".")[-2:][0] or spec.name.endswith(("norm.weight", "q_weight", "k_weight")):
        return 1 + 0.1 * values
    if spec.name.endswith(("bias", "bias_vl", "_base", "attn_sink")):
        return 0.3 * values
    if spec.name.endswith("_scale"):
        return 1 + 0.1 * values
    if len(spec.shape) == 2 and spec.role not in ("embedding", "engram_table"):
        return values / math.sqrt(spec.shape[1])
    return values


def _tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer(), bos_id=0, eos_ids=(1,), pad_id=2)
