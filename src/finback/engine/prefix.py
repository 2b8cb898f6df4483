"""Prefix cache: pages of finished prompts and outputs, found again by what they hold. Plain Python, no torch.

A tree of pages. A node stands for one page of tokens after its parent's; its key is the tokens themselves (image tokens
with the digest of their image), so a match is an exact comparison, not a hash. A sequence may start at page border m
when the cache has, for tokens [0, m), every page of the classes that keep all rows, and for each windowed class the
pages that a token at m can read.

Rows of windows are right only for some borders: a prompt whose upper layers ran on its tail alone has right rows of
every layer from its `exact_from` on, and before it only those of the layers that always run. Each cached window page
therefore knows the lowest border that it serves in full (`good_from`). Below that it still serves a sequence that runs
its own upper layers on a tail which begins at m or later, `reach` positions before the first output that it wants.

Windows of the borders that are likely to be asked for, a prompt's end and a place where two prompts part, stay as long
as others of that kind. Those on the way there ("spare") fill memory that nobody needs, and make room first.

Nothing is ever served approximately. What cannot be restored is a miss, counted by its reason:
  "too short": no whole page comes before the prompt's last token, which is always computed.
  "no match": the first page of tokens is unknown.
  "images differ": it would match but for the pixels of an image.
  "never kept": pages match, but no border's windows serve this prompt. One is kept from now on (`Match.branch`).
  "window evicted": they did, and had to make room.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from finback.engine.blocks import HOLE, PagePool, Pages, PageTable

Key = tuple[tuple[int, ...], tuple[tuple[int, str], ...]]
"""One page: its token ids, and (offset of its span's start from the page's start, digest) of every image in it."""

REASONS = ("too short", "no match", "images differ", "never kept", "window evicted")


class PageKeys:
    """Keys of a growing sequence's whole pages, each made once. tokens: the live list. images: (start, end, digest)."""

    def __init__(self, tokens: Sequence[int], page_tokens: int, images: Sequence[tuple[int, int, str]] = ()):
        self._tokens, self._size, self._images = tokens, page_tokens, images
        self._keys: list[Key] = []

    def first(self, count: int) -> list[Key]:
        """Keys of the first `count` pages, which must be whole."""
        assert count * self._size <= len(self._tokens)
        for i in range(len(self._keys), count):
            a, b = i * self._size, (i + 1) * self._size
            images = tuple((start - a, digest) for start, end, digest in self._images if start < b and end > a)
            self._keys.append((tuple(self._tokens[a:b]), images))
        return self._keys[:count]


@dataclass(eq=False)
class Node:
    """One page of tokens. pages: class -> (physical page, lowest border it serves in full). kept: the border at its end
    was once kept in full."""

    parent: Node | None
    key: Key | None
    depth: int
    children: dict[Key, Node] = field(default_factory=dict)
    pages: dict[str, tuple[int, int]] = field(default_factory=dict)
    kept: bool = False


@dataclass(frozen=True)
class Match:
    """length: tokens that a sequence may start with, already in `table`'s pages (0: none). branch: a longer border
    that matched and cannot be started from, worth keeping this time (0: none). reason: why length is 0, else None."""

    length: int
    branch: int
    reason: str | None


