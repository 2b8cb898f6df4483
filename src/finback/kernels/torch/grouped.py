"""Products with one matrix per expert for training: rows are sorted by expert once, and nothing loops over experts.

A token stands in its `K` experts' groups; a group is a run of rows. Where torch has grouped products for the device and
dtype (bf16 on a GPU), a product is one call and the host never learns how long the groups are; their lengths are then
rounded up to what such products like, with rows of weight 0. Elsewhere a product is one node of autograd that goes over
the groups: no gradient of the size of all experts is made for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from finback.kernels.torch.attention import accumulator

_ALIGN = 16  # rows; both operands of a weight gradient then start at multiples of 16 bytes


@dataclass(frozen=True)
class Groups:
    """Rows of T tokens sorted by expert. token: [P] int64, the token of each row (padding repeats token 0). place: [T,
    K] int64, the row of each token's k-th expert. ends: [E] int32, where each expert's group ends; the last is P.
    padded: whether there is padding, and products are grouped calls."""

    token: Tensor
    place: Tensor
    ends: Tensor
    padded: bool

    @cached_property
    def host_ends(self) -> list[int]:
        return self.ends.tolist()


def has_grouped_products(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype == torch.bfloat16


def group_rows(experts: Tensor, n_experts: int, padded: bool) -> Groups:
    tokens, k = experts.shape
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    # `bincount` would make the host wait for a GPU.
    counts = (flat.unsqueeze(1) == torch.arange(n_experts, device=flat.device)).sum(dim=0)
    sizes = (counts + (_ALIGN - 1)) // _ALIGN * _ALIGN if padded else counts
    # The most that padding can come to: how much it is must not matter to the host.
    rows = len(flat) + padded * n_experts * (_ALIGN - 1)
    ends = sizes.cumsum(0)
    shift = (ends - sizes) - (counts.cumsum(0) - counts)  # from a pair's number in `order` to its row
    row = torch.arange(len(flat), device=flat.device) + shift[flat[order]]
    place = torch.empty_like(flat).scatter_(0, order, row)
    token = torch.zeros(rows, dtype=torch.int64, device=flat.device).scatter_(0, row, order // k)
    ends[-1] = rows
    return Groups(token, place.view(tokens, k), ends.to(torch.int32), padded)


def spread_rows(x: Tensor, groups: Groups) -> Tensor:
    return _Spread.apply(x, groups.token, groups.place)


def spread_weights(weights: Tensor, groups: Groups) -> Tensor:
    rows = weights.new_zeros(len(groups.token)).scatter(0, groups.place.flatten(), weights.flatten())
    return rows.unsqueeze(1)


def collect_rows(y: Tensor, groups: Groups, out: Tensor) -> Tensor:
    return out + _Collect.apply(y, groups.token, groups.place, out.dtype)


def grouped_linear(x: Tensor, stack: Tensor, groups: Groups) -> Tensor:
    if groups.padded:
        return F.grouped_mm(x, stack.transpose(1, 2), offs=groups.ends)
    return _GroupedLinear.apply(x, stack, groups.host_ends)


class _Spread(torch.autograd.Function):
    """Tokens to rows; backwards, each token's rows are gathered and summed, which no order of threads can change."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]  (the decorator hides the names)
        (place,) = ctx.saved_tensors
        grad = grad_outputs[0]
        return _sum_places(grad, place, accumulator(grad.dtype)).to(grad.dtype), None, None


class _Collect(torch.autograd.Function):
    """Rows to tokens, summed in `dtype`: the reverse of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(token)
        ctx.dtype = y.dtype
        return _sum_places(y, place, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]  (the decorator hides the names)
        (token,) = ctx.saved_tensors
        return grad_outputs[0].to(ctx.dtype).index_select(0, token), None, None, None


def _sum_places(rows: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.index_select(0, place.flatten()).view(*place.shape, rows.shape[1]).sum(1, dtype=dtype)


class _GroupedLinear(torch.autograd.Function):
    """Rows [P, k] times their expert's matrix of stack [E, n, k], group by group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: Tensor, ends: list[int]) -> Tensor:
        ctx.save_for_backward(x, stack)
        ctx.ends = ends
        y = x.new_empty(len(x), stack.shape[1])
        for rows, weight in zip(_slices(ends), stack, strict=True):
            torch.mm(x[rows], weight.t(), out=y[rows])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]  (the decorator hides the names)
        x, stack = ctx.saved_tensors
        grad = grad_outputs[0]
        grad_x, grad_stack = torch.empty_like(x), torch.empty_like(stack)
        for e, rows in enumerate(_slices(ctx.ends)):
            torch.mm(grad[rows], stack[e], out=grad_x[rows])
            torch.mm(grad[rows].t(), x[rows], out=grad_stack[e])
        return grad_x, grad_stack, None


def _slices(ends: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
