"""Packed tokens and the rows that models remember.

Every model of finback maps a `ForwardBatch` (T tokens of any number of sequences, no batch dimension) to hidden states
`[T, D]`. Whatever it remembers between calls is *rows addressed by (sequence, row number)*, in `RowGroup`s. Two stores
hold rows behind one small interface, `RowView`:

* `BatchRows` keeps the rows of this forward only, as ordinary tensors with autograd. Training and one-shot scoring.
* `PagedRows` keeps pages of physical rows in tensors that outlive the forward. Serving.

A model never sees which of the two it writes to:

    table = view.append("window", layer, kv)          # [N, width]: the physical rows of this group and layer
    index = view.window("window")                     # [T, w] int64: physical rows of each token's window, -1 = none
    picked = view.locate("compressed", rows)          # [T, k] int64: row numbers of the token's own sequence ->
    physical keys = view.sequence("index_key", table, b)       # [n, width]: all rows of sequence b, in order

Rejecting speculated tokens is lowering a length: rows past it are overwritten by the next append and never read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from finback import kernels
from finback.nn.tape import Tape


@dataclass(frozen=True)
class RowGroup:
    """Facts of one kind of row.

    name: what models call it. layers: the layers that own such rows. width: values a row. stride: one row per `stride`
    tokens, finished by the last of them. window: only rows of the last `window` tokens are read (None: all).
    full_precision: kept in the accumulation type (float32, or float64 in a float64 model) instead of the model's dtype.
    """

    name: str
    layers: tuple[int, ...]
    width: int
    stride: int = 1
    window: int | None = None
    full_precision: bool = False


@dataclass(frozen=True)
class Chunk:
    """The new tokens of one sequence in one forward.

    ids: new token ids. start: tokens of the sequence that the store already holds. context: the ids right before
    `start`, oldest first (as many as a model's n-gram memory looks back; a shorter list means the sequence starts
    there), -1 for a token that takes no part in n-grams (images). types: per new token, -1 text and >= 0 inside an
    image span; None = all text. pages: page numbers of the sequence by page class, for `PagedRows` only. exact_from:
    position from which outputs are wanted (0 = all): a model may skip whatever no output from there on, in this forward
    or a later one, depends on.
    """

    ids: Sequence[int]
    start: int = 0
    context: Sequence[int] = ()
    types: Sequence[int] | None = None
    pages: Mapping[str, Sequence[int]] = field(default_factory=dict)
    exact_from: int = 0

    def tail(self, first: int) -> Chunk:
        """The part of the chunk from position `first` on (empty past its end). Its context is not kept."""
        skip = min(max(0, first - self.start), len(self.ids))
        types = None if self.types is None else self.types[skip:]
        return replace(self, ids=self.ids[skip:], start=self.start + skip, context=(), types=types)


class ForwardBatch:
    """T packed tokens of B sequences, and the integers that every layer needs, built once per forward.

    ids, positions, seq: [T] int64 token ids, positions in their sequence, and sequence numbers (0..B-1).
    starts, lengths: B Python ints: tokens before this forward, and new tokens (0 is allowed).
    is_image: [T] bool, or None when there is no image token. inserted: (index [m] int64 into T, rows [m, D]): embedding
    rows that replace the looked-up ones (image features). tape: records or replays discrete choices.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        device: torch.device | str = "cpu",
        inserted: tuple[Tensor, Tensor] | None = None,
        tape: Tape | None = None,
    ):
        self.chunks = tuple(chunks)
        self.device = torch.device(device)
        self.starts = [c.start for c in chunks]
        self.lengths = [len(c.ids) for c in chunks]
        self.inserted = inserted
        self.tape = tape or Tape()
        lengths = np.asarray(self.lengths, dtype=np.int64)
        self.offsets = [0, *np.cumsum(lengths).tolist()]
        self.host_seq = np.repeat(np.arange(len(chunks)), lengths)
        self.seq = self.tensor(self.host_seq)
        positions = [np.arange(c.start, c.start + len(c.ids)) for c in chunks]
        self.host_positions = np.concatenate(positions) if positions else np.empty(0, np.int64)
        self.positions = self.tensor(self.host_positions)
        self.ids = self.tensor(np.concatenate([np.asarray(c.ids, dtype=np.int64) for c in chunks]) if chunks else [])
        self.is_image: Tensor | None = None
        if any(c.types is not None and max(c.types, default=-1) >= 0 for c in chunks):
            types = [np.asarray(c.types) if c.types is not None else np.full(len(c.ids), -1) for c in chunks]
            self.is_image = self.tensor(np.concatenate(types)) >= 0

    def tensor(self, values: object) -> Tensor:
        """`values` (numpy array or list of ints) as an int64 tensor on this batch's device."""
        host = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
        return host if self.device.type == "cpu" else host.to(self.device)

    def __len__(self) -> int:
        return self.offsets[-1]

    @property
    def ends(self) -> list[int]:
        """B ints: the length of every sequence after this forward."""
        return [s + n for s, n in zip(self.starts, self.lengths, strict=True)]

    def last_tokens(self) -> list[int]:
        """For every sequence with new tokens, the index in [0, T) of its last one."""
        return [o + n - 1 for o, n in zip(self.offsets, self.lengths, strict=False) if n]

    def narrow(self, firsts: Sequence[int]) -> tuple[ForwardBatch, Tensor]:
        """The batch of each sequence's tokens from position firsts[b] on, and their indices [T'] in this batch."""
        chunks = [c.tail(first) for c, first in zip(self.chunks, firsts, strict=True)]
        ends = self.offsets[1:]
        kept = [np.arange(end - len(c.ids), end) for c, end in zip(chunks, ends, strict=True)]
        return ForwardBatch(chunks, device=self.device, tape=self.tape), self.tensor(np.concatenate(kept))

    def previous_ids(self, reach: int) -> Tensor:
        """[T, reach] int64: the token ids 1..reach places before each token; -1 where the sequence has not begun or the
        token there is part of an image."""
        rows = []
        for c in self.chunks:
            if not len(c.ids):
                continue
            before = list(c.context)[-reach:] if reach else []
            ids = np.asarray(c.ids, dtype=np.int64)
            if c.types is not None:
                ids = np.where(np.asarray(c.types) >= 0, -1, ids)
            line = np.concatenate([np.full(reach - len(before), -1), np.asarray(before, dtype=np.int64), ids])
            windows = np.lib.stride_tricks.sliding_window_view(line, reach + 1)[: len(ids)]
            rows.append(windows[:, :-1][:, ::-1])
        return self.tensor(np.concatenate(rows) if rows else np.empty((0, reach)))

    def finished(self, stride: int) -> Finished:
        """The groups of `stride` tokens that this forward completes. Cached by stride."""
        if stride not in self._finished:
            first = np.asarray(self.starts) // stride
            last = np.asarray(self.ends) // stride
            counts = (last - first).tolist()
            groups = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)] or [[]])
            owner = np.repeat(np.arange(len(counts)), counts)
            groups = groups.astype(np.int64)
            self._finished[stride] = Finished(counts, owner, groups, self.tensor(owner), self.tensor(groups))
        return self._finished[stride]

    @cached_property
    def _finished(self) -> dict[int, Finished]:
        return {}


