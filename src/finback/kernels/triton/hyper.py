"""Hyper-connections in few launches: on a GPU the bill is the traffic of the residual copies, not the arithmetic.

Copies are read in their own dtype (bf16 in training) and never stored wider; all sums are float32 and are rounded once.
Shapes are as in `finback.kernels`; M must be a power of two. One program of the copies' kernels is one token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# Three TF32 products for one of float32: on tensor cores, and within 1e-6 of it.
_PRECISION = tl.constexpr("tf32x3")
_LANES = 128  # values of D that a program holds at once
_TOKENS = 32  # tokens a program of the small matrices, and a tile of the mixes
_DEPTH = 64  # values of M D that a tile of the mixes holds
_CHUNK = 1024  # tokens whose share of a gradient of `fn` one program sums


# -- Sinkhorn ----------------------------------------------------------------------------------------------------------


@triton.jit
def _sinkhorn_forward(logits, out, tokens, eps, M: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, M)
    at = token[:, None, None] * (M * M) + column[None, :, None] * M + column[None, None, :]
    live = token[:, None, None] < tokens
    z = tl.load(logits + at, mask=live, other=0.0)
    z = tl.exp(z - tl.max(z, axis=2, keep_dims=True))
    z = z / tl.sum(z, axis=2, keep_dims=True) + eps
    z = z / (tl.sum(z, axis=1, keep_dims=True) + eps)
    for _ in range(ITERATIONS - 1):
        z = z / (tl.sum(z, axis=2, keep_dims=True) + eps)
        z = z / (tl.sum(z, axis=1, keep_dims=True) + eps)
    tl.store(out + at, z, mask=live)


@triton.jit
def _sinkhorn_backward(
    logits, grad_out, grad_in, sums, tokens, eps, M: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr
):
    """Forward again, leaving the divisors in `sums` [2 ITERATIONS - 1, T, M], then back: z = z' s undoes z' = z / s."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, M)
    at = token[:, None, None] * (M * M) + column[None, :, None] * M + column[None, None, :]
    by_row = token[:, None, None] * M + column[None, :, None]
    by_column = token[:, None, None] * M + column[None, None, :]
    live = token[:, None, None] < tokens
    step = tokens * M
    z = tl.load(logits + at, mask=live, other=0.0)
    z = tl.exp(z - tl.max(z, axis=2, keep_dims=True))
    p = z / tl.sum(z, axis=2, keep_dims=True)
    z = p + eps
    column_sum = tl.sum(z, axis=1, keep_dims=True) + eps
    tl.store(sums + by_column, column_sum, mask=live)
    z = z / column_sum
    for i in range(ITERATIONS - 1):
        row_sum = tl.sum(z, axis=2, keep_dims=True) + eps
        tl.store(sums + (2 * i + 1) * step + by_row, row_sum, mask=live)
        z = z / row_sum
        column_sum = tl.sum(z, axis=1, keep_dims=True) + eps
        tl.store(sums + (2 * i + 2) * step + by_column, column_sum, mask=live)
        z = z / column_sum
    tl.debug_barrier()  # what was stored is read by other threads of the program
    g = tl.load(grad_out + at, mask=live, other=0.0)
    for j in range(ITERATIONS - 1):
        last = ITERATIONS - 2 - j
        column_sum = tl.load(sums + (2 * last + 2) * step + by_column, mask=live, other=1.0)
        g = (g - tl.sum(g * z, axis=1, keep_dims=True)) / column_sum
        z = z * column_sum
        row_sum = tl.load(sums + (2 * last + 1) * step + by_row, mask=live, other=1.0)
        g = (g - tl.sum(g * z, axis=2, keep_dims=True)) / row_sum
        z = z * row_sum
    column_sum = tl.load(sums + by_column, mask=live, other=1.0)
    g = (g - tl.sum(g * z, axis=1, keep_dims=True)) / column_sum
    g = p * (g - tl.sum(g * p, axis=2, keep_dims=True))
    tl.store(grad_in + at, g, mask=live)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float) -> Tensor:
        logits = logits.contiguous()
        tokens, m, _ = logits.shape
        ctx.save_for_backward(logits)
        ctx.settings = iterations, eps
        out = torch.empty_like(logits)
        _sinkhorn_forward[(triton.cdiv(tokens, _TOKENS),)](
            logits, out, tokens, eps, M=m, ITERATIONS=iterations, BLOCK=_TOKENS, num_warps=1
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]  (the decorator hides the names)
        (logits,) = ctx.saved_tensors
        iterations, eps = ctx.settings
        tokens, m, _ = logits.shape
        grad, sums = torch.empty_like(logits), logits.new_empty(2 * iterations - 1, tokens, m)
        _sinkhorn_backward[(triton.cdiv(tokens, _TOKENS),)](
            logits, grad_outputs[0].contiguous(), grad, sums, tokens, eps,
            M=m, ITERATIONS=iterations, BLOCK=_TOKENS, num_warps=1,
        )  # fmt: skip
        return grad, None, None


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """[T, M, M] float32 -> doubly stochastic [T, M, M]; one launch forward and one backward."""
    return _Sinkhorn.apply(logits, iterations, eps)


