"""What a chat consists of, and what a chat format does with it. Plain Python, no torch.

A `ChatFormat` turns messages into a prompt, and gives a parser that turns what the model writes into reasoning, content
and tool calls. How a prompt becomes token ids and images is the same for all of them (`finback.io.chat`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

ToolChoice = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class Image:
    """An image of a message: the bytes of an image file, not decoded yet."""

    data: bytes = field(repr=False)


Part = str | Image


@dataclass(frozen=True)
class ToolCall:
    """A call in an assistant message. arguments: the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: its JSON schema, None for none."""

    name: str
    description: str | None = None
    parameters: Any = None


@dataclass(frozen=True)
class Message:
    """One message.

    role: system, user, assistant, tool or latest_reminder. parts: texts and images in order; only user and tool
    messages may hold images. reasoning, calls: of an assistant message. call_id: the call that a tool message answers.
    prefix: the model goes on with this last assistant message instead of answering it.
    """

    role: str
    parts: tuple[Part, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    prefix: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How the model shall answer.

    thinking: reason before the answer. effort: how thoroughly, 1..100, or None for the format's default. tool_choice:
    "required" makes the answer begin with a call. response_schema: JSON schema that the prompt asks the answer to
    follow, None for free text.
    """

    thinking: bool = True
    effort: int | None = None
    tool_choice: ToolChoice = "auto"
    response_schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Control:
    """A control token inside a prompt, by its role in the format ("user", "think", ...)."""

    role: str


Piece = str | Control | Image


@dataclass(frozen=True)
class CallDelta:
    """A piece of a tool call. index: its place among the answer's calls. name: given once, with the first piece."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class ChatDelta:
    """What one step added to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


@dataclass(frozen=True)
class Answer:
    """A whole answer: what its deltas add up to."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # (name, arguments)

    def plus(self, delta: ChatDelta) -> Answer:
        """This answer with `delta` added."""
        calls = list(self.calls)
        for piece in delta.calls:
            if piece.index == len(calls):
                calls.append((piece.name or "", ""))
            name, arguments = calls[piece.index]
            calls[piece.index] = (name, arguments + piece.arguments)
        return replace(
            self, reasoning=self.reasoning + delta.reasoning, content=self.content + delta.content, calls=tuple(calls)
        )


class ChatParser(Protocol):
    """Takes an answer apart while it is written. Its deltas add up to the same answer, however the input was cut.

    end_think: the token that ends the reasoning which the answer begins with, None for an answer without reasoning.
    """

    end_think: int | None

    def feed(self, token_ids: Sequence[int], text: str) -> ChatDelta:
        """Take in generated tokens and the text that became certain with them (which may lag behind the tokens, and
        ends early where a stop string was found). Tokens tell markup from text that only looks like it."""
        ...

    def feed_text(self, text: str) -> ChatDelta:
        """Take in text whose tokens are not known: every spelling of a control token counts as one."""
        ...

    def finish(self, *, truncated: bool = False) -> ChatDelta:
        """What was held back and can no longer become markup. truncated: the output was cut off by a limit."""
        ...


class ChatFormat(Protocol):
    """One family's way of writing a chat."""

    def pieces(self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatOptions) -> Iterator[Piece]:
        """The prompt as text, control tokens and images. Raises RequestError for what the format cannot say."""
        ...

    def token_id(self, role: str) -> int:
        """The id of a control token."""
        ...

    def parser(self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatOptions) -> ChatParser:
        """A parser for the answer to this prompt."""
        ...

    def grammar(self, tools: Sequence[Tool], options: ChatOptions, schema: Mapping[str, Any] | None) -> str:
        """A grammar (Lark) that holds the answer to a form: reasoning where there is some, then JSON that follows
        `schema`, or calls (only these where `options.tool_choice` is "required"). Raises RequestError where the format
        has no such form."""
        ...
