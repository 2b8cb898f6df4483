"""Facts about many names, hidden in other text, and questions for some of them: what only memory can answer.

A length is aimed at in tokens; a token is taken to be `CHARACTERS` characters of English.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from finback.io.conversation import ChatOptions, Message
from finback.train.synth import words as w
from finback.train.synth.sample import Draw, Sample, answered, said
from finback.train.synth.stories import write

CHARACTERS = 4.3
LONGEST = 7400  # tokens; with questions and answers a document stays below 8192
_TOPICS = ("code", "number", "locker", "room", "seat", "ticket")
_WORDS = {"color": w.COLORS, "animal": w.ANIMALS, "fruit": w.GOODS}
_SYLLABLES = ("bar", "den", "fel", "gor", "hul", "kin", "lam", "mor", "nes", "pol", "ras", "sul", "tam", "vor", "wes")
_ENDS = ("berg", "dale", "ford", "ham", "mouth", "ton", "wick", "field")


def recall(draw: Draw) -> Sample:
    """4 to 64 names over anything up to 8k tokens, several questions in training."""
    return _recall(draw, "recall", _span(draw, LONGEST), None)


def recall_short(draw: Draw) -> Sample:
    """The same over at most 1k tokens, for stages of training with sequences of that length."""
    return _recall(draw, "recall_short", _span(draw, 720), None)


def recall_medium(draw: Draw) -> Sample:
    """The same over at most 2k tokens."""
    return _recall(draw, "recall_medium", _span(draw, 1700), None)


def recall_near(draw: Draw) -> Sample:
    """One question for a fact about 256 tokens back."""
    return _recall(draw, "recall_256", 640, 256)


def recall_middle(draw: Draw) -> Sample:
    """One question for a fact about 1024 tokens back."""
    return _recall(draw, "recall_1k", 1600, 1024)


def recall_far(draw: Draw) -> Sample:
    """One question for a fact about 4096 tokens back."""
    return _recall(draw, "recall_4k", 4700, 4096)


def _span(draw: Draw, longest: int) -> int:
    """A length whose logarithm is even between that of 48 and that of `longest`."""
    return int(math.exp(draw.random.uniform(math.log(48), math.log(longest))))


def _values(draw: Draw, topic: str, count: int) -> list[str]:
    if topic == "town":
        return [(draw.one(_SYLLABLES) + draw.one(_SYLLABLES) + draw.one(_ENDS)).capitalize() for _ in range(count)]
    if topic in _WORDS:
        return [draw.one(_WORDS[topic]) for _ in range(count)]
    digits = draw.one((2, 3, 4, 4))
    return [str(draw.number(10 ** (digits - 1), 10**digits - 1)) for _ in range(count)]


def _recall(draw: Draw, kind: str, span: int, distance: int | None) -> Sample:
    keys = int(4 * 16 ** draw.random.random())
    keys = max(4, min(keys, 64, span // 16))
    topic = draw.one(_TOPICS if distance else (*_TOPICS, *_WORDS, "town"))
    names = draw.some(w.NAMES, keys)
    facts = [f"The {topic} of {n} is {v}." for n, v in zip(names, _values(draw, topic, keys), strict=True)]
    count = draw.number(1, min(8, keys)) if draw.split == "train" and distance is None else 1
    asked = draw.some(range(keys), count)
    if distance is None:
        lines = _scatter(draw, facts, int(span * CHARACTERS))
    else:
        lines = _scatter(draw, facts[: asked[0]] + facts[asked[0] + 1 :], int(span * CHARACTERS))
        lines.insert(_place(lines, distance), facts[asked[0]])
    # The question may come first, so that what to look for is known while reading; at a set distance it comes last.
    first = distance is None and draw.chance(0.15)
    turns: list[Message] = []
    for i, key in enumerate(asked):
        text = f"What is the {topic} of {names[key]}?"
        if i == 0:
            text = f"{text}\n\n{' '.join(lines)}" if first else f"{' '.join(lines)}\n\n{text}"
        turns += [said("user", text), answered(facts[key])]
    return Sample(kind, messages=tuple(turns), options=ChatOptions(thinking=draw.chance(0.4)))


def _scatter(draw: Draw, facts: list[str], characters: int) -> list[str]:
    """Lines of the facts, in order, with other text between them."""
    room = characters - sum(len(f) + 1 for f in facts)
    other = []
    for line in _distractors(draw):
        if (room := room - len(line) - 1) < 0:
            break
        other.append(line)
    places = set(draw.some(range(len(facts) + len(other)), len(facts)))
    waiting, rest = iter(facts), iter(other)
    return [next(waiting) if i in places else next(rest) for i in range(len(facts) + len(other))]


def _distractors(draw: Draw) -> Iterator[str]:
    """Sentences of stories, and of nothing in particular."""
    while True:
        if draw.chance(0.5):
            for line in write(draw, 1).text.replace("\n\n", " ").split(". ")[0:-1:2]:
                yield line if line[-1] in '.!?"' else line + "."
        name, place = draw.one(w.NAMES), draw.one(w.PLACES)
        yield draw.one(
            (
                f"{name} went to {place} on {draw.one(w.DAYS)}.",
                f"It was {w.a(draw.one(w.WEATHER))} {draw.one(w.PARTS)}.",
                f"There was {w.a(draw.one(w.COLORS))} {draw.one(w.OBJECTS)} {draw.one(w.SPOTS)}.",
                f"{name} likes {draw.one(w.HOBBIES)}.",
                f"The way to {place} takes {draw.one(w.NUMBERS[2:])} minutes.",
            )
        )


def _place(lines: list[str], distance: int) -> int:
    """The index in lines from which on they are about `distance` tokens long."""
    after = 0
    for i in range(len(lines) - 1, -1, -1):
        after += len(lines[i]) + 1
        if after >= distance * CHARACTERS:
            return i
    return 0
