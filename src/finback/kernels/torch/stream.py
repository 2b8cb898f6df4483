"""Norms, rotation, hyper-connections and the Engram gate in torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from finback.kernels.torch import fixed
from finback.kernels.torch.attention import accumulator, cast
from finback.kernels.torch.matmul import linear

Array = npt.NDArray[Any]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return cast(F.rms_norm(cast(x, accumulator(x.dtype)), x.shape[-1:], weight, eps), x.dtype)


def rotate_pairs(x: Tensor, turns: Tensor, *, inverse: bool = False) -> Tensor:
    turns = turns.conj() if inverse else turns
    # A copy of all of x and a product in place: cheaper than cutting the tail off and joining it again.
    wide = x.to(accumulator(x.dtype), copy=True, memory_format=torch.contiguous_format)
    if _needs_gradient(wide):
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    else:
        pairs = wide.view(turns.dtype)  # one call; it has no derivative
    pairs[..., -turns.shape[-1] :].mul_(turns.unsqueeze(1) if x.ndim > turns.ndim else turns)
    return wide if wide.dtype == x.dtype else wide.to(x.dtype)


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
    copies = streams.shape[1]
    flat = streams.flatten(1)
    if flat.is_cpu and not _needs_gradient(flat, fn, scale, base):
        norm = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
        z, norms, scales, bases = (_array(t) for t in (linear(flat, fn), norm, scale, base))
        z = z / np.sqrt(norms * norms / flat.shape[1] + norm_eps)
        z *= np.repeat(scales, (copies, copies, copies * copies))
        z += bases
        return _split_mixes_numpy(z, copies, iterations, eps)
    # The norm is one pass without a temporary of the streams' size.
    mean_square = torch.linalg.vector_norm(flat, dim=1, keepdim=True).square() / flat.shape[1]
    mixes = linear(flat, fn) * torch.rsqrt(mean_square + norm_eps)
    mixes = torch.addcmul(base, mixes, scale.index_select(0, _parts_of_mixes(copies, scale.device)))
    pre, post, comb = mixes.split([copies, copies, copies * copies], dim=1)
    return pre.sigmoid() + eps, 2 * post.sigmoid(), sinkhorn(comb.unflatten(1, (copies, copies)), iterations, eps)


@lru_cache
def _parts_of_mixes(copies: int, device: torch.device) -> Tensor:
    """[(2 + M) M] int64: which of the three scales each mix has."""
    with torch.inference_mode(False):  # a tensor made under inference mode could not serve a backward pass later
        return torch.tensor([0] * copies + [1] * copies + [2] * copies * copies, device=device)


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _array(x: Tensor) -> Array:
    """A CPU tensor's memory for numpy: a tiny array costs what a call costs, several times more in torch."""
    return np.from_dlpack(x.detach() if x.requires_grad else x)


def _split_mixes_numpy(mixes: Array, copies: int, iterations: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (2 + M) M] logits -> pre, post, comb."""
    with np.errstate(over="ignore"):  # exp(-z) = inf is a sigmoid of 0
        gates = 1 / (1 + np.exp(-mixes[:, : 2 * copies]))
    gates[:, :copies] += eps
    gates[:, copies:] *= 2
    comb = _sinkhorn_numpy(mixes[:, 2 * copies :].reshape(-1, copies, copies), iterations, eps)
    pre, post = torch.from_numpy(gates).split(copies, dim=1)
    return pre, post, torch.from_numpy(comb)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    if logits.is_cpu and not _needs_gradient(logits):
        return torch.from_numpy(_sinkhorn_numpy(_array(logits), iterations, eps))
    return _Sinkhorn.apply(logits, iterations, eps)


class _Sinkhorn(torch.autograd.Function):
    """Keeps its input alone: 40 divisions of [T, M, M] are cheaper to redo than to remember.

    Tokens go innermost, as in `_sinkhorn_numpy`. Of z' = z / s with s = sum(z) + eps, dz = (dz' - sum(dz' z')) / s.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.settings = iterations, eps
        z = _sinkhorn_start(logits, eps)
        for axis in _sinkhorn_axes(iterations):
            z.div_(z.sum(axis, keepdim=True).add_(eps))
        return z.permute(2, 0, 1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]  (the decorator hides the names)
        (logits,) = ctx.saved_tensors
        iterations, eps = ctx.settings
        z, axes = _sinkhorn_start(logits, eps), _sinkhorn_axes(iterations)
        rows, sums, results = z - eps, [], []
        for axis in axes:
            sums.append(z.sum(axis, keepdim=True).add_(eps))
            z = z / sums[-1]
            results.append(z)
        grad = grad_outputs[0].permute(1, 2, 0).contiguous()
        for axis, total, z in zip(reversed(axes), reversed(sums), reversed(results), strict=True):
            grad = grad.sub((grad * z).sum(axis, keepdim=True)).div_(total)
        grad = (grad - (grad * rows).sum(1, keepdim=True)).mul_(rows)  # of the softmax
        return grad.permute(2, 0, 1), None, None


def _sinkhorn_start(logits: Tensor, eps: float) -> Tensor:
    """[T, M, M] -> row softmax + eps as [M, M, T], contiguous."""
    return logits.permute(1, 2, 0).contiguous().softmax(1).add_(eps)


def _sinkhorn_axes(iterations: int) -> tuple[int, ...]:
    """The axes of [M, M, T] that are normalised after the softmax: columns, then rows and columns in turns."""
    return (0, *(1, 0) * (iterations - 1))


def _sinkhorn_numpy(logits: Array, iterations: int, eps: float) -> Array:
    """The same on [T, M, M] arrays. Tokens go innermost: 40 tiny passes then vectorise, and cost no dispatch."""
    z = np.ascontiguousarray(logits.transpose(1, 2, 0))
    z = np.exp(z - z.max(1, keepdims=True))
    z /= z.sum(1, keepdims=True)
    z += eps
    sums = np.empty_like(z[:, :1]), np.empty_like(z[:1])
    for axis in _sinkhorn_axes(iterations):
        total = np.add.reduce(z, axis, out=sums[1 - axis], keepdims=True)
        total += eps
        z /= total
    return np.ascontiguousarray(z.transpose(2, 0, 1))


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    if len(streams) == 1 and not fixed.deterministic.get():
        return torch.mm(pre, streams.squeeze(0))
    return torch.bmm(pre.unsqueeze(1), streams).squeeze(1)


def hc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return torch.baddbmm(post.unsqueeze(2) * y.unsqueeze(1), comb.transpose(1, 2), streams)


def engram_gate(streams: Tensor, key: Tensor, weight: Tensor, eps: float) -> Tensor:
    rstd = torch.rsqrt(streams.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (streams * weight * key).sum(-1) * rstd * streams.shape[-1] ** -0.5
    opening = torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot)
    return fixed.elementwise(opening, torch.sigmoid) if fixed.deterministic.get() else opening.sigmoid()
