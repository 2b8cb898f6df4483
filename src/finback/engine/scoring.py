"""Bookkeeping of `LLM.score`: chunk lengths in, per-sequence logits and traces out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from finback.base.runtime import RequestError
from finback.nn.tape import Trace


def check_splits(splits: Sequence[Sequence[int]] | None, lengths: Sequence[int], chunk: int) -> list[list[int]]:
    """Steps of new tokens per sequence: steps[i][s]. None cuts every sequence into chunks of at most `chunk`."""
    if splits is None:
        splits = [[min(chunk, n - at) for at in range(0, n, chunk)] for n in lengths]
    if len(splits) != len(lengths):
        raise RequestError(f"splits has {len(splits)} lists for {len(lengths)} sequences; give one for each")
    for i, (parts, n) in enumerate(zip(splits, lengths, strict=True)):
        if not isinstance(parts, Sequence) or not all(type(p) is int for p in parts):
            raise RequestError(f"splits of sequence {i} are {parts!r}; give a list of integers")
        if any(p < 0 for p in parts) or sum(parts) != n:
            raise RequestError(
                f"splits {list(parts)} add up to {sum(parts)}, but sequence {i} has {n} tokens; give lengths that add "
                "up to its tokens"
            )
    count = max((len(parts) for parts in splits), default=0)
    return [[parts[i] if i < len(parts) else 0 for parts in splits] for i in range(count)]


class Collector:
    """Puts the packed results of several forwards back into one tensor per sequence."""

    def __init__(self, sequences: int):
        self._logits: list[list[Tensor]] = [[] for _ in range(sequences)]
        self._seen: list[dict[str, list[Tensor]]] = [{} for _ in range(sequences)]

    def add(self, lengths: Sequence[int], logits: Tensor, seen: Mapping[str, Tensor]) -> None:
        """One forward's logits [T, V] and tape, T = sum of `lengths`."""
        for i, part in enumerate(logits.split(list(lengths))):
            self._logits[i].append(part)
        for name, value in seen.items():
            for i, part in enumerate(value.split(list(lengths))):
                self._seen[i].setdefault(name, []).append(part)

    def logits(self) -> list[Tensor]:
        return [torch.cat(parts) for parts in self._logits]

    def traces(self) -> list[Trace]:
        return [Trace({name: _join(parts) for name, parts in seen.items()}) for seen in self._seen]


def _join(parts: list[Tensor]) -> Tensor:
    """Concatenate lines; lists of choices that differ in width are filled up with -1."""
    if parts[0].ndim == 2 and not parts[0].is_floating_point():
        width = max(p.shape[1] for p in parts)
        parts = [torch.nn.functional.pad(p, (0, width - p.shape[1]), value=-1) for p in parts]
    return torch.cat(parts)