class PrefixCache:
    """Cached pages of `pages`' pools. It is their `evict`. reach: how far before the first wanted output a sequence's
    tail can begin (`runner.tail_reach`)."""

    def __init__(self, pages: Pages, reach: int = 0):
        self.pages, self.reach = pages, reach
        self.root = Node(None, None, 0)
        self._used: dict[str, OrderedDict[Node, None]] = {cls: OrderedDict() for cls in pages.pools}  # oldest first
        self._spare: dict[str, OrderedDict[Node, None]] = {cls: OrderedDict() for cls in pages.pools}  # oldest first
        pages.evict = self._evict

    def match(self, keys: Sequence[Key], table: PageTable, exact_from: int) -> Match:
        """Start an empty `table` with the longest usable prefix of `keys` (one per whole page that may be reused).
        exact_from: first position whose outputs the sequence wants, or `Match.branch` where that is earlier."""
        path = [self.root]
        for key in keys:
            node = path[-1].children.get(key)
            if node is None or not self._complete(node):
                break
            path.append(node)
        size = self.pages.page_tokens
        found, branch = len(path) - 1, 0
        best = self._longest(path, exact_from)
        if found > best:  # start earlier, where that is possible, and leave the end of what matched for the next one
            earlier = self._longest(path, min(exact_from, found * size))
            if earlier or not best:
                best, branch = earlier, found * size
        if not best:
            return Match(0, branch, self._reason(path, keys))
        for cls, pool in self.pages.pools.items():
            first = self.pages.first_needed(cls, best * size)
            table.pages[cls] = [HOLE] * first + [path[i + 1].pages[cls][0] for i in range(first, best)]
            table.holes[cls] = first
            for page in table.pages[cls][first:]:
                pool.hold(page)
        self._touch(path[1 : best + 1])
        return Match(best * size, branch, None)

    def insert(self, keys: Sequence[Key], table: PageTable, exact_from: int, *, spare: bool = False) -> None:
        """Keep the border at the end of `keys`, whose tokens are all committed in `table`. exact_from: first position
        of that sequence whose outputs are exact. spare: only while nothing else needs the memory."""
        depth = len(keys)
        if not depth:
            return
        node, path = self.root, []
        for key in keys:
            node = node.children.setdefault(key, Node(node, key, node.depth + 1))
            path.append(node)
        for cls, pool in self.pages.pools.items():
            windowed = self.pages.windows[cls] is not None
            for i in range(self.pages.first_needed(cls, depth * self.pages.page_tokens), depth):
                self._attach(path[i], cls, pool, table.pages[cls][i], exact_from if windowed else 0)
        path[-1].kept |= depth * self.pages.page_tokens >= exact_from
        if not spare:
            self._touch(path)

    def forget(self, keys: Sequence[Key], table: PageTable) -> None:
        """Drop what `table`'s sequence itself brought in: from the first node on that holds one of its pages."""
        node = self.root
        for i, key in enumerate(keys):
            child = node.children.get(key)
            if child is None:
                return
            if any(len(table.pages[c]) > i and table.pages[c][i] == page for c, (page, _) in child.pages.items()):
                self._drop(child)
                return
            node = child

    def clear(self) -> None:
        """Forget everything."""
        for child in list(self.root.children.values()):
            self._drop(child)

    def __len__(self) -> int:
        """Cached pages, all classes together."""
        return sum(len(self.nodes(cls)) for cls in self._used)

    def nodes(self, cls: str) -> list[Node]:
        """The nodes that have a page of a class, those that make room first at the front."""
        return [*self._spare[cls], *self._used[cls]]

    def _complete(self, node: Node) -> bool:
        return all(cls in node.pages for cls, window in self.pages.windows.items() if window is None)

    def _longest(self, path: Sequence[Node], exact_from: int) -> int:
        """The largest depth of a path that a sequence with that `exact_from` can start from, 0 for none."""
        return next((d for d in range(len(path) - 1, 0, -1) if self._serves(path, d, exact_from)), 0)

    def _serves(self, path: Sequence[Node], depth: int, exact_from: int) -> bool:
        border = depth * self.pages.page_tokens
        own_tail = border + self.reach <= exact_from
        return all(
            cls in path[i + 1].pages and (own_tail or path[i + 1].pages[cls][1] <= border)
            for cls in self.pages.pools
            for i in range(self.pages.first_needed(cls, border), depth)
        )

    def _reason(self, path: Sequence[Node], keys: Sequence[Key]) -> str:
        if not keys:
            return "too short"
        if any(node.kept for node in path[1:]):
            return "window evicted"
        if len(path) > 1:
            return "never kept"
        if any(key[0] == keys[0][0] for key in self.root.children):
            return "images differ"
        return "no match"

    def _attach(self, node: Node, cls: str, pool: PagePool, page: int, good_from: int) -> None:
        assert page != HOLE, "a border is kept before its pages are recycled"
        if cls in node.pages:
            held, serves = node.pages[cls]
            if held == page or serves <= good_from:
                node.pages[cls] = held, min(serves, good_from) if held == page else serves
                return
            pool.uncache(held)
        pool.cache(page)
        node.pages[cls] = page, good_from
        if node not in self._used[cls]:
            self._spare[cls][node] = None

    def _touch(self, path: Sequence[Node]) -> None:
        """The border at the end of a path was used: its pages stay longest. The last one counts as used first, so that
        eviction begins there and leaves a shorter prefix."""
        border = len(path) * self.pages.page_tokens
        for cls, used in self._used.items():
            for node in reversed(path[self.pages.first_needed(cls, border) :]):
                self._spare[cls].pop(node, None)
                used[node] = None
                used.move_to_end(node)

    def _evict(self, cls: str) -> None:
        """Free an idle page of a class: a spare one, else the least recently used."""
        pool = self.pages.pools[cls]
        nodes = itertools.chain(self._spare[cls], self._used[cls])
        node = next(n for n in nodes if pool.holders(n.pages[cls][0]) == 1)
        if self.pages.windows[cls] is None:
            self._drop(node)  # nothing below can be reached without it
            return
        self._detach(node, cls)
        while node.parent is not None and not node.pages and not node.children:
            assert node.key is not None
            del node.parent.children[node.key]
            node = node.parent

    def _detach(self, node: Node, cls: str) -> None:
        self.pages.pools[cls].uncache(node.pages.pop(cls)[0])
        self._spare[cls].pop(node, None)
        self._used[cls].pop(node, None)

    def _drop(self, node: Node) -> None:
        """Forget a node and everything below it."""
        assert node.parent is not None and node.key is not None
        del node.parent.children[node.key]
        todo = [node]
        while todo:
            gone = todo.pop()
            todo += gone.children.values()
            for cls in list(gone.pages):
                self._detach(gone, cls)
