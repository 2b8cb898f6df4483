"""From an engine's deltas to the events of an answer. Plain Python, no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from finback.engine.request import Delta, SamplingParams
from finback.io.conversation import ChatDelta, ChatParser
from finback.server.answers import Event


async def chat_events(
    index: int, deltas: AsyncIterator[Delta], parser: ChatParser, *, one_call: bool = False
) -> AsyncGenerator[Event]:
    """The events of one choice of a chat. one_call: end it after its first call."""
    end_think = parser.end_think
    called, reasons = False, end_think is not None
    async with aclosing(deltas) as stream:  # type: ignore[type-var]
        async for delta in stream:
            said = parser.feed(delta.token_ids, delta.text)
            reason = delta.finish_reason
            if reason is not None:
                said = _plus(said, parser.finish(truncated=reason != "stop"))
            if one_call and any(call.index for call in said.calls):
                said = replace(said, calls=tuple(call for call in said.calls if call.index == 0))
                reason = "stop"
            called = called or bool(said.calls)
            # A call that was cut off must not be run, so its reason stays "length".
            shown = "tool_calls" if called and reason == "stop" else reason
            tokens, reasoning = delta.token_ids, 0
            if reasons:
                reasons = end_think not in tokens
                reasoning = len(tokens) if reasons else tokens.index(end_think)  # type: ignore[arg-type]
            logprobs = delta.logprobs or ()
            yield Event(index, said, len(tokens), shown, logprobs, reasoning, delta.stop, delta.cached_tokens)
            if reason is not None:
                return


def _plus(one: ChatDelta, other: ChatDelta) -> ChatDelta:
    return ChatDelta(one.reasoning + other.reasoning, one.content + other.content, one.calls + other.calls)


async def text_events(index: int, deltas: AsyncIterator[Delta]) -> AsyncGenerator[Event]:
    """The events of one choice of a completion."""
    async with aclosing(deltas) as stream:  # type: ignore[type-var]
        async for delta in stream:
            said = ChatDelta(content=delta.text)
            logprobs = delta.logprobs or ()
            yield Event(index, said, len(delta.token_ids), delta.finish_reason, logprobs, cached=delta.cached_tokens)


async def merged(streams: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[Event]:
    """The events of several choices as they come. Closing it closes all of them."""
    if len(streams) == 1:  # the usual case, without a task and a queue between
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield event
        return
    inbox: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Event]) -> None:
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    inbox.put_nowait(event)
            inbox.put_nowait(None)
        except Exception as error:
            inbox.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            found = await inbox.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def seeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    """The sampling of the i-th choice: a seed gives every choice another draw, repeatably."""
    return sampling if sampling.seed is None or not choice else replace(sampling, seed=sampling.seed + choice)
