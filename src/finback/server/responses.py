"""/v1/responses: what clients may send there. Plain Python, no torch.

Nothing is stored: `store: true`, `previous_response_id`, `conversation` and `background` are refused. Of the tools only
functions are known. Reasoning is given as text (`reasoning_text`), never encrypted, and may be sent back the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from finback.server import protocol as p


class InputText(p.Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        return {"annotations": (None, []), "logprobs": (None, [])}


class InputImage(p.Strict):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "high"] | None = None

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        return {"file_id": (None,)}


InputParts = str | list[Annotated[InputText | InputImage, Field(discriminator="type")]]


class InputMessage(p.Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: InputParts
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ReasoningText(p.Strict):
    type: Literal["reasoning_text"]
    text: str


class Reasoning(p.Strict):
    """Reasoning of an earlier answer. A summary says nothing that the model wrote."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[dict[str, Any]] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class FunctionCall(p.Strict):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionCallOutput(p.Strict):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: InputParts
    id: str | None = None
    status: str | None = None


def _typed(item: Any) -> Any:
    """Messages may come without a type."""
    return {"type": "message", **item} if isinstance(item, dict) and "role" in item else item


Item = Annotated[
    Annotated[InputMessage | Reasoning | FunctionCall | FunctionCallOutput, Field(discriminator="type")],
    BeforeValidator(_typed),
]


class FunctionTool(p.ToolFunction):
    type: Literal["function"]


class NamedTool(p.Strict):
    type: Literal["function"]
    name: str


class ReasoningOptions(p.Strict):
    effort: Annotated[int, Field(ge=1, le=100)] | str | None = None

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        return dict.fromkeys(("summary", "generate_summary"), (None, "auto", "detailed", "concise"))


class SchemaFormat(p.JsonSchema):
    type: Literal["json_schema"]


class TextOptions(p.Strict):
    format: Annotated[p.TextFormat | p.JsonFormat | SchemaFormat, Field(discriminator="type")] | None = None

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        return {"verbosity": (None, "medium")}


class ResponsesRequest(p.Strict):
    """metadata is given back as it is; user, safety_identifier and prompt_cache_key change nothing: prefixes are cached
    without a key."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    stream: bool = False
    max_output_tokens: p.Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    seed: p.Int64 | None = None

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        return {
            **dict.fromkeys(("store", "background"), (None, False)),
            **dict.fromkeys(("previous_response_id", "conversation", "prompt", "max_tool_calls"), (None,)),
            **dict.fromkeys(("tool_choice", "parallel_tool_calls", "stream", "prompt_cache_retention"), (None,)),
            "stream_options": (None, {}, {"include_obfuscation": False}),
            "truncation": (None, "disabled"),
            "service_tier": (None, "auto", "default"),
        }

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def as_chat(self) -> tuple[p.ChatRequest, list[str]]:
        """The same request to /v1/chat/completions, and for each of its messages the field that it comes from."""
        messages, origins = self._messages()
        choice = self.tool_choice
        form = None if self.text is None else self.text.format
        fields: dict[str, Any] = {
            "messages": messages,
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "tools": [{"type": "function", "function": _without_type(tool)} for tool in self.tools or ()],
            "tool_choice": {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, NamedTool)
            else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "seed": self.seed,
        }
        if isinstance(form, SchemaFormat):
            fields["response_format"] = {"type": "json_schema", "json_schema": _without_type(form)}
        elif form is not None:
            fields["response_format"] = {"type": form.type}
        return p.chat_request(fields, origins), origins

    def _messages(self) -> tuple[list[dict[str, Any]], list[str]]:
        found = [] if self.instructions is None else [("instructions", _message("system", self.instructions))]
        if isinstance(self.input, str):
            found.append(("input", _message("user", self.input)))
            return [message for _, message in found], [origin for origin, _ in found]
        answer: dict[str, Any] | None = None  # what the model wrote in one go is one message
        for i, item in enumerate(self.input):
            if isinstance(item, Reasoning | FunctionCall) or (
                isinstance(item, InputMessage) and item.role == "assistant"
            ):
                if answer is None:
                    answer = _message("assistant", [])
                    found.append((f"input[{i}]", answer))
                _extend(answer, item)
                continue
            answer = None
            if isinstance(item, FunctionCallOutput):
                message = {**_message("tool", _parts(item.output)), "tool_call_id": item.call_id}
            else:
                message = _message(item.role, _parts(item.content))
            found.append((f"input[{i}]", message))
        return [message for _, message in found], [origin for origin, _ in found]


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _without_type(model: p.Strict) -> dict[str, Any]:
    return model.model_dump(by_alias=True, exclude_none=True, exclude={"type"})


def _parts(content: InputParts) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, InputText)
        else {"type": "image_url", "image_url": {"url": part.image_url}}
        for part in content
    ]


def _extend(answer: dict[str, Any], item: InputMessage | Reasoning | FunctionCall) -> None:
    if isinstance(item, FunctionCall):
        function = {"name": item.name, "arguments": item.arguments}
        answer.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, Reasoning):
        texts = [part.text for part in item.content or ()]
        answer["reasoning_content"] = answer.get("reasoning_content", "") + "".join(texts)
    else:
        parts = _parts(item.content)
        answer["content"] += [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
