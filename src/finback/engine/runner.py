"""Runs a model on sequences: builds the batch, keeps the row store, finds where non-finite values come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finback import kernels
from finback.base.runtime import NonFiniteError
from finback.engine.blocks import Pages, PageTable
from finback.engine.request import SequenceState
from finback.nn.rows import Chunk, ForwardBatch, PagedRows, page_class
from finback.nn.tape import Tape


@dataclass
class Slot:
    """A sequence in the runner: its state, its pages, and the embedding rows of its images once computed."""

    state: SequenceState
    table: PageTable
    image_rows: list[tuple[int, Tensor]] | None = None


class Runner:
    """One model with one paged row store.

    lengths: most tokens of each sequence that will be held at once; chunk: most tokens a forward adds to one of them.
    """

    def __init__(
        self, model: Any, lengths: Sequence[int], chunk: int, *, backend: str = "auto", page_tokens: int | None = None
    ):
        self.model, self.backend = model, backend
        groups = model.row_groups()
        page_tokens = page_tokens or default_page_tokens(groups)
        windows = {page_class(g): g.window for g in groups}
        counts = Pages.enough(lengths, chunk, windows, page_tokens)
        self.pages = Pages(counts, windows, page_tokens)
        self.device = next(model.parameters()).device
        self.store = PagedRows(groups, counts, page_tokens=page_tokens, dtype=model.dtype, device=self.device)

    def open(self, state: SequenceState) -> Slot:
        return Slot(state, PageTable())

    def close(self, slot: Slot) -> None:
        self.pages.release(slot.table)

    @torch.inference_mode()
    def forward(self, work: Sequence[tuple[Slot, int]], tape: Tape | None = None) -> Tensor:
        """Run the next `n` tokens of each slot and return hidden states [T, D], T = sum of n. The new tokens count as
        computed afterwards, and pages behind windows are recycled."""
        with kernels.backend(self.backend):
            batch = self.batch(work, tape)
            hidden = self.model(batch, self.store.view(batch))
        for slot, n in work:
            slot.state.computed += n
            self.pages.recycle(slot.table, slot.state.computed)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, D] -> [n, V] float32 (float64)."""
        with kernels.backend(self.backend):
            return self.model.logits(hidden)

    def batch(self, work: Sequence[tuple[Slot, int]], tape: Tape | None = None) -> ForwardBatch:
        """The packed tokens of `work`, with pages for them."""
        chunks, inserted, offset = [], [], 0
        for slot, n in work:
            state, start = slot.state, slot.state.computed
            self.pages.extend(slot.table, start + n)
            types = state.types[start : start + n] if state.types is not None else None
            context = state.context(start, self.model.lookback)
            chunks.append(Chunk(state.tokens[start : start + n], start, context, types, slot.table.pages))
            inserted += self._image_rows(slot, start, n, offset)
            offset += n
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
        tape = Tape(trace=True)
        for slot, n in work:
            slot.state.computed -= n
        self.forward(work, tape)
        bad = [
            name for name, value in tape.seen.items() if value.is_floating_point() and not bool(value.isfinite().all())
        ]
        where = f"first in {bad[0]}" if bad else "after the last layer"
        raise NonFiniteError(
            f"{what}: the model computed NaN or infinity ({where}); no text is made from it. "
            "Check that layer's weights, or run with dtype='float32'"
        )


def default_page_tokens(groups: Sequence[Any]) -> int:
    """64 tokens, rounded up to a multiple of every stride."""
    unit = 1
    for group in groups:
        unit = unit * group.stride // _gcd(unit, group.stride)
    return -(-64 // unit) * unit


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def replay_slice(replay: Mapping[str, Sequence[Tensor]], parts: Sequence[tuple[int, int, int]]) -> dict[str, Tensor]:
    """Replayed choices for one forward. replay: name -> one tensor [n, k] a sequence; parts: (sequence, start, stop)."""
    picked = {}
    for name, tensors in replay.items():
        width = max(tensors[s].shape[1] for s, _, _ in parts)
        rows = [tensors[s][a:b].long() for s, a, b in parts]
        rows = [torch.nn.functional.pad(r, (0, width - r.shape[1]), value=-1) for r in rows]
        picked[name] = torch.cat(rows)
    return picked
