"""Tasks on short lists of words or numbers."""

from __future__ import annotations

from collections.abc import Sequence

from finback.train.synth import words as w
from finback.train.synth.sample import Draw, Sample, question

_GROUPS = {"colors": w.COLORS, "animals": w.ANIMALS, "fruits and vegetables": w.GOODS, "things": w.OBJECTS}
_TASKS = ("sort", "sort", "reverse", "count", "first", "last", "nth", "filter", "larger", "repeat")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def list_task(draw: Draw) -> Sample:
    """Sort, reverse, count, pick, filter or repeat a list of 3 to 8 entries."""
    task = draw.one(_TASKS)
    if task == "filter":
        return _filter(draw)
    count = draw.number(3, 8)
    if task == "larger" or (task != "repeat" and draw.chance(0.3)):
        entries: list[str] = list(map(str, draw.some(range(100), count)))
        what, ordered = "numbers", sorted(entries, key=int)
        by = "from small to large"
    else:
        pool = [word for group in draw.some(list(_GROUPS), 2) for word in _GROUPS[group]]
        entries = draw.some(pool, count)
        what, ordered, by = "words", sorted(entries), "by the alphabet"
    text = ", ".join(entries)
    if task == "larger":
        limit = draw.number(10, 90)
        asked = f"Which of these numbers are larger than {limit}? {text}"
        return _asked(draw, asked, [e for e in entries if int(e) > limit] or ["none"])
    nth = draw.number(0, count - 1)
    forms, answer = {
        "sort": ((f"Sort these {what} {by}: {text}", f"Put these {what} in order: {text}"), ordered),
        "reverse": ((f"Reverse this list: {text}", f"Say these {what} backwards: {text}"), entries[::-1]),
        "count": ((f"How many {what} are in this list? {text}", f"Count these {what}: {text}"), [str(count)]),
        "first": ((f"What is the first entry of this list? {text}",), entries[:1]),
        "last": ((f"What is the last entry of this list? {text}",), entries[-1:]),
        "nth": ((f"What is the {_ORDINALS[nth]} entry of this list? {text}",), [entries[nth]]),
        "repeat": ((f"Repeat this list: {text}", f"Say these {what} again: {text}"), entries),
    }[task]
    return _asked(draw, draw.one(forms), answer)


def _asked(draw: Draw, text: str, answer: Sequence[str]) -> Sample:
    return question("list", text, ", ".join(answer), "" if draw.chance(0.4) else None)


def _filter(draw: Draw) -> Sample:
    """Keep the members of one group."""
    wanted, other = draw.some(list(_GROUPS), 2)
    entries = draw.some(_GROUPS[wanted], draw.number(1, 4)) + draw.some(_GROUPS[other], draw.number(1, 4))
    draw.random.shuffle(entries)
    kept = [e for e in entries if e in _GROUPS[wanted]]
    asked = draw.one((f"Which of these are {wanted}? ", f"Keep only the {wanted}: ")) + ", ".join(entries)
    return _asked(draw, asked, kept)
