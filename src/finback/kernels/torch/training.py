"""What only training needs of attention: a dense form for short rows, and the share of attention that each row gets.

Picking rows copies every key once per token that reads it, and a backward pass keeps the copies. Over a run of
neighbouring tokens the picked rows lie close together, so for short sequences it is cheaper to score the whole range
and mask: the keys stay where they are, and the products are ordinary matrix products.

Runs differ in how far back they look (the first of a sequence sees little of it), so runs of about equal ranges are
computed together. How they are sorted and their masks depend on the picks alone: they are made once for picks that many
layers share, which is also the only time that the host waits for a GPU.

On a GPU the products are torch's fused attention in q's dtype: with bf16 the results differ from float32 arithmetic by
about 2^-8 of the largest value, as those of any bf16 attention do, and [T, H, range] weights are never stored.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakIdKeyDictionary

from finback.kernels.torch.attention import _gather, _token_blocks, accumulator, block_elements, cast

_RUN = 128  # tokens whose rows are scored together
_BUCKETS, _ALIKE = 5, 0.75  # sizes of ranges: each at least so much of the next
_LANES = 8  # fused attention on a GPU takes widths that are multiples of this
# Numbers of runs and columns are multiples of these in fused attention, filled up with runs that nobody asks for and
# columns of no weight: few shapes, so that what is prepared once for each is prepared seldom.
_RUNS, _COLUMNS = 32, 256
# Not cuDNN's: it plans anew for each shape, for milliseconds, and has given gradients that are not finite under vmap.
FUSED_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# A picked column costs about as much as so many dense ones.
_COST_OF_PICKING = {"cpu": 4, "cuda": 16}
_MOST_DENSE = 1 << 30  # scores of one head, on a GPU

Scopes = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Bucket:
    """Runs whose ranges are about equally wide. runs: [R] int64, which ones, ascending; lows: one [R] int64 per scope,
    the first row of each range; widths: how many rows from there on, one int per scope."""

    runs: Tensor
    lows: list[Tensor]
    widths: list[int]

    @property
    def columns(self) -> int:
        return sum(self.widths)


@dataclass(frozen=True)
class Layout:
    """How the tokens of some picks are scored densely. lengths: rows in each scope's table. back: [runs] int64, where
    each run stands in the buckets' order; None = they are in order and nothing is filled up. masks: made when first
    used, by bucket and type."""

    index: list[weakref.ref[Tensor]]
    lengths: list[int]
    buckets: list[Bucket]
    back: Tensor | None
    masks: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def fits(self, scopes: Scopes) -> bool:
        same = len(scopes) == len(self.index) and all(
            ref() is index for ref, (_, index) in zip(self.index, scopes, strict=True)
        )
        return same and self.lengths == [len(rows) for rows, _ in scopes]


_layouts: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the last scope's picks -> their layout, while they live


def layout_of(scopes: Scopes) -> Layout:
    """The layout of these picks, which must not be changed in place while they are in use."""
    key = scopes[-1][1]
    found = _layouts.get(key)
    if found is None or not found.fits(scopes):
        found = _layouts[key] = _new_layout(scopes)
    return found


def _new_layout(scopes: Scopes) -> Layout:
    lengths = [len(rows) for rows, _ in scopes]
    found = []
    for (_, index), length in zip(scopes, lengths, strict=True):
        runs = _in_runs(index).flatten(1)
        if not runs.shape[1]:
            found += [runs.new_zeros(len(runs))] * 2
            continue
        found += [torch.where(runs < 0, length, runs).amin(1), runs.amax(1) + 1]
    bounds = torch.stack(found).cpu().numpy().reshape(len(scopes), 2, -1)
    lows = np.minimum(bounds[:, 0], bounds[:, 1].clip(min=0))
    widths = (bounds[:, 1] - lows).clip(min=0)
    device = scopes[0][1].device
    groups = _alike(widths.sum(0))
    if has_fused_attention(scopes[0][1]):
        groups = [np.append(runs, np.repeat(runs[-1], -len(runs) % _RUNS)) for runs in groups]
    buckets = [
        Bucket(
            torch.from_numpy(runs).to(device),
            list(torch.from_numpy(lows[:, runs]).to(device)),
            widths[:, runs].max(1).tolist(),
        )
        for runs in groups
    ]
    _, first = np.unique(np.concatenate(groups), return_index=True)
    back = None if len(groups) == 1 and len(first) == len(groups[0]) else torch.from_numpy(first).to(device)
    return Layout([weakref.ref(index) for _, index in scopes], lengths, buckets, back)


def _alike(widths: np.ndarray) -> list[np.ndarray]:
    """Numbers of runs, grouped by width: in all but the last group the narrowest has `_ALIKE` of the widest."""
    order, groups = np.argsort(-widths, kind="stable"), []
    while len(order):
        last = len(groups) == _BUCKETS - 1
        count = len(order) if last else int(np.sum(widths[order] >= _ALIKE * widths[order[0]]))
        groups.append(np.sort(order[:count]))
        order = order[count:]
    return groups


def _in_runs(index: Tensor) -> Tensor:
    """[T, k] -> [R, _RUN, k], filled up with -1; a batch of fewer tokens is one run."""
    run = min(_RUN, len(index))
    return F.pad(index, (0, 0, 0, -len(index) % run), value=-1).view(-(-len(index) // run), run, index.shape[1])


def has_fused_attention(q: Tensor) -> bool:
    return q.is_cuda


def dense_pays(q: Tensor, scopes: Scopes, layout: Layout) -> bool:
    """Whether `masked_attention` is the smaller and cheaper form here."""
    tokens, heads, width = q.shape
    picked = tokens * sum(index.shape[1] for _, index in scopes)
    dense = min(_RUN, tokens) * sum(len(b.runs) * b.columns for b in layout.buckets)
    if dense > _COST_OF_PICKING.get(q.device.type, 4) * picked:
        return False
    return dense <= _MOST_DENSE if q.is_cuda else dense * (heads + 1) <= picked * (heads + width)


def masked_attention(
    q: Tensor,
    scopes: Scopes,
    sink: Tensor | None,
    scale: float,
    *,
    value_width: int | None = None,
    layout: Layout | None = None,
) -> Tensor:
    if not len(q):
        return q[..., :value_width].clone()
    layout = layout_of(scopes) if layout is None else layout
    fused = has_fused_attention(q)
    acc = q.dtype if fused else accumulator(q.dtype)
    tokens, heads, width = q.shape
    run = min(_RUN, tokens)
    if sink is None:  # finite, so that a token without any row gives all its mass to it instead of 0 / 0
        sink = torch.full((heads,), -1e30, dtype=acc, device=q.device)
    # The sink is one more key: a query has it as one more value, which meets 1 in that key and 0 in all others.
    more = -(width + 1) % _LANES if fused else 0
    asking = torch.cat([q.to(acc) * scale, sink.to(acc).view(1, -1, 1).expand(tokens, -1, 1)], dim=2)
    asking = F.pad(asking, (0, more, 0, 0, 0, -tokens % run)).unflatten(0, (-1, run))  # [runs, run, H, h + 1]
    end = F.pad(asking.new_ones(1, 1), (width, more))
    table = torch.cat([*(F.pad(rows.to(acc), (0, 1 + more)) for rows, _ in scopes), end])
    out = []
    for number, bucket in enumerate(layout.buckets):
        places, bias = _mask(scopes, layout, number, acc, fused)
        kv = F.embedding(places, table)
        part = asking if layout.back is None else asking.index_select(0, bucket.runs)
        out.append((_attend_fused if fused else _attend)(part, kv, bias))
    joined = out[0] if layout.back is None else torch.cat(out).index_select(0, layout.back)
    return joined.flatten(0, 1)[:tokens, :, : width if value_width is None else value_width].to(q.dtype)


def _attend(asking: Tensor, kv: Tensor, bias: Tensor) -> Tensor:
    """asking [R, run, H, w], kv [R, n, w], bias [R, run, n] -> [R, run, H, w]."""
    shape = asking.shape
    logits = torch.bmm(asking.flatten(1, 2), kv.transpose(1, 2)).view(*shape[:3], -1).add_(bias.unsqueeze(2))
    return torch.bmm(logits.softmax(dim=3).flatten(1, 2), kv).view(shape)


def _attend_fused(asking: Tensor, kv: Tensor, bias: Tensor) -> Tensor:
    """The same by fused attention, which wants heads outside of tokens."""
    heads = kv.unsqueeze(1).expand(-1, asking.shape[2], -1, -1)
    with sdpa_kernel(FUSED_ATTENTION):
        y = F.scaled_dot_product_attention(asking.transpose(1, 2), heads, heads, attn_mask=bias.unsqueeze(1), scale=1.0)
    return y.transpose(1, 2)


def _mask(scopes: Scopes, layout: Layout, number: int, dtype: torch.dtype, fused: bool) -> tuple[Tensor, Tensor]:
    """A bucket's rows of the joined table [R, n], the sink's last, and the log of how often each token picks each of
    them [R, run, n]: 0 once, -inf never."""
    key = number, dtype
    if key not in layout.masks:
        bucket = layout.buckets[number]
        start, places, biases = 0, [], []
        for (_, index), length, low, n in zip(scopes, layout.lengths, bucket.lows, bucket.widths, strict=True):
            rows = low.unsqueeze(1) + torch.arange(n, device=index.device)
            places.append(rows.clamp_(max=max(length - 1, 0)) + start)
            biases.append(_log_counts(_in_runs(index)[bucket.runs], low, n, dtype))
            start += length
        spare = -(bucket.columns + 1) % _COLUMNS if fused else 0
        places.append(torch.full((len(bucket.runs), 1 + spare), start, device=bucket.runs.device))
        biases.append(F.pad(biases[0].new_zeros(*biases[0].shape[:2], 1), (0, spare), value=float("-inf")))
        layout.masks[key] = torch.cat(places, dim=1), torch.cat(biases, dim=2)
    return layout.masks[key]


def _log_counts(index: Tensor, low: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Of picks [R, run, k], how often each of the rows from low [R] to low + n is among them, as a log [R, run, n]."""
    counts = torch.zeros(*index.shape[:2], n, dtype=dtype, device=index.device)
    if n:
        # What is no pick adds 0, each to another column: many additions to one place would wait for each other.
        nowhere = torch.arange(index.shape[2], device=index.device) % n
        columns = torch.where(index < 0, nowhere, index - low.view(-1, 1, 1))
        counts.scatter_add_(2, columns, (index >= 0).to(dtype))
    return counts.log_()


