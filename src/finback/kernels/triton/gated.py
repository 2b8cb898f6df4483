"""SwiGLU between two products in one launch: its float32 values never reach memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_LANES = 256


@triton.jit
def _forward(gate_up, weights, out, WIDTH, limit, LIMITED: tl.constexpr, WEIGHED: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, WIDTH, LANES):
        lane = start + tl.arange(0, LANES)
        gate = tl.load(gate_up + row * 2 * WIDTH + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
        if LIMITED:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        y = gate * tl.sigmoid(gate) * up
        if WEIGHED:
            y = y * tl.load(weights + row)
        tl.store(out + row * WIDTH + lane, y.to(out.dtype.element_ty), mask=lane < WIDTH)


@triton.jit
def _backward(
    gate_up, weights, grad, grad_gate_up, grad_weights, WIDTH, limit,
    LIMITED: tl.constexpr, WEIGHED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slope = tl.zeros([LANES], tl.float32)
    for start in range(0, WIDTH, LANES):
        lane = start + tl.arange(0, LANES)
        gate = tl.load(gate_up + row * 2 * WIDTH + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
        g = tl.load(grad + row * WIDTH + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
        gate_passes, up_passes = 1.0, 1.0
        if LIMITED:
            gate_passes = tl.where(gate <= limit, 1.0, 0.0)
            up_passes = tl.where((up <= limit) & (up >= -limit), 1.0, 0.0)
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        open_ = tl.sigmoid(gate)
        silu = gate * open_
        if WEIGHED:
            slope += g * silu * up
            g = g * tl.load(weights + row)
        to_gate = g * up * (open_ + silu * (1 - open_)) * gate_passes
        to_up = g * silu * up_passes
        at = grad_gate_up + row * 2 * WIDTH + lane
        tl.store(at, to_gate.to(grad_gate_up.dtype.element_ty), mask=lane < WIDTH)
        tl.store(at + WIDTH, to_up.to(grad_gate_up.dtype.element_ty), mask=lane < WIDTH)
    if WEIGHED:
        tl.store(grad_weights + row, tl.sum(slope, axis=0))


class _WeighedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None, limit: float) -> Tensor:
        gate_up = gate_up.contiguous()
        weights = None if weights is None else weights.contiguous()
        ctx.save_for_backward(gate_up, weights)
        ctx.limit = limit
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        _forward[(rows,)](
            gate_up, gate_up if weights is None else weights, out, width, limit,
            LIMITED=limit > 0, WEIGHED=weights is not None, LANES=_LANES, num_warps=1,
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]  (the decorator hides the names)
        gate_up, weights = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        grad_weights = None if weights is None else torch.empty_like(weights)
        _backward[(len(gate_up),)](
            gate_up, gate_up if weights is None else weights, grad_outputs[0].contiguous(), grad_gate_up,
            gate_up if grad_weights is None else grad_weights, gate_up.shape[1] // 2, ctx.limit,
            LIMITED=ctx.limit > 0, WEIGHED=weights is not None, LANES=_LANES, num_warps=1,
        )  # fmt: skip
        return grad_gate_up, grad_weights, None


def weighed_swiglu(gate_up: Tensor, weights: Tensor | None, limit: float) -> Tensor:
    """[n, 2I], [n, 1] float32 or None -> [n, I] in gate_up's dtype."""
    return _WeighedSwiGLU.apply(gate_up, weights, limit)
