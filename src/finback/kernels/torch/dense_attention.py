"""Dense causal attention of packed sequences in torch, with a softmax or with normalised error-function weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from finback.kernels.torch.attention import accumulator

_BLOCK = 1 << 22
_EPS = 1e-8


def causal_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lengths: Sequence[int],
    scale: float,
    derf: tuple[Tensor, Tensor, Tensor] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    out = [
        _softmax(part, k, v, scale, dropout) if derf is None else _derf(part, k, v, scale, derf, dropout)
        for part, k, v in zip(q.split(list(lengths)), keys, values, strict=True)
        if len(part)
    ]
    if not out:
        return q.new_empty(0, q.shape[1], values[0].shape[2] if values else q.shape[2])
    return torch.cat(out) if len(out) != 1 else out[0]


def _softmax(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float) -> Tensor:
    """One sequence: q [m, H, h] are its last m tokens, k [n, G, h] and v [n, G, v] all of them."""
    m, n = len(q), len(k)
    mask = None
    if 1 < m < n:  # the causal flag of torch's kernel aligns the first rows, not the last
        mask = torch.ones(m, n, dtype=torch.bool, device=q.device).tril_(n - m)
    y = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=1 < m == n,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return y.squeeze(0).transpose(0, 1)


def _derf(q: Tensor, k: Tensor, v: Tensor, scale: float, derf: tuple[Tensor, Tensor, Tensor], dropout: float) -> Tensor:
    """As `_softmax`. Queries go in blocks, and a block reads only the rows that its last query sees."""
    m, n, heads = len(q), len(k), q.shape[1]
    acc = accumulator(q.dtype)
    groups = k.shape[1]
    queries = q.to(acc).unflatten(1, (groups, -1)).permute(1, 2, 0, 3)  # [G, H/G, m, h]
    keys, rows = k.to(acc).permute(1, 2, 0).unsqueeze(1), v.to(acc).transpose(0, 1).unsqueeze(1)
    alpha, bias, gamma = (p.to(acc).view(groups, -1, 1, 1) for p in derf)
    step = max(1, _BLOCK // (heads * n))
    out = []
    for start in range(0, m, step):
        stop = min(start + step, m)
        seen = n - m + stop
        scores = queries[:, :, start:stop] @ keys[..., :seen] * scale
        # REF: the sum cancels where erf is near -1, so that small weights become exactly 0, as the models were trained.
        weights = 0.5 * gamma * (1 + torch.erf(alpha * scores + bias))
        weights = weights * torch.ones(stop - start, seen, dtype=acc, device=q.device).tril_(n - m + start)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _EPS)
        out.append(F.dropout(weights, dropout, training=dropout > 0) @ rows[:, :, :seen])
    return torch.cat(out, dim=2).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


def exclude_self(y: Tensor, own: Tensor) -> Tensor:
    acc = accumulator(y.dtype)
    wide = own.to(acc)
    unit = (wide / (wide.norm(dim=-1, keepdim=True) + _EPS)).unsqueeze(2)  # [T, G, 1, v]
    heads = y.to(acc).unflatten(1, (own.shape[1], -1))
    return (heads - (heads * unit).sum(dim=-1, keepdim=True) * unit).flatten(1, 2).to(y.dtype)
