"""SpikeWhale's weight table, and fresh weights.

Every parameter and frozen matrix of the model has its published name, so the table is a walk over the modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from finback.base.formats import BF16, F16, F32
from finback.models.base import TensorSpec
from finback.models.spikewhale.config import SpikeWhaleConfig
from finback.models.spikewhale.engram import Frozen
from finback.nn.linear import Embedding, Weight
from finback.nn.norm_rope import RMSNorm

if TYPE_CHECKING:
    from finback.models.spikewhale.model import SpikeWhale

# First match decides: part of the tensor's name -> role.
_ROLES = {
    "embed_tokens": "embedding", "lm_head": "head", "lookup.tables": "engram_table", "engram": "engram",
    "norm": "norm", "hc_": "hyper_connection", "hrm_refine": "refinement", "mtp_heads": "draft", "attn": "attention",
    "router": "router", "shared_expert": "shared_expert", "experts": "expert", "ffn": "ffn",
    "ve_gate": "value_embedding",
}  # fmt: skip


def weight_table(model: SpikeWhale) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Every (spec, destination). Some files of tied models hold a copy of the embedding as the head's weight: it comes
    first, and the embedding overwrites it."""
    embedding = model.model.embed_tokens.weight
    if model.lm_head is None:
        yield TensorSpec("lm_head.weight", tuple(embedding.shape), (F32, BF16, F16), "head", optional=True), embedding
    for name, tensor in model.state_dict(keep_vars=True).items():
        role = next(role for part, role in _ROLES.items() if part in name)
        yield TensorSpec(name, tuple(tensor.shape), (F32, BF16, F16), role), tensor


@torch.no_grad()
def init_module(module: nn.Module, c: SpikeWhaleConfig) -> None:
    """Fresh values for what `module` itself owns. Modules of this family that differ from the rule have their own
    `reset_parameters`; else matrices and embeddings are normal with standard deviation `initializer_range`, norms 1 and
    biases 0."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=c.initializer_range)
        nn.init.zeros_(module.bias)
    elif callable(reset := getattr(module, "reset_parameters", None)):
        reset()
    elif isinstance(module, Weight | Embedding | Frozen):
        nn.init.normal_(module.weight, std=c.initializer_range)
    elif isinstance(module, RMSNorm):
        nn.init.ones_(module.weight)
