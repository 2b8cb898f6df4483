"""`AsyncEngine`: many clients of one engine. A thread steps it; coroutines add requests and read their deltas."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from finback.base.runtime import FinbackError, RequestError
from finback.engine.llm import LLM
from finback.engine.request import Delta, SamplingParams
from finback.engine.running import Running
from finback.engine.stats import Stats

T = TypeVar("T")


class AsyncEngine:
    """Runs an `LLM`'s engine in a thread of its own, from the first request to `close`.

    The LLM must not generate by itself meanwhile. Several event loops may use one AsyncEngine.
    """

    def __init__(self, llm: LLM):
        self.llm = llm
        self._wake = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._listeners: dict[Running, Callable[[Delta], None]] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def stats(self) -> Stats:
        return self.llm.stats

    async def generate(
        self, prompt: Any, sampling: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Continue one prompt (in any of the forms of `LLM.generate`); deltas as the steps bring them.

        Closing the iterator, or cancelling the task that reads it, gives the request up before the next step. Raises
        RequestError at once for a request that cannot be served, NonFiniteError for one whose computation fails.
        """
        state, params = self.llm.prompt(prompt), sampling or SamplingParams()
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Delta]()

        def hear(delta: Delta) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(inbox.put_nowait, delta)

        def add() -> Running:
            running = self.llm.engine.add(state, params, request_id)
            self._listeners[running] = hear
            return running

        adding = self._submit(add)
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

        if not self._closed:
            self._submit(abort)

    def close(self) -> None:
        """Give all requests up and stop the thread. The LLM may be used by itself again."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        """Have the thread run `job` before its next step. Raises RequestError once closed."""
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
            self._jobs.append(run)
            self._wake.notify()
        return future

    def _run(self) -> None:
        engine = self.llm.engine
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._jobs or engine.unfinished or self._closed)
                jobs, closed = list(self._jobs), self._closed
                self._jobs.clear()
            for job in jobs:
                job()
            if closed:
                self._end_all(RequestError("the engine was closed before this request ended"))
                return
            try:
                for running, delta in engine.step():
                    self._tell(running, delta)
            except Exception as error:
                # A defect of finback: nobody may wait for ever, and the state of the rows is unknown.
                with self._wake:
                    self._closed = True
                self._end_all(FinbackError(f"the engine failed and stopped: {error!r}"))
                raise

    def _tell(self, running: Running, delta: Delta) -> None:
        running.deltas.clear()
        listener = self._listeners.get(running)
        if delta.finish_reason is not None:
            self._listeners.pop(running, None)
        if listener is not None:
            listener(delta)

    def _end_all(self, error: FinbackError) -> None:
        for running, listener in list(self._listeners.items()):
            self.llm.engine.abort(running)
            listener(Delta("", (), "error", error=error))
        self._listeners.clear()
