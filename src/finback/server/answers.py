"""What clients get back. A whole answer is what its chunks add up to, so both forms cannot differ. Plain Python, no
torch."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from finback.engine.request import TokenLogprobs, json_logprob
from finback.io.conversation import Answer, ChatDelta
from finback.io.text import Detokenizer, Tokenizer
from finback.server.errors import ApiError


@dataclass(frozen=True)
class Event:
    """What one step added to one choice. finish_reason: on its last event. tokens: how many it took, reasoning of them
    before the end of the reasoning. stop: the stop string that ended it. cached: tokens of the prompt that the prefix
    cache had."""

    index: int
    delta: ChatDelta = field(default_factory=ChatDelta)
    tokens: int = 0
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: int = 0
    stop: str | None = None
    cached: int = 0


@dataclass
class Usage:
    """Tokens of a request. reasoning: of the completion. cached: by prompt, of its first choice."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning: int = 0
    cached: dict[int, int] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


Frame = tuple[str | None, str]
"""One event of a stream: its name, None for OpenAI's nameless ones, and its data."""


class AnyReply(Protocol):
    """One request's answer while it grows: events for a stream, or the whole at the end."""

    id: str
    usage: Usage

    @property
    def finish_reasons(self) -> list[str | None]: ...

    def take(self, event: Event) -> None:
        """Add an event to the whole."""
        ...

    def opening(self) -> Iterator[Frame]:
        """What a stream begins with."""
        ...

    def frames(self, event: Event) -> Iterator[Frame]:
        """What a stream says about the event that was taken last."""
        ...

    def closing(self, *, usage: bool) -> Iterator[Frame]:
        """What a stream ends with. usage: the client asked for it."""
        ...

    def failed(self, error: ApiError) -> Iterator[Frame]:
        """What a stream ends with that could not be finished."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        ...

    def error_body(self, error: ApiError) -> dict[str, Any]:
        """An error before anything was sent."""
        ...


@dataclass
class _Choice:
    answer: Answer = field(default_factory=Answer)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Reply:
    """`AnyReply` of /v1/chat/completions.

    choices: of one prompt, `prompts` of which there are. logprobs: whether they were asked for.
    """

    prefix, chunk_object, whole_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def __init__(
        self, model: str, tokenizer: Tokenizer | None, choices: int, *, prompts: int = 1, logprobs: bool = False
    ):
        self.id, self.model, self.created = f"{self.prefix}-{uuid.uuid4().hex}", model, int(time.time())
        self.usage = Usage()
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._each = choices
        self._choices = [_Choice() for _ in range(choices * prompts)]
        self._call_ids: dict[tuple[int, int], str] = {}

    def take(self, event: Event) -> None:
        """Add an event to the whole."""
        choice = self._choices[event.index]
        choice.answer = choice.answer.plus(event.delta)
        choice.finish_reason = event.finish_reason or choice.finish_reason
        choice.logprobs += event.logprobs
        self.usage.completion_tokens += event.tokens
        self.usage.reasoning += event.reasoning
        prompt, choice_of_prompt = divmod(event.index, self._each)
        if choice_of_prompt == 0:
            self.usage.cached[prompt] = event.cached

    @property
    def finish_reasons(self) -> list[str | None]:
        return [choice.finish_reason for choice in self._choices]

    def opening(self) -> Iterator[Frame]:
        for index in range(len(self._choices)):
            chunk = self._chunk([self._chunk_choice(index, {"role": "assistant", "content": ""}, Event(index))])
            yield None, dumps(chunk)

    def frames(self, event: Event) -> Iterator[Frame]:
        if event.delta or event.finish_reason or (self._logprobs and event.logprobs):
            yield None, dumps(self._chunk([self._chunk_choice(event.index, self._delta(event), event)]))

    def closing(self, *, usage: bool) -> Iterator[Frame]:
        if usage:
            yield None, dumps({**self._chunk([]), "usage": self.usage.as_json()})
        yield None, "[DONE]"

    def failed(self, error: ApiError) -> Iterator[Frame]:
        yield None, dumps(error.body())

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def whole(self) -> dict[str, Any]:
        choices = [self._whole_choice(i, choice) for i, choice in enumerate(self._choices)]
        return {**self._chunk(choices), "object": self.whole_object, "usage": self.usage.as_json()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": self.chunk_object, "created": self.created, "model": self.model, "choices": choices
        }  # fmt: skip

    def _chunk_choice(self, index: int, delta: dict[str, Any], event: Event) -> dict[str, Any]:
        found = self._shown_logprobs(event.logprobs) if self._logprobs and event.logprobs else None
        return {"index": index, "delta": delta, "logprobs": found, "finish_reason": event.finish_reason}

    def _delta(self, event: Event) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if event.delta.reasoning:
            delta["reasoning_content"] = event.delta.reasoning
        if event.delta.content:
            delta["content"] = event.delta.content
        calls: list[dict[str, Any]] = []
        for call in event.delta.calls:
            function: dict[str, Any] = {"arguments": call.arguments}
            if call.name is None:
                calls.append({"index": call.index, "function": function})
            else:
                head: dict[str, Any] = {
                    "index": call.index,
                    "id": self._call_id(event.index, call.index),
                    "type": "function",
                }
                calls.append({**head, "function": {"name": call.name, **function}})
        return {**delta, "tool_calls": calls} if calls else delta

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        answer = choice.answer
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": self._call_id(index, i), "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(answer.calls)
            ]
        found = self._shown_logprobs(choice.logprobs) if self._logprobs else None
        return {"index": index, "message": message, "logprobs": found, "finish_reason": choice.finish_reason}

    def _call_id(self, choice: int, call: int) -> str:
        return self._call_ids.setdefault((choice, call), f"call_{uuid.uuid4().hex[:24]}")

    def _shown_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": shown_logprobs(self._tokenizer, logprobs)}


class CompletionReply(Reply):
    """The answer of /v1/completions. Its text is the content of the events; offsets count from the text's start."""

    prefix, chunk_object, whole_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, model: str, tokenizer: Tokenizer | None, choices: int, *, prompts: int = 1, logprobs: bool = False
    ):
        super().__init__(model, tokenizer, choices, prompts=prompts, logprobs=logprobs)
        self._texts = [_Offset(tokenizer) for _ in range(choices * prompts)]

    def opening(self) -> Iterator[Frame]:
        yield from ()

    def _chunk_choice(self, index: int, delta: dict[str, Any], event: Event) -> dict[str, Any]:
        found = self._lists(index, event.logprobs) if self._logprobs and event.logprobs else None
        text = event.delta.content
        return {"index": index, "text": text, "logprobs": found, "finish_reason": event.finish_reason}

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        self._texts[index] = _Offset(self._tokenizer)
        found = self._lists(index, choice.logprobs) if self._logprobs else None
        return {
            "index": index, "text": choice.answer.content, "logprobs": found, "finish_reason": choice.finish_reason
        }  # fmt: skip

    def _lists(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in logprobs:
            text, _ = token_text(self._tokenizer, entry.token_id)
            out["tokens"].append(text)
            first = entry.logprob != entry.logprob  # NaN: the first token of a prompt has none
            out["token_logprobs"].append(None if first else json_logprob(entry.logprob))
            top = {token_text(self._tokenizer, token)[0]: json_logprob(value) for token, value in entry.top}
            out["top_logprobs"].append(None if first else top)
            out["text_offset"].append(self._texts[index].advance(entry.token_id))
        return out


class _Offset:
    """Where the tokens of a text begin in it."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._length, self._detokenizer = 0, None if tokenizer is None else Detokenizer(tokenizer, skip_special=True)

    def advance(self, token: int) -> int:
        """The offset of the next token."""
        start = self._length
        self._length += 0 if self._detokenizer is None else len(self._detokenizer.push(token))
        return start


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def dumps(value: Any) -> str:
    """Compact JSON that every client can read: no NaN, no bare surrogates. One encoder for all of it: making one for
    each token of each stream takes longer than encoding."""
    return _ENCODER.encode(value)


def shown_logprobs(tokenizer: Tokenizer | None, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Log probabilities as OpenAI's chats show them."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text, data = token_text(tokenizer, token)
        return {"token": text, "logprob": json_logprob(logprob), "bytes": data}

    return [
        {**one(entry.token_id, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top]} for entry in logprobs
    ]


def token_text(tokenizer: Tokenizer | None, token: int) -> tuple[str, list[int] | None]:
    """A token as text, and its bytes where the vocabulary knows them: part of a character has no text of its own."""
    if tokenizer is None:
        return str(token), None
    if not tokenizer.is_byte_level:
        text = tokenizer.decode([token])
        return text, list(text.encode())
    data = tokenizer.token_bytes(token)
    try:
        return data.decode(), list(data)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data), list(data)
