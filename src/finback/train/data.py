"""From documents to batches: mixing by share, packing, held-out documents, exact resume.

A batch is a fixed number of tokens. It is filled with pieces of documents, at most `length` tokens each; every piece is
a sequence of its own (a document mask: no attention, no n-gram and no label crosses a border). The next piece comes
from the source that lies furthest behind its share, so every batch holds all sources in about their shares. A piece
that is cut has the next token of its document as last label, and the rest of the document goes on later as a new piece.

The state of a stream is a few integers a source. Documents are visited in an order that a seed and the number of the
pass decide; of several ranks, each takes every n-th document of that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finback.base.runtime import ConfigError
from finback.nn.rows import Chunk, ForwardBatch
from finback.nn.tape import Tape
from finback.train.loss import IGNORE
from finback.train.sources import Corpus, Document


@dataclass(frozen=True)
class Batch:
    """chunks: one per piece. labels: [T] int64, the token after each, `IGNORE` = not learned. sources: tokens by
    source."""

    chunks: list[Chunk]
    labels: Tensor
    sources: dict[str, int]

    def __len__(self) -> int:
        return len(self.labels)

    def forward_batch(self, device: torch.device | str, tape: Tape | None = None) -> ForwardBatch:
        return ForwardBatch(self.chunks, device=device, tape=tape)

    def targets(self) -> int:
        return int((self.labels != IGNORE).sum())


@dataclass
class _Place:
    """Where a source stands: pass over its documents, documents taken in it, tokens of the next one already used."""

    epoch: int = 0
    taken: int = 0
    used: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class _Source:
    name: str
    corpus: Corpus
    share: float
    documents: npt.NDArray[np.int64]


class Stream:
    """An endless stream of batches.

    corpora: (name, corpus, share) of each source. tokens: of a batch. length: most tokens of a piece. held_out: share
    of documents left out. rank, world: this process's part of the documents.
    """

    def __init__(
        self,
        corpora: Sequence[tuple[str, Corpus, float]],
        *,
        tokens: int,
        length: int,
        seed: int = 0,
        held_out: float = 0.0,
        rank: int = 0,
        world: int = 1,
    ):
        self.tokens, self.length, self.seed, self.rank, self.world = tokens, length, seed, rank, world
        self.sources = []
        for name, corpus, share in corpora:
            kept = [i for i in range(len(corpus)) if not (held_out and corpus.is_held_out(i, held_out))]
            if len(kept) < world:
                raise ConfigError(f"source {name}: {len(kept)} documents to train on are too few for {world} processes")
            self.sources.append(_Source(name, corpus, share, np.asarray(kept)))
        if not any(s.share for s in self.sources):
            raise ConfigError("data.sources: at least one source needs a share above 0")
        self.places = [_Place() for _ in self.sources]
        self._orders: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    def set_shares(self, shares: Sequence[float]) -> None:
        """Change the mix from the next piece on; the present shares change nothing."""
        if list(shares) == [s.share for s in self.sources]:
            return
        self.sources = [
            _Source(s.name, s.corpus, share, s.documents) for s, share in zip(self.sources, shares, strict=True)
        ]
        for place in self.places:
            place.tokens = 0

    def next(self, length: int | None = None) -> Batch:
        """The next batch; length: most tokens of its pieces, None = the stream's."""
        limit = self.length if length is None else length
        chunks, labels, room = [], [], self.tokens
        sources: dict[str, int] = {}
        while room:
            which = self._behind()
            place = self.places[which]
            document = self._document(which)
            left = len(document.ids) - 1 - place.used
            n = min(left, limit, room)
            ids, targets = piece(document, place.used, n)
            chunks.append(Chunk(ids.tolist()))
            labels.append(targets)
            room -= n
            place.tokens += n
            sources[self.sources[which].name] = sources.get(self.sources[which].name, 0) + n
            place.used += n
            if n == left:
                place.used = 0
                place.taken += 1
                if place.taken == len(self._order(which)):
                    place.epoch, place.taken = place.epoch + 1, 0
        return Batch(chunks, torch.from_numpy(np.concatenate(labels)), sources)

    def _behind(self) -> int:
        """The source whose tokens so far are fewest for its share. Several may have a document under way."""
        worth = [
            p.tokens / s.share if s.share else float("inf") for s, p in zip(self.sources, self.places, strict=True)
        ]
        return int(np.argmin(worth))

    def _order(self, which: int) -> npt.NDArray[np.int64]:
        """This rank's documents in the source's present pass."""
        key = which, self.places[which].epoch
        if key not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k[0] != which}
            rng = np.random.default_rng([self.seed, which, key[1]])
            self._orders[key] = rng.permutation(self.sources[which].documents)[self.rank :: self.world]
        return self._orders[key]

    def _document(self, which: int) -> Document:
        return self.sources[which].corpus.document(int(self._order(which)[self.places[which].taken]))

    def state_dict(self) -> dict[str, Any]:
        return {s.name: list(vars(p).values()) for s, p in zip(self.sources, self.places, strict=True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. ConfigError where the sources have changed."""
        names = [s.name for s in self.sources]
        if sorted(state) != sorted(names):
            raise ConfigError(
                f"the run was made with the sources {', '.join(state)}; the recipe has {', '.join(names)}"
            )
        self.places = [_Place(*state[name]) for name in names]


def piece(document: Document, start: int, n: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """n tokens of a document from `start` on, and the tokens after them (`IGNORE` where those are not learned)."""
    ids, targets = document.ids[start : start + n], document.ids[start + 1 : start + n + 1].copy()
    if document.learn is not None:
        targets[~document.learn[start + 1 : start + n + 1]] = IGNORE
    return ids, targets


def held_out_batches(corpus: Corpus, share: float, *, tokens: int, length: int, limit: int) -> Iterator[Batch]:
    """Batches of a source's held-out documents, in order and each once, up to about `limit` tokens."""
    chunks: list[Chunk] = []
    labels: list[npt.NDArray[np.int64]] = []
    room, total = tokens, 0
    for i in range(len(corpus)):
        if total >= limit or not corpus.is_held_out(i, share):
            continue
        document = corpus.document(i)
        for start in range(0, len(document.ids) - 1, length):
            n = min(length, len(document.ids) - 1 - start)
            if n > room and chunks:
                yield Batch(chunks, torch.from_numpy(np.concatenate(labels)), {})
                chunks, labels, room = [], [], tokens
            ids, targets = piece(document, start, n)
            chunks.append(Chunk(ids.tolist()))
            labels.append(targets)
            room -= n
            total += n
    if chunks:
        yield Batch(chunks, torch.from_numpy(np.concatenate(labels)), {})
