"""Answers as a row of blocks: reasoning, text, one for each call. /v1/responses and /v1/messages show them so, each
with events of its own. Plain Python, no torch."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from finback.engine.request import TokenLogprobs
from finback.server.answers import Event, Frame, Usage, dumps

Said = tuple[str, dict[str, Any]]
"""An event before it is sent: its name and its fields."""


@dataclass
class Block:
    """One block. name: of a call. call_id: how results name it. logprobs: of the tokens that a text came with."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    name: str = ""
    call_id: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def said(name: str, **fields: Any) -> Said:
    return name, fields


class BlockReply(ABC):
    """`AnyReply` of an answer in blocks, one choice. What a stream says is made while events are taken, from the same
    state that the whole is made of."""

    prefix, call_prefix = "", "call"

    def __init__(self, model: str):
        self.id, self.model, self.usage = f"{self.prefix}_{uuid.uuid4().hex}", model, Usage()
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop: str | None = None
        self._open = False
        self._said: list[Said] = []

    @property
    def finish_reasons(self) -> list[str | None]:
        return [self.finish_reason]

    def take(self, event: Event) -> None:
        self.usage.completion_tokens += event.tokens
        self.usage.reasoning += event.reasoning
        self.usage.cached[0] = event.cached
        self._said = [*self._advance(event)]

    def frames(self, event: Event) -> Iterator[Frame]:
        yield from map(self.frame, self._said)

    def frame(self, event: Said) -> Frame:
        """An event on its way into the stream."""
        name, fields = event
        return name, dumps({"type": name, **fields})

    def _advance(self, event: Event) -> Iterator[Said]:
        if event.delta.reasoning:
            yield from self._add("reasoning", event.delta.reasoning)
        if event.delta.content:
            yield from self._add("text", event.delta.content, event.logprobs)
        for call in event.delta.calls:
            if call.name is not None:
                call_id = f"{self.call_prefix}_{uuid.uuid4().hex[:24]}"
                yield from self._begin(Block(len(self.blocks), "call", name=call.name, call_id=call_id))
            if call.arguments:
                yield from self._add("call", call.arguments)
        if event.finish_reason is not None:
            self.finish_reason, self.stop = event.finish_reason, event.stop
            yield from self._end()

    def _add(self, kind: Any, text: str, logprobs: tuple[TokenLogprobs, ...] = ()) -> Iterator[Said]:
        if not (self._open and self.blocks[-1].kind == kind):
            yield from self._begin(Block(len(self.blocks), kind))
        block = self.blocks[-1]
        block.text += text
        block.logprobs += logprobs
        yield from self.added(block, text, logprobs)

    def _begin(self, block: Block) -> Iterator[Said]:
        yield from self._end()
        self.blocks.append(block)
        self._open = True
        yield from self.begun(block)

    def _end(self) -> Iterator[Said]:
        if self._open:
            self._open = False
            yield from self.ended(self.blocks[-1])

    @abstractmethod
    def begun(self, block: Block) -> Iterator[Said]:
        """What a stream says when a block begins."""

    @abstractmethod
    def added(self, block: Block, text: str, logprobs: tuple[TokenLogprobs, ...]) -> Iterator[Said]:
        """What a stream says when a block grows."""

    @abstractmethod
    def ended(self, block: Block) -> Iterator[Said]:
        """What a stream says when a block is complete."""
