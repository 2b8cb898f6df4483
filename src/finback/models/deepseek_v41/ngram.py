"""The n-gram hash of Engram: which table rows a token looks up, from itself and the tokens just before it.

1. Ids are compressed (tokens that differ only in case, accents or white space share one), by the caller.
2. `ngram_history`: at and beyond the first dead token (image content, or before the start) every id becomes pad.
3. `hash_rows`: multiply each distance by its own odd number, XOR distance after distance, and reduce each n-gram's
   value by one prime per head. The heads of all n-gram sizes are columns of one table per layer, at their own offsets.

All arithmetic is exact int64: a product of a compressed id and a multiplier stays below 2^63, but far above 2^53, so
nothing here may pass through a float. Source: the released reference's Engram hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count

import numpy as np
import torch
from torch import Tensor

from finback.base.runtime import ConfigError

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # Miller-Rabin is exact with these below 3.3e24
_SEED_STEP = 10007  # multipliers of a layer come from numpy's generator seeded with 10007 * layer id


@dataclass(frozen=True)
class NgramLayout:
    """The hash functions of all Engram layers, derived from the config alone.

    L Engram layers, G = max_ngram_size, columns C = (G - 1) * n_heads in the order 2-grams (all heads), 3-grams, ...
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]  # table rows per layer, without padding
    max_ngram_size: int
    n_heads: int
    head_dim: int
    primes: tuple[tuple[int, ...], ...]  # [L][C] rows of each column
    offsets: tuple[tuple[int, ...], ...]  # [L][C] first row of each column
    multipliers: tuple[tuple[int, ...], ...]  # [L][G], odd; index = distance from the token

    @classmethod
    def build(
        cls,
        layer_ids: Sequence[int],
        num_embeddings: Sequence[int],
        max_ngram_size: int,
        vocab_size: int,
        n_heads: int,
        head_dim: int,
        compressed_vocab_size: int,
    ) -> NgramLayout:
        """The layout of a config; arguments are its `engram_*` fields (`vocab_size` is `engram_vocab_size`, where each
        search for primes starts).

        Raises:
            ConfigError: a value out of range, or tables (`num_embeddings`) whose rows are not the sum of the primes.
        """
        sizes = {"vocab_size": vocab_size, "n_heads": n_heads, "head_dim": head_dim}
        for name, value in {**sizes, "compressed_vocab_size": compressed_vocab_size}.items():
            if value < 1:
                raise ConfigError(f"engram_{name} must be at least 1, not {value}")
        if max_ngram_size < 2:
            raise ConfigError(f"engram_max_ngram_size must be at least 2 for Engram layers, not {max_ngram_size}")
        distinct = len(set(layer_ids)) == len(layer_ids) and min(layer_ids, default=0) >= 0
        if not distinct or len(num_embeddings) != len(layer_ids):
            raise ConfigError(
                f"engram_layer_ids {list(layer_ids)} must be different layers, with one entry each in "
                f"engram_num_embeddings {list(num_embeddings)}"
            )
        primes = _bucket_primes(len(layer_ids), max_ngram_size, vocab_size, n_heads)
        for layer, rows, columns in zip(layer_ids, num_embeddings, primes, strict=True):
            if sum(columns) != rows:
                raise ConfigError(
                    f"engram_num_embeddings says {rows:,} rows for layer {layer}, but engram_vocab_size "
                    f"{vocab_size:,}, {n_heads} heads and n-grams up to {max_ngram_size} need {sum(columns):,}. "
                    "Correct one of them"
                )
        return cls(
            layer_ids=tuple(layer_ids),
            num_embeddings=tuple(num_embeddings),
            max_ngram_size=max_ngram_size,
            n_heads=n_heads,
            head_dim=head_dim,
            primes=primes,
            offsets=tuple(tuple(accumulate(columns[:-1], initial=0)) for columns in primes),
            multipliers=tuple(_multipliers(layer, max_ngram_size, compressed_vocab_size) for layer in layer_ids),
        )

    def tables(self, device: torch.device | str) -> NgramTables:
        """The same numbers as tensors on `device`. Make them once and keep them."""
        by_size = (len(self.layer_ids), self.max_ngram_size - 1, self.n_heads)
        return NgramTables(
            multipliers=torch.tensor(self.multipliers, dtype=torch.int64, device=device),
            primes=torch.tensor(self.primes, dtype=torch.int64, device=device).view(by_size),
            offsets=torch.tensor(self.offsets, dtype=torch.int64, device=device).view(by_size),
        )


