"""From documents to batches: mixing by share, packing, held-out documents, exact resume.

A batch is a fixed number of tokens. It is filled with pieces of documents, at most `length` tokens each; every piece is
a sequence of its own (a document mask: no attention, no n-gram and no label crosses a border). The next piece comes
from the source that lies furthest behind its share, so every batch holds all sources in about their shares. A piece
that is cut has the next token of its document as last label, and the rest of the document goes on later as a new piece.
Images are never cut, and a document that shows one or is to stay whole is in one piece where `length` allows it, so
that no answer is parted from what it is about: where it finds no room, another source fills the batch, or else the
batch ends early.

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
from finback.models.deepseek_v41.vision import IMAGE, TEXT
from finback.nn.rows import Chunk, ForwardBatch
from finback.nn.tape import Tape
from finback.train.images import Picture, inserted
from finback.train.loss import IGNORE
from finback.train.sources import Corpus, Document


@dataclass(frozen=True)
class Batch:
    """chunks: one per piece. labels: [T] int64, the token after each, `IGNORE` = not learned. sources: tokens by
    source. pictures: images, with their places among the T tokens."""

    chunks: list[Chunk]
    labels: Tensor
    sources: dict[str, int]
    pictures: tuple[Picture, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def forward_batch(self, device: torch.device | str, tape: Tape | None = None, *, model: Any = None) -> ForwardBatch:
        """The packed tokens. model: whose vision tower encodes the images, with gradient; needed where it has any."""
        rows = None
        if self.pictures:
            assert model is not None, "a batch with images needs the model that encodes them"
            rows = inserted(model, self.pictures, device)
        return ForwardBatch(self.chunks, device=device, tape=tape, inserted=rows)

    def patches(self) -> int:
        """How many patches its images have."""
        return sum(one.grid_h * one.grid_w for one in self.pictures)

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
            kept = np.flatnonzero(~corpus.held_out(held_out)) if held_out else np.arange(len(corpus))
            if len(kept) < world:
                raise ConfigError(f"source {name}: {len(kept)} documents to train on are too few for {world} processes")
            self.sources.append(_Source(name, corpus, share, kept))
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
        pack = _Pack(self.tokens)
        sources: dict[str, int] = {}
        for name, document, start, n in self._pieces(length):
            pack.add(document, start, n)
            sources[name] = sources.get(name, 0) + n
        return pack.batch(sources)

    def skip(self, length: int | None = None) -> None:
        """Go on as `next` does, without a batch: it is another process's."""
        for _ in self._pieces(length):
            pass

    def _pieces(self, length: int | None) -> Iterator[tuple[str, Document, int, int]]:
        """(source, document, first token, tokens) of the pieces of the next batch."""
        limit, room = min(self.tokens, self.length if length is None else length), self.tokens
        while room and (found := self._next_piece(limit, room)):
            which, document, n = found
            place = self.places[which]
            start = place.used
            place.tokens += n
            place.used += n
            room -= n
            if place.used == len(document.ids) - 1:
                place.used = 0
                place.taken += 1
                if place.taken == len(self._order(which)):
                    place.epoch, place.taken = place.epoch + 1, 0
            yield self.sources[which].name, document, start, n

    def _next_piece(self, limit: int, room: int) -> tuple[int, Document, int] | None:
        """(source, document, tokens) of the next piece: of the first source by need whose next piece fits into `room`;
        None where none does."""
        for which in self._by_need():
            document = self._document(which)
            n = fitting(document, self.places[which].used, limit, room)
            if n:
                return which, document, n
            if room == self.tokens:
                longest = max(one.tokens for one in document.pictures)
                raise ConfigError(
                    f"source {self.sources[which].name}: an image of {longest} tokens does not fit into a piece of "
                    f"{limit}; raise data.length (and data.batch_tokens), or lower max_image_tokens of vision_config"
                )
        return None

    def _by_need(self) -> list[int]:
        """The sources by how few tokens they gave for their share. Several may have a document under way."""
        worth = [p.tokens / s.share if s.share else np.inf for s, p in zip(self.sources, self.places, strict=True)]
        return [int(i) for i in np.argsort(worth, kind="stable") if worth[i] < np.inf]

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


class _Pack:
    """Pieces on their way into one batch of at most `room` tokens."""

    def __init__(self, room: int):
        self.room, self.size = room, 0
        self.chunks: list[Chunk] = []
        self.labels: list[npt.NDArray[np.int64]] = []
        self.pictures: list[Picture] = []

    def add(self, document: Document, start: int, n: int) -> None:
        ids, targets = piece(document, start, n)
        shown = [one for one in document.pictures if start <= one.start < start + n]
        types = np.full(n, TEXT) if shown else None
        for one in shown:
            assert types is not None
            types[one.start - start : one.end - start] = IMAGE
        self.chunks.append(Chunk(ids.tolist(), types=None if types is None else types.tolist()))
        self.labels.append(targets)
        self.pictures += [one.moved(self.size - start) for one in shown]
        self.size += n
        self.room -= n

    def batch(self, sources: dict[str, int]) -> Batch:
        return Batch(self.chunks, torch.from_numpy(np.concatenate(self.labels)), sources, tuple(self.pictures))


def fitting(document: Document, start: int, limit: int, room: int) -> int:
    """Tokens of the piece of a document that begins at `start`: at most `limit` and `room`, no image cut, and all of
    the rest where `limit` allows it and an image is still to come or the document is to stay whole. 0 = it needs more
    room."""
    left = len(document.ids) - 1 - start
    n = min(left, limit, room)
    coming = [one for one in document.pictures if one.start >= start]
    if n == left or not (coming or document.whole):
        return n
    if left <= limit:
        return 0
    return min([n, *(one.start - start for one in coming if one.start < start + n < one.end)])


def piece(document: Document, start: int, n: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """n tokens of a document from `start` on, and the tokens after them (`IGNORE` where those are not learned)."""
    if document.whole and start:  # what they follow from was cut off
        return document.ids[start : start + n], np.full(n, IGNORE)
    ids, targets = document.ids[start : start + n], document.ids[start + 1 : start + n + 1].copy()
    if document.learn is not None:
        targets[~document.learn[start + 1 : start + n + 1]] = IGNORE
    return ids, targets


def held_out_batches(corpus: Corpus, share: float, *, tokens: int, length: int, limit: int) -> Iterator[Batch]:
    """Batches of a source's held-out documents, in order and each once, up to about `limit` tokens."""
    pack, total = _Pack(tokens), 0
    for i in np.flatnonzero(corpus.held_out(share)).tolist():
        if total >= limit:
            break
        document, start = corpus.document(i), 0
        while n := fitting(document, start, length, length):
            if n > pack.room and pack.size:
                yield pack.batch({})
                pack = _Pack(tokens)
            pack.add(document, start, n)
            start += n
            total += n
    if pack.size:
        yield pack.batch({})
