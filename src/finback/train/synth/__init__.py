"""Synthetic documents with answers that are known: made as fast as they are read, as many as wanted.

Document i of (kind, seed, split) is always the same. Three splits, of which no two share a document:

* "train";
* "test": other seeds, combinations of the kinds that training has;
* "withheld": combinations that training never has (a name in a plot, a pair of numbers, a shape in a colour, the
  arguments of a call).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from finback.base.runtime import ConfigError, nearest
from finback.train.synth import lists, recall, records, scenes, stories, sums, tools
from finback.train.synth.sample import SPLITS, Draw, Sample

KINDS: dict[str, Callable[[Draw], Sample]] = {
    "story": stories.story,
    "story_chat": stories.story_chat,
    "story_questions": stories.story_questions,
    "sum": sums.sum_,
    "word_problem": sums.word_problem,
    "recall": recall.recall,
    "recall_short": recall.recall_short,
    "recall_medium": recall.recall_medium,
    "recall_256": recall.recall_near,
    "recall_1k": recall.recall_middle,
    "recall_4k": recall.recall_far,
    "list": lists.list_task,
    "tool": tools.tool_call,
    "json": records.json_answer,
    "scene": scenes.scene,
}
"""Kinds of documents by name."""


def documents(
    kinds: str | Sequence[str], seed: int = 0, split: str = "train", count: int | None = None, first: int = 0
) -> Iterator[Sample]:
    """Documents `first`, `first + 1`, ... of an endless list, `count` of them (None = without end).

    kinds: the name of a kind, or several as "name" or "name=weight"; each document is of a kind drawn by weight.
    Raises ConfigError for an unknown kind or split.
    """
    names, weights = read_kinds([kinds] if isinstance(kinds, str) else kinds)
    if split not in SPLITS:
        raise ConfigError(f"synthetic documents have no split {split!r}{nearest(split, SPLITS)}; {', '.join(SPLITS)}")
    i = first
    while count is None or i < first + count:
        name = names[0]
        if len(names) > 1:
            name = random.Random(f"{split}:{seed}:{i}").choices(names, weights)[0]
        yield KINDS[name](Draw(random.Random(f"{split}:{seed}:{name}:{i}"), split))
        i += 1


def read_kinds(kinds: Sequence[str]) -> tuple[list[str], list[float]]:
    """Names and weights from entries "name" or "name=weight". Raises ConfigError."""
    names, weights = [], []
    for entry in kinds:
        name, _, weight = entry.partition("=")
        if name not in KINDS:
            raise ConfigError(f"synthetic kind {name!r}{nearest(name, KINDS)}; use {', '.join(KINDS)}")
        try:
            weights.append(float(weight or 1))
        except ValueError:
            raise ConfigError(f"synthetic kind {entry!r}: {weight!r} is no number; write '{name}=2'") from None
        names.append(name)
    if not names or sum(weights) <= 0 or min(weights) < 0:
        raise ConfigError(f"synthetic kinds {list(kinds)} need weights of at least 0, one of them above 0")
    return names, weights


__all__ = ["KINDS", "SPLITS", "Sample", "documents", "read_kinds"]
