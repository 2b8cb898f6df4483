"""What the endpoints do: admit a request, turn it into a prompt, run it, account for it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from finback.base.runtime import RequestError
from finback.engine.request import Delta, SamplingParams
from finback.io.chat import Chat, RenderedPrompt
from finback.io.conversation import ChatDelta, ChatOptions
from finback.server import protocol as p
from finback.server.answers import AnyReply, CompletionReply, Event, Reply
from finback.server.anthropic import CountRequest, MessagesReply, MessagesRequest
from finback.server.backend import Backend
from finback.server.errors import ApiError, as_api_error
from finback.server.generation import chat_events, merged, seeded, text_events
from finback.server.live import LiveResponse, Outcome
from finback.server.messages import ChatTask, chat_task, messages_of, sampling_params, thinking_of, tools_of
from finback.server.metrics import Metrics
from finback.server.remote import image_bytes
from finback.server.responses import ResponsesRequest
from finback.server.responses_reply import ResponsesReply

logger = logging.getLogger("finback.server")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """api_keys: any of them is accepted; () asks for none. max_concurrent: choices that may run or wait; more get 429.
    max_body_bytes, max_images, max_image_bytes: of one request. request_timeout: seconds for a whole answer, None for
    any time. remote_images: fetch images from the web. log_prompts: put the text of prompts into the log. version:
    finback's."""

    api_keys: tuple[str, ...] = ()
    max_concurrent: int = 256
    max_body_bytes: int = 64 * 2**20
    max_images: int = 16
    max_image_bytes: int = 20 * 2**20
    request_timeout: float | None = None
    remote_images: bool = False
    log_prompts: bool = False
    version: str = "unknown"


