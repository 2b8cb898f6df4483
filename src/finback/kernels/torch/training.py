"""What only training needs of attention: a dense form for short rows, and the share of attention that each row gets.

Picking rows copies every key once per token that reads it, and a backward pass keeps the copies. Over a run of
neighbouring tokens the picked rows lie close together, so for short sequences it is cheaper to score the whole range
and mask: the keys stay where they are, and the products are ordinary matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from finback.kernels.torch.attention import _gather, _token_blocks, accumulator

_RUN = 128  # tokens whose rows are scored together
_COST_OF_PICKING = 4  # a picked column costs about as much as this many dense ones

Scopes = Sequence[tuple[Tensor, Tensor]]
Spans = list[list[tuple[int, int]]]


def spans(scopes: Scopes) -> Spans:
    """For each run of `_RUN` tokens, the range [low, high) of rows that its tokens pick from each scope."""
    found = []
    for rows, index in scopes:
        padded = torch.nn.functional.pad(index, (0, 0, 0, -len(index) % _RUN), value=-1).view(-1, _RUN * index.shape[1])
        if not padded.shape[1]:
            found.append([(0, 0)] * len(padded))
            continue
        low = torch.where(padded < 0, len(rows), padded).amin(1)
        high = padded.amax(1) + 1
        found.append([(min(a, b), b) for a, b in zip(low.tolist(), high.tolist(), strict=True)])
    return [list(run) for run in zip(*found, strict=True)]


def dense_pays(q: Tensor, scopes: Scopes, found: Spans) -> bool:
    """Whether `masked_attention` is the smaller and cheaper form here."""
    tokens, heads, width = q.shape
    picked = tokens * sum(index.shape[1] for _, index in scopes)
    dense = sum(min(_RUN, tokens - i * _RUN) * (b - a) for i, run in enumerate(found) for a, b in run)
    return dense <= _COST_OF_PICKING * picked and dense * (heads + 1) <= picked * (heads + width)


def masked_attention(
    q: Tensor,
    scopes: Scopes,
    sink: Tensor | None,
    scale: float,
    *,
    value_width: int | None = None,
    found: Spans | None = None,
) -> Tensor:
    if not len(q):
        return q[..., :value_width].clone()
    found = spans(scopes) if found is None else found
    acc = accumulator(q.dtype)
    if sink is None:  # finite, so that a token without any row gives all its mass to it instead of 0 / 0
        sink = torch.full(q.shape[1:2], torch.finfo(acc).min, dtype=acc, device=q.device)
    # The sink is one more key: a query has it as one more value, which meets 1 in that key and 0 in all others.
    asking = torch.cat([q.to(acc) * scale, sink.to(acc).view(1, -1, 1).expand(len(q), -1, 1)], dim=2)
    end = torch.nn.functional.one_hot(torch.tensor([q.shape[2]], device=q.device)).to(acc)
    out = []
    for i, run in enumerate(found):
        keys, bias = [], []
        for (rows, index), (low, high) in zip(scopes, run, strict=True):
            keys.append(rows[low:high])
            bias.append(_counted(index[i * _RUN : (i + 1) * _RUN] - low, high - low, acc))
        kv = torch.cat([torch.nn.functional.pad(torch.cat(keys).to(acc), (0, 1)), end])
        bias.append(bias[0].new_zeros(len(bias[0]), 1))
        logits = torch.matmul(asking[i * _RUN : (i + 1) * _RUN], kv.t()).add_(torch.cat(bias, dim=1).unsqueeze(1))
        width = q.shape[2] if value_width is None else value_width
        out.append(torch.matmul(logits.softmax(dim=2), kv[:, :width]).to(q.dtype))
    return torch.cat(out)


def _counted(index: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """[t, columns]: log of how often each column is picked: 0 once, -inf never; negative entries of index are none."""
    counts = torch.zeros(len(index), columns + 1, dtype=dtype, device=index.device)
    places = torch.where(index < 0, columns, index)
    return counts.scatter_add_(1, places, torch.ones_like(places, dtype=dtype))[:, :columns].log_()


@torch.no_grad()
def attention_mass(q: Tensor, scopes: Scopes, sink: Tensor | None, scale: float) -> list[Tensor]:
    acc = accumulator(q.dtype)
    widths = [index.shape[1] for _, index in scopes]
    out: list[Tensor] = []
    for b in _token_blocks(len(q), sum(widths) * (q.shape[-1] + q.shape[1])):
        wide = q[b].to(acc)
        logits = [
            torch.bmm(wide, _gather(rows, index[b]).to(acc).transpose(1, 2))
            .mul_(scale)
            .masked_fill_((index[b] < 0).unsqueeze(1), torch.finfo(acc).min)
            for rows, index in scopes
        ]
        if sink is not None:
            logits.append(sink.to(acc).view(1, -1, 1).expand(len(wide), -1, 1))
        out.append(torch.cat(logits, dim=2).softmax(dim=2).sum(dim=1)[:, : sum(widths)])
    total = torch.cat(out) if out else q.new_zeros(0, sum(widths), dtype=acc)
    index = torch.cat([index for _, index in scopes], dim=1)
    return list(total.masked_fill_(index < 0, 0).split(widths, dim=1))
