"""Sparse attention, index scores and top-k selection in torch: exact, differentiable where it is continuous, CPU-fast.

Work is cut into token blocks so that temporaries stay near a fixed number of elements whatever the prompt's length: few
enough for a CPU's memory and caches, many enough to keep a GPU busy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from finback.base.runtime import NonFiniteError
from finback.kernels.torch import fixed
from finback.kernels.torch.quant import straight_through

_BLOCK = 1 << 22  # elements, on a CPU
_GPU_BLOCK = 1 << 28  # at most, and 1/64 of a GPU's memory in float32
_RUN = 64  # rows that the released kernel takes at a time


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type that sums and softmaxes run in: float64 for float64, otherwise float32."""
    return dtype if dtype == torch.float64 else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`; x itself, without a call into torch, where it has that type."""
    return x if x.dtype == dtype else x.to(dtype)


def block_elements(device: torch.device) -> int:
    """How many elements the temporaries of one block of work may have."""
    if device.type != "cuda":
        return _BLOCK
    return max(_BLOCK, min(_GPU_BLOCK, torch.cuda.get_device_properties(device).total_memory // 256))


def _token_blocks(tokens: int, elements_per_token: int, device: torch.device) -> list[slice]:
    step = max(1, block_elements(device) // max(1, elements_per_token))
    return [slice(i, min(i + step, tokens)) for i in range(0, tokens, step)]


def sparse_attention(
    q: Tensor,
    scopes: Sequence[tuple[Tensor, Tensor]],
    sink: Tensor | None,
    scale: float,
    *,
    value_width: int | None = None,
    released_columns: Sequence[int] | None = None,
) -> Tensor:
    if not len(q):
        return q[..., :value_width].clone()
    if sink is None:  # finite, so that a token without any row gives all its mass to it instead of 0 / 0
        acc = accumulator(q.dtype)
        sink = torch.full(q.shape[1:2], torch.finfo(acc).min, dtype=acc, device=q.device)
    width = sum(index.shape[1] for _, index in scopes)
    blocks = _token_blocks(len(q), width * (q.shape[-1] + q.shape[1]), q.device)
    if len(blocks) == 1:
        return _attend(q, scopes, sink, scale, value_width, released_columns)
    parts = [([(rows, index[b]) for rows, index in scopes], b) for b in blocks]
    return torch.cat([_attend(q[b], part, sink, scale, value_width, released_columns) for part, b in parts])


def _attend(
    q: Tensor,
    scopes: Sequence[tuple[Tensor, Tensor]],
    sink: Tensor,
    scale: float,
    value_width: int | None,
    released_columns: Sequence[int] | None,
) -> Tensor:
    acc = accumulator(q.dtype)
    index = torch.cat([index for _, index in scopes], dim=1) if len(scopes) > 1 else scopes[0][1]
    gathered = [_gather(rows, part) for rows, part in scopes]  # [T, k, h]
    kv = cast(torch.cat(gathered, dim=1) if len(gathered) > 1 else gathered[0], acc)
    logits = torch.baddbmm(_bias(index, acc).unsqueeze(1), cast(q, acc), kv.transpose(1, 2), alpha=scale)  # [T, H, K]
    sink = cast(sink, acc).view(1, -1, 1)
    if released_columns is not None:
        spans = [(first, first + part.shape[1]) for first, (_, part) in zip(released_columns, scopes, strict=True)]
        return _released_average(logits, kv[..., :value_width], sink, spans).to(q.dtype)
    # The sink takes mass and has no value row.
    sink = sink if len(q) == 1 else sink.expand(len(q), -1, 1)
    weights = torch.cat([logits, sink], dim=2).softmax(dim=2)[..., :-1]
    values = kv if value_width is None else kv[..., :value_width]
    return cast(torch.bmm(weights, values), q.dtype)


def _released_average(logits: Tensor, values: Tensor, sink: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Average of values [T, K, v] with weights rounded as the released kernel does: [T, H, v] in the logits' dtype.

    REF: the kernel walks its list of rows in runs of `_RUN` with a running maximum, and multiplies rows by weights in
    bf16. A weight is therefore rounded relative to the highest logit up to its own run; their sum is not rounded.
    logits: [T, H, K], -inf = none; sink: [1, H, 1]; spans: (first, end) place in that list of each part of the columns.
    """
    runs = logits.unsqueeze(2) if spans[-1][1] <= _RUN else _in_runs(logits, spans)  # [T, H, R, _RUN]
    # Detached: the result does not depend on the peaks but for rounding. The floor keeps -inf - peak from being NaN.
    peaks = runs.detach().amax(3, keepdim=True).clamp_min_(torch.finfo(logits.dtype).min)
    if runs.shape[2] == 1:
        weights = (runs - peaks).exp_().squeeze(2)
        total = weights.sum(2, keepdim=True) + (sink - peaks.squeeze(2)).exp_()
        return torch.bmm(_round_bf16(weights), values) / total
    peaks = peaks.cummax(2).values
    weights = (runs - peaks).exp_()
    highest = peaks[:, :, -1]
    shrink = (peaks - highest.unsqueeze(2)).exp_()
    total = (weights.sum(3, keepdim=True) * shrink).sum(2) + (sink - highest).exp_()
    weights = (_round_bf16(weights) * shrink).flatten(2)
    return torch.bmm(torch.cat([weights[..., a:b] for a, b in spans], dim=2), values) / total


def _in_runs(logits: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Columns at their places in the released list, in runs: [T, H, K] -> [T, H, R, _RUN], -inf elsewhere."""
    parts, at = [], 0
    for part, (first, end) in zip(logits.split([b - a for a, b in spans], dim=2), spans, strict=True):
        parts.append(F.pad(part, (first - at, 0), value=float("-inf")))
        at = end
    return F.pad(torch.cat(parts, dim=2), (0, -at % _RUN), value=float("-inf")).unflatten(2, (-1, _RUN))


@straight_through
def _round_bf16(weights: Tensor) -> Tensor:
    return weights.bfloat16().to(weights.dtype)


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], and some row where the index is -1."""
    if not len(rows):  # nothing stored yet: every index is -1 and is masked
        return rows.new_zeros(*index.shape, rows.shape[1])
    return F.embedding(index.clamp(min=0), rows)


def _bias(index: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where there is a key, -inf where the index is -1."""
    return cast(torch.where(index < 0, float("-inf"), 0.0), dtype)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    acc = accumulator(q.dtype)
    if fixed.deterministic.get():
        return _index_scores_fixed(cast(q, acc), weights.to(acc).unsqueeze(1), cast(keys, acc))
    tokens, heads, width = q.shape
    keys = cast(keys, acc).t()
    out = [
        torch.bmm(
            cast(weights[b], acc).unsqueeze(1),
            torch.mm(cast(q[b].reshape(-1, width), acc), keys).relu_().view(b.stop - b.start, heads, keys.shape[1]),
        ).squeeze(1)
        for b in _token_blocks(tokens, heads * keys.shape[1], q.device)
    ]
    return torch.cat(out) if len(out) != 1 else out[0]


def _index_scores_fixed(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """`index_scores` with one product of a fixed shape per token and block of keys."""
    parts = []
    for block in fixed.pad_rows(keys, fixed.COLUMNS).split(fixed.COLUMNS):
        heads = torch.bmm(q, block.t().expand(len(q), -1, -1)).relu_()
        parts.append(torch.bmm(weights, heads).squeeze(1))
    return torch.cat(parts, dim=1)[:, : len(keys)]


def index_scores_at(q: Tensor, weights: Tensor, table: Tensor, index: Tensor) -> Tensor:
    acc = accumulator(q.dtype)
    out = []
    for b in _token_blocks(len(q), index.shape[1] * (table.shape[1] + q.shape[1]), q.device):
        keys = _gather(table, index[b]).to(acc)
        heads = torch.bmm(cast(q[b], acc), keys.transpose(1, 2)).relu_()
        out.append(torch.bmm(cast(weights[b], acc).unsqueeze(1), heads).squeeze(1))
    scores = torch.cat(out) if len(out) != 1 else out[0]
    return scores.masked_fill_(index < 0, float("-inf"))


def top_rows(scores: Tensor, k: int, visible: Tensor) -> Tensor:
    tokens, n = scores.shape
    whole = tokens == 1 and visible.is_cpu and int(visible) == n  # a decode step: nothing is hidden
    if not whole or n <= k:
        columns = torch.arange(n, device=scores.device)
        hidden = columns >= visible.unsqueeze(1)
        if n <= k:
            return torch.where(hidden, -1, columns)
        scores = scores.masked_fill(hidden, float("-inf"))
    border = scores.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    picked = (scores < border).logical_not_()  # a row with NaN has too many picks then, never too few
    if int(picked.sum()) != tokens * k:  # ties at the border: the lowest positions win
        above = scores > border
        tied = scores == border
        picked = above | (tied & (tied.cumsum(1) <= k - above.sum(1, keepdim=True)))
        if int(picked.sum()) != tokens * k:
            raise NonFiniteError("index scores contain NaN, so no rows can be selected")
    rows = picked.nonzero()[:, 1].view(tokens, k)
    return rows if whole else torch.where(rows < visible.unsqueeze(1), rows, -1)


def top_blocks(scores: Tensor, n_blocks: int, block: int, visible: Tensor) -> Tensor:
    tokens, n = scores.shape
    hidden = torch.arange(n, device=scores.device) >= visible.unsqueeze(1)
    scores = scores.masked_fill(hidden, float("-inf"))
    scores = torch.nn.functional.pad(scores, (0, -n % block), value=float("-inf"))
    best = scores.view(tokens, -1, block).amax(dim=2)
    newest = (visible - 1) // block
    pinned = torch.arange(best.shape[1], device=scores.device) == newest.unsqueeze(1)
    return top_rows(best.masked_fill_(pinned, float("inf")), n_blocks, newest + 1)


def pool_groups(values: Tensor, scores: Tensor) -> Tensor:
    return (values * scores.softmax(dim=1)).sum(dim=1)
