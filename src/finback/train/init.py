"""Fresh weights for a trainable model, by the role of each tensor in the family's weight table.

| tensors                    | start as                                                                               |
|----------------------------|----------------------------------------------------------------------------------------|
| matrices                   | normal, std 0.5 / sqrt(fan in), cut off at two std                                     |
| embeddings                 | normal, std 1 / sqrt(D)                                                                |
| norms                      | 1, their biases 0                                                                      |
| sinks, router biases       | 0                                                                                      |
| hyper-connections          | an ordinary residual (below)                                                           |
| Engram tables, their `wkv` | tables normal, std 0.02; keys as matrices; value rows 0, so that nothing is added yet  |

A hyper-connection that starts at zeros averages its residual copies for ever: they get equal gradients and stay equal.
So each sublayer reads one copy (`pre`: sigmoid(3) against sigmoid(-3)), writes to all of them (`post` = 1) and leaves
them as they are (`comb`: Sinkhorn of 6 I - 3). What is read first is copy 0, then copy 1, and so on around. In V4.1 the
`pre` that a sublayer computes is used by the next one, so it is given the copy of the next; the last one's is what the
final norm reads. Source: mHC (arXiv 2512.24880), appendix A.6.

Families with an `init_weights` of their own (SpikeWhale) use that.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from finback.base.runtime import seed_everything
from finback.models.base import Model, TensorSpec

_MATRIX, _TABLE = 0.5, 0.02
_OPEN, _CLOSED, _KEEP = 3.0, -3.0, 6.0
_ALPHA = 0.01  # how much a hyper-connection depends on its input at the start


@torch.no_grad()
def initialise(model: Model, seed: int) -> None:
    """Fill every parameter of `model`; the same seed gives the same values on every device and in every dtype (rounded
    to it). Seeds the global generators."""
    seed_everything(seed)
    if callable(own := getattr(model, "init_weights", None)):
        own()
        return
    generator = torch.Generator().manual_seed(seed)
    for spec, out in model.weights():
        out.copy_(_fresh(spec, generator))
    for name, module in model.named_modules():
        if hasattr(module, "hc_attn"):  # a block of a family with hyper-connections
            _plain_residual(module, first=2 * int(name.rsplit(".", 1)[1]))
        if hasattr(module, "copies") and hasattr(module, "wkv"):
            engram: Any = module
            engram.wkv.weight[engram.copies * engram.q_weight.shape[1] :] = 0


def _fresh(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """float32 values of one tensor of the weight table."""
    last = spec.name.rsplit(".", 1)[-1]
    if spec.role == "norm" or "norm" in spec.name or last in ("q_weight", "k_weight"):
        return torch.zeros(spec.shape) if last == "bias" else torch.ones(spec.shape)
    if spec.role == "embedding" or last.startswith("image_"):
        return _normal(spec.shape, spec.shape[-1] ** -0.5, generator)
    if spec.role == "engram_table":
        return _normal(spec.shape, _TABLE, generator)
    if len(spec.shape) < 2:
        return torch.zeros(spec.shape)
    return _normal(spec.shape, _MATRIX / math.sqrt(math.prod(spec.shape[1:])), generator)


def _normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    """Normal values without those beyond two standard deviations."""
    return torch.nn.init.trunc_normal_(torch.empty(shape), 0.0, std, -2 * std, 2 * std, generator=generator)


def _plain_residual(block: Any, first: int) -> None:
    """Bases and scales of a block's two hyper-connections, sublayers `first` and `first` + 1 of their stack."""
    for sublayer, hc in ((first, block.hc_attn), (first + 1, block.hc_ffn)):
        if not hasattr(hc, "base"):
            continue
        copies = math.isqrt(len(hc.base) + 1) - 1  # (2 + M) M = (M + 1)^2 - 1
        pre, post, comb = hc.base.split([copies, copies, copies * copies])
        pre.fill_(_CLOSED)[(sublayer + 1) % copies] = _OPEN
        post.zero_()
        comb.copy_((_KEEP * torch.eye(copies) + _CLOSED).flatten())
        hc.scale.fill_(_ALPHA)
