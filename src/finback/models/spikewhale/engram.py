"""SpikeWhale's Engram: an n-gram memory that is looked up by hashes of compressed embeddings, and a DERF gate.

1. compressed [T, C] = frozen projection of the token's embedding. It is the row "engram" of the token, so a token that
   is decoded alone still knows the n-grams that end in it.
2. For n = 1 .. max_ngram: add the projections of the last n compressed tokens, each with the directions of its place in
   the n-gram, and hash the sum to one row per head. A token with fewer than n tokens up to it has no n-gram of size n.
3. retrieved = mean of the table rows; times a gate in (0, 1) * gamma from retrieved and the embedding.

Hashes are computed in float64 from rows that are rounded once, because a hash that depended on how the tokens were cut
would flip to another table row now and then.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finback import kernels
from finback.models.spikewhale.config import SpikeWhaleConfig
from finback.nn.linear import Embedding
from finback.nn.rows import RowView

HISTORY = "engram"
_TABLE_STD = 0.01


class Frozen(nn.Module):
    """A matrix `weight` [n, k] that is part of the checkpoint and is never trained."""

    def __init__(self, n: int, k: int):
        super().__init__()
        self.register_buffer("weight", torch.empty(n, k, dtype=kernels.accumulator(torch.get_default_dtype())))
        self.weight: Tensor


class Table(Embedding):
    """Rows that are looked up by hash."""

    def reset_parameters(self) -> None:
        """Small, so as not to disturb the embeddings at first."""
        nn.init.normal_(self.weight, std=_TABLE_STD)


class Compressor(nn.Module):
    """x [T, D] -> [T, C] float32 (float64), without a gradient: nothing differentiable follows it."""

    def __init__(self, dim: int, compressed: int):
        super().__init__()
        self.proj = Frozen(compressed, dim)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.detach().double() @ self.proj.weight.double().t()
        return wide.to(kernels.accumulator(x.dtype))


class Lookup(nn.Module):
    """One table per head, and random directions per n-gram size and place: "hash_proj_n<size>_p<place>"
    [heads * bits, C], place 0 being the oldest token. "released" needs one direction a head, "spread" `hash_bits`."""

    def __init__(self, c: SpikeWhaleConfig):
        super().__init__()
        self.c = c
        self.bits = c.hash_bits if c.engram_hash == "spread" else 1
        self.tables = nn.ModuleList(Table(c.engram_table_size, c.hidden_size) for _ in range(c.engram_num_heads))
        for n in range(1, c.engram_max_ngram + 1):
            for place in range(n):
                directions = Frozen(c.engram_num_heads * self.bits, c.engram_compress_dim).weight
                self.register_buffer(f"hash_proj_n{n}_p{place}", directions)

    def reset_parameters(self) -> None:
        """Random directions of about unit length; for signs orthogonal, so that the bits are independent and n-grams
        spread evenly over the table."""
        for directions in self.buffers(recurse=False):
            if self.c.engram_hash == "spread":
                nn.init.orthogonal_(directions)
            else:
                nn.init.normal_(directions, std=self.c.engram_compress_dim**-0.5)

    def rows(self, history: Tensor, known: Tensor) -> Tensor:
        """history [T, w, C], the token itself last; known [T, w] bool -> table rows [T, max_ngram, heads] int64, -1
        where the sequence is shorter than the n-gram."""
        width = history.shape[1]
        wide = history.double()
        out = []
        for n in range(1, self.c.engram_max_ngram + 1):
            if n > width:
                out.append(torch.full((len(wide), self.c.engram_num_heads), -1, device=wide.device))
                continue
            places = [getattr(self, f"hash_proj_n{n}_p{k}").double() for k in range(n)]
            total = sum((wide[:, width - n + k] @ p.t() for k, p in enumerate(places)), start=wide.new_zeros(()))
            out.append(torch.where(known[:, width - n].unsqueeze(1), self.hash(total), -1))
        return torch.stack(out, dim=1)

    def hash(self, total: Tensor) -> Tensor:
        """Summed projections [T, heads * bits] -> rows [T, heads] int64."""
        if self.c.engram_hash == "released":
            return total.abs().long() % self.c.engram_table_size
        signs = total.unflatten(1, (self.c.engram_num_heads, self.bits)) > 0
        return (signs << torch.arange(self.bits, device=total.device)).sum(dim=2)

    def forward(self, rows: Tensor) -> Tensor:
        """rows [T, n, heads] (-1 = none) -> the mean of their table rows [T, D], float32 (float64)."""
        acc = kernels.accumulator(self.tables[0].weight.dtype)
        known = (rows >= 0).to(acc)
        picked = [
            (table(rows[:, :, head].clamp(min=0)).to(acc) * known[:, :, head, None]).sum(dim=1)
            for head, table in enumerate(self.tables)
        ]
        return torch.stack(picked).sum(dim=0) / known.sum(dim=(1, 2)).clamp(min=1).unsqueeze(1)


class Gate(nn.Module):
    """retrieved * gamma (erf(alpha z + bias) + 1) / 2 with z = proj(retrieved | x)."""

    def __init__(self, dim: int, init_bias: float):
        super().__init__()
        self.init_bias = init_bias
        self.proj = nn.Linear(2 * dim, dim)
        self.alpha, self.bias, self.gamma = (nn.Parameter(torch.empty(dim)) for _ in range(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.alpha)
        nn.init.constant_(self.bias, self.init_bias)
        nn.init.ones_(self.gamma)

    def forward(self, retrieved: Tensor, x: Tensor) -> Tensor:
        z = self.proj(torch.cat([retrieved, x], dim=1))
        return retrieved * self.gamma * 0.5 * torch.erfc(-(self.alpha * z + self.bias))


class Engram(nn.Module):
    """The whole memory: x [T, D] embeddings -> [T, D] to add to them. Stores the tokens' compressed rows."""

    def __init__(self, c: SpikeWhaleConfig):
        super().__init__()
        self.compressor = Compressor(c.hidden_size, c.engram_compress_dim)
        self.lookup = Lookup(c)
        self.gate = Gate(c.hidden_size, c.engram_gate_init_bias)

    def forward(self, x: Tensor, view: RowView) -> Tensor:
        table = view.append(HISTORY, 0, self.compressor(x))
        index = view.window(HISTORY)
        history = F.embedding(index.clamp(min=0), table)
        rows = self.lookup.rows(history, index >= 0)
        view.batch.tape.note("engram_hashes", rows)
        return self.gate(self.lookup(rows).to(x.dtype), x)
