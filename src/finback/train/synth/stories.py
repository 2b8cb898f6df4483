"""Stories whose facts are planned before a word is written, so that the answers to questions about them are known.

The plots stand in plots.txt: `#` a plot's name, `~` what it is about, `>` a sentence or a few that every telling has,
`?` a question `=>` its answer, `!` what the hero learns. [a|b] is a choice of words. {names} are facts of the plan.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from finback.io.conversation import ChatOptions, Message
from finback.train.synth import words as w
from finback.train.synth.sample import Draw, Sample, answered, said

Facts = dict[str, str]

_OPENINGS = (
    "[Once|Long ago|Many years ago] there was {ha} {hk} [called|named] {h}, who lived near {home}.",
    "Near {home} lived {ha} {hk} [called|named|by the name of] {h}.",
    "{h} was {ha} {hk} and lived near {home}.",
    "This is the story of {h}, {ha} {hk} who lived near {home}.",
)
_LINKS = (
    "[Not long after that|A few weeks later|Some time later], [something else happened.|there was more in store.]",
    "But that was not [the end of it.|all that happened to {h} that year.]",
    "[The next month|Later that year] brought [another adventure.|something new for {h}.]",
)
_CLOSINGS = (
    "From that day on, {h} knew that {lesson}.",
    "And so {h} learned that {lesson}.",
    '"Now I know that {lesson}," said {h}.',
    "That night, {h} thought: {lesson}.",
)
_REQUESTS = (
    "[Tell me|Write|Please write] a [short |]story about {about}.",
    "[Can you tell me|I would like to hear] a story about {h} and {f}{mark}",
    "[Tell me|Write] a story about {ha} {hk} [called|named] {h}.",
    "[Tell me a story.|Please tell me a story.|Do you know a story?|Write a short story.]",
)


@dataclass(frozen=True)
class Plot:
    """beats: for each passage, all its wordings. questions: (question, answer) with facts to fill in."""

    name: str
    about: str
    beats: tuple[tuple[str, ...], ...]
    questions: tuple[tuple[str, str], ...]
    lesson: str


@dataclass(frozen=True)
class Story:
    """paragraphs: of the whole. episodes: plot and facts of each. questions: everything that may be asked."""

    paragraphs: tuple[str, ...]
    episodes: tuple[tuple[Plot, Facts], ...]
    questions: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)


@cache
def wordings(line: str) -> tuple[str, ...]:
    """Every way to choose from the [a|b] groups of a line."""
    parts = [part.split("|") if i % 2 else [part] for i, part in enumerate(re.split(r"\[([^\]]*)\]", line))]
    return tuple("".join(choice) for choice in itertools.product(*parts))


@cache
def plots() -> tuple[Plot, ...]:
    """All plots of plots.txt."""
    found = []
    text = resources.files("finback.train.synth").joinpath("plots.txt").read_text(encoding="utf-8")
    for block in text.split("# ")[1:]:
        name, *lines = block.strip().split("\n")
        by = {mark: [line[2:] for line in lines if line.startswith(mark)] for mark in "~>?!"}
        questions = tuple((q, a) for q, a in (line.split(" => ") for line in by["?"]))
        beats = tuple(wordings(line) for line in by[">"])
        found.append(Plot(name, by["~"][0], beats, questions, by["!"][0]))
    return tuple(found)


def write(draw: Draw, episodes: int | None = None) -> Story:
    """A story of 1 to 3 episodes with one hero; None draws how many. There are fewer where the hero's withheld plots
    are."""
    count = episodes or draw.one((1, 1, 1, 2, 2, 3))
    cast = _Cast(draw)
    while not (open_to := [p for p in plots() if draw.may(cast.hero["h"], p.name)]):
        cast = _Cast(draw)
    told = [(plot, cast.episode()) for plot in draw.some(open_to, min(count, len(open_to)))]
    paragraphs = []
    for i, (plot, facts) in enumerate(told):
        start = draw.one(_OPENINGS) if i == 0 else draw.one(_LINKS)
        passages = [_fill(draw.one(wordings(start)), facts)]
        passages += [_fill(draw.one(beat), facts) for beat in plot.beats]
        cut = 1 + draw.number(1, len(plot.beats) - 1)
        paragraphs += [" ".join(passages[:cut]), " ".join(passages[cut:])]
    plot, facts = told[-1]
    if draw.chance(0.7):
        paragraphs[-1] += " " + _fill(draw.one(_CLOSINGS), {**facts, "lesson": plot.lesson})
    return Story(tuple(paragraphs), tuple(told), _questions(told))


def _fill(text: str, facts: Facts) -> str:
    text = text.format_map(facts)
    return text[0].upper() + text[1:]


def _questions(told: list[tuple[Plot, Facts]]) -> tuple[tuple[str, str], ...]:
    first = told[0][1]
    found = [("Who is the story about?", "It is about {h}."), ("Where does {h} live?", "{h} lives near {home}.")]
    found = [(q.format_map(first), a.format_map(first)) for q, a in (*found, ("What is {h}?", "{h} is {ha} {hk}."))]
    for plot, facts in told:
        asked = (*plot.questions, ("What is {f}?", "{f} is {fa} {fk}."))
        found += [(q.format_map(facts), _fill(a, facts)) for q, a in asked]
    if len(told) > 1:
        one, other = told[0][1]["f"], told[-1][1]["f"]
        for pair in ((one, other), (other, one)):
            found.append((f"Who comes first in the story, {' or '.join(pair)}?", f"{one} comes first."))
    return tuple(found)


class _Cast:
    """The hero, and what is drawn anew for every episode; nothing is drawn twice."""

    def __init__(self, draw: Draw):
        self.draw = draw
        names = draw.some(w.NAMES, 4)
        self.friends = names[1:]
        kind = draw.one(w.ANIMALS) if draw.chance(0.5) else "girl" if names[0] in w.GIRLS else "boy"
        self.places = draw.some(w.PLACES, 7)
        self.objects, self.spots = draw.some(w.OBJECTS, 3), draw.some(w.SPOTS, 3)
        self.foods, self.goods = draw.some(w.FOODS, 3), draw.some(w.GOODS, 3)
        self.hero = {"h": names[0], "hk": kind, "ha": w.a(draw.one(w.TRAITS)), "home": self.places.pop()}
        self.hero |= _pronouns("", names[0])

    def episode(self) -> Facts:
        draw, friend = self.draw, self.friends.pop()
        color, thing = draw.one(w.COLORS), self.objects.pop()
        low, high = draw.some(range(3, 13), 2)
        one = draw.one
        return {
            **self.hero, **_pronouns("f", friend),
            "f": friend, "fk": one(w.ANIMALS), "fa": w.a(one(w.TRAITS)),
            "col": color, "ob": thing, "aob": w.a(f"{color} {thing}"),
            "place": self.places.pop(), "place2": self.places.pop(), "spot": self.spots.pop(),
            "food": self.foods.pop(), "goods": self.goods.pop(), "num": w.NUMBERS[low], "num2": w.NUMBERS[high],
            "high": one(w.HIGH), "hut": one(w.HUTS), "seat": one(w.SEATS), "tool": one(w.TOOLS),
            "plant": one(w.PLANTS), "hobby": one(w.HOBBIES), "skill": one(w.SKILLS), "song": one(w.SONGS),
            "tune": one(w.TUNES), "work": one(w.WORK), "weather": one(w.WEATHER), "part": one(w.PARTS),
            "late": one(w.LATE), "day": one(w.DAYS), "who": one(w.FAMILY), "limb": one(w.LIMBS),
            "sad": one(w.SAD), "glad": one(w.GLAD), "pet": one(w.PETS),
        }  # fmt: skip


@cache
def _pronouns(prefix: str, name: str) -> Facts:
    he, him, his = ("she", "her", "her") if name in w.GIRLS else ("he", "him", "his")
    forms = {"he": he, "him": him, "his": his, "himself": him + "self"}
    capital = {"FHe" if prefix else "He": he.capitalize(), "FHis" if prefix else "His": his.capitalize()}
    return {prefix + k: v for k, v in forms.items()} | capital


# -- documents ---------------------------------------------------------------------------------------------------------


def story(draw: Draw) -> Sample:
    """A story as running text."""
    return Sample("story", text=write(draw).text)


def story_chat(draw: Draw) -> Sample:
    """A request for a story, and the story."""
    told = write(draw, 1)
    plot, facts = told.episodes[0]
    about = plot.about.format_map(facts)
    request = draw.one(wordings(draw.one(_REQUESTS)))
    mark = "?" if request.startswith("Can") else "."
    request = request.format_map({**facts, "about": about, "mark": mark})
    reasoning = f"A story about {about}." if draw.chance(0.4) else None
    return Sample(
        "story_chat",
        messages=(said("user", request), answered(told.text, reasoning or "")),
        options=ChatOptions(thinking=reasoning is not None),
    )


def story_questions(draw: Draw) -> Sample:
    """A story with questions about it, one after the other; outside training a single one."""
    told = write(draw)
    count = draw.number(1, 5) if draw.split == "train" else 1
    asked = draw.some(told.questions, min(count, len(told.questions)))
    turns: list[Message] = []
    for i, (question, answer) in enumerate(asked):
        if i == 0:
            question = f"{told.text}\n\n{question}" if draw.chance(0.6) else f"{question}\n\n{told.text}"
        turns += [said("user", question), answered(answer)]
    return Sample("story_questions", messages=tuple(turns), options=ChatOptions(thinking=draw.chance(0.5)))
