"""Pages of the row store: who owns which. Plain Python, no torch.

Groups of rows with the same window share a page class ("full", "window:128", ...). A sequence holds, per class, a list
of pages that covers its tokens from the front; pages wholly behind a window go back to the pool and leave holes. A hole
is page 0, which is never handed out: its rows stay zeros, so reading it by mistake or as filler harms nobody.

Pages are counted by reference, because the prefix cache (prefix.py) and several sequences may hold the same one. A page
that more than one holder has is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

HOLE = 0


class OutOfPages(Exception):
    """No page of a class is left."""


class PagePool:
    """The pages of one class. count: all of them, the hole included."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, HOLE, -1))  # popped from the end: a lone sequence gets consecutive pages
        self._holders: dict[int, int] = {}
        self._cached: set[int] = set()
        self._idle = 0  # cached pages that nothing but the cache holds

    @property
    def usable(self) -> int:
        """Pages that exist, without the hole."""
        return self.count - 1

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Pages that only the prefix cache holds, so that they can be had by evicting."""
        return self._idle

    def holders(self, page: int) -> int:
        return self._holders.get(page, 0)

    def take(self) -> int:
        """A free page number, held once. Raises OutOfPages."""
        if not self._free:
            raise OutOfPages
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more holder of a page in use."""
        assert page in self._holders, f"page {page} is not in use"
        self._count(page, +1)

    def give(self, page: int) -> None:
        """One holder less; a page without holders is free."""
        assert page in self._holders, f"page {page} is not in use"
        self._count(page, -1)

    def cache(self, page: int) -> None:
        """The prefix cache becomes a holder."""
        assert page in self._holders and page not in self._cached, f"page {page} cannot be cached"
        self._holders[page] += 1  # whoever gives it to the cache still holds it, so it is not idle
        self._cached.add(page)

    def uncache(self, page: int) -> None:
        """The prefix cache gives up a page."""
        assert page in self._cached, f"page {page} is not cached"
        self._idle -= self._holders[page] == 1
        self._cached.remove(page)
        self._count(page, -1)

    def _count(self, page: int, change: int) -> None:
        before = self._holders[page]
        after = before + change
        self._holders[page] = after
        if page in self._cached:
            self._idle += (after == 1) - (before == 1)
        if not after:
            del self._holders[page]
            self._free.append(page)


@dataclass
class PageTable:
    """One sequence's pages: by class, the page of tokens [i * page_tokens, (i + 1) * page_tokens), and how many of the
    first ones are holes."""

    pages: dict[str, list[int]] = field(default_factory=dict)
    holes: dict[str, int] = field(default_factory=dict)

    def held(self, cls: str) -> list[int]:
        """The pages that are not holes."""
        return self.pages.get(cls, [])[self.holes.get(cls, 0) :]


class Pages:
    """All pools. counts: pages by class, the hole included. windows: class -> tokens that stay readable, the newest one
    included (None: all). evict(class) makes an idle page free; None where nothing caches pages."""

    def __init__(self, counts: Mapping[str, int], windows: Mapping[str, int | None], page_tokens: int):
        self.page_tokens = page_tokens
        self.windows = dict(windows)
        self.pools = {cls: PagePool(counts[cls]) for cls in windows}
        self.evict: Callable[[str], None] | None = None

    def can_extend(self, table: PageTable, length: int) -> bool:
        """Whether `extend` would succeed."""
        need = -(-length // self.page_tokens)
        return all(need - len(table.pages.get(cls, ())) <= pool.free + pool.idle for cls, pool in self.pools.items())

    def extend(self, table: PageTable, length: int) -> None:
        """Hold pages for `length` tokens in every class, evicting idle ones. Raises OutOfPages and then has taken
        nothing."""
        if not self.can_extend(table, length):
            raise OutOfPages
        need = -(-length // self.page_tokens)
        for cls, pool in self.pools.items():
            pages = table.pages.setdefault(cls, [])
            for _ in range(need - len(pages)):
                if not pool.free:
                    assert self.evict is not None, "idle pages without a cache"
                    self.evict(cls)
                pages.append(pool.take())

    def check_writable(self, table: PageTable, start: int, end: int) -> None:
        """Assert that no one else holds the pages of tokens [start, end)."""
        for cls, pool in self.pools.items():
            for page in table.pages[cls][start // self.page_tokens : -(-end // self.page_tokens)]:
                assert pool.holders(page) == 1, f"{cls} page {page} of tokens {start}..{end - 1} is shared"

    def first_needed(self, cls: str, border: int) -> int:
        """Index of the first page that tokens from position `border` on can read."""
        window = self.windows[cls]
        return 0 if window is None else max(0, border - window + 1) // self.page_tokens

    def recycle(self, table: PageTable, length: int) -> None:
        """Give back pages that no token from position `length` on can read: the sequence's first `length` tokens are
        committed and will not be taken back."""
        for cls, pool in self.pools.items():
            pages = table.pages.get(cls, [])
            first = table.holes.get(cls, 0)
            dead = min(self.first_needed(cls, length), len(pages))
            for i in range(first, dead):
                pool.give(pages[i])
                pages[i] = HOLE
            if dead > first:
                table.holes[cls] = dead

    def truncate(self, table: PageTable, length: int) -> None:
        """Give back pages wholly past `length` tokens (rejected drafts)."""
        keep = -(-length // self.page_tokens)
        for cls, pages in table.pages.items():
            while len(pages) > max(keep, table.holes.get(cls, 0)):
                self.pools[cls].give(pages.pop())

    def release(self, table: PageTable) -> None:
        """Give back everything."""
        for cls in table.pages:
            for page in table.held(cls):
                self.pools[cls].give(page)
        table.pages.clear()
        table.holes.clear()

    @staticmethod
    def enough(
        lengths: Iterable[int], chunk: int, windows: Mapping[str, int | None], page_tokens: int
    ) -> dict[str, int]:
        """Pages by class that hold sequences of `lengths` tokens at once when no forward adds more than `chunk`
        tokens to one of them."""
        counts = {}
        for cls, window in windows.items():
            spans = [n if window is None else min(n, window + chunk + page_tokens) for n in lengths]
            counts[cls] = 1 + sum(-(-n // page_tokens) + (window is not None) for n in spans)
        return counts
