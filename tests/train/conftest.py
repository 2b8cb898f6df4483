"""Tiny models and data of the training tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from finback.models.base import family
from finback.models.deepseek_v41.ngram import table_rows
from finback.train.data import Batch
from finback.train.init import initialise

VOCAB = 48


def config_v41(**changes: Any) -> dict[str, Any]:
    """Every text feature in six layers: two ratios, three index sources, candidates that bind, Engram, copies."""
    text = {
        "hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
        "q_lora_rank": 32, "head_dim": 32, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16,
        "sliding_window": 8, "compress_ratios": [0, 2, 2, 1, 1], "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 4], "candidate_source_layer_id": 3, "candidate_topk_blocks": 4,
        "candidate_block_size": 2, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 6, "hc_mult": 4,
        "hc_sinkhorn_iters": 4, "engram_layer_ids": [1], "engram_max_ngram_size": 3, "engram_vocab_size": 61,
        "engram_n_heads": 2, "engram_num_embeddings": list(table_rows(1, 3, 61, 2)), "engram_head_dim": 32,
        "engram_compressed_vocab_size": VOCAB, "vocab_size": VOCAB, "max_position_embeddings": 512,
    }  # fmt: skip
    return {"model_type": "deepseek_v41", "text_config": {**text, **changes}}


def config_v32(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v32", "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "index_n_heads": 16, "index_head_dim": 32, "index_topk": 6, "vocab_size": VOCAB,
        "max_position_embeddings": 512, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, **changes,
    }  # fmt: skip


def config_spikewhale(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "spikewhale", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_lora_rank": 16, "moe_intermediate_size": 32, "vocab_size": VOCAB,
        "use_moe": True, "moe_layers": [1], "n_routed_experts": 4, "use_hyper_connections": True, "use_engram": True,
        "engram_table_size": 64, "engram_hash": "spread", "num_nextn_predict_layers": 1, "tie_word_embeddings": True,
        "use_hrm_refine": True, "hrm_refine_dim": 16, **changes,
    }  # fmt: skip


CONFIGS = {"v41": config_v41, "v32": config_v32, "spikewhale": config_spikewhale}


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., dict[str, Any]]:
    """tiny_config(family, **changes) -> config.json."""
    return lambda name, **changes: CONFIGS[name](**changes)


@pytest.fixture
def tiny_model(seed: int) -> Callable[..., Any]:
    """tiny_model(family, dtype, **changes) -> an initialised trainable model."""

    def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
        config = CONFIGS[name](**changes)
        model = family(config).from_config(config, dtype=dtype, trainable=True)
        initialise(model, seed % 1000)
        if model.token_map_sizes() is not None:
            model.set_token_map(torch.arange(VOCAB))
        return model.train()

    return build


@pytest.fixture
def random_batch(rng: torch.Generator) -> Callable[..., Batch]:
    """random_batch(lengths) -> random tokens and the ones after them."""
    from finback.nn.rows import Chunk

    def build(*lengths: int) -> Batch:
        lines = [torch.randint(0, VOCAB, (n + 1,), generator=rng) for n in lengths]
        return Batch([Chunk(line[:-1].tolist()) for line in lines], torch.cat([line[1:] for line in lines]), {})

    return build
