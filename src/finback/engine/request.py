"""What a caller asks for and what comes back: plain Python, no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finback.base.runtime import ConfigError, FinbackError, RequestError, nearest


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to pick tokens and when to stop. Names and meanings are vLLM's.

    Length: max_tokens, most new tokens; min_tokens, no end-of-sequence token and none of `stop_token_ids` before this
    many. stop: strings that end the text (not part of it unless include_stop_str_in_output). stop_token_ids: ids that
    end it. ignore_eos: go on after the end-of-sequence token.

    Choice: temperature, 0 (and anything below 1e-5) picks the likeliest, ties to the lowest id. min_p, top_k, top_p:
    sample only among tokens with at least `min_p` of the best one's probability, among the `top_k` likeliest (0 or -1:
    all), among the likeliest that hold `top_p` of the probability, in that order. seed: makes this request's draws
    repeatable, whatever runs beside it; None draws a new one.

    Logits, before the temperature: repetition_penalty divides positive and multiplies negative logits of every token
    of the prompt and the output; presence_penalty is taken off once, and frequency_penalty per occurrence, for tokens
    of the output. logit_bias: id -> number in [-100, 100] that is added. allowed_token_ids: only these. bad_words:
    strings or id sequences whose last token is banned where the output ends with the rest of them; a string is banned
    as the text's start and after a blank.

    Form, at most one of the three and with the package's `structured` extra: json_schema (a schema, as JSON text or as
    a mapping; {} is any JSON), regex (the whole output), grammar (Lark).

    logprobs: report the chosen token's log probability and this many of the likeliest. logprobs_mode: "raw_logprobs"
    are the model's own, before any setting above; "processed_logprobs" are those that the token was drawn from (at
    temperature 0: after everything but the temperature), -inf for what was ruled out.

    Raises RequestError, naming the field, for a value that cannot be used."""

    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str | Sequence[int]] = ()
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_mode: str = "raw_logprobs"
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        forms = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(forms) > 1:
            raise RequestError(f"{' and '.join(forms)} are both given; an output has one form, so give one of them")
        if forms and self.ignore_eos:
            raise RequestError(f"{forms[0]} ends the output when it is complete, so ignore_eos cannot be given with it")
        schema = self.json_schema
        self._check(schema is None or isinstance(schema, str | Mapping), "json_schema", "JSON text or a mapping")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            self._check(value is None or (isinstance(value, str) and value != ""), name, "a non-empty string")

    def _check(self, ok: bool, name: str, allowed: str) -> None:
        if not ok:
            raise RequestError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

    def _check_numbers(self) -> None:
        check = self._check
        check(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", "an integer >= 1")
        ok = _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        check(ok, "min_tokens", f"an integer in 0..{self.max_tokens} (max_tokens)")
        ok = _is_number(self.temperature) and 0.0 <= self.temperature < float("inf")
        check(ok, "temperature", "a finite number >= 0")
        check(_is_number(self.top_p) and 0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]")
        check(_is_int(self.top_k) and self.top_k >= -1, "top_k", "an integer >= -1 (0 or -1: no limit)")
        check(_is_number(self.min_p) and 0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]")
        ok = _is_number(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100
        check(ok, "repetition_penalty", "in [0.01, 100] (1: none)")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            check(_is_number(value) and -2.0 <= value <= 2.0, name, "in [-2, 2]")
        check(self.seed is None or _is_int(self.seed), "seed", "None or an integer")
        ok = self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= 100)
        check(ok, "logprobs", "None or an integer in 0..100")
        check(self.logprobs_mode in LOGPROBS_MODES, "logprobs_mode", " or ".join(map(repr, LOGPROBS_MODES)))

    def _check_lists(self) -> None:
        """Check what holds several values, and keep them as tuples."""
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        strings = [self.stop] if isinstance(self.stop, str) else self.stop
        ok = isinstance(strings, Sequence) and all(isinstance(s, str) and s for s in strings)
        self._check(ok, "stop", "one or more non-empty strings")
        words = [self.bad_words] if isinstance(self.bad_words, str) else self.bad_words
        ok = isinstance(words, Sequence) and all(_is_word(w) for w in words)
        self._check(ok, "bad_words", "non-empty strings or non-empty lists of token ids")
        for word in words:
            if isinstance(word, str):
                check_text(word, "bad_words")
        self._check(_are_ids(self.stop_token_ids), "stop_token_ids", "a list of token ids")
        allowed = self.allowed_token_ids
        self._check(allowed is None or (_are_ids(allowed) and len(allowed) > 0), "allowed_token_ids", "None or ids")
        bias = self.logit_bias
        ok = bias is None or (
            isinstance(bias, Mapping)
            and _are_ids(list(bias))
            and all(_is_number(v) and -100 <= v <= 100 for v in bias.values())
        )
        self._check(ok, "logit_bias", "a mapping from token ids to numbers in [-100, 100]")
        object.__setattr__(self, "stop", tuple(strings))
        object.__setattr__(self, "bad_words", tuple(w if isinstance(w, str) else tuple(w) for w in words))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """A float, or an integer that a float can hold."""
    return isinstance(value, float) or (_is_int(value) and abs(value) <= sys.float_info.max)  # type: ignore[arg-type]


def check_text(text: str, what: str) -> None:
    """RequestError for text with half a surrogate pair, which no encoding can hold (JSON's "\\ud83d" alone)."""
    at = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
    if at is not None:
        raise RequestError(f"{what} has {text[at]!r} at place {at}, half of a surrogate pair; send whole characters")


def _are_ids(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(_is_int(i) and i >= 0 for i in value)


def _is_word(value: object) -> bool:
    return bool(value) and (isinstance(value, str) or _are_ids(value))


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and accepted. Greedy output never depends on it.

    method: "auto" (the model's own draft layers where it has some, else no drafts), "model", "ngram" (repeat what
    followed the same few tokens before; any model). num_speculative_tokens: most drafts a step, None = as many as the
    model's block holds (ngram: 5). Fewer than the block uses its first ones; more are refused.

    rule: how sampled requests accept drafts. Each is exact: tokens come from the model's own distribution.
      "coupled": a position's token is drawn as without drafts, by random numbers of (seed, position), and a draft is
        accepted where it is that token; the drafter uses the same numbers. The text is the same with any drafts, none,
        and after a preemption.
      "standard": rejection sampling, token by token. More drafts are accepted than by "coupled"; the text of a seed
        depends on how many were offered at each step.
      "block": the same, judging the block as a whole; accepts most.

    verify_length: "adaptive" weighs each draft's confidence against measured step times, "static" verifies all of
    them; drafters without a confidence are static. prompt_lookup_max, prompt_lookup_min: tokens that "ngram" compares.

    Raises ConfigError for a value that cannot be used."""

    method: str = "auto"
    num_speculative_tokens: int | None = None
    rule: str = "coupled"
    verify_length: str = "adaptive"
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        for name, allowed in _SPECULATIVE_CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                hint = nearest(str(value), allowed)
                raise ConfigError(f"speculative {name} is {value!r}{hint}; use one of {', '.join(allowed)}")
        count = self.num_speculative_tokens
        if count is not None and (not _is_int(count) or count < 1):
            raise ConfigError(f"num_speculative_tokens is {count!r}; it must be None or an integer >= 1")
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if not (_is_int(low) and _is_int(high) and 1 <= low <= high):
            raise ConfigError(f"prompt_lookup_min, _max are {low!r}, {high!r}; they must be integers, 1 <= min <= max")


_SPECULATIVE_CHOICES = {
    "method": ("auto", "model", "ngram"),
    "rule": ("coupled", "standard", "block"),
    "verify_length": ("adaptive", "static"),
}


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities of one generated position (see `SamplingParams.logprobs_mode`). top: (id, logprob),
    likeliest first, ties by id. What was ruled out has -inf, which JSON cannot hold: send `json_logprob` of it."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def json_logprob(value: float) -> float | None:
    """A log probability as JSON can hold it: None (null) for -inf."""
    return None if value == float("-inf") else value


@dataclass
class RequestOutput:
    """A finished (or running) request.

    finish_reason: "stop" (end of sequence, stop string or id), "length" (max_tokens or the model's last position),
    "abort" (given up by whoever asked), "error" (see `error`; what came before it stands), None while it runs.
    cached_tokens: tokens of the prompt that the prefix cache had.
    """

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    request_id: str = ""
    cached_tokens: int = 0
    error: FinbackError | None = None


@dataclass(frozen=True)
class Delta:
    """What one step added to a request: the text that became certain, and the ids (several where drafts were accepted,
    with one entry of `logprobs` each where they are wanted). stop: the stop string that ended it, None for any other
    end. cached_tokens: of the whole request, see RequestOutput."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: FinbackError | None = None
    stop: str | None = None
    cached_tokens: int = 0


@dataclass
class SequenceState:
    """One sequence on its way through the model. `computed` of its tokens have their rows in the store.

    types: per token of the prompt, -1 text and >= 0 image span; None = all text, as generated tokens always are.
    images: opaque to this module.
    """

    tokens: list[int]
    types: list[int] | None = None
    images: Sequence[Any] = ()
    computed: int = 0

    def types_of(self, start: int, count: int) -> list[int] | None:
        """Types of `count` tokens from position `start` on, drafts included; None = all text."""
        if self.types is None or start >= len(self.types):
            return None
        types = self.types[start : start + count]
        return types + [-1] * (count - len(types))

    def context(self, end: int, reach: int) -> list[int]:
        """The `reach` token ids before position `end`, image tokens as -1."""
        start = max(0, end - reach)
        ids = self.tokens[start:end]
        types = self.types_of(start, len(ids))
        return ids if types is None else [-1 if kind >= 0 else i for i, kind in zip(ids, types, strict=True)]
