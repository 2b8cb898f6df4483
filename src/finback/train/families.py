"""What training asks of a family beyond `Model`: finishing its config, and attending to everything.

One entry a family; nothing else in `train` knows their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finback.io.text import Tokenizer, compression_map
from finback.models.base import Model
from finback.models.deepseek_v41.ngram import table_rows
from finback.nn.rows import ForwardBatch
from finback.train.tokenizer import IMAGE, SYSTEM


@dataclass(frozen=True)
class Family:
    """complete: fills the keys of a recipe's [model] that follow from others or the tokenizer. everything: choices that
    make every layer attend to all visible rows, for the dense stage. attention_products: multiplications a token in
    scores and sums of a forward over sequences of that length, for estimates."""

    complete: Callable[[dict[str, Any], Tokenizer | None], None]
    everything: Callable[[Any, ForwardBatch], dict[str, Tensor]]
    attention_products: Callable[[Any, int], float]


def _visible(batch: ForwardBatch, ratio: int) -> Tensor:
    """[T, n] row numbers of all finished groups that each token may see, -1 = none."""
    visible = torch.div(batch.positions + 1, ratio, rounding_mode="floor").unsqueeze(1)
    rows = torch.arange(max(batch.ends, default=0) // ratio, device=batch.device)
    return torch.where(rows < visible, rows, -1)


def _complete_v41(config: dict[str, Any], tokenizer: Tokenizer | None) -> None:
    text = config["text_config"]
    if tokenizer is not None:
        text.setdefault("vocab_size", tokenizer.vocab_size)
    if text.get("engram_layer_ids"):
        rows = table_rows(
            len(text["engram_layer_ids"]),
            text["engram_max_ngram_size"],
            text["engram_vocab_size"],
            text["engram_n_heads"],
        )
        text.setdefault("engram_num_embeddings", list(rows))
        size = text["vocab_size"] if tokenizer is None else int(compression_map(tokenizer).max()) + 1
        text.setdefault("engram_compressed_vocab_size", size)
    if tokenizer is not None and text.get("engram_layer_ids"):
        text.setdefault("engram_pad_token_id", tokenizer.pad_id or 0)
    if text.get("dspark_block_size"):
        system = None if tokenizer is None else tokenizer.token_to_id(SYSTEM)
        text.setdefault("dspark_noise_token_id", 0 if system is None else system)  # as in the released model
    if config.get("vision_config"):  # without a tokenizer, where train_tokenizer puts it
        token = text["vocab_size"] - 1 if tokenizer is None else tokenizer.token_to_id(IMAGE)
        config.setdefault("image_token_id", token)


def _everything_v41(model: Any, batch: ForwardBatch) -> dict[str, Tensor]:
    c = model.config.text_config
    rows = {r: _visible(batch, r) for r in {c.compress_ratios[i] for i in c.index_source_layer_ids}}
    return {f"layer{i}.selected": rows[c.compress_ratios[i]] for i in c.index_source_layer_ids}


def _products_v41(model: Any, length: int) -> float:
    c = model.config.text_config
    keys = 0.0
    for ratio in c.compress_ratios[: c.num_hidden_layers]:
        keys += min(c.sliding_window, length / 2) + (min(c.index_topk, length / 2 / ratio) if ratio else 0)
    scored = sum(length / 2 / c.compress_ratios[i] for i in c.index_source_layer_ids)
    return 2 * keys * c.num_attention_heads * c.head_dim + scored * c.index_n_heads * c.index_head_dim / 3


def _complete_flat(config: dict[str, Any], tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None:
        config.setdefault("vocab_size", tokenizer.vocab_size)


def _everything_v32(model: Any, batch: ForwardBatch) -> dict[str, Tensor]:
    rows = _visible(batch, 1)
    return {f"layer{i}.selected": rows for i in range(model.config.num_hidden_layers)}


def _products_v32(model: Any, length: int) -> float:
    c = model.config
    keys = min(c.index_topk, length / 2)
    each = keys * c.num_attention_heads * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
    return c.num_hidden_layers * (each + length / 2 * c.index_n_heads * c.index_head_dim / 3)


def _products_spikewhale(model: Any, length: int) -> float:
    c = model.config
    return c.num_hidden_layers * length * c.num_attention_heads * c.head_dim


_FAMILIES: Mapping[str, Family] = {
    "deepseek_v41": Family(_complete_v41, _everything_v41, _products_v41),
    "deepseek_v32": Family(_complete_flat, _everything_v32, _products_v32),
    "spikewhale": Family(_complete_flat, lambda model, batch: {}, _products_spikewhale),
}


def family_of(model_type: str) -> Family:
    """The entry of a config's `model_type` (one that `models.base.family` knows)."""
    return _FAMILIES[model_type]


def routers(model: Model) -> dict[str, Any]:
    """Name of each router whose bias balances the load ("layer3") -> the router."""
    layers: Any = getattr(model, "layers", [])
    gates = {f"layer{i}": getattr(block.ffn, "gate", None) for i, block in enumerate(layers)}
    return {name: gate for name, gate in gates.items() if gate is not None and gate.bias is not None}


def blocks(model: Any) -> Any:
    """The backbone's blocks, each of which activation checkpointing recomputes as a whole."""
    return model.layers if hasattr(model, "layers") else model.model.layers


def head_weight(model: Any) -> Tensor:
    """The vocabulary matrix [V, D], which may be the embedding."""
    head = model.head if hasattr(model, "head") else model.lm_head
    return model.model.embed_tokens.weight if head is None else head.weight
