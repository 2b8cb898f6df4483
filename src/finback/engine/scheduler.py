"""Which tokens run in the next forward. Plain Python, no torch.

Every step: first one token (and its drafts) of each sequence that is generating, so that the time between two tokens of
a stream stays bounded; then chunks of the prompts in hand, the earliest arrival first; then new sequences while there
is a seat, budget and memory. When pages run out, the sequence that arrived last gives up all of its own and starts over
later ("preemption by recompute"). The earliest sequence is never the victim, so every sequence ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from finback.engine.blocks import Pages, PageTable
from finback.engine.prefix import PageKeys, PrefixCache
from finback.engine.request import SequenceState
from finback.engine.stats import Stats


@dataclass(eq=False)
class Slot:
    """A sequence that the engine holds.

    arrival: its place in the queue. keys: of its pages, for the prefix cache. most_drafts: drafts that it can use now.
    exact_from: first position whose output is wanted. cached_tokens, miss: prefix found in the cache at its first
    admission (None: not admitted yet), and why not. borders: page borders ahead to keep in the cache, ascending, and
    whether they are spare (prefix.py). image_rows: the embedding rows of its images once computed, opaque here.
    """

    state: SequenceState
    table: PageTable = field(default_factory=PageTable)
    arrival: int = 0
    keys: PageKeys | None = None
    most_drafts: int = 0
    exact_from: int = 0
    borders: list[tuple[int, bool]] = field(default_factory=list)
    cached_tokens: int | None = None
    miss: str | None = None
    preemptions: int = 0
    image_rows: Any = None

    @property
    def pending(self) -> int:
        """Tokens whose rows are not computed yet; 1 while it generates."""
        return len(self.state.tokens) - self.state.computed


@dataclass(frozen=True)
class Limits:
    """max_num_seqs: sequences in one forward. max_num_batched_tokens: tokens in one forward, drafts included.
    keep_every: keep the windows of every that many pages' border as those of a prompt's end are (0: of none)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    keep_every: int = 0