@dataclass(frozen=True)
class NgramTables:
    """`NgramLayout` on a device, all int64: multipliers [L, G], primes and offsets [L, G - 1, n_heads]."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor


def ngram_history(compressed: Tensor, previous: Tensor, pad: int) -> Tensor:
    """The ids that each token's n-grams are made of, with dead ones and all beyond them replaced by `pad`.

    Args:
        compressed: [T] int64 compressed ids, negative = dead (a token of an image span).
        previous: [T, G - 1] int64 compressed ids at distance 1, 2, ..., G - 1; negative = dead, or before the start of
            the token's sequence or document.
        pad: compressed id of the config's pad token.

    Returns:
        [T, G] int64; column s is the id at distance s. A dead token is pad everywhere, and text after an image never
        sees across it.
    """
    history = torch.cat((compressed.unsqueeze(1), previous), dim=1)
    # A running minimum is negative from the first dead id on.
    return history.masked_fill(history.cummin(dim=1).values < 0, pad)


def hash_rows(history: Tensor, tables: NgramTables) -> Tensor:
    """Table rows that each token looks up, for all Engram layers at once.

        value_n = XOR over s < n of history[s] * multiplier[s];   row = value_n mod prime + offset

    Args:
        history: [T, G] int64 from `ngram_history`, every id in [0, compressed_vocab_size).

    Returns:
        [T, L, C] int64, C = (G - 1) * n_heads; entries of layer i are in [0, num_embeddings[i]).
    """
    products = (history.unsqueeze(1) * tables.multipliers).split(1, dim=-1)  # G of [T, L, 1]
    values = torch.cat(list(accumulate(products, torch.bitwise_xor))[1:], dim=-1)  # [T, L, G - 1]
    return (values.unsqueeze(-1) % tables.primes).add_(tables.offsets).flatten(2)


def table_rows(n_layers: int, max_ngram_size: int, vocab_size: int, n_heads: int) -> tuple[int, ...]:
    """Rows that each Engram layer's table needs: `engram_num_embeddings` of a new config."""
    return tuple(map(sum, _bucket_primes(n_layers, max_ngram_size, vocab_size, n_heads)))


def _bucket_primes(n_layers: int, max_ngram_size: int, vocab_size: int, n_heads: int) -> tuple[tuple[int, ...], ...]:
    """[L][C] primes >= vocab_size: each layer's and n-gram size's search starts there, but none is used twice."""
    seen: set[int] = set()
    layers = []
    for _ in range(n_layers):
        columns: list[int] = []
        for _ in range(max_ngram_size - 1):
            fresh = (c for c in count(vocab_size) if c not in seen and _is_prime(c))
            group = [next(fresh) for _ in range(n_heads)]
            seen.update(group)
            columns += group
        layers.append(tuple(columns))
    return tuple(layers)


def _is_prime(n: int) -> bool:
    if n < 2 or any(n % p == 0 for p in _WITNESSES):
        return n in _WITNESSES
    odd = (n - 1) >> (twos := ((n - 1) & (1 - n)).bit_length() - 1)
    for witness in _WITNESSES:
        x = pow(witness, odd, n)
        if x != 1 and all(pow(x, 1 << i, n) != n - 1 for i in range(twos)):
            return False
    return True


def _multipliers(layer_id: int, max_ngram_size: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """[G] odd numbers so small that a product with any compressed id fits into int64."""
    bound = max(1, np.iinfo(np.int64).max // compressed_vocab_size // 2)
    drawn = np.random.default_rng(_SEED_STEP * layer_id).integers(0, bound, size=max_ngram_size, dtype=np.int64)
    return tuple(int(m) * 2 + 1 for m in drawn)