# -- reading and writing the copies ------------------------------------------------------------------------------------


@triton.jit
def _collapse_forward(streams, pre, out, D, M: tl.constexpr, LANES: tl.constexpr):
    token, copy = tl.program_id(0).to(tl.int64), tl.arange(0, M)
    weight = tl.load(pre + token * M + copy)
    for start in range(0, D, LANES):
        lane = start + tl.arange(0, LANES)
        x = tl.load(streams + (token * M + copy)[:, None] * D + lane[None, :], mask=lane[None, :] < D, other=0.0)
        y = tl.sum(x.to(tl.float32) * weight[:, None], axis=0)
        tl.store(out + token * D + lane, y.to(out.dtype.element_ty), mask=lane < D)


@triton.jit
def _collapse_backward(streams, pre, grad, grad_streams, grad_pre, D, M: tl.constexpr, LANES: tl.constexpr):
    token, copy = tl.program_id(0).to(tl.int64), tl.arange(0, M)
    weight = tl.load(pre + token * M + copy)
    slope = tl.zeros([M], tl.float32)
    for start in range(0, D, LANES):
        lane = start + tl.arange(0, LANES)
        at = (token * M + copy)[:, None] * D + lane[None, :]
        x = tl.load(streams + at, mask=lane[None, :] < D, other=0.0).to(tl.float32)
        g = tl.load(grad + token * D + lane, mask=lane < D, other=0.0).to(tl.float32)
        slope += tl.sum(x * g[None, :], axis=1)
        tl.store(
            grad_streams + at, (weight[:, None] * g[None, :]).to(grad_streams.dtype.element_ty), mask=lane[None, :] < D
        )
    tl.store(grad_pre + token * M + copy, slope)


class _Collapse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, pre: Tensor) -> Tensor:
        streams, pre = streams.contiguous(), pre.contiguous()
        tokens, m, dim = streams.shape
        ctx.save_for_backward(streams, pre)
        out = streams.new_empty(tokens, dim)
        _collapse_forward[(tokens,)](streams, pre, out, dim, M=m, LANES=_LANES, num_warps=1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]  (the decorator hides the names)
        streams, pre = ctx.saved_tensors
        tokens, m, dim = streams.shape
        grad_streams, grad_pre = torch.empty_like(streams), torch.empty_like(pre)
        _collapse_backward[(tokens,)](
            streams, pre, grad_outputs[0].contiguous(), grad_streams, grad_pre, dim, M=m, LANES=_LANES, num_warps=1
        )
        return grad_streams, grad_pre


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """[T, M, D], [T, M] float32 -> [T, D] in the streams' dtype."""
    return _Collapse.apply(streams, pre)


