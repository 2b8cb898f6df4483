"""Pages of the row store: who owns which. Plain Python, no torch.

Groups of rows with the same window share a page class ("full", "window:128", ...). A sequence owns, per class, a list
of pages that covers its tokens from the front; pages wholly behind a window go back to the pool and leave `None`-like
holes (the number 0, never read).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


class OutOfPages(Exception):
    """No free page of a class is left."""


class PagePool:
    """The free pages of one class."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))  # popped from the end: a lone sequence gets consecutive pages
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free page number. Raises OutOfPages."""
        if not self._free:
            raise OutOfPages
        page = self._free.pop()
        self._taken.add(page)
        return page

    def give(self, page: int) -> None:
        """Return a page that `take` handed out."""
        assert page in self._taken, f"page {page} is not taken"
        self._taken.remove(page)
        self._free.append(page)


@dataclass
class PageTable:
    """One sequence's pages: by class, the page of tokens [i * page_tokens, (i + 1) * page_tokens), and how many of the
    first ones were already given back."""

    pages: dict[str, list[int]] = field(default_factory=dict)
    recycled: dict[str, int] = field(default_factory=dict)


class Pages:
    """All pools. windows: class -> tokens that stay readable behind the newest one (None: all)."""

    def __init__(self, counts: Mapping[str, int], windows: Mapping[str, int | None], page_tokens: int):
        self.page_tokens = page_tokens
        self.windows = dict(windows)
        self.pools = {cls: PagePool(counts[cls]) for cls in windows}

    def extend(self, table: PageTable, length: int) -> None:
        """Own pages for `length` tokens in every class. Raises OutOfPages and then has taken nothing."""
        need = -(-length // self.page_tokens)
        short = {cls: need - len(table.pages.setdefault(cls, [])) for cls in self.pools}
        if any(n > self.pools[cls].free for cls, n in short.items()):
            raise OutOfPages
        for cls, n in short.items():
            table.pages[cls] += [self.pools[cls].take() for _ in range(n)]

    def recycle(self, table: PageTable, length: int) -> None:
        """Give back pages that no token from position `length` on can read: the sequence's first `length` tokens are
        committed and will not be taken back."""
        for cls, window in self.windows.items():
            if window is None:
                continue
            dead = max(0, length - window + 1) // self.page_tokens
            for i in range(table.recycled.get(cls, 0), min(dead, len(table.pages.get(cls, ())))):
                self.pools[cls].give(table.pages[cls][i])
                table.pages[cls][i] = 0
                table.recycled[cls] = i + 1

    def truncate(self, table: PageTable, length: int) -> None:
        """Give back pages wholly past `length` tokens (rejected drafts)."""
        keep = -(-length // self.page_tokens)
        for cls, pages in table.pages.items():
            while len(pages) > max(keep, table.recycled.get(cls, 0)):
                self.pools[cls].give(pages.pop())

    def release(self, table: PageTable) -> None:
        """Give back everything."""
        for cls, pages in table.pages.items():
            for page in pages[table.recycled.get(cls, 0) :]:
                self.pools[cls].give(page)
        table.pages.clear()
        table.recycled.clear()

    @staticmethod
    def enough(
        lengths: Iterable[int], chunk: int, windows: Mapping[str, int | None], page_tokens: int
    ) -> dict[str, int]:
        """Pages by class that hold sequences of `lengths` tokens at once when no forward adds more than `chunk`
        tokens to one of them."""
        counts = {}
        for cls, window in windows.items():
            spans = [n if window is None else min(n, window + chunk + page_tokens) for n in lengths]
            counts[cls] = sum(-(-n // page_tokens) + (window is not None) for n in spans)
        return counts
