"""A response that lives as long as its client: the work stops when the client goes away, the time is up, or the server
stops. Errors before the first byte are an HTTP status, later ones an event in the stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from finback.server.answers import AnyReply, Event, Frame, dumps
from finback.server.errors import ApiError, as_api_error


@dataclass
class Outcome:
    """How a request went, for the log and the metrics. Times in seconds, None for what did not happen."""

    status: int = 200
    error: str | None = None
    gone: bool = False
    seconds: float = 0.0
    first_token: float | None = None


class LiveResponse(Response):
    """events: the work; it begins when the response is sent. stopping: set when the server gives up what is open.
    timeout: seconds for the whole answer, None for any time. on_end: called once, with the outcome."""

    def __init__(
        self,
        reply: AnyReply,
        events: AsyncGenerator[Event],
        *,
        stream: bool,
        usage: bool,
        stopping: asyncio.Event,
        timeout: float | None,
        on_end: Callable[[Outcome, Exception | None], None],
    ):
        super().__init__()
        self._reply, self._events, self._stream, self._usage = reply, events, stream, usage
        self._stopping, self._timeout, self._on_end = stopping, timeout, on_end
        self._outcome, self._started = Outcome(), False
        self._began = time.perf_counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        work = asyncio.create_task(self._work())
        gone = asyncio.create_task(_gone(receive))
        stop = asyncio.create_task(self._stopping.wait())
        tasks, failure = {work, gone, stop}, None
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                failure = work.exception()
            elif gone in done:
                self._outcome.gone = True
            elif stop in done:
                failure = ApiError("the server is shutting down", status=503, code="shutting_down", retry_after=5)
            else:
                failure = ApiError(f"no complete answer within {self._timeout:g} seconds", status=504, code="timeout")
            await _end({work})
            if isinstance(failure, Exception):
                await self._fail(as_api_error(failure))
        finally:
            await _end(tasks)
            self._outcome.seconds = time.perf_counter() - self._began
            self._on_end(self._outcome, failure if isinstance(failure, Exception) else None)

    async def _work(self) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                if self._outcome.first_token is None:
                    self._outcome.first_token = time.perf_counter() - self._began
                self._reply.take(event)
                if self._stream:
                    await self._open()
                    await self._frames(self._reply.frames(event))
        if not self._stream:
            await self._json(200, self._reply.whole())
            return
        await self._open()
        await self._frames(self._reply.closing(usage=self._usage), more=False)

    async def _open(self) -> None:
        if self._started:
            return
        await self._start(
            200, [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        )
        await self._frames(self._reply.opening())

    async def _frames(self, frames: Iterable[Frame], *, more: bool = True) -> None:
        """Send events; those that belong together in one piece."""
        data = "".join(f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n" for name, text in frames)
        if data or not more:
            await self._send({"type": "http.response.body", "body": data.encode(), "more_body": more})

    async def _json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = dumps(body).encode()
        extra = [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()]
        size = (b"content-length", str(len(data)).encode())
        await self._start(status, [(b"content-type", b"application/json"), size, *extra])
        await self._send({"type": "http.response.body", "body": data})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        headers = [*headers, (b"x-request-id", self._reply.id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _fail(self, error: ApiError) -> None:
        self._outcome.status, self._outcome.error = error.status, error.code or "invalid_request_error"
        if not self._started:
            await self._json(error.status, self._reply.error_body(error), error.headers())
        elif self._stream:
            await self._frames(self._reply.failed(error), more=False)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