@dataclass(frozen=True)
class Finished:
    """Row groups completed by a forward: counts[b] ints per sequence, and seq [n], row [n] int64 in packed order, also
    on the host."""

    counts: list[int]
    host_seq: np.ndarray
    host_row: np.ndarray
    seq: Tensor
    row: Tensor


class RowView(Protocol):
    """One forward's access to a row store. Indices returned are physical rows of the tables of the named group."""

    batch: ForwardBatch

    def rebind(self, batch: ForwardBatch) -> RowView:
        """The same rows for a narrower batch of the same sequences."""
        ...

    def append(self, group: str, layer: int, values: Tensor) -> Tensor:
        """Store one row per new token (stride 1) or per finished group, in packed order: values [n, width].
        Returns the table [N, width] that `locate`, `window` and `sequence` refer to."""
        ...

    def table(self, group: str, layer: int) -> Tensor:
        """The table [N, width] without writing to it."""
        ...

    def locate(self, group: str, seq: Tensor, rows: Tensor) -> Tensor:
        """Physical rows of row numbers `rows` (int64, any shape, -1 = none stays -1) of sequences `seq` (broadcast)."""
        ...

    def window(self, group: str) -> Tensor:
        """[T, w] int64: physical rows of the last `window` rows up to and including each token, newest last, -1 = none.
        w = min(window, longest sequence), or `window` under `kernels.deterministic`."""
        ...

    def sequence(self, group: str, table: Tensor, b: int) -> Tensor:
        """[n, width]: the rows of sequence b after this forward, in order. May be a view of `table`."""
        ...


