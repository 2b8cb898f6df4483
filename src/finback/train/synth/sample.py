"""One synthetic document, and how an answer to it is judged."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from finback.io.conversation import Answer, ChatOptions, Message, Part, Tool, ToolCall
from finback.train.synth.words import withheld

SPLITS = ("train", "test", "withheld")


@dataclass(frozen=True)
class Sample:
    """Running text, or a conversation whose last message is the assistant's right answer.

    kind: what it exercises. text: of running text, else "". messages, tools, options: of a conversation.
    """

    kind: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    options: ChatOptions = field(default_factory=lambda: ChatOptions(thinking=False))

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The conversation without the right answer."""
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """What the right answer says, without reasoning; of a call, its name and arguments."""
        last = self.messages[-1]
        if last.calls:
            return "; ".join(f"{call.name}({call.arguments})" for call in last.calls)
        return "".join(part for part in last.parts if isinstance(part, str))

    def texts(self) -> Iterator[str]:
        """Every text in it, without the markup of the chat format."""
        yield from (self.text,) if self.text else ()
        for message in self.messages:
            yield from (part for part in (*message.parts, message.reasoning) if isinstance(part, str) and part)
            yield from (call.arguments for call in message.calls)
        yield from (json.dumps(tool.parameters) for tool in self.tools)

    def accepts(self, given: Answer) -> bool:
        """Whether an answer is exactly right: the same words (blanks aside); equal JSON where a schema asked for
        JSON; the same calls with equal arguments, and none where none was due."""
        calls = self.messages[-1].calls
        if calls or given.calls:
            return [(c.name, _parsed(c.arguments)) for c in calls] == [(n, _parsed(x)) for n, x in given.calls]
        if self.options.response_schema is not None:
            return _parsed(given.content) == _parsed(self.answer)
        return given.content.split() == self.answer.split()


def _parsed(text: str) -> Any:
    """The JSON value of a text; a text that is none equals only itself."""
    try:
        return json.loads(text)
    except ValueError:
        return ("no JSON", text)


@dataclass(frozen=True)
class Draw:
    """Where a generator's choices come from: random numbers of one document, and the side of the split it is on."""

    random: random.Random
    split: str

    def one(self, options: Sequence[Any]) -> Any:
        return options[int(self.random.random() * len(options))]

    def some(self, options: Sequence[Any], count: int) -> list[Any]:
        return self.random.sample(options, count)

    def number(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + int(self.random.random() * (high + 1 - low))

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def may(self, *parts: object) -> bool:
        """Whether a combination is on this document's side: withheld ones never in "train" nor in "test", only those
        in "withheld"."""
        return withheld(*parts) == (self.split == "withheld")

    def allowed(self, make: Callable[[], Any], *parts: Callable[[Any], object]) -> Any:
        """`make()` until its combination of `parts` is one that `may` be. There must be a few hundred of them, or it
        might never come."""
        made = make()
        while not self.may(*(part(made) for part in parts)):
            made = make()
        return made


def said(role: str, *parts: Part) -> Message:
    return Message(role, parts)


def answered(text: str, reasoning: str = "") -> Message:
    return Message("assistant", (text,), reasoning)


def called(name: str, arguments: dict[str, Any], reasoning: str = "") -> Message:
    call = ToolCall("call_0", name, json.dumps(arguments, ensure_ascii=False))
    return Message("assistant", (), reasoning, (call,))


def question(kind: str, text: str, answer: str, reasoning: str | None = None) -> Sample:
    """A question and its answer; reasoning None = without thinking."""
    options = ChatOptions(thinking=reasoning is not None)
    return Sample(kind, messages=(said("user", text), answered(answer, reasoning or "")), options=options)
