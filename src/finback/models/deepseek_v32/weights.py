"""The weight table of DeepSeek-V3.2: every tensor of the released layout, and the parameter that it fills.

Names are the released ones (Hugging Face's). Quantised matrices have a `.weight_scale_inv` beside `.weight`, float32 or
power-of-two bytes; it multiplies, whatever its name says. In a checkpoint without a `quantization_config` every tensor
is plain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from finback.base.formats import BF16, E4M3_B128, E4M3_B128_E8M0, F16, F32, Format
from finback.models.base import TensorSpec
from finback.nn.moe import MoE

if TYPE_CHECKING:
    from finback.models.deepseek_v32.attention import Attention
    from finback.models.deepseek_v32.config import DeepseekV32Config
    from finback.models.deepseek_v32.model import DeepseekV32

Entry = tuple[TensorSpec, Tensor]
Formats = tuple[Format, ...]
PLAIN: Formats = (BF16, F32, F16)
QUANTISED: Formats = (E4M3_B128, E4M3_B128_E8M0)


def _entry(name: str, tensor: Tensor | None, role: str, formats: Formats = PLAIN, *, optional: bool = False) -> Entry:
    assert tensor is not None, f"{name} was already given up for its packed form"
    scale = name.removesuffix(".weight") + ".weight_scale_inv"
    return TensorSpec(name, tuple(tensor.shape), formats, role, optional=optional, scale_name=scale), tensor


def weight_table(model: DeepseekV32) -> Iterator[Entry]:
    """Every (spec, destination). Destinations are views of parameters, on whatever device they are (also "meta")."""
    c = model.config
    formats = PLAIN if c.quantization_config is None else QUANTISED
    yield _entry("model.embed_tokens.weight", model.embed.weight, "embedding")
    for i, block in enumerate(model.layers):
        name = f"model.layers.{i}"
        yield _entry(f"{name}.input_layernorm.weight", block.attn_norm.weight, "norm")
        yield _entry(f"{name}.post_attention_layernorm.weight", block.ffn_norm.weight, "norm")
        yield from _attention(f"{name}.self_attn", block.attn, formats)
        if isinstance(block.ffn, MoE):
            yield from _moe(f"{name}.mlp", block.ffn, c, formats)
        else:
            yield from _swiglu(f"{name}.mlp", block.ffn.w13.weight, block.ffn.w2.weight, "ffn", formats)
    yield _entry("model.norm.weight", model.norm.weight, "norm")
    yield _entry("lm_head.weight", model.head.weight, "head")


def _attention(name: str, attn: Attention, formats: Formats) -> Iterator[Entry]:
    for theirs, ours in (
        ("q_a_proj", attn.wq_a),
        ("q_b_proj", attn.wq_b),
        ("kv_a_proj_with_mqa", attn.wkv_a),
        ("kv_b_proj", attn.wkv_b),
        ("o_proj", attn.wo),
    ):
        yield _entry(f"{name}.{theirs}.weight", ours.weight, "attention", formats)
    yield _entry(f"{name}.q_a_layernorm.weight", attn.q_norm.weight, "norm")
    yield _entry(f"{name}.kv_a_layernorm.weight", attn.kv_norm.weight, "norm")
    indexer = attn.indexer
    yield _entry(f"{name}.indexer.wq_b.weight", indexer.wq_b.weight, "indexer", formats)
    yield _entry(f"{name}.indexer.wk.weight", indexer.wk.weight, "indexer", formats)
    yield _entry(f"{name}.indexer.k_norm.weight", indexer.k_norm.weight, "norm")
    yield _entry(f"{name}.indexer.k_norm.bias", indexer.k_norm.bias, "norm")
    yield _entry(f"{name}.indexer.weights_proj.weight", indexer.weights_proj.weight, "indexer")


def _moe(name: str, moe: MoE, c: DeepseekV32Config, formats: Formats) -> Iterator[Entry]:
    yield _entry(f"{name}.gate.weight", moe.gate.weight, "router")
    if moe.gate.bias is not None:
        # Softmax routers come without it. Without groups a zero bias is no bias; with groups it changes their ranking.
        optional = c.scoring_func == "softmax" and c.n_group == 1
        yield _entry(f"{name}.gate.e_score_correction_bias", moe.gate.bias, "router", (F32, BF16), optional=optional)
    shared = moe.shared_experts
    yield from _swiglu(f"{name}.shared_experts", shared.w13.weight, shared.w2.weight, "shared_expert", formats)
    w13, w2 = moe.experts.w13, moe.experts.w2
    assert w13 is not None and w2 is not None
    for e in range(len(w13)):
        yield from _swiglu(f"{name}.experts.{e}", w13[e], w2[e], "expert", formats)


def _swiglu(name: str, w13: Tensor | None, w2: Tensor | None, role: str, formats: Formats) -> Iterator[Entry]:
    assert w13 is not None
    gate, up = w13.chunk(2)
    yield _entry(f"{name}.gate_proj.weight", gate, role, formats)
    yield _entry(f"{name}.up_proj.weight", up, role, formats)
    yield _entry(f"{name}.down_proj.weight", w2, role, formats)
