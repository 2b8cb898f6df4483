"""What only training needs of attention: a dense form for short rows, and the share of attention that each row gets.

Picking rows copies every key once per token that reads it, and a backward pass keeps the copies. Over a run of
neighbouring tokens the picked rows lie close together, so for short sequences it is cheaper to score the whole range
and mask: the keys stay where they are, and the products are ordinary matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from finback.kernels.torch.attention import _gather, _token_blocks, accumulator

_RUN = 128  # tokens whose rows are scored together
_COST_OF_PICKING = 4  # a picked column costs about as much as this many dense ones

Scopes = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Ranges:
    """For R runs of `_RUN` tokens, the rows of one scope that their tokens pick from: low [R] int64 to low + width."""

    low: Tensor
    width: int


def _in_runs(index: Tensor) -> Tensor:
    """[T, k] -> [R, _RUN, k], filled up with -1; a batch of fewer tokens is one run."""
    run = min(_RUN, len(index))
    return F.pad(index, (0, 0, 0, -len(index) % run), value=-1).view(-(-len(index) // run), run, index.shape[1])


def ranges(scopes: Scopes) -> list[Ranges]:
    """The ranges of each scope; the width is that of the widest run."""
    found = []
    for rows, index in scopes:
        runs = _in_runs(index).flatten(1)
        if not runs.shape[1]:
            found.append(Ranges(runs.new_zeros(len(runs)), 0))
            continue
        low = torch.where(runs < 0, len(rows), runs).amin(1)
        found.append(Ranges(low, max(0, int((runs.amax(1) + 1 - low).amax()))))
    return found


def dense_pays(q: Tensor, scopes: Scopes, found: Sequence[Ranges]) -> bool:
    """Whether `masked_attention` is the smaller and cheaper form here."""
    tokens, heads, width = q.shape
    picked = tokens * sum(index.shape[1] for _, index in scopes)
    dense = tokens * sum(r.width for r in found)
    return dense <= _COST_OF_PICKING * picked and dense * (heads + 1) <= picked * (heads + width)


def masked_attention(
    q: Tensor,
    scopes: Scopes,
    sink: Tensor | None,
    scale: float,
    *,
    value_width: int | None = None,
    found: Sequence[Ranges] | None = None,
) -> Tensor:
    if not len(q):
        return q[..., :value_width].clone()
    found = ranges(scopes) if found is None else found
    acc = accumulator(q.dtype)
    tokens, heads, width = q.shape
    run = min(_RUN, tokens)
    if sink is None:  # finite, so that a token without any row gives all its mass to it instead of 0 / 0
        sink = torch.full((heads,), torch.finfo(acc).min, dtype=acc, device=q.device)
    # The sink is one more key: a query has it as one more value, which meets 1 in that key and 0 in all others.
    asking = torch.cat([q.to(acc) * scale, sink.to(acc).view(1, -1, 1).expand(tokens, -1, 1)], dim=2)
    asking = F.pad(asking, (0, 0, 0, 0, 0, -tokens % run)).view(-1, run * heads, width + 1)
    parts = [_part(rows, index, r, acc) for (rows, index), r in zip(scopes, found, strict=True)]
    end = F.one_hot(torch.tensor([[width]], device=q.device)).to(acc).expand(len(asking), -1, -1)
    kv = torch.cat([*(F.pad(keys, (0, 1)) for keys, _ in parts), end], dim=1)  # [R, n, h + 1]
    bias = torch.cat([*(bias for _, bias in parts), asking.new_zeros(len(asking), run, 1)], dim=2)
    logits = torch.bmm(asking, kv.transpose(1, 2)).view(-1, run, heads, kv.shape[1]).add_(bias.unsqueeze(2))
    values = kv[..., : width if value_width is None else value_width]
    out = torch.bmm(logits.softmax(dim=3).flatten(1, 2), values)
    return out.view(-1, heads, values.shape[2])[:tokens].to(q.dtype)


def _part(rows: Tensor, index: Tensor, found: Ranges, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One scope's keys by run [R, n, h], and the log of how often each is picked [R, _RUN, n]: 0 once, -inf never."""
    index, n = _in_runs(index), found.width
    runs, run, _ = index.shape
    if not n:
        return rows.new_zeros(runs, 0, rows.shape[1], dtype=dtype), rows.new_zeros(runs, run, 0, dtype=dtype)
    places = found.low.unsqueeze(1) + torch.arange(n, device=rows.device)
    keys = F.embedding(places.clamp(max=len(rows) - 1), rows).to(dtype)
    columns = torch.where(index < 0, n, index - found.low.view(-1, 1, 1))
    counts = torch.zeros(runs, run, n + 1, dtype=dtype, device=rows.device)
    return keys, counts.scatter_add_(2, columns, torch.ones_like(columns, dtype=dtype))[..., :n].log_()


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
