"""Packed tokens and the two row stores, against plain lists of rows per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from finback.nn.rows import BatchRows, Chunk, ForwardBatch, PagedRows, RowGroup, page_class
from finback.nn.tape import Tape

GROUPS = (
    RowGroup("every", (0, 3), 3),
    RowGroup("window", (1,), 2, window=5),
    RowGroup("pairs", (0,), 4, stride=2),
    RowGroup("fours", (2,), 1, stride=4),
    RowGroup("raw", (2,), 2, window=4, full_precision=True),
)
PAGE = 4


# -- a batch -----------------------------------------------------------------------------------------------------------


def test_packed_integers() -> None:
    """Positions counted from the chunk, sequence numbers that skip a sequence without tokens, or offsets off by one."""
    batch = ForwardBatch([Chunk([5, 6], 3), Chunk([], 9), Chunk([7, 8, 9], 0)])
    assert batch.ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [3, 4, 0, 1, 2]
    assert batch.seq.tolist() == [0, 0, 2, 2, 2]
    assert (batch.starts, batch.lengths, batch.ends) == ([3, 9, 0], [2, 0, 3], [5, 9, 3])
    assert batch.offsets == [0, 2, 2, 5] and len(batch) == 5
    assert batch.last_tokens() == [1, 4]
    assert batch.is_image is None


@pytest.mark.parametrize("chunks", [[], [Chunk([])], [Chunk([], 4), Chunk([], 0, types=[])]], ids=len)
def test_batches_without_tokens(chunks: list[Chunk]) -> None:
    """numpy makes float arrays of empty lists: such a batch must still be integers."""
    batch = ForwardBatch(chunks)
    assert len(batch) == 0 and batch.last_tokens() == []
    for tensor in (batch.ids, batch.positions, batch.seq, batch.previous_ids(3), batch.finished(2).row):
        assert tensor.dtype == torch.int64 and tensor.numel() == 0


def test_image_tokens_are_marked_in_every_kind_of_batch() -> None:
    """Text beside an image, text without types, and a chunk that ends before the image begins."""
    batch = ForwardBatch([Chunk([1, 2]), Chunk([3, 4, 5], types=[-1, 0, 3]), Chunk([6], types=[-1])])
    assert batch.is_image is not None and batch.is_image.tolist() == [False, False, False, True, True, False]
    assert ForwardBatch([Chunk([1, 2], types=[-1, -1])]).is_image is None


def test_groups_that_a_forward_finishes() -> None:
    """A group counts when its last token comes, wherever the chunk began; row numbers are the sequence's own."""
    done = ForwardBatch([Chunk(range(5)), Chunk(range(1), 7), Chunk(range(1), 6), Chunk([], 8)]).finished(4)
    assert done.counts == [1, 1, 0, 0]
    assert done.seq.tolist() == [0, 1] and done.row.tolist() == [0, 1]
    single = ForwardBatch([Chunk(range(2), 3)]).finished(1)
    assert single.counts == [2] and single.row.tolist() == [3, 4]


def test_previous_ids() -> None:
    """n-grams across the border of packed documents, an image seen as text, a context longer or shorter than needed."""
    chunks = [
        Chunk([10, 11, 12], 5, context=[7, 8, 9, -1]),
        Chunk([], 3, context=[1, 2]),
        Chunk([20, 21], 0),
        Chunk([30, 31], 1, context=[40]),
        Chunk([50, 51, 52], 2, context=[48, 49], types=[-1, 0, -1]),
    ]
    assert ForwardBatch(chunks).previous_ids(3).tolist() == [
        [-1, 9, 8], [10, -1, 9], [11, 10, -1],
        [-1, -1, -1], [20, -1, -1],
        [40, -1, -1], [30, 40, -1],
        [49, 48, -1], [50, 49, 48], [-1, 50, 49],
    ]  # fmt: skip
    assert ForwardBatch(chunks[:1]).previous_ids(0).shape == (3, 0)


def test_tails() -> None:
    """Tokens from a position on: the packed indices must point at the same tokens, also when a sequence has none
    left."""
    tape = Tape(record=True)
    chunks = [Chunk([1, 2, 3, 4], 10, types=[-1, -1, 0, 1]), Chunk([5, 6], 0, context=[]), Chunk([7, 8, 9], 4)]
    batch = ForwardBatch(chunks, tape=tape)
    narrow, kept = batch.narrow([12, 9, -3])
    assert kept.tolist() == [2, 3, 6, 7, 8]
    assert narrow.positions.equal(batch.positions[kept]) and narrow.ids.equal(batch.ids[kept])
    assert narrow.seq.equal(batch.seq[kept]) and narrow.ends == batch.ends
    assert narrow.is_image is not None and batch.is_image is not None
    assert narrow.is_image.equal(batch.is_image[kept]) and narrow.tape is tape


# -- the stores against lists ------------------------------------------------------------------------------------------