class Scheduler:
    """prefill: "full" wants the outputs of whole prompts, anything else only those of their tails. cache: None = no
    prefix cache."""

    def __init__(self, pages: Pages, cache: PrefixCache | None, limits: Limits, prefill: str, stats: Stats):
        self.pages, self.cache, self.limits, self.prefill, self.stats = pages, cache, limits, prefill, stats
        self.waiting: list[Slot] = []  # by arrival
        self.running: list[Slot] = []  # by arrival

    def add(self, slot: Slot) -> None:
        insort(self.waiting, slot, key=_arrival)

    def can_ever_hold(self, length: int) -> bool:
        """Whether a sequence may grow to `length` tokens when it is alone."""
        need = -(-length // self.pages.page_tokens)
        return all(w is not None or need <= self.pages.pools[cls].usable for cls, w in self.pages.windows.items())

    def plan(self) -> list[tuple[Slot, int]]:
        """(sequence, tokens) of the next forward, pages for them included. More than one token of a sequence that is
        generating means that it may bring that many less one drafts."""
        decoding = [slot for slot in self.running if slot.pending == 1]
        step = _Step(self.limits.max_num_batched_tokens - len(decoding))
        for slot in decoding:
            if slot in self.running:  # not preempted meanwhile
                step.add(slot, self._grow(slot, 1 + min(slot.most_drafts, max(0, step.spare)), step), reserved=1)
        for slot in [slot for slot in self.running if slot.pending > 1]:
            if slot in self.running and step.spare > 0:
                step.add(slot, self._grow(slot, min(slot.pending, step.spare), step))
        while self.waiting and len(self.running) < self.limits.max_num_seqs and step.spare > 0:
            if not (count := self._admit(self.waiting[0], step.spare)):
                break
            slot = self.waiting.pop(0)
            insort(self.running, slot, key=_arrival)
            step.add(slot, count)
        return list(step.work.items())

    def commit(self, slot: Slot, computed: int) -> None:
        """The sequence's first `computed` tokens are final and have their rows: give back what is not needed any more,
        and let the cache keep the borders that were passed."""
        slot.state.computed = computed
        self.pages.truncate(slot.table, computed)
        while slot.borders and slot.borders[0][0] <= computed:
            self._keep(slot, *slot.borders.pop(0))
        # The window of the last page border stays until the next one is passed, so that the cache can have it; and one
        # row more, since draft layers look back a whole window from the last computed token.
        self.pages.recycle(slot.table, self._floor(computed) - 1)

    def finish(self, slot: Slot, *, keep: bool = True) -> None:
        """The sequence is over, wherever it was. keep: its rows may serve others."""
        if slot in self.waiting:
            self.waiting.remove(slot)
            return
        self.running.remove(slot)
        if keep:
            self._keep(slot, self._floor(slot.state.computed))
        elif self.cache is not None and slot.keys is not None:
            self.cache.forget(slot.keys.first(slot.state.computed // self.pages.page_tokens), slot.table)
        self.pages.release(slot.table)

    def _floor(self, length: int) -> int:
        return length // self.pages.page_tokens * self.pages.page_tokens

    def _keep(self, slot: Slot, border: int, spare: bool = False) -> None:
        if self.cache is not None and slot.keys is not None:
            keys = slot.keys.first(border // self.pages.page_tokens)
            self.cache.insert(keys, slot.table, slot.exact_from, spare=spare)

    def _room(self, slot: Slot) -> int:
        """Most tokens that the sequence's next forward can have pages for."""
        pages, size = slot.table.pages, self.pages.page_tokens
        held = (len(pages.get(cls, ())) + pool.free + pool.idle for cls, pool in self.pages.pools.items())
        return min(held) * size - slot.state.computed

    def _grow(self, slot: Slot, want: int, step: _Step) -> int:
        """Pages for the next `want` tokens or as many as there is room for, at the cost of later arrivals. 0: the
        sequence was preempted itself."""
        while (room := self._room(slot)) < 1:
            victim = self.running[-1]
            step.drop(victim)
            self._preempt(victim)
            if victim is slot:
                return 0
        count = min(want, room)
        self.pages.extend(slot.table, slot.state.computed + count)
        return count

    def _preempt(self, slot: Slot) -> None:
        assert len(self.running) > 1, "a sequence alone always has room: requests are checked when they come in"
        self.running.remove(slot)
        self._keep(slot, self._floor(slot.state.computed))
        self.pages.release(slot.table)
        slot.state.computed = 0
        slot.preemptions += 1
        self.stats.preemptions += 1
        insort(self.waiting, slot, key=_arrival)

    def _admit(self, slot: Slot, spare: int) -> int:
        """Pages for the first tokens of a waiting sequence, cached ones included; their number, 0 if it has to wait."""
        total = len(slot.state.tokens)
        branch = self._start_from_cache(slot, total)
        count = min(slot.pending, spare)
        # A page for every sequence in hand stays free, or this one would be thrown out again at once.
        if self._room(slot) < count + (len(self.running) * self.pages.page_tokens if self.running else 0):
            if self.running:
                self.pages.release(slot.table)
                slot.state.computed = 0
                return 0
            count = min(count, self._room(slot))
        self._count_hit(slot)
        self._set_borders(slot, total, branch)
        self.pages.extend(slot.table, slot.state.computed + count)
        return count

    def _start_from_cache(self, slot: Slot, total: int) -> int:
        """Take over a cached prefix; returns the border worth keeping because another sequence branches off there."""
        if self.cache is None or slot.keys is None:
            return 0
        wanted = 0 if self.prefill == "full" else self._floor(total - 1)
        match = self.cache.match(slot.keys.first((total - 1) // self.pages.page_tokens), slot.table, wanted)
        slot.state.computed, slot.miss = match.length, match.reason
        return match.branch

    def _count_hit(self, slot: Slot) -> None:
        """Statistics of a sequence's first admission."""
        if slot.cached_tokens is None:
            slot.cached_tokens = slot.state.computed
            if self.cache is not None:
                self.stats.count_prefix(len(slot.state.tokens), slot.state.computed, slot.miss)

    def _set_borders(self, slot: Slot, total: int, branch: int) -> None:
        """Where this sequence's outputs must be exact from, and which borders of its prompt to keep."""
        if self.cache is None:
            slot.exact_from = 0 if self.prefill == "full" else total - 1
            return
        size, hit = self.pages.page_tokens, slot.state.computed
        exact = {border for border in (self._floor(total - 1), branch) if border > hit}
        slot.exact_from = 0 if self.prefill == "full" else min([total - 1, *exact])
        if self.limits.keep_every:
            exact.update(range(0, total, self.limits.keep_every * size))
        spare = {page * size for page in _spaced(total // size)} - exact
        borders = [*((border, False) for border in exact), *((border, True) for border in spare)]
        slot.borders = sorted(pair for pair in borders if pair[0] > hit)


class _Step:
    """A forward being put together. spare: tokens left of the budget."""

    def __init__(self, spare: int):
        self.work: dict[Slot, int] = {}
        self.spare = spare

    def add(self, slot: Slot, count: int, reserved: int = 0) -> None:
        if count:
            self.work[slot] = count
            self.spare -= count - reserved

    def drop(self, slot: Slot) -> None:
        self.spare += self.work.pop(slot, 0)


def _spaced(count: int) -> Iterator[int]:
    """Numbers up to `count` such that at least fifteen sixteenths of any of them lie below one of these."""
    page = 1
    while page <= count:
        yield page
        page += 1 << max(0, page.bit_length() - 5)


def _arrival(slot: Slot) -> int:
    return slot.arrival
