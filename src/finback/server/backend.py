"""What the server needs from a model, and the model behind it. The protocol layer is tested with other ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from finback.base.runtime import ConfigError
from finback.engine.async_engine import AsyncEngine
from finback.engine.llm import LLM
from finback.engine.request import Delta, SamplingParams, TokenLogprobs
from finback.engine.stats import Stats
from finback.io.chat import Chat
from finback.io.images import MAX_PIXELS
from finback.io.text import Tokenizer


class Backend(Protocol):
    """model: the name that clients use. chat: None for a model that cannot chat, with the reason in `no_chat`.
    max_model_len: most tokens of prompt and answer; longest: most that also fit the memory for rows."""

    model: str
    tokenizer: Tokenizer | None
    chat: Chat | None
    no_chat: str
    max_model_len: int
    longest: int

    @property
    def stats(self) -> Stats: ...

    @property
    def alive(self) -> bool:
        """False once the engine has failed."""
        ...

    def generate(self, prompt: Any, sampling: SamplingParams) -> AsyncIterator[Delta]:
        """See `AsyncEngine.generate`."""
        ...

    async def score(self, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Log probabilities of the tokens of a prompt; NaN for the first one."""
        ...

    def close(self) -> None: ...


class LocalBackend:
    """`Backend` over an `LLM` in this process. max_pixels: largest image that is decoded, None for the usual limit."""

    def __init__(self, llm: LLM, model: str, *, max_pixels: int | None = None):
        self.model, self.tokenizer = model, llm.tokenizer
        self.chat, self.no_chat = _chat(llm, max_pixels or MAX_PIXELS)
        self.max_model_len, self.longest = llm.engine.max_model_len, _longest(llm)
        self._llm, self._engine = llm, AsyncEngine(llm)

    @property
    def stats(self) -> Stats:
        return self._engine.stats

    @property
    def alive(self) -> bool:
        return self._engine.alive

    def generate(self, prompt: Any, sampling: SamplingParams) -> AsyncIterator[Delta]:
        return self._engine.generate(prompt, sampling)

    async def score(self, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        """See `Backend.score`. Open requests wait meanwhile."""
        return await asyncio.wrap_future(self._engine.between_steps(lambda: self._scored(token_ids, top)))

    def _scored(self, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        logprobs = self._llm.score(list(token_ids)).float().log_softmax(-1)
        best = logprobs.sort(dim=-1, descending=True, stable=True)
        out = [TokenLogprobs(token_ids[0], float("nan"), ())]
        for i, token in enumerate(token_ids[1:]):
            pairs = zip(best.indices[i, :top].tolist(), best.values[i, :top].tolist(), strict=True)
            out.append(TokenLogprobs(token, float(logprobs[i, token]), tuple(pairs)))
        return out

    def close(self) -> None:
        self._engine.close()


def _chat(llm: LLM, max_pixels: int) -> tuple[Chat | None, str]:
    """The model's chat, or the reason why there is none."""
    if llm.tokenizer is None:
        return None, "this model has no tokenizer; use /v1/completions with token ids"
    try:
        return Chat.of(llm.config, llm.tokenizer, max_pixels=max_pixels), ""
    except ConfigError as error:
        return None, str(error)


def _longest(llm: LLM) -> int:
    """Most tokens that one request may have: found by halving, since pages make it a step function."""
    low, high = 1, llm.engine.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if llm.engine.scheduler.can_ever_hold(middle) else (low, middle - 1)
    return low