def expected_rows(group: RowGroup, layer: int, s: int, count: int) -> Tensor:
    """The rows 0 .. count - 1 of sequence s: every value tells where it belongs. [count, width]"""
    row, column = torch.arange(count).unsqueeze(1), torch.arange(group.width)
    return (10_000 * s + 1000 * layer + row + column / 8).float()


class Feeder:
    """Appends recognisable rows and checks everything that the view answers."""

    def __init__(self, store: Any, sequences: int):
        self.store, self.done = store, [0] * sequences

    def step(self, counts: Sequence[int], pages: Sequence[dict[str, list[int]]] | None = None) -> None:
        chunks = [
            Chunk(range(n), at, pages=pages[s] if pages else {})
            for s, (at, n) in enumerate(zip(self.done, counts, strict=True))
        ]
        batch = ForwardBatch(chunks)
        view = self.store.view(batch)
        self.done = batch.ends
        for group in GROUPS:
            for layer in group.layers:
                table = view.append(group.name, layer, self.new_rows(group, layer, batch))
                assert (
                    table.equal(
                        view.table(group.name, layer),
                    )
                    or table.isnan().any()
                )
                self.check_sequences(view, group, layer, table)
                if group.window is not None:
                    self.check_window(view, group, layer, table)

    def new_rows(self, group: RowGroup, layer: int, batch: ForwardBatch) -> Tensor:
        parts = [
            expected_rows(group, layer, s, end // group.stride)[start // group.stride :]
            for s, (start, end) in enumerate(zip(batch.starts, batch.ends, strict=True))
        ]
        return torch.cat(parts)

    def check_sequences(self, view: Any, group: RowGroup, layer: int, table: Tensor) -> None:
        if group.window is not None:
            return
        for s, end in enumerate(self.done):
            expected = expected_rows(group, layer, s, end // group.stride)
            assert view.sequence(group.name, table, s).equal(expected)
            if len(expected):
                rows = torch.tensor([-1, len(expected) - 1, 0, -1])
                places = view.locate(group.name, torch.tensor([s]), rows)
                assert places[[0, 3]].tolist() == [-1, -1]
                assert table[places[[1, 2]]].equal(expected[[-1, 0]])

    def check_window(self, view: Any, group: RowGroup, layer: int, table: Tensor) -> None:
        batch, index = view.batch, view.window(group.name)
        assert index.shape == (len(batch), min(group.window, max(self.done)))
        for line, s, position in zip(index, batch.seq.tolist(), batch.positions.tolist(), strict=True):
            seen = line[line >= 0]
            expected = expected_rows(group, layer, s, position + 1)[-group.window :]
            assert line[: len(line) - len(expected)].tolist() == [-1] * (len(line) - len(expected))
            assert table[seen].equal(expected)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_batch_rows_are_the_sequences_rows(lengths: list[int]) -> None:
    """Offsets of a group counted in tokens; a neighbour's rows in a window; a sequence shorter than one group."""
    if sum(lengths):
        Feeder(BatchRows(GROUPS), len(lengths)).step(lengths)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Tokens a step of each of up to three sequences, and a seed for the places of pages."""
    sequences = draw(st.integers(1, 3))
    steps = draw(st.lists(st.lists(st.integers(0, 7), min_size=sequences, max_size=sequences), min_size=1, max_size=5))
    return [s for s in steps if sum(s)] or [[1] * sequences], draw(st.integers(0, 99))


@given(plans())
def test_paged_rows_are_the_sequences_rows(plan: tuple[list[list[int]], int]) -> None:
    """Pages in any places, given step by step; pages behind a window go to whoever needs one next, so a row that is
    read after its page was given away holds another sequence's values (or NaN at first)."""
    steps, seed = plan
    generator = torch.Generator().manual_seed(seed)
    windows = {page_class(g): g.window for g in GROUPS}
    counts = dict.fromkeys(windows, 30)
    store = PagedRows(GROUPS, counts, page_tokens=PAGE)
    for table in store.tables.values():
        table.fill_(float("nan"))
    free = {cls: torch.randperm(30, generator=generator).tolist() for cls in windows}
    pages: list[dict[str, list[int]]] = [{cls: [] for cls in windows} for _ in steps[0]]
    feeder = Feeder(store, len(pages))
    for counts_now in steps:
        for own, done, n in zip(pages, feeder.done, counts_now, strict=True):
            for cls, window in windows.items():
                while len(own[cls]) * PAGE < done + n:
                    own[cls].append(free[cls].pop(0))
                dead = 0 if window is None else max(0, done - window + 1) // PAGE
                for i in range(dead):
                    if own[cls][i] >= 0:
                        free[cls].append(own[cls][i])
                        own[cls][i] = -1
        given_pages = [{cls: [max(p, 0) for p in lists] for cls, lists in own.items()} for own in pages]
        feeder.step(counts_now, given_pages)


def test_neighbouring_pages_are_not_copied() -> None:
    """The rows of one long sequence are a view: a copy a layer would cost more than the attention."""
    store = PagedRows(GROUPS, {page_class(g): 6 for g in GROUPS}, page_tokens=PAGE)
    for pages, shared in (([2, 3, 4], True), ([4, 2, 3], False)):
        view = store.view(ForwardBatch([Chunk(range(11), pages={"full": pages})]))
        table = view.table("every", 0)
        inside = view.sequence("every", table, 0).untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
        assert inside == shared


def test_rejected_tokens_are_overwritten() -> None:
    """Lowering a length must be enough to take tokens back: rows, and the group that they had finished."""
    store = PagedRows(GROUPS, {page_class(g): 6 for g in GROUPS}, page_tokens=PAGE)
    pages = [{page_class(g): [5, 1, 3] for g in GROUPS}]
    feeder = Feeder(store, 1)
    feeder.step([5], pages)
    draft = ForwardBatch([Chunk(range(4), 5, pages=pages[0])])
    for group in GROUPS:
        count = 4 if group.stride == 1 else draft.finished(group.stride).counts[0]
        for layer in group.layers:
            store.view(draft).append(group.name, layer, torch.full((count, group.width), -7.0))
    feeder.done = [6]  # one of the four is kept, and computed again here
    feeder.done = [5]
    feeder.step([1], pages)
    feeder.step([3], pages)


def test_a_narrower_batch_reads_the_same_rows() -> None:
    """Upper layers go on with a tail of the tokens: windows must be those of the kept tokens."""
    store = PagedRows(GROUPS, {page_class(g): 6 for g in GROUPS}, page_tokens=PAGE)
    batch = ForwardBatch([Chunk(range(9), pages={page_class(g): [4, 0, 2] for g in GROUPS})])
    view = store.view(batch)
    narrow, kept = batch.narrow([6])
    assert view.rebind(narrow).window("window").equal(view.window("window")[kept])
    with pytest.raises(AssertionError, match="exact_from"):
        BatchRows(GROUPS).view(batch).rebind(narrow)


def test_dtypes_and_bytes() -> None:
    """Raw scores of unfinished groups in bfloat16 would make a group depend on where it was cut."""
    store = PagedRows(GROUPS, {"full": 2, "window:5": 1, "window:4": 3}, page_tokens=PAGE, dtype=torch.bfloat16)
    kinds = {key: (table.dtype, tuple(table.shape)) for key, table in store.tables.items()}
    assert kinds == {
        ("every", 0): (torch.bfloat16, (8, 3)), ("every", 3): (torch.bfloat16, (8, 3)),
        ("window", 1): (torch.bfloat16, (4, 2)), ("pairs", 0): (torch.bfloat16, (4, 4)),
        ("fours", 2): (torch.bfloat16, (2, 1)), ("raw", 2): (torch.float32, (12, 2)),
    }  # fmt: skip
    assert store.nbytes() == 2 * (24 + 24 + 8 + 16 + 2) + 4 * 24
    wide = PagedRows(GROUPS, {"full": 1, "window:5": 1, "window:4": 1}, page_tokens=PAGE, dtype=torch.float64)
    assert wide.tables["raw", 2].dtype == torch.float64
    with pytest.raises(AssertionError, match="multiple of fours"):
        PagedRows(GROUPS, {"full": 1, "window:5": 1, "window:4": 1}, page_tokens=6)


def test_gradients_pass_through_batch_rows() -> None:
    """Training reads rows of this very forward: a copy without history would train keys and values of nobody."""
    view = BatchRows(GROUPS).view(ForwardBatch([Chunk(range(3)), Chunk(range(2))]))
    rows = torch.randn(5, 2, requires_grad=True)
    table = view.append("window", 1, rows)
    index = view.window("window")
    (table[index.clamp(min=0)] * (index >= 0).unsqueeze(2)).sum().backward()
    assert rows.grad is not None and rows.grad[:, 0].tolist() == [3, 2, 1, 2, 1]


def test_an_index_is_located_once():
    """What kernels prepare for an index lives as long as the tensor does: a layer that runs again has to get the same
    one, and other rows another."""
    groups = [RowGroup("window", (0,), 4, window=4), RowGroup("pair", (0,), 4, stride=2)]
    view = BatchRows(groups).view(ForwardBatch([Chunk([1, 2, 3]), Chunk([4, 5, 6, 7])]))
    rows, seq = torch.tensor([[0, -1]] * 7), view.batch.seq
    first = view.locate("pair", seq.unsqueeze(1), rows)
    assert first.tolist() == [[0, -1]] * 3 + [[1, -1]] * 4
    assert view.locate("pair", seq.unsqueeze(1), rows) is first
    assert view.locate("window", seq.unsqueeze(1), rows).tolist() == [[0, -1]] * 3 + [[3, -1]] * 4
    assert view.locate("pair", seq.unsqueeze(1), rows.clone()) is not first
