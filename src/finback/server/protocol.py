"""What clients may send, as OpenAI names it, with vLLM's additions. Plain Python, no torch.

A field that is not served is refused, never ignored; so is a value that could not be honoured. Fields that change
nothing (`store: false`, `service_tier: "auto"`) may be sent with the value that says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from finback.base.runtime import nearest
from finback.server.errors import ApiError

MAX_DEPTH = 128
_INT64 = 2**63

Int64 = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Strings = str | list[Annotated[str, Field(min_length=1)]]


class Strict(BaseModel):
    """Nothing is converted, nothing unknown is let through, except `neutral` fields with a value that says nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        return {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        neutral = cls.neutral()
        return {k: v for k, v in data.items() if not (k in neutral and any(v is n or v == n for n in neutral[k]))}


# -- messages ----------------------------------------------------------------------------------------------------------


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    url: str
    detail: Literal["auto", "high"] | None = None


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


Texts = str | list[TextPart]
Parts = str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


class Function(Strict):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class Call(Strict):
    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: Function
    index: int | None = None


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Texts


class UserMessage(Strict):
    role: Literal["user"]
    content: Parts


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Texts | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[Call], Field(min_length=1)] | None = None
    prefix: bool = False

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        nothing = (None, [])
        return dict.fromkeys(("refusal", "annotations", "audio", "function_call"), nothing) | {"tool_calls": (None,)}


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Parts
    tool_call_id: str
    name: str | None = None


class ReminderMessage(Strict):
    role: Literal["latest_reminder"]
    content: Texts


AnyMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage | ReminderMessage, Field(discriminator="role")
]
Messages = Annotated[list[AnyMessage], Field(min_length=1)]


# -- tools and forms ---------------------------------------------------------------------------------------------------


class ToolFunction(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]+$", max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        return {"strict": (None, False)}


class ToolSpec(Strict):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonFormat(Strict):
    type: Literal["json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]


class TemplateOptions(Strict):
    thinking: bool | None = None
    enable_thinking: bool | None = None


class StreamOptions(Strict):
    include_usage: bool = False

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        return {"include_obfuscation": (None, False)}


# -- requests ----------------------------------------------------------------------------------------------------------


class Sampling(Strict):
    """Fields of both completion endpoints."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    seed: Int64 | None = None
    stop: Strings | None = None
    stop_token_ids: list[TokenId] = []
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: list[Annotated[str, Field(min_length=1)]] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    user: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are given, but stream is not true")
        if isinstance(self.stop, str) and not self.stop:
            raise ValueError("stop is an empty string")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "metadata": (None,),
    "modalities": (None, ["text"]),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "functions", "function_call"), (None,)),
    **dict.fromkeys(("n", "stream", "top_k", "min_p", "repetition_penalty", "presence_penalty"), (None,)),
    **dict.fromkeys(("frequency_penalty", "stop_token_ids", "bad_words", "min_tokens"), (None,)),
    **dict.fromkeys(("max_tokens", "logprobs", "echo", "parallel_tool_calls", "tool_choice", "suffix"), (None,)),
    "best_of": (None, 1),
    "logit_bias": (None, {}),
}


class ChatRequest(Sampling):
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    response_format: Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")] | None = None
    reasoning_effort: Annotated[int, Field(ge=1, le=100)] | str | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        return _SAYS_NOTHING


def chat_request(fields: dict[str, Any], origins: Sequence[str]) -> ChatRequest:
    """A chat request made from one to another interface; origins[i]: the field of it that messages[i] comes from.
    Raises ApiError (400) in the words of that interface."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise _explained(error, ChatRequest, fields).moved(origins) from None


class CompletionRequest(Sampling):
    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str | Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False

    @classmethod
    def neutral(cls) -> Mapping[str, tuple[Any, ...]]:
        return _SAYS_NOTHING

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more prompts."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[ToolSpec] | None = None
    thinking: Thinking | None = None
    reasoning_effort: Annotated[int, Field(ge=1, le=100)] | str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give one of prompt and messages")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[TokenId]


# -- reading a body ----------------------------------------------------------------------------------------------------

R = TypeVar("R", bound=Strict)


def read_request(body: bytes, kind: type[R]) -> R:
    """A request from the bytes of its body. Raises ApiError (400), which names the field."""
    data = read_json(body)
    if not isinstance(data, dict):
        raise ApiError("the body must be a JSON object")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _explained(error, kind, data) from None


def read_json(body: bytes) -> Any:
    """JSON from untrusted bytes: UTF-8, no NaN, no key twice, not too deep. Raises ApiError (400)."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not valid UTF-8 (byte {error.start})") from None
    try:
        data = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    level, depth = [data], 0
    while level := [v for c in level if isinstance(c, dict | list) for v in (c.values() if isinstance(c, dict) else c)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
    return data


def _too_deep() -> ApiError:
    return ApiError(f"the body is nested more than {MAX_DEPTH} levels deep")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} is given twice")
    return found


def _explained(error: ValidationError, kind: type[Strict], data: Mapping[str, Any]) -> ApiError:
    """The first, deepest complaint as one sentence and the path of its field."""
    found = max(error.errors(include_url=False, include_context=False), key=lambda e: len(e["loc"]))
    first = error.errors(include_url=False, include_context=False)[0]
    unknown = next((e for e in error.errors(include_url=False) if e["type"] == "extra_forbidden"), None)
    kind_of = next((e for e in error.errors(include_url=False) if e["loc"][-1:] == ("type",)), None)
    chosen = kind_of or unknown or (found if found["loc"][:1] == first["loc"][:1] else first)
    path = _path(chosen["loc"], data, absent=chosen["type"] == "missing")
    if chosen["type"] == "extra_forbidden":
        name = str(chosen["loc"][-1])
        hint = nearest(name, kind.model_fields)
        return ApiError(f"{path} is not supported{hint}; leave it out", param=path, code="unsupported_parameter")
    message = chosen["msg"].removeprefix("Value error, ")
    code = "missing_required_parameter" if chosen["type"] == "missing" else "invalid_value"
    return ApiError(f"{path}: {message}" if path else message, param=path or None, code=code)


def _path(loc: tuple[int | str, ...], data: Any, *, absent: bool) -> str:
    """messages[2].content from a location, which also names the branches of unions on the way. absent: its last step is
    not in the data."""
    out = ""
    for step in loc:
        if isinstance(step, int):
            inside = isinstance(data, list) and step < len(data)
            if not isinstance(data, list):
                continue
            data = data[step] if inside else None
            out += f"[{step}]"
        elif isinstance(data, dict) and (step in data or (absent and step == loc[-1])):
            data = data.get(step)
            out += f".{step}" if out else step
    return out
