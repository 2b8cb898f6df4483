"""Norms, rotation, hyper-connections and the Engram gate in torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from finback.kernels.torch.attention import accumulator


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x.to(accumulator(x.dtype)), x.shape[-1:], weight, eps).to(x.dtype)


def rotate_pairs(x: Tensor, turns: Tensor, *, inverse: bool = False) -> Tensor:
    width = 2 * turns.shape[-1]
    turns = turns.conj() if inverse else turns
    if x.ndim == 3:
        turns = turns.unsqueeze(1)
    tail = x[..., -width:].to(accumulator(x.dtype)).unflatten(-1, (-1, 2))
    tail = torch.view_as_real(torch.view_as_complex(tail.contiguous()) * turns).flatten(-2).to(x.dtype)
    return tail if width == x.shape[-1] else torch.cat([x[..., :-width], tail], dim=-1)


def rotate_halves(x: Tensor, turns: Tensor) -> Tensor:
    width = 2 * turns.shape[-1]
    if x.ndim == 3:
        turns = turns.unsqueeze(1)
    first, second = x[..., :width].to(accumulator(x.dtype)).chunk(2, dim=-1)
    cos, sin = turns.real, turns.imag
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], dim=-1)


def hc_mixes(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, iterations: int, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, copies, _ = streams.shape
    flat = streams.flatten(1)
    mixes = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    scales = scale.repeat_interleave(_mix_counts(copies, scale.device), output_size=base.shape[0])
    mixes = torch.addcmul(base, mixes, scales)
    pre, post = mixes[:, : 2 * copies].sigmoid().chunk(2, dim=1)
    comb = sinkhorn(mixes[:, 2 * copies :].unflatten(1, (copies, copies)), iterations, eps)
    return pre + eps, 2 * post, comb


def _mix_counts(copies: int, device: torch.device) -> Tensor:
    return torch.tensor([copies, copies, copies * copies], device=device)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    if logits.is_cpu and not (torch.is_grad_enabled() and logits.requires_grad):
        return _sinkhorn_numpy(logits, iterations, eps)
    z = logits.softmax(dim=2) + eps
    z = z / (z.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        z = z / (z.sum(2, keepdim=True) + eps)
        z = z / (z.sum(1, keepdim=True) + eps)
    return z


def _sinkhorn_numpy(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """The same arithmetic on [M, M, T] arrays: tokens innermost, so that 40 tiny passes vectorise and cost no dispatch."""
    z = np.ascontiguousarray(logits.detach().permute(1, 2, 0).numpy())
    z = np.exp(z - z.max(1, keepdims=True))
    z /= z.sum(1, keepdims=True)
    z += z.dtype.type(eps)
    z /= z.sum(0, keepdims=True) + z.dtype.type(eps)
    for _ in range(iterations - 1):
        z /= z.sum(1, keepdims=True) + z.dtype.type(eps)
        z /= z.sum(0, keepdims=True) + z.dtype.type(eps)
    return torch.from_numpy(z).permute(2, 0, 1).contiguous()


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return torch.bmm(pre.unsqueeze(1), streams).squeeze(1)


def hc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return torch.baddbmm(post.unsqueeze(2) * y.unsqueeze(1), comb.transpose(1, 2), streams)


def engram_gate(streams: Tensor, key: Tensor, weight: Tensor, eps: float) -> Tensor:
    rstd = torch.rsqrt(streams.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (streams * weight * key).sum(-1) * rstd * streams.shape[-1] ** -0.5
    return torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
