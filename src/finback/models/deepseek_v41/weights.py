"""The weight table of DeepSeek-V4.1: every tensor of the released layout, and the parameter that it fills.

Names are the released ones. Quantised matrices have a `.scale` beside `.weight`; in a checkpoint without a
`quantization_config` every tensor is plain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from finback.base.formats import BF16, E2M1_R32, E4M3_B32, E4M3_R32, F16, F32, Format
from finback.models.base import TensorSpec
from finback.nn.moe import MoE

if TYPE_CHECKING:
    from finback.models.deepseek_v41.attention import Attention
    from finback.models.deepseek_v41.model import Block, DeepseekV41, HyperConnection

Entry = tuple[TensorSpec, Tensor]
PLAIN = (BF16, F32, F16)


class _Formats:
    """Stored formats of this checkpoint's quantised matrices."""

    def __init__(self, model: DeepseekV41):
        quant = model.config.quantization_config
        self.dense: tuple[Format, ...] = PLAIN if quant is None else (E4M3_B32,)
        self.expert = (E2M1_R32,) if quant is not None and quant.expert_dtype == "fp4" else self.dense


def _entry(name: str, tensor: Tensor | None, role: str, formats: tuple[Format, ...] = PLAIN) -> Entry:
    assert tensor is not None, f"{name} was already given up for its packed form"
    return TensorSpec(name, tuple(tensor.shape), formats, role), tensor


def weight_table(model: DeepseekV41) -> Iterator[Entry]:
    """Every (spec, destination). Destinations are views of parameters, on whatever device they are (also "meta")."""
    formats = _Formats(model)
    yield _entry("embed.weight", model.embed.weight, "embedding")
    for i, block in enumerate(model.layers):
        yield from _block(f"layers.{i}", block, formats, "attention")
    for layer, engram in model.engrams.items():
        name = f"layers.{layer}.engram"
        table = engram.embed
        stored = (table.rows, table.dim)
        destination = table.weight if table.weight is not None else engram.q_weight.new_empty(stored, device="meta")
        yield _entry(f"{name}.embed.weight", destination, "engram_table", (E4M3_R32, F32, BF16))
        yield _entry(f"{name}.wkv.weight", engram.wkv.weight, "engram", formats.dense)
        yield _entry(f"{name}.q_weight", engram.q_weight, "engram")
        yield _entry(f"{name}.k_weight", engram.k_weight, "engram")
    yield _entry("norm.weight", model.norm.weight, "norm")
    yield _entry("head.weight", model.head.weight, "head")
    if model.mtp is not None:
        yield from _drafts(model, formats)
    if model.config.vision_config is not None:
        for prefix, part in (("vision", model.vision), ("aligner", model.aligner)):
            for name, parameter in part.named_parameters():
                yield _entry(f"{prefix}.{name}", parameter, "vision")
        for name in ("image_start", "image_end", "image_newline"):
            yield _entry(name, getattr(model, name), "vision")


def _drafts(model: DeepseekV41, formats: _Formats) -> Iterator[Entry]:
    draft = model.mtp
    assert draft is not None
    for i, stage in enumerate(draft.stages):
        yield from _block(f"mtp.{i}", stage, formats, "draft")
    last = f"mtp.{len(draft.stages) - 1}"
    yield _entry("mtp.0.main_proj.weight", draft.main_proj.weight, "draft", formats.dense)
    yield _entry("mtp.0.main_norm.weight", draft.main_norm.weight, "draft")
    yield _entry(f"{last}.norm.weight", draft.norm.weight, "draft")
    yield _entry(f"{last}.markov_head.embed.weight", draft.markov_embed.weight, "draft")
    yield _entry(f"{last}.markov_head.head.weight", draft.markov_head.weight, "draft")
    yield _entry(f"{last}.confidence_head.proj.weight", draft.confidence.weight, "draft")


def _block(name: str, block: Block, formats: _Formats, role: str) -> Iterator[Entry]:
    yield _entry(f"{name}.attn_norm.weight", block.attn_norm.weight, "norm")
    yield _entry(f"{name}.ffn_norm.weight", block.ffn_norm.weight, "norm")
    yield from _hyper_connection(f"{name}.hc_attn", block.hc_attn)
    yield from _hyper_connection(f"{name}.hc_ffn", block.hc_ffn)
    yield from _attention(f"{name}.attn", block.attn, formats, role)
    yield from _moe(f"{name}.ffn", block.ffn, formats, role)


def _hyper_connection(name: str, hc: HyperConnection) -> Iterator[Entry]:
    for part in ("fn", "base", "scale"):
        yield _entry(f"{name}_{part}", getattr(hc, part), "hyper_connection", (F32, BF16))


def _attention(name: str, attn: Attention, formats: _Formats, role: str) -> Iterator[Entry]:
    for part in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"):
        yield _entry(f"{name}.{part}.weight", getattr(attn, part).weight, role, formats.dense)
    yield _entry(f"{name}.q_norm.weight", attn.q_norm.weight, "norm")
    yield _entry(f"{name}.kv_norm.weight", attn.kv_norm.weight, "norm")
    yield _entry(f"{name}.attn_sink", attn.attn_sink, role, (F32, BF16))
    if (compressor := attn.compressor) is not None:
        yield _entry(f"{name}.compressor.wkv.weight", compressor.wkv.weight, "compressor")
        if compressor.ratio > 1:
            yield _entry(f"{name}.compressor.wgate.weight", compressor.wgate.weight, "compressor")
        yield _entry(f"{name}.compressor.norm.weight", compressor.norm.weight, "norm")
    if (indexer := attn.indexer) is not None:
        yield _entry(f"{name}.indexer.wq_b.weight", indexer.wq_b.weight, "indexer", formats.dense)
        yield _entry(f"{name}.indexer.weights_proj.weight", indexer.weights_proj.weight, "indexer")
        if indexer.owns_keys:
            yield _entry(f"{name}.indexer.wk.weight", indexer.wk.weight, "indexer")
            yield _entry(f"{name}.indexer.k_norm.weight", indexer.k_norm.weight, "norm")


def _moe(name: str, moe: MoE, formats: _Formats, role: str) -> Iterator[Entry]:
    expert, shared = ("draft", "draft") if role == "draft" else ("expert", "shared_expert")
    yield _entry(f"{name}.gate.weight", moe.gate.weight, "router")
    yield _entry(f"{name}.gate.bias", moe.gate.bias, "router", (F32, BF16))
    if moe.gate.bias_vl is not None:
        yield _entry(f"{name}.gate.bias_vl", moe.gate.bias_vl, "router", (F32, BF16))
    yield from _swiglu(
        f"{name}.shared_experts", moe.shared_experts.w13.weight, moe.shared_experts.w2.weight, shared, formats.dense
    )
    w13, w2 = moe.experts.w13, moe.experts.w2
    assert w13 is not None and w2 is not None
    for e in range(len(w13)):
        yield from _swiglu(f"{name}.experts.{e}", w13[e], w2[e], expert, formats.expert)


def _swiglu(
    name: str,
    w13: nn.Parameter | Tensor | None,
    w2: nn.Parameter | Tensor | None,
    role: str,
    formats: tuple[Format, ...],
) -> Iterator[Entry]:
    assert w13 is not None
    gate, up = w13.chunk(2)
    yield _entry(f"{name}.w1.weight", gate, role, formats)
    yield _entry(f"{name}.w2.weight", w2, role, formats)
    yield _entry(f"{name}.w3.weight", up, role, formats)