@triton.jit
def _expand_forward(y, streams, post, comb, out, D, M: tl.constexpr, LANES: tl.constexpr):
    token, copy = tl.program_id(0).to(tl.int64), tl.arange(0, M)
    gain = tl.load(post + token * M + copy)
    mix = tl.load(comb + token * (M * M) + copy[:, None] * M + copy[None, :])  # [source, result]
    for start in range(0, D, LANES):
        lane = start + tl.arange(0, LANES)
        at = (token * M + copy)[:, None] * D + lane[None, :]
        x = tl.load(streams + at, mask=lane[None, :] < D, other=0.0).to(tl.float32)
        new = tl.load(y + token * D + lane, mask=lane < D, other=0.0).to(tl.float32)
        mixed = tl.sum(mix[:, :, None] * x[:, None, :], axis=0) + gain[:, None] * new[None, :]
        tl.store(out + at, mixed.to(out.dtype.element_ty), mask=lane[None, :] < D)


@triton.jit
def _expand_backward(
    y, streams, post, comb, grad, grad_y, grad_streams, grad_post, grad_comb, D, M: tl.constexpr, LANES: tl.constexpr
):
    token, copy = tl.program_id(0).to(tl.int64), tl.arange(0, M)
    square = token * (M * M) + copy[:, None] * M + copy[None, :]
    gain = tl.load(post + token * M + copy)
    mix = tl.load(comb + square)
    slope_gain, slope_mix = tl.zeros([M], tl.float32), tl.zeros([M, M], tl.float32)
    for start in range(0, D, LANES):
        lane = start + tl.arange(0, LANES)
        at = (token * M + copy)[:, None] * D + lane[None, :]
        x = tl.load(streams + at, mask=lane[None, :] < D, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=lane[None, :] < D, other=0.0).to(tl.float32)
        new = tl.load(y + token * D + lane, mask=lane < D, other=0.0).to(tl.float32)
        slope_gain += tl.sum(g * new[None, :], axis=1)
        slope_mix += tl.sum(x[:, None, :] * g[None, :, :], axis=2)
        back = tl.sum(mix[:, :, None] * g[None, :, :], axis=1)
        tl.store(grad_streams + at, back.to(grad_streams.dtype.element_ty), mask=lane[None, :] < D)
        to_y = tl.sum(gain[:, None] * g, axis=0)
        tl.store(grad_y + token * D + lane, to_y.to(grad_y.dtype.element_ty), mask=lane < D)
    tl.store(grad_post + token * M + copy, slope_gain)
    tl.store(grad_comb + square, slope_mix)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        y, streams, post, comb = y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous()
        tokens, m, dim = streams.shape
        ctx.save_for_backward(y, streams, post, comb)
        out = torch.empty_like(streams)
        _expand_forward[(tokens,)](y, streams, post, comb, out, dim, M=m, LANES=_LANES, num_warps=1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]  (the decorator hides the names)
        inputs = ctx.saved_tensors
        tokens, m, dim = inputs[1].shape
        grads = [torch.empty_like(x) for x in inputs]
        _expand_backward[(tokens,)](
            *inputs, grad_outputs[0].contiguous(), *grads, dim, M=m, LANES=_LANES, num_warps=1
        )  # fmt: skip
        return tuple(grads)


def hc_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """[T, D], [T, M, D], [T, M] and [T, M, M] float32 -> [T, M, D] in the streams' dtype."""
    return _Expand.apply(y, streams, post, comb)


# -- the products that the coefficients come from ----------------------------------------------------------------------