@torch.no_grad()
def attention_mass(q: Tensor, scopes: Scopes, sink: Tensor | None, scale: float) -> list[Tensor]:
    acc = accumulator(q.dtype)
    widths = [index.shape[1] for _, index in scopes]
    out: list[Tensor] = []
    for b in _token_blocks(len(q), sum(widths) * (q.shape[-1] + q.shape[1]), q.device):
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


def index_scores_of_sequences(
    q: Tensor, weights: Tensor, keys: Sequence[Tensor], lengths: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    acc = accumulator(q.dtype)
    offsets = np.cumsum([0, *lengths])
    firsts = np.cumsum([0, *map(len, keys)])
    table = torch.cat(list(keys))
    left = sorted((b for b, n in enumerate(lengths) if n), key=lambda b: -lengths[b])
    while left:
        longest, most = lengths[left[0]], max(len(keys[b]) for b in left)
        count = max(1, block_elements(q.device) // max(1, longest * q.shape[1] * most))
        part, left = left[:count], left[count:]
        tokens, real = _padded(offsets[part], [lengths[b] for b in part], q.device)
        rows, _ = _padded(firsts[part], [len(keys[b]) for b in part], q.device)
        heads = torch.bmm(cast(q[tokens].flatten(1, 2), acc), cast(table[rows], acc).transpose(1, 2)).relu_()
        heads = heads.view(tokens.numel(), q.shape[1], rows.shape[1])
        scores = torch.bmm(cast(weights[tokens].view(len(heads), 1, -1), acc), heads).squeeze(1)
        tokens = tokens.flatten()
        yield (tokens, scores) if real is None else (tokens[real], scores[real])


def _padded(starts: np.ndarray, counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Numbers starts[b] to starts[b] + counts[b] as lines of a matrix, filled up with 0; and which places of
    the flattened matrix are no filling, None = all."""
    columns = np.arange(max(counts))
    real = columns < np.asarray(counts)[:, None]
    numbers = torch.from_numpy(np.where(real, starts[:, None] + columns, 0))
    return numbers.to(device), None if real.all() else torch.from_numpy(np.flatnonzero(real)).to(device)
