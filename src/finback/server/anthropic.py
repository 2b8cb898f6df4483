"""/v1/messages: what clients of Anthropic's interface may send, and the events of its answers. Plain Python, no torch.

Differences to know: `thinking.budget_tokens` and the signatures of reasoning are taken and mean nothing here (how
thorough the reasoning is comes from `output_config.effort`); a last message of the assistant is answered, not gone on
with; `cache_control` is not needed, as prefixes are cached anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from finback.engine.request import TokenLogprobs
from finback.server import protocol as p
from finback.server.answers import Frame, dumps
from finback.server.blocks import Block, BlockReply, Said, said
from finback.server.errors import ApiError


class CacheControl(p.Strict):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cacheable(p.Strict):
    cache_control: CacheControl | None = None


class TextBlock(Cacheable):
    type: Literal["text"]
    text: str

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        return {"citations": (None, [])}


class Base64Source(p.Strict):
    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-z]+$")]
    data: str


class UrlSource(p.Strict):
    type: Literal["url"]
    url: str


class ImageBlock(Cacheable):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class ToolUse(Cacheable):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any]


class ToolResult(Cacheable):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] = ""
    is_error: bool = False


class ThinkingBlock(p.Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


UserBlocks = list[Annotated[TextBlock | ImageBlock | ToolResult, Field(discriminator="type")]]
AssistantBlocks = list[Annotated[TextBlock | ToolUse | ThinkingBlock, Field(discriminator="type")]]


class UserTurn(p.Strict):
    role: Literal["user"]
    content: str | Annotated[UserBlocks, Field(min_length=1)]


class AssistantTurn(p.Strict):
    role: Literal["assistant"]
    content: str | AssistantBlocks


class Tool(Cacheable):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]+$", max_length=64)]
    description: str | None = None
    input_schema: dict[str, Any]

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        return {"type": (None, "custom"), "strict": (None, False)}


class ToolChoice(p.Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOptions(p.Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: p.Count | None = None


class OutputFormat(p.Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputOptions(p.Strict):
    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(p.Strict):
    user_id: str | None = None


class CountRequest(p.Strict):
    """A conversation: what /v1/messages/count_tokens takes."""

    model: str | None = None
    messages: Annotated[list[Annotated[UserTurn | AssistantTurn, Field(discriminator="role")]], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None

    def chat_fields(self) -> tuple[dict[str, Any], list[str]]:
        """Fields of the same request to /v1/chat/completions, and where each of its messages comes from."""
        messages, origins = [], []
        if self.system is not None:
            messages.append({"role": "system", "content": _texts(self.system)})
            origins.append("system")
        for i, turn in enumerate(self.messages):
            turns = _user(turn) if isinstance(turn, UserTurn) else [_assistant(turn)]
            messages += turns
            origins += [f"messages[{i}]"] * len(turns)
        fields: dict[str, Any] = {"messages": messages, "tools": [_function(tool) for tool in self.tools or ()]}
        if self.tool_choice is not None:
            fields["tool_choice"] = _choice(self.tool_choice)
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        options = self.output_config or OutputOptions()
        if self.thinking is not None and self.thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
        elif options.effort is not None:
            fields["reasoning_effort"] = options.effort
        if options.format is not None:
            schema = {"name": "output", "schema": options.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields, origins


class MessagesRequest(CountRequest):
    max_tokens: p.Count
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    metadata: Metadata | None = None

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        return {
            "service_tier": (None, "auto", "standard_only"),
            **dict.fromkeys(("stream", "top_k", "stop_sequences", "container"), (None,)),
            **dict.fromkeys(("mcp_servers", "context_management"), (None, [])),
        }

    def as_chat(self) -> tuple[p.ChatRequest, list[str]]:
        """See `CountRequest.chat_fields`."""
        fields, origins = self.chat_fields()
        fields |= {
            "stream": self.stream, "max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": self.top_p,
            "top_k": self.top_k, "stop": self.stop_sequences or None,
        }  # fmt: skip
        return p.chat_request(fields, origins), origins


def _texts(content: str | Sequence[TextBlock]) -> Any:
    return content if isinstance(content, str) else [{"type": "text", "text": block.text} for block in content]


def _function(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError("tool_choice of type tool needs a name", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _user(turn: UserTurn) -> list[dict[str, Any]]:
    """One turn as messages: results of calls are messages of their own."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    out: list[dict[str, Any]] = []
    for block in turn.content:
        if isinstance(block, ToolResult):
            content = block.content if isinstance(block.content, str) else [_part(part) for part in block.content]
            out.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif out and out[-1]["role"] == "user":
            out[-1]["content"].append(_part(block))
        else:
            out.append({"role": "user", "content": [_part(block)]})
    return out


def _assistant(turn: AssistantTurn) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    message: dict[str, Any] = {"role": "assistant", "content": []}
    for block in turn.content:
        if isinstance(block, TextBlock):
            message["content"].append({"type": "text", "text": block.text})
        elif isinstance(block, ThinkingBlock):
            message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        else:
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            call = {"id": block.id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return message


class MessagesReply(BlockReply):
    """The answer of /v1/messages."""

    prefix, call_prefix = "msg", "toolu"

    def opening(self) -> Iterator[Frame]:
        usage = {**self._usage(), "output_tokens": 0}
        message = {**self._message([]), "usage": usage, "stop_reason": None, "stop_sequence": None}
        yield self.frame(said("message_start", message=message))

    def begun(self, block: Block) -> Iterator[Said]:
        empty = Block(block.index, block.kind, name=block.name, call_id=block.call_id)
        yield said("content_block_start", index=block.index, content_block=_shown(empty))

    def added(self, block: Block, text: str, logprobs: tuple[TokenLogprobs, ...]) -> Iterator[Said]:
        kind, key = {
            "reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]  # fmt: skip
        yield said("content_block_delta", index=block.index, delta={"type": kind, key: text})

    def ended(self, block: Block) -> Iterator[Said]:
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": self.id}
            yield said("content_block_delta", index=block.index, delta=delta)
        yield said("content_block_stop", index=block.index)

    def closing(self, *, usage: bool) -> Iterator[Frame]:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self.stop}
        yield self.frame(said("message_delta", delta=delta, usage=self._usage()))
        yield self.frame(said("message_stop"))

    def failed(self, error: ApiError) -> Iterator[Frame]:
        yield "error", dumps(error_body(error))

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return error_body(error)

    def whole(self) -> dict[str, Any]:
        content = [_shown(block, self.id) for block in self.blocks]
        return {**self._message(content), "stop_reason": self._stop_reason(), "stop_sequence": self.stop}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, "usage": self._usage()}

    def _stop_reason(self) -> str:
        if self.stop is not None:
            return "stop_sequence"
        return {"length": "max_tokens", "tool_calls": "tool_use"}.get(self.finish_reason or "", "end_turn")

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens, "output_tokens": usage.completion_tokens,
        }  # fmt: skip


def _shown(block: Block, signature: str = "") -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": signature}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    try:
        arguments = json.loads(block.text or "{}")
    except ValueError:  # cut off
        arguments = {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error as clients of this interface read it."""
    kind = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}.get(error.status)
    kind = kind or ("api_error" if error.status >= 500 else error.body()["error"]["type"])
    where = "" if error.param is None or error.message.startswith(error.param) else f"{error.param}: "
    return {"type": "error", "error": {"type": kind, "message": where + error.message}}
