"""`AsyncEngine`: many clients of one engine. A thread steps it; coroutines add requests and read their deltas."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from finback.base.runtime import FinbackError, RequestError
from finback.engine.llm import LLM
from finback.engine.request import Delta, SamplingParams
from finback.engine.running import Running
from finback.engine.stats import Stats

T = TypeVar("T")
_News = tuple[asyncio.Queue[Delta], Delta]
_Listener = tuple[asyncio.AbstractEventLoop, asyncio.Queue[Delta]]


class AsyncEngine:
    """Runs an `LLM`'s engine in a thread of its own, from the first request to `close`.

    The LLM must not generate by itself meanwhile. Several event loops may use one AsyncEngine.
    """

    def __init__(self, llm: LLM):
        self.llm = llm
        self._wake = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._listeners: dict[Running, _Listener] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    async def generate(
        self, prompt: Any, sampling: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Continue one prompt (in any of the forms of `LLM.generate`); deltas as the steps bring them.

        Closing the iterator, or cancelling the task that reads it, gives the request up before the next step. Raises
        RequestError at once for a request that cannot be served, NonFiniteError for one whose computation fails.
        """
        state, params = self.llm.prompt(prompt), sampling or SamplingParams()
        inbox = asyncio.Queue[Delta]()
        listener = (asyncio.get_running_loop(), inbox)

        def add() -> Running:
            running = self.llm.engine.add(state, params, request_id)
            self._listeners[running] = listener
            return running

        adding = self.between_steps(add)
        finished = False
        try:
            await asyncio.wrap_future(adding)
            while not finished:
                delta = await inbox.get()
                finished = delta.finish_reason is not None
                if delta.error is not None:
                    raise delta.error
                yield delta
        finally:
            if not finished:
                # A client that goes away may do so before its request was even added.
                adding.add_done_callback(self._give_up)

    def _give_up(self, adding: Future[Running]) -> None:
        if adding.cancelled() or adding.exception() is not None:
            return

        def abort() -> None:
            self._listeners.pop(adding.result(), None)
            self.llm.engine.abort(adding.result())

        with suppress(RequestError):  # closed: everything was given up
            self.between_steps(abort)

    @property
    def alive(self) -> bool:
        """False once the engine is closed or has failed."""
        return not self._closed

    @property
    def stats(self) -> Stats:
        """See `LLM.stats`."""
        return self.llm.stats

    def close(self) -> None:
        """Give all requests up and stop the thread. The LLM may be used by itself again."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def between_steps(self, job: Callable[[], T]) -> Future[T]:
        """Have the engine's thread run `job` before its next step. Raises RequestError once closed."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

        with self._wake:
            if self._closed:
                raise RequestError("the engine is closed; no more requests are taken")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="finback-engine", daemon=True)
                self._thread.start()
            self._jobs.append((run, future))
            self._wake.notify()
        return future

    def _run(self) -> None:
        try:
            engine = self.llm.engine  # made here, at the first request
            while not self._stop():
                self._do_jobs()
                self._tell(engine.step())
            self._do_jobs()
            self._end_all(RequestError("the engine was closed before this request ended"))
        except Exception as error:
            # Memory that is not there, or a defect of finback: nobody may wait for ever, and the state of the rows is
            # unknown.
            failure = FinbackError(f"the engine failed and stopped: {error!r}")
            with self._wake:
                self._closed = True
            for _, future in self._jobs:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error if isinstance(error, FinbackError) else failure)
            self._end_all(failure)
            raise

    def _stop(self) -> bool:
        """Wait for something to do; whether it is to end."""
        with self._wake:
            self._wake.wait_for(lambda: self._jobs or self.llm.engine.unfinished or self._closed)
            return self._closed

    def _do_jobs(self) -> None:
        while self._jobs:
            self._jobs.popleft()[0]()

    def _tell(self, deltas: Iterable[tuple[Running, Delta]]) -> None:
        """Hand out what a step gave: one call for each event loop, since each call wakes its thread, which then takes
        the interpreter away from the next step."""
        news: dict[asyncio.AbstractEventLoop, list[_News]] = {}
        for running, delta in deltas:
            running.deltas.clear()
            listener = self._listeners.get(running)
            if delta.finish_reason is not None:
                self._listeners.pop(running, None)
            if listener is not None:
                loop, inbox = listener
                news.setdefault(loop, []).append((inbox, delta))
        for loop, found in news.items():
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(_deliver, found)

    def _end_all(self, error: FinbackError) -> None:
        ended = list(self._listeners)
        for running in ended:
            self.llm.engine.abort(running)
        self._tell((running, Delta("", (), "error", error=error)) for running in ended)


def _deliver(news: Iterable[_News]) -> None:
    for inbox, delta in news:
        inbox.put_nowait(delta)
