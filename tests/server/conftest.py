"""A server on a port of its own, over an engine that says what a test tells it to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from finback.engine.request import Delta, SamplingParams, TokenLogprobs
from finback.engine.stats import Stats
from finback.engine.stops import StopStrings
from finback.io.chat import Chat, ImageSizes
from finback.io.chat_v41 import DeepseekV41Chat
from finback.io.text import Detokenizer, Tokenizer
from finback.server.app import create_app
from finback.server.service import Settings
from finback.tools.tiny_tokenizer import byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer(), bos_id=0, eos_ids=(1,), pad_id=2)


def deltas(tokens: Sequence[int], sizes: Sequence[int], sampling: SamplingParams) -> Iterator[Delta]:
    """What an engine gives for these tokens, `sizes` of them at a time (the last size for ever)."""
    text, stops = Detokenizer(TOKENIZER, skip_special=True), StopStrings(sampling.stop)
    rest, turn = list(tokens), 0
    while True:
        taken, out, reason = [], "", None
        for _ in range(sizes[min(turn, len(sizes) - 1)]):
            token = rest.pop(0)
            taken.append(token)
            out += stops.push(text.push(token))
            left = sampling.max_tokens - (len(tokens) - len(rest))
            reason = "stop" if token == 1 or stops.matched else "length" if not (left and rest) else None
            if reason:
                out += stops.push(text.finish()) + stops.finish()
                break
        turn += 1
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = tuple(
                TokenLogprobs(t, -0.5, ((t, -0.5), (3, float("-inf")))[: sampling.logprobs]) for t in taken
            )
        yield Delta(out, tuple(taken), reason, logprobs, stop=stops.matched)
        if reason:
            return


class FakeBackend:
    """Answers every prompt with `tokens` (the text `says`), in steps of `sizes`, waiting `pause` seconds a step."""

    def __init__(self, says: str = "hm</think>Hello.", *, tokens: Sequence[int] | None = None):
        self.model, self.tokenizer, self.no_chat = "fake", TOKENIZER, ""
        sizes = ImageSizes(TOKENIZER.token_to_id("<｜deepseek_image｜>") or 0, 4, 3, 64, 144, None)
        self.chat: Chat | None = Chat(DeepseekV41Chat(TOKENIZER), TOKENIZER, sizes)
        self.max_model_len, self.longest, self.alive, self.stats = 4000, 4000, True, Stats()
        self.tokens = list(tokens) if tokens is not None else self.spelled(says)
        self.sizes: Sequence[int] = (1,)
        self.pause = 0.0
        self.error: Exception | None = None
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.open = 0

    @staticmethod
    def spelled(text: str) -> list[int]:
        return [*TOKENIZER.encode(text, allow_special=True), 1]

    async def generate(self, prompt: Any, sampling: SamplingParams) -> AsyncIterator[Delta]:
        self.asked.append((prompt, sampling))
        self.open += 1
        try:
            for delta in deltas(self.tokens, self.sizes, sampling):
                await asyncio.sleep(self.pause)
                if self.error is not None:
                    raise self.error
                yield delta
        finally:
            self.open -= 1

    async def score(self, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        return [
            TokenLogprobs(t, -1.0 if i else float("nan"), ((t, -1.0),) * bool(top)) for i, t in enumerate(token_ids)
        ]

    def close(self) -> None:
        self.alive = False


@contextmanager
def running(backend: Any, **settings: Any) -> Iterator[httpx.Client]:
    """A client of a real server that runs meanwhile."""
    config = uvicorn.Config(create_app(backend, Settings(**settings)), port=0, log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(20)


class Kit:
    """What the tests of this folder share."""

    FakeBackend, TOKENIZER = FakeBackend, TOKENIZER
    running, deltas = staticmethod(running), staticmethod(deltas)

    @staticmethod
    def wait(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
        """Whether it comes true in time."""
        event = threading.Event()
        for _ in range(int(seconds * 200)):
            if condition():
                return True
            event.wait(0.005)
        return False


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit
