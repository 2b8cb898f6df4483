"""Engram: n-gram memory written into the residual copies of a few early layers.

The hash of a token and the ones before it (`ngram.py`) picks rows of a large FP8 table. `wkv` turns them into one key
per residual copy and one shared value; a gate per copy compares key and copy; value times gate is added to each copy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from finback import kernels
from finback.base.formats import E4M3_R32
from finback.kernels.torch.quant import dequantize
from finback.models.deepseek_v41.config import TextConfig
from finback.nn.linear import ActRound, Linear


class EngramTable(nn.Module):
    """A table [R, d] looked up by row. Released tables stay as stored, FP8 values with one scale byte per 32
    (possibly a memory-mapped file far larger than memory); `trainable` ones are a parameter."""

    def __init__(self, rows: int, dim: int, *, trainable: bool = False):
        super().__init__()
        self.rows, self.dim = rows, dim
        self.weight = nn.Parameter(torch.empty(rows, dim)) if trainable else None
        self.stored: tuple[Tensor, Tensor] | None = None

    def attach(self, values: Tensor, scales: Tensor) -> None:
        """Use stored rows: values [R, d] e4m3, scales [R, d / 32] uint8 exponents."""
        self.stored = values, scales

    def allocate(self, device: torch.device) -> Tensor:
        """Make room for rows stored without scales, as a parameter; returns it."""
        self.weight = nn.Parameter(torch.empty(self.rows, self.dim, device=device))
        return self.weight

    def forward(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """index [T, C] int64 -> [T, C * d] in `dtype`."""
        flat = index.flatten()
        if self.weight is not None:
            rows = nn.functional.embedding(flat, self.weight).to(dtype)
        else:
            assert self.stored is not None, "the table was never attached"
            values, scales = self.stored
            here = flat.to(values.device)  # the table may lie in host memory beside a model on a GPU
            picked = values.view(torch.uint8).index_select(0, here).view(torch.float8_e4m3fn)
            rows = dequantize(picked, scales.index_select(0, here), E4M3_R32, dtype).to(index.device)
        return rows.view(len(index), -1)


class Engram(nn.Module):
    """One layer's memory. See the module docstring."""

    def __init__(self, c: TextConfig, rows: int, rounds: ActRound | None, *, trainable: bool = False):
        super().__init__()
        self.copies, self.eps = c.hc_mult, c.rms_norm_eps
        columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
        self.embed = EngramTable(rows, c.engram_head_dim, trainable=trainable)
        self.wkv = Linear((c.hc_mult + 1) * c.hidden_size, columns * c.engram_head_dim, rounds=rounds)
        self.q_weight = nn.Parameter(torch.empty(c.hc_mult, c.hidden_size))
        self.k_weight = nn.Parameter(torch.empty(c.hc_mult, c.hidden_size))

    def forward(self, streams: Tensor, rows: Tensor, is_image: Tensor | None) -> Tensor:
        """streams [T, M, D], rows [T, C] int64 of the table -> streams with the memory added; image tokens
        unchanged."""
        acc = kernels.accumulator(streams.dtype)
        wide = streams.to(acc)
        memory = self.wkv(self.embed(rows, streams.dtype)).to(acc).unflatten(1, (self.copies + 1, -1))
        key, value = memory[:, : self.copies], memory[:, self.copies :]
        gate = kernels.engram_gate(wide, key, self.q_weight.to(acc) * self.k_weight.to(acc), self.eps)
        if is_image is not None:
            gate = gate.masked_fill(is_image.unsqueeze(1), 0)
        return torch.addcmul(wide, gate.unsqueeze(2), value).to(streams.dtype)
