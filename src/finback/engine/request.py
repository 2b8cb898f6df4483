"""What a caller asks for and what comes back: plain Python, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from finback.base.runtime import RequestError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to pick tokens and when to stop. Names and meanings are vLLM's.

    max_tokens: most new tokens. temperature: 0 picks the likeliest (ties: the lowest id). top_p, top_k, min_p: sample
    only among the likeliest tokens that hold `top_p` of the probability, among the `top_k` likeliest (0: all), among
    those with at least `min_p` of the best one's probability. seed: makes this request's draws repeatable, whatever
    runs beside it. stop: strings that end the text (not part of it). stop_token_ids: ids that end it. ignore_eos: go
    on after the end-of-sequence token. logprobs: report the chosen token's log probability and this many of the
    likeliest."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

        check(isinstance(self.max_tokens, int) and self.max_tokens >= 1, "max_tokens", "an integer >= 1")
        check(0.0 <= self.temperature < float("inf"), "temperature", "a finite number >= 0")
        check(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]")
        check(isinstance(self.top_k, int) and self.top_k >= 0, "top_k", "an integer >= 0 (0: no limit)")
        check(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]")
        check(self.logprobs is None or 0 <= self.logprobs <= 100, "logprobs", "None or 0..100")
        strings = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        check(all(isinstance(s, str) and s for s in strings), "stop", "one or more non-empty strings")
        object.__setattr__(self, "stop", tuple(strings))


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities of one generated position, before temperature. top: (id, logprob), likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class RequestOutput:
    """A finished (or running) request. finish_reason: "stop" (end of sequence, stop string or id), "length"
    (max_tokens or the model's last position), None while it runs."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Delta:
    """What one step added to a request: the text that became certain, and the ids."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclass
class SequenceState:
    """One sequence on its way through the model. `computed` of its tokens have their rows in the store.

    types: per token, -1 text and >= 0 image span; None = all text. images: opaque to this module. pages: page numbers
    by page class.
    """

    tokens: list[int]
    types: list[int] | None = None
    images: Sequence[Any] = ()
    computed: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)

    def context(self, end: int, reach: int) -> list[int]:
        """The `reach` token ids before position `end`, image tokens as -1."""
        start = max(0, end - reach)
        ids = self.tokens[start:end]
        if self.types is None:
            return ids
        return [-1 if kind >= 0 else i for i, kind in zip(ids, self.types[start:end], strict=True)]