class Service:
    """One model's endpoints. Used from one event loop."""

    def __init__(self, backend: Backend, settings: Settings):
        self.backend, self.settings = backend, settings
        self.metrics = Metrics(backend.model, lambda: backend.stats)
        self.open = 0
        self._stopping = asyncio.Event()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """End every open request with an error, and refuse new ones."""
        self._stopping.set()

    # -- endpoints -------------------------------------------------------------------------------------------------

    def chat(self, request: p.ChatRequest) -> LiveResponse:
        """POST /v1/chat/completions."""
        if request.max_tokens and request.max_completion_tokens and request.max_tokens != request.max_completion_tokens:
            raise ApiError("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError("top_logprobs is given, but logprobs is not true", param="top_logprobs")
        chat = self._need_chat()
        reply = Reply(self.backend.model, self.backend.tokenizer, request.n, logprobs=request.logprobs)
        return self._respond(request, reply, request.n, self._chat_events(request, chat, reply))

    def responses(self, request: ResponsesRequest) -> LiveResponse:
        """POST /v1/responses."""
        asked, origins = request.as_chat()
        reply = ResponsesReply(self.backend.model, self.backend.tokenizer, request)
        return self._respond(asked, reply, 1, self._chat_events(asked, self._need_chat(), reply, origins))

    def messages(self, request: MessagesRequest) -> LiveResponse:
        """POST /v1/messages."""
        asked, origins = request.as_chat()
        reply = MessagesReply(self.backend.model)
        return self._respond(asked, reply, 1, self._chat_events(asked, self._need_chat(), reply, origins))

    async def count_tokens(self, request: CountRequest) -> dict[str, Any]:
        """POST /v1/messages/count_tokens."""
        fields, origins = request.chat_fields()
        asked = p.chat_request(fields, origins)
        _, prompt = await asyncio.to_thread(self._prepare, asked, self._need_chat(), origins)
        return {"input_tokens": len(prompt.token_ids)}

    def _prepare(
        self, request: p.ChatRequest, chat: Chat, origins: Sequence[str] | None
    ) -> tuple[ChatTask, RenderedPrompt]:
        """origins: the fields that the messages come from where they were written otherwise."""
        try:
            task = chat_task(request, self._fetcher())
            return task, chat.render(task.messages, task.tools, task.options)
        except (ApiError, RequestError) as error:
            raise as_api_error(error).moved(origins) from None

    async def _chat_events(
        self, request: p.ChatRequest, chat: Chat, reply: AnyReply, origins: Sequence[str] | None = None
    ) -> AsyncGenerator[Event]:
        task, prompt = await asyncio.to_thread(self._prepare, request, chat, origins)
        reply.usage.prompt_tokens = len(prompt.token_ids)
        self._log_prompt(reply, prompt.token_ids)
        wanted = request.max_completion_tokens or request.max_tokens
        where = "messages" if origins is None else origins[-1].partition("[")[0]
        most = self._most_tokens(len(prompt.token_ids), wanted, task.default_tokens, where)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        sampling = sampling_params(request, max_tokens=most, logprobs=logprobs, **_form(task, chat))
        streams = [
            chat_events(
                i,
                self.backend.generate(prompt.as_prompt(), seeded(sampling, i)),
                chat.parser(task.messages, task.tools, task.options),
                one_call=not request.parallel_tool_calls,
            )
            for i in range(request.n)
        ]
        async for event in merged(streams):
            yield event

    def complete(self, request: p.CompletionRequest) -> LiveResponse:
        """POST /v1/completions."""
        prompts = request.prompts
        count = len(prompts) * request.n
        if request.max_tokens == 0 and not request.echo:
            raise ApiError("max_tokens is 0 and echo is not true, so there is nothing to send", param="max_tokens")
        wants = request.logprobs is not None
        model, tokenizer = self.backend.model, self.backend.tokenizer
        reply = CompletionReply(model, tokenizer, request.n, prompts=len(prompts), logprobs=wants)
        return self._respond(request, reply, count, self._completion_events(request, reply))

    async def _completion_events(self, request: p.CompletionRequest, reply: AnyReply) -> AsyncGenerator[Event]:
        prompts = [await asyncio.to_thread(self._encode, prompt) for prompt in request.prompts]
        reply.usage.prompt_tokens = sum(map(len, prompts))
        streams = []
        for i, ids in enumerate(prompts):
            self._log_prompt(reply, ids)
            most = self._most_tokens(len(ids), request.max_tokens, request.max_tokens, "prompt")
            sampling = sampling_params(request, max_tokens=max(1, most), logprobs=request.logprobs)
            for choice in range(request.n):
                index = i * request.n + choice
                if request.echo:
                    streams.append(self._echo(index, ids, request, seeded(sampling, choice)))
                else:
                    streams.append(text_events(index, self._generate(ids, seeded(sampling, choice))))
        async for event in merged(streams):
            yield event

    async def _echo(
        self, index: int, ids: list[int], request: p.CompletionRequest, sampling: SamplingParams
    ) -> AsyncGenerator[Event]:
        """The prompt as the first event of its own answer, with log probabilities where they are wanted."""
        found = () if request.logprobs is None else tuple(await self.backend.score(ids, request.logprobs))
        last = "length" if request.max_tokens == 0 else None
        yield Event(index, ChatDelta(content=self._need_tokenizer().decode(ids, skip_special=True)), 0, last, found)
        if last is None:
            async for event in text_events(index, self._generate(ids, sampling)):
                yield event

    async def tokenize(self, request: p.TokenizeRequest) -> dict[str, Any]:
        """POST /tokenize."""
        if request.messages is not None:
            chat, messages = self._need_chat(), request.messages
            thinking, effort = thinking_of(request.reasoning_effort, request.thinking)
            options = ChatOptions(thinking=thinking, effort=effort)

            def render() -> list[int]:
                return chat.render(messages_of(messages, self._fetcher()), tools_of(request.tools), options).token_ids

            ids = await asyncio.to_thread(render)
        else:
            tokenizer = self._need_tokenizer()
            bos = request.add_special_tokens and tokenizer.bos_id is not None
            ids = await asyncio.to_thread(tokenizer.encode, request.prompt or "", add_bos=bos)
        return {"tokens": ids, "count": len(ids), "max_model_len": self.backend.max_model_len}

    def detokenize(self, request: p.DetokenizeRequest) -> dict[str, Any]:
        """POST /detokenize."""
        return {"prompt": self._need_tokenizer().decode(request.tokens)}

    def model_card(self) -> dict[str, Any]:
        """One entry of GET /v1/models."""
        length = self.backend.max_model_len
        return {
            "id": self.backend.model,
            "object": "model",
            "created": 0,
            "owned_by": "finback",
            "max_model_len": length,
        }

    # -- parts -----------------------------------------------------------------------------------------------------

    def _respond(
        self, request: p.Sampling, reply: AnyReply, choices: int, events: AsyncGenerator[Event]
    ) -> LiveResponse:
        """Admit a request. Raises ApiError: 503 while stopping or after a failure of the engine, 429 when full."""
        if self.stopping or not self.backend.alive:
            raise ApiError("the server is stopping", status=503, code="shutting_down", retry_after=5)
        if choices > self.settings.max_concurrent:
            raise ApiError(f"at most {self.settings.max_concurrent} choices are served", param="n")
        if self.open + choices > self.settings.max_concurrent:
            raise ApiError(
                f"{self.open} answers are being written; at most {self.settings.max_concurrent} can be",
                status=429, code="queue_full", retry_after=self._retry_after(),
            )  # fmt: skip
        self.open += choices

        def on_end(outcome: Outcome, error: Exception | None) -> None:
            self.open -= choices
            self._account(reply, outcome, error)

        return LiveResponse(
            reply,
            events,
            stream=request.stream,
            usage=request.stream_options is not None and request.stream_options.include_usage,
            stopping=self._stopping,
            timeout=self.settings.request_timeout,
            on_end=on_end,
        )

    def _retry_after(self) -> int:
        """Seconds in which, going by the last requests, a place gets free."""
        stats = self.backend.stats
        answers = max(1, sum(stats.finished.values()))
        seconds = stats.inter_token_latency.total / answers / max(1, stats.running)
        return min(60, max(1, math.ceil(seconds)))

    def _account(self, reply: AnyReply, outcome: Outcome, error: Exception | None) -> None:
        tokens = reply.usage.completion_tokens
        if outcome.first_token is not None:
            self.metrics.first_token.observe(outcome.first_token)
            if tokens > 1:
                self.metrics.per_token.observe((outcome.seconds - outcome.first_token) / (tokens - 1))
        self.metrics.whole.observe(outcome.seconds)
        entry = {
            "event": "request", "id": reply.id, "status": "gone" if outcome.gone else outcome.status,
            "prompt_tokens": reply.usage.prompt_tokens, "completion_tokens": tokens,
            "finish": reply.finish_reasons, "seconds": round(outcome.seconds, 4), "first_token": outcome.first_token,
            "error": outcome.error,
        }  # fmt: skip
        logger.info(json.dumps(entry))
        if error is not None and as_api_error(error).status == 500:
            logger.error("request %s failed", reply.id, exc_info=error)

    def _log_prompt(self, reply: AnyReply, ids: list[int]) -> None:
        if self.settings.log_prompts and self.backend.tokenizer is not None:
            text = self.backend.tokenizer.decode(ids)
            logger.info(json.dumps({"event": "prompt", "id": reply.id, "text": text}))

    def _fetcher(self) -> Callable[[str], bytes]:
        """What gets the images of one request, and counts them."""
        left = [self.settings.max_images]

        def fetch(url: str) -> bytes:
            left[0] -= 1
            if left[0] < 0:
                raise RequestError(f"the request has more than {self.settings.max_images} images")
            return image_bytes(url, remote=self.settings.remote_images, max_bytes=self.settings.max_image_bytes)

        return fetch

    def _most_tokens(self, prompt: int, wanted: int | None, default: int, param: str) -> int:
        """How long the answer may be. Raises ApiError where the prompt, or what was asked for, does not fit."""
        limit = min(self.backend.max_model_len, self.backend.longest)
        asked = max(1, wanted if wanted is not None else 1)
        if prompt + asked > limit:
            raise ApiError(
                f"the prompt has {prompt} tokens; with {asked} of the answer they are more than the {limit} that fit",
                param=param,
                code="context_length_exceeded",
            )
        return wanted if wanted is not None else min(default, limit - prompt)

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        tokenizer = self._need_tokenizer()
        ids = tokenizer.encode(prompt, add_bos=tokenizer.bos_id is not None)
        if not ids:
            raise ApiError("the prompt is empty, and the model has no token to begin with", param="prompt")
        return ids

    def _generate(self, ids: list[int], sampling: SamplingParams) -> AsyncIterator[Delta]:
        return self.backend.generate({"prompt_token_ids": ids}, sampling)

    def _need_tokenizer(self) -> Any:
        if self.backend.tokenizer is None:
            raise ApiError("this model has no tokenizer; send token ids, and leave echo out", param="prompt")
        return self.backend.tokenizer

    def _need_chat(self) -> Chat:
        if self.backend.chat is None:
            raise ApiError(f"this model cannot chat: {self.backend.no_chat}", param="messages")
        return self.backend.chat


def _form(task: ChatTask, chat: Chat) -> dict[str, Any]:
    """The fields of SamplingParams that hold an answer to its form."""
    if task.form == "free":
        return {}
    callable_tools = task.tools if task.options.tool_choice != "none" else []
    if task.form == "json" and not task.options.thinking and not callable_tools:
        return {"json_schema": task.schema}
    return {"grammar": chat.format.grammar(task.tools, task.options, task.schema)}
