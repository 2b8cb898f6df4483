"""Many clients of one engine.

Would catch: a client that goes away and keeps its slot, an iterator that never ends because its error went nowhere, a
neighbour that pays for it.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from finback.base.runtime import ConfigError, FinbackError, NonFiniteError, RequestError
from finback.engine.async_engine import AsyncEngine
from finback.engine.llm import LLM


@pytest.fixture
def llm(box):
    """An LLM around the fake model, without a checkpoint."""
    llm = LLM.__new__(LLM)
    engine = box.fake(max_num_batched_tokens=16, max_num_seqs=8, max_queued_requests=20)
    llm.__dict__.update(engine=engine, model=engine.runner.model, tokenizer=None, args=engine.args)
    return llm


async def read(engine, prompt, params):
    return [t async for delta in engine.generate(prompt, params) for t in delta.token_ids]


def test_clients_get_their_own_tokens(llm, box):
    async def main():
        engine = AsyncEngine(llm)
        prompts = [[i, i + 1, 2 * i] for i in range(12)]
        answers = await asyncio.gather(*(read(engine, p, box.greedy(9)) for p in prompts))
        assert answers == [box.continuation(p, 9) for p in prompts]
        engine.close()
        assert not llm.engine.unfinished

    asyncio.run(main())


def test_a_client_that_goes_away_frees_its_slot(llm, box):
    """Fifty times, at the first token, during the prompt, and by cancelling; then a request on the same engine."""

    async def leave(engine, i):
        prompt, params = [i] * (150 if i % 3 == 1 else 4), box.greedy(200)
        stream = engine.generate(prompt, params)
        if i % 3 == 0:
            await anext(stream)
            await stream.aclose()
        else:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    async def main():
        engine = AsyncEngine(llm)
        for i in range(50):
            await leave(engine, i)
        assert await read(engine, [1, 2, 3], box.greedy(5)) == box.continuation([1, 2, 3], 5)
        steps = llm.stats.steps
        await asyncio.sleep(0.05)
        assert llm.stats.steps - steps <= 1, "someone is still generated for"
        engine.close()
        assert not llm.engine.unfinished and llm.stats.running == 0
        box.audit(llm.engine)

    asyncio.run(main())


def test_errors_reach_the_client_who_caused_them(llm, box):
    """A refused request raises at once, NaN raises for its request, and the others' iterators go on."""

    async def main():
        engine = AsyncEngine(llm)
        llm.model.bad_token = 60
        fine = asyncio.ensure_future(read(engine, [1, 2, 3], box.greedy(2)))
        with pytest.raises(RequestError, match="400 positions"):
            await read(engine, [1] * 400, box.greedy(1))
        with pytest.raises(NonFiniteError, match="named"):
            async for _ in engine.generate([60], box.greedy(3), request_id="named"):
                pass
        assert await fine == box.continuation([1, 2, 3], 2)
        engine.close()
        with pytest.raises(RequestError, match="closed"):
            await read(engine, [1], box.greedy(1))

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_an_engine_that_died(llm, box, monkeypatch):
    """A defect in a step ends every iterator with an error instead of silence; so does closing."""

    async def main():
        engine = AsyncEngine(llm)
        waiting = asyncio.ensure_future(read(engine, [1, 2], box.greedy(300)))
        while not llm.stats.steps:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(llm.engine.scheduler, "plan", lambda: 1 / 0)
        with pytest.raises(FinbackError, match="division"):
            await waiting

    async def closing():
        engine = AsyncEngine(llm)
        waiting = asyncio.ensure_future(read(engine, [1, 2], box.greedy(300)))
        await asyncio.sleep(0.01)
        engine.close()
        with pytest.raises(FinbackError, match="closed"):
            await waiting

    asyncio.run(closing())
    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_an_engine_that_could_not_be_made(llm, box):
    """Memory is taken at the first request. One that is not there is said to whoever asked, and to later clients."""

    class Unmade(LLM):
        @property
        def engine(self):
            raise ConfigError("kv_cache_memory_bytes 1 does not hold one request")

    llm.__class__ = Unmade

    async def main():
        engine = AsyncEngine(llm)
        with pytest.raises(ConfigError, match="one request"):
            await asyncio.wait_for(read(engine, [1], box.greedy(1)), 10)
        assert not engine.alive
        with pytest.raises(RequestError, match="closed"):
            await read(engine, [1], box.greedy(1))

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_on_its_way_to_a_dying_engine_gets_an_answer(llm, box, monkeypatch):
    """It was handed over during the step that failed, and would be taken in before a next one that never comes."""

    async def main():
        engine, entered, go = AsyncEngine(llm), threading.Event(), threading.Event()

        def fail():
            entered.set()
            go.wait(10)
            raise ZeroDivisionError

        monkeypatch.setattr(llm.engine.scheduler, "plan", fail)
        first = asyncio.ensure_future(read(engine, [1, 2], box.greedy(3)))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(read(engine, [3, 4], box.greedy(3)))
        await asyncio.sleep(0.01)
        go.set()
        for waiting in (first, second):
            with pytest.raises(FinbackError, match="ZeroDivision"):
                await asyncio.wait_for(waiting, 10)

    asyncio.run(main())
