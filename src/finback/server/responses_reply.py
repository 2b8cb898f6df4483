"""The answers of /v1/responses, whole and as events. Plain Python, no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from finback.engine.request import TokenLogprobs
from finback.server.answers import Frame, dumps, shown_logprobs
from finback.server.blocks import Block, BlockReply, Said, said
from finback.server.errors import ApiError
from finback.server.responses import ResponsesRequest


class ResponsesReply(BlockReply):
    """The answer of /v1/responses. Every event has a name and a number."""

    prefix = "resp"

    def __init__(self, model: str, tokenizer: Any, request: ResponsesRequest):
        super().__init__(model)
        self.created, self._request, self._tokenizer = int(time.time()), request, tokenizer
        self._number = 0

    def opening(self) -> Iterator[Frame]:
        for name in ("response.created", "response.in_progress"):
            yield self.frame(said(name, response=self._response("in_progress")))

    def begun(self, block: Block) -> Iterator[Said]:
        item = self._item(block, "in_progress")
        place = {"item_id": item["id"], "output_index": block.index, "content_index": 0}
        if block.kind == "call":
            yield said("response.output_item.added", output_index=block.index, item={**item, "arguments": ""})
            return
        [part] = item["content"]
        yield said("response.output_item.added", output_index=block.index, item={**item, "content": []})
        yield said("response.content_part.added", **place, part=part)

    def added(self, block: Block, text: str, logprobs: tuple[TokenLogprobs, ...]) -> Iterator[Said]:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind == "call":
            yield said("response.function_call_arguments.delta", **place, delta=text)
        elif block.kind == "reasoning":
            yield said("response.reasoning_text.delta", **place, content_index=0, delta=text)
        else:
            found = self._logprobs(logprobs)
            yield said("response.output_text.delta", **place, content_index=0, delta=text, logprobs=found)

    def ended(self, block: Block) -> Iterator[Said]:
        item = self._item(block, self._status(block))
        place: dict[str, Any] = {"item_id": item["id"], "output_index": block.index}
        if block.kind == "call":
            yield said("response.function_call_arguments.done", **place, arguments=block.text)
        else:
            [part] = item["content"]
            place["content_index"] = 0
            if block.kind == "reasoning":
                yield said("response.reasoning_text.done", **place, text=block.text)
            else:
                yield said("response.output_text.done", **place, text=block.text, logprobs=part["logprobs"])
            yield said("response.content_part.done", **place, part=part)
        yield said("response.output_item.done", output_index=block.index, item=item)

    def closing(self, *, usage: bool) -> Iterator[Frame]:
        whole = self.whole()
        yield self.frame(said(f"response.{whole['status']}", response=whole))

    def failed(self, error: ApiError) -> Iterator[Frame]:
        found = {"code": "server_error", "message": error.message}
        yield self.frame(said("response.failed", response={**self._response("failed"), "error": found}))

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def whole(self) -> dict[str, Any]:
        return self._response("incomplete" if self.finish_reason == "length" else "completed")

    def _status(self, block: Block) -> str:
        cut = self.finish_reason == "length" and block is self.blocks[-1]
        return "incomplete" if cut else "completed"

    def frame(self, event: Said) -> Frame:
        name, fields = event
        number, self._number = self._number, self._number + 1
        return name, dumps({"type": name, "sequence_number": number, **fields})

    def _item_id(self, block: Block) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
        return f"{prefix}_{self.id.removeprefix('resp_')}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **item, **call}
        if block.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": block.text}]
            return {"type": "reasoning", **item, "summary": [], "content": content}
        part = {
            "type": "output_text", "text": block.text, "annotations": [], "logprobs": self._logprobs(block.logprobs)
        }  # fmt: skip
        return {"type": "message", **item, "role": "assistant", "content": [part]}

    def _logprobs(self, found: Any) -> list[dict[str, Any]]:
        return shown_logprobs(self._tokenizer, found) if self._request.wants_logprobs else []

    def _response(self, status: str) -> dict[str, Any]:
        request, usage, ended = self._request, self.usage, status != "in_progress"
        effort = None if request.reasoning is None else request.reasoning.effort
        form = None if request.text is None else request.text.format
        choice = request.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self.model,
            "output": [self._item(block, self._status(block)) for block in self.blocks] if ended else [],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{"strict": None, **tool.model_dump()} for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
            if ended
            else None,
            "user": request.user,
            "metadata": request.metadata or {},
        }