def _window_rows(batch: ForwardBatch, width: int) -> Tensor:
    """[T, w] row numbers of a stride-1 window, -1 before the sequence's start."""
    if not kernels.is_deterministic():  # there, the width must not depend on the longest sequence
        width = min(width, max(batch.ends, default=0))
    back = torch.arange(1 - width, 1, device=batch.device)
    return (batch.positions.unsqueeze(1) + back).clamp_(min=-1)


class BatchRows:
    """The rows of one forward, kept nowhere: every sequence must start at 0. Differentiable."""

    def __init__(self, groups: Sequence[RowGroup]):
        self.groups = {g.name: g for g in groups}

    def view(self, batch: ForwardBatch) -> BatchView:
        assert not any(batch.starts), "BatchRows holds nothing between forwards: sequences must start at 0"
        return BatchView(self.groups, batch)


class BatchView:
    def __init__(self, groups: Mapping[str, RowGroup], batch: ForwardBatch):
        self.groups, self.batch = groups, batch
        self._tables: dict[tuple[str, int], Tensor] = {}
        self._windows: dict[str, Tensor] = {}
        self._offsets: dict[int, tuple[list[int], Tensor]] = {}
        self._located: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def rebind(self, batch: ForwardBatch) -> RowView:
        raise AssertionError("BatchRows holds whole sequences only: score them with exact_from 0")

    def _row_offsets(self, stride: int) -> tuple[list[int], Tensor]:
        if stride not in self._offsets:
            offsets = [0, *np.cumsum([n // stride for n in self.batch.lengths]).tolist()]
            self._offsets[stride] = offsets, self.batch.tensor(offsets)
        return self._offsets[stride]

    def append(self, group: str, layer: int, values: Tensor) -> Tensor:
        self._tables[group, layer] = values
        return values

    def table(self, group: str, layer: int) -> Tensor:
        return self._tables[group, layer]

    def locate(self, group: str, seq: Tensor, rows: Tensor) -> Tensor:
        stride = self.groups[group].stride
        _, offsets = self._row_offsets(stride)
        # Kernels prepare an index once for as long as it is the same tensor: also in a layer that is recomputed.
        key = stride, id(rows), seq.data_ptr()
        if key not in self._located:
            self._located[key] = rows, seq, torch.where(rows < 0, rows, rows + offsets[seq])
        return self._located[key][2]

    def window(self, group: str) -> Tensor:
        if group not in self._windows:
            width = self.groups[group].window
            assert width is not None
            self._windows[group] = self.locate(group, self.batch.seq.unsqueeze(1), _window_rows(self.batch, width))
        return self._windows[group]

    def sequence(self, group: str, table: Tensor, b: int) -> Tensor:
        offsets, _ = self._row_offsets(self.groups[group].stride)
        return table[offsets[b] : offsets[b + 1]]


def page_class(group: RowGroup) -> str:
    """Groups with equal windows live and die together, so they share page tables: "full" or "window:<w>"."""
    return "full" if group.window is None else f"window:{group.window}"


class PagedRows:
    """Rows in pages of `page_tokens` tokens, in tensors that outlive a forward.

    A page of class c holds, for every group of that class and each of its layers, the page's `page_tokens / stride`
    rows; `page_tokens` is a multiple of every stride, so no page border cuts a group. Which pages belong to which
    sequence is the caller's business (`Chunk.pages`, an allocator outside); the store never looks at ownership.

    page_counts: physical pages by class. Memory is page_counts[c] * bytes_per_page[c].
    """

    def __init__(
        self,
        groups: Sequence[RowGroup],
        page_counts: Mapping[str, int],
        *,
        page_tokens: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.groups = {g.name: g for g in groups}
        self.page_tokens = page_tokens
        for g in groups:
            assert page_tokens % g.stride == 0, (
                f"page_tokens {page_tokens} is no multiple of {g.name}'s stride {g.stride}"
            )
        full = torch.promote_types(dtype, torch.float32)
        self.tables: dict[tuple[str, int], Tensor] = {}
        for g in groups:
            rows = page_counts[page_class(g)] * (page_tokens // g.stride)
            for layer in g.layers:
                self.tables[g.name, layer] = torch.zeros(
                    rows, g.width, dtype=full if g.full_precision else dtype, device=device
                )

    def view(self, batch: ForwardBatch) -> PagedView:
        return PagedView(self, batch)

    def clear(self) -> None:
        """Set every row to zeros."""
        for table in self.tables.values():
            table.zero_()

    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(t.numel() * t.element_size() for t in self.tables.values())


class PagedView:
    def __init__(self, store: PagedRows, batch: ForwardBatch):
        self.store, self.groups, self.batch = store, store.groups, batch
        self._windows: dict[str, Tensor] = {}
        self._targets: dict[tuple[str, int], Tensor] = {}
        self._page_tables: dict[str, np.ndarray] = {}
        self._shift_tables: dict[tuple[str, int], Tensor] = {}

    def rebind(self, batch: ForwardBatch) -> PagedView:
        return PagedView(self.store, batch)

    def _host_page_table(self, cls: str) -> np.ndarray:
        """[B, pages] int64 physical page numbers of this batch's sequences, 0-padded."""
        if cls not in self._page_tables:
            lists = [c.pages[cls] for c in self.batch.chunks]
            table = np.zeros((len(lists), max(map(len, lists), default=0)), dtype=np.int64)
            for line, pages in zip(table, lists, strict=True):
                line[: len(pages)] = pages
            self._page_tables[cls] = table
        return self._page_tables[cls]

    def _shifts(self, group: str) -> Tensor:
        """[B, pages + 1] int64: what to add to a row number by its page; the last column, that of row -1, is 0."""
        per_page = self._rows_per_page(group)
        key = page_class(self.groups[group]), per_page
        if key not in self._shift_tables:
            pages = self._host_page_table(key[0])
            shifts = np.zeros((len(pages), pages.shape[1] + 1), np.int64)
            shifts[:, :-1] = (pages - np.arange(pages.shape[1])) * per_page
            self._shift_tables[key] = self.batch.tensor(shifts)
        return self._shift_tables[key]

    def _host_locate(self, group: str, seq: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """`locate` of numbers that are known on the host."""
        page, rest = np.divmod(rows, self._rows_per_page(group))
        physical = self._host_page_table(page_class(self.groups[group]))[seq, page] * self._rows_per_page(group) + rest
        return np.where(rows < 0, rows, physical)

    def _rows_per_page(self, group: str) -> int:
        return self.store.page_tokens // self.groups[group].stride

    def _target(self, group: str) -> Tensor:
        """[n] physical rows that `append` writes."""
        key = page_class(self.groups[group]), self.groups[group].stride
        if key not in self._targets:
            if key[1] == 1:
                seq, rows = self.batch.host_seq, self.batch.host_positions
            else:
                done = self.batch.finished(key[1])
                seq, rows = done.host_seq, done.host_row
            self._targets[key] = self.batch.tensor(self._host_locate(group, seq, rows))
        return self._targets[key]

    def append(self, group: str, layer: int, values: Tensor) -> Tensor:
        table = self.store.tables[group, layer]
        if values.shape[0]:
            table.index_copy_(0, self._target(group), kernels.cast(values, table.dtype))
        return table

    def table(self, group: str, layer: int) -> Tensor:
        return self.store.tables[group, layer]

    def locate(self, group: str, seq: Tensor, rows: Tensor) -> Tensor:
        return rows + self._shifts(group)[seq, rows // self._rows_per_page(group)]

    def window(self, group: str) -> Tensor:
        if group not in self._windows:
            width = self.groups[group].window
            assert width is not None
            if not kernels.is_deterministic():
                width = min(width, max(self.batch.ends, default=0))
            rows = np.maximum(self.batch.host_positions[:, None] + np.arange(1 - width, 1), -1)
            self._windows[group] = self.batch.tensor(self._host_locate(group, self.batch.host_seq[:, None], rows))
        return self._windows[group]

    def sequence(self, group: str, table: Tensor, b: int) -> Tensor:
        spec, per_page = self.groups[group], self._rows_per_page(group)
        count = self.batch.ends[b] // spec.stride
        pages = list(self.batch.chunks[b].pages[page_class(spec)][: -(-count // per_page)])
        if not pages:
            return table[:0]
        if pages == list(range(pages[0], pages[0] + len(pages))):
            return table[pages[0] * per_page : pages[0] * per_page + count]  # contiguous: no copy
        return table.view(-1, per_page, spec.width)[self.batch.tensor(pages)].flatten(0, 1)[:count]