@triton.jit
def _products_forward(
    flat, fn, products, squares, tokens, K, N, WIDE: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr
):
    token, column = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDE)
    live = token < tokens
    total, square = tl.zeros([TOKENS, WIDE], tl.float32), tl.zeros([TOKENS], tl.float32)
    for start in range(0, K, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = depth < K
        x = tl.load(flat + token[:, None] * K + depth[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        x = x.to(tl.float32)
        w = tl.load(fn + column[None, :] * K + depth[:, None], mask=(column < N)[None, :] & inside[:, None], other=0.0)
        total += tl.dot(x, w, input_precision=_PRECISION)
        square += tl.sum(x * x, axis=1)
    tl.store(products + token[:, None] * N + column[None, :], total, mask=live[:, None] & (column < N)[None, :])
    tl.store(squares + token, square, mask=live)


@triton.jit
def _products_backward(
    flat, fn, grad, grad_squares, grad_flat, grad_fn, tokens, K, N,
    WIDE: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk of tokens and one run of K: their gradient, and their share of that of fn, [chunks, N, K]."""
    chunk, column = tl.program_id(0), tl.arange(0, WIDE)
    depth = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    inside = depth < K
    w_at, w_mask = column[:, None] * K + depth[None, :], (column < N)[:, None] & inside[None, :]
    w = tl.load(fn + w_at, mask=w_mask, other=0.0)
    share = tl.zeros([WIDE, DEPTH], tl.float32)
    for start in range(0, CHUNK, TOKENS):
        token = chunk.to(tl.int64) * CHUNK + start + tl.arange(0, TOKENS)
        live = token < tokens
        g_mask = live[:, None] & (column < N)[None, :]
        g = tl.load(grad + token[:, None] * N + column[None, :], mask=g_mask, other=0.0)
        slope = tl.load(grad_squares + token, mask=live, other=0.0)
        at, mask = token[:, None] * K + depth[None, :], live[:, None] & inside[None, :]
        x = tl.load(flat + at, mask=mask, other=0.0).to(tl.float32)
        back = tl.dot(g, w, input_precision=_PRECISION) + 2 * slope[:, None] * x
        tl.store(grad_flat + at, back.to(grad_flat.dtype.element_ty), mask=mask)
        share += tl.dot(tl.trans(g), x, input_precision=_PRECISION)
    tl.store(grad_fn + chunk.to(tl.int64) * N * K + w_at, share, mask=w_mask)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
        flat, fn = flat.contiguous(), fn.contiguous()
        tokens, n = len(flat), len(fn)
        ctx.save_for_backward(flat, fn)
        products, squares = fn.new_empty(tokens, n), fn.new_empty(tokens)
        _products_forward[(triton.cdiv(tokens, _TOKENS),)](
            flat, fn, products, squares, tokens, flat.shape[1], n, WIDE=_wide(n), TOKENS=_TOKENS, DEPTH=_DEPTH
        )
        return products, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]  (the decorator hides the names)
        flat, fn = ctx.saved_tensors
        grad, grad_squares = (g.contiguous() for g in grad_outputs)
        tokens, width = flat.shape
        chunks = triton.cdiv(tokens, _CHUNK)
        grad_flat, shares = torch.empty_like(flat), fn.new_empty(chunks, *fn.shape)
        _products_backward[(chunks, triton.cdiv(width, _DEPTH))](
            flat, fn, grad, grad_squares, grad_flat, shares, tokens, width, len(fn),
            WIDE=_wide(len(fn)), TOKENS=_TOKENS, DEPTH=_DEPTH, CHUNK=_CHUNK,
        )  # fmt: skip
        return grad_flat, shares.sum(0)


def _wide(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def hc_mixes(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, iterations: int, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients pre [T, M], post [T, M], comb [T, M, M], float32, of streams [T, M, D]: one reading of them."""
    copies = streams.shape[1]
    flat = streams.flatten(1)
    products, squares = _Products.apply(flat, fn)
    mixes = products * torch.rsqrt(squares / flat.shape[1] + norm_eps).unsqueeze(1)
    scales = torch.cat([scale[:1].expand(copies), scale[1:2].expand(copies), scale[2:].expand(copies * copies)])
    mixes = torch.addcmul(base, mixes, scales)
    pre, post, comb = mixes.split([copies, copies, copies * copies], dim=1)
    return pre.sigmoid() + eps, 2 * post.sigmoid(), sinkhorn(comb.unflatten(1, (copies, copies)), iterations, eps)
