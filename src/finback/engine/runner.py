"""Runs packed forwards of one model on paged rows: makes batches from sequences, finds where bad values start."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finback import kernels
from finback.base.runtime import NonFiniteError
from finback.engine.blocks import Pages
from finback.engine.drafters import Drafter
from finback.engine.request import SequenceState
from finback.engine.scheduler import Slot as Slot
from finback.engine.verify import Drafted
from finback.models.spikewhale.model import SpikeWhale
from finback.nn.rows import Chunk, ForwardBatch, PagedRows, RowGroup, page_class
from finback.nn.tape import Tape


@dataclass(eq=False)
class Work:
    """Tokens of one sequence in a forward: its next `count` known ones, then drafts."""

    slot: Slot
    count: int
    drafted: Drafted | None = None

    @property
    def drafts(self) -> Sequence[int]:
        return self.drafted.tokens if self.drafted is not None else ()

    @property
    def wanted(self) -> int:
        """Last rows whose logits are wanted: none while known tokens are left, else one and one per draft."""
        return 1 + len(self.drafts) if self.count == self.slot.pending else 0

    @property
    def size(self) -> int:
        return self.count + len(self.drafts)


class Runner:
    """One model with one paged row store.

    lengths: most tokens of each sequence that will be held at once; chunk: most tokens a forward adds to one of them.
    counts: pages by class instead, the hole included. deterministic: see `kernels.deterministic`. one_by_one: every
    token runs in a forward of its own, for `deterministic` in a family that has products which it does not reach.
    """

    def __init__(
        self,
        model: Any,
        lengths: Sequence[int],
        chunk: int,
        *,
        backend: str = "auto",
        page_tokens: int | None = None,
        counts: Mapping[str, int] | None = None,
        deterministic: bool = False,
    ):
        self.model, self.backend, self.deterministic = model, backend, deterministic
        self.one_by_one = deterministic and isinstance(model, SpikeWhale)  # dense attention, double-precision hashes
        groups = model.row_groups()
        page_tokens = page_tokens or default_page_tokens(groups)
        windows = page_windows(groups)
        counts = counts or Pages.enough(lengths, chunk, windows, page_tokens)
        self.pages = Pages(counts, windows, page_tokens)
        self.device = next(model.parameters()).device
        self.store = PagedRows(groups, counts, page_tokens=page_tokens, dtype=model.dtype, device=self.device)
        self.drafter: Drafter | None = None

    def open(self, state: SequenceState) -> Slot:
        return Slot(state)

    def close(self, slot: Slot) -> None:
        self.pages.release(slot.table)

    @contextlib.contextmanager
    def settings(self) -> Generator[None]:
        """The kernels that this runner's model is to use."""
        with kernels.backend(self.backend), kernels.deterministic(self.deterministic), torch.inference_mode():
            yield

    def forward(self, work: Sequence[tuple[Slot, int]], tape: Tape | None = None) -> Tensor:
        """Run the next `n` tokens of each slot and return hidden states [T, D], T = sum of n. The new tokens count as
        computed afterwards, and pages behind windows are recycled. Raises NonFiniteError naming a layer where selecting
        rows met NaN."""
        for slot, n in work:
            self.pages.extend(slot.table, slot.state.computed + n)
        parts = [Work(slot, n) for slot, n in work]
        try:
            with self.settings():
                batch = self.batch(parts, tape)
                hidden = self.model(batch, self.store.view(batch))
        except NonFiniteError:
            raise NonFiniteError(self.diagnose(parts, "score")) from None
        for slot, n in work:
            slot.state.computed += n
            self.pages.recycle(slot.table, slot.state.computed)
        return hidden

    def step(self, work: Sequence[Work], tape: Tape | None = None) -> Tensor:
        """Run `work`, whose pages are there, and return the wanted logits [n, V], float32 (float64), in its order.
        Nothing counts as computed yet. Raises NonFiniteError where selecting rows met NaN."""
        with self.settings():
            if self.one_by_one:
                found = [self._run(self.batch([w], tape, at)) for w in work for at in range(w.size)]
                hidden, counts = torch.cat(found), [w.size for w in work]
            else:
                batch = self.batch(work, tape)
                hidden = self._run(batch)
                counts = returned_rows(batch, len(hidden))
            rows, end = [], 0
            for w, count in zip(work, counts, strict=True):
                end += count
                rows += range(end - w.wanted, end)
            if not rows:
                return hidden.new_empty(0, self.model.vocab_size)
            if len(rows) != len(hidden):
                hidden = hidden[torch.tensor(rows).to(self.device)]
            return self.model.logits(hidden)

    def _run(self, batch: ForwardBatch) -> Tensor:
        """One forward, shown to the drafter: hidden states."""
        view = self.store.view(batch)
        result = self.model.backbone(batch, view) if hasattr(self.model, "backbone") else self.model(batch, view)
        if self.drafter is not None:
            self.drafter.observe(result, view)
        return result if isinstance(result, Tensor) else result.hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, D] -> [n, V] float32 (float64)."""
        with self.settings():
            return self.model.logits(hidden)

    def batch(self, work: Sequence[Work], tape: Tape | None = None, only: int | None = None) -> ForwardBatch:
        """The packed tokens of `work`, or just the one of each at offset `only`."""
        chunks, inserted, offset = [], [], 0
        for w in work:
            slot, state, start = w.slot, w.slot.state, w.slot.state.computed
            self.pages.check_writable(slot.table, start, start + w.size)
            ids = [*state.tokens[start : start + w.count], *w.drafts]
            context = state.context(start, self.model.lookback)
            if only is not None:
                context, ids, start = [*context, *ids[:only]], ids[only : only + 1], start + only
            types = state.types_of(start, len(ids))
            chunks.append(Chunk(ids, start, context, types, slot.table.pages, slot.exact_from))
            if state.images:
                inserted += self._image_rows(slot, start, len(ids), offset)
            offset += len(ids)
        rows = None
        if inserted:
            index = torch.cat([torch.arange(at, at + len(part)) for at, part in inserted]).to(self.device)
            rows = index, torch.cat([part for _, part in inserted])
        return ForwardBatch(chunks, device=self.device, inserted=rows, tape=tape)

    def _image_rows(self, slot: Slot, start: int, n: int, offset: int) -> list[tuple[int, Tensor]]:
        """(packed index, rows) of the parts of image spans inside tokens [start, start + n)."""
        if slot.image_rows is None:
            slot.image_rows = [
                (i.start, self.model.image_rows(i.patches, i.grid_h, i.grid_w)) for i in slot.state.images
            ]
        parts = []
        for first, rows in slot.image_rows:
            low, high = max(first, start), min(first + len(rows), start + n)
            if low < high:
                parts.append((offset + low - start, rows[low - first : high - first]))
        return parts

    def check_finite(self, logits: Tensor, work: Sequence[tuple[Slot, int]], what: str) -> None:
        """Raise NonFiniteError naming the first layer with NaN or infinity if `logits` hold any. `work` is what
        `forward` just ran; it is run again with a trace, over the same rows."""
        if bool(logits.isfinite().all()):
            return
        for slot, n in work:
            slot.state.computed -= n
        raise NonFiniteError(self.diagnose([Work(slot, n) for slot, n in work], what))

    def diagnose(self, work: Sequence[Work], what: str) -> str:
        """Run `work` once more and say where its first non-finite value is."""
        tape, where = Tape(trace=True), "after the last layer"
        try:
            with self.settings():
                batch = self.batch(work, tape)
                self.model(batch, self.store.view(batch))
        except NonFiniteError as error:  # rows cannot be selected by NaN scores; an earlier layer may be the cause
            where = f"first in {error}"
        bad = [
            name for name, value in tape.seen.items() if value.is_floating_point() and not bool(value.isfinite().all())
        ]
        if bad:
            where = f"first in {bad[0]}"
        return (
            f"{what}: the model computed NaN or infinity ({where}); no text is made from it. "
            "Check that layer's weights, or run with dtype='float32'"
        )


def returned_rows(batch: ForwardBatch, returned: int) -> list[int]:
    """Hidden states of each chunk among the `returned` ones: a model may leave out what lies before `exact_from`."""
    if returned == len(batch):
        return batch.lengths
    ends = zip(batch.chunks, batch.ends, strict=True)
    counts = [max(0, end - max(c.start, c.exact_from)) for c, end in ends]
    assert sum(counts) == returned, (counts, returned)
    return counts


def tail_reach(model: Any) -> int:
    """How far before the first wanted output (`Chunk.exact_from`) a prompt's tail can begin: from that position on a
    forward reads no row of an earlier position that layers running on tails alone leave out.

    A family that leaves nothing out, or does not say what, gets a bound that holds for any: each layer's windowed rows
    reach back one window less one position."""
    if not hasattr(model, "needed_from"):
        return sum(len(g.layers) * (g.window - 1) for g in model.row_groups() if g.window is not None)
    end = model.max_positions
    return end - model.needed_from(model.last_source, ForwardBatch([Chunk([0], exact_from=end)]))[0]


def page_windows(groups: Sequence[RowGroup]) -> dict[str, int | None]:
    """Page class -> its window."""
    return {page_class(g): g.window for g in groups}


def default_page_tokens(groups: Sequence[RowGroup]) -> int:
    """64 tokens, rounded up to a multiple of every stride."""
    unit = math.lcm(*(g.stride for g in groups))
    return -(-64 // unit) * unit


def page_bytes(groups: Sequence[RowGroup], page_tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of a page by class."""
    sizes = dict.fromkeys(page_windows(groups), 0)
    for g in groups:
        kind = torch.promote_types(dtype, torch.float32) if g.full_precision else dtype
        sizes[page_class(g)] += len(g.layers) * g.width * (page_tokens // g.stride) * kind.itemsize
    return sizes


def replay_slice(replay: Mapping[str, Sequence[Tensor]], parts: Sequence[tuple[int, int, int]]) -> dict[str, Tensor]:
    """Replayed choices for a forward. replay: name -> one tensor [n, k] a sequence; parts: (sequence, start, stop)."""
    picked = {}
    for name, tensors in replay.items():
        width = max(tensors[s].shape[1] for s, _, _ in parts)
        rows = [tensors[s][a:b].long() for s, a, b in parts]
        rows = [torch.nn.functional.pad(r, (0, width - r.shape[1]), value=-1) for r in rows]
        picked[name] = torch.cat(rows)
    return picked
