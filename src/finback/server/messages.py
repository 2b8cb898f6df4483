"""From a request to what a chat format and an engine take. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from finback.base.runtime import RequestError
from finback.engine.request import SamplingParams
from finback.io.conversation import ChatOptions, Image, Message, Part, Tool, ToolCall
from finback.server import protocol as p
from finback.server.errors import ApiError

# DeepSeek's own service: the words for the effort, and how long an answer may be if the request does not say.
EFFORTS = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "ultra": 100, "max": 100}
DEFAULT_TOKENS, DEFAULT_TOKENS_THINKING, DEFAULT_TOKENS_FULL_EFFORT = 8192, 65536, 131072

Fetch = Callable[[str], bytes]


@dataclass(frozen=True)
class ChatTask:
    """A chat request, ready to be rendered.

    form: what the engine holds the answer to: nothing, JSON that follows `schema`, or calls of `tools`.
    """

    messages: list[Message]
    tools: list[Tool]
    options: ChatOptions
    form: Literal["free", "json", "calls"] = "free"
    schema: dict[str, Any] | None = None

    @property
    def default_tokens(self) -> int:
        """Longest answer where the request names none."""
        if not self.options.thinking:
            return DEFAULT_TOKENS
        return DEFAULT_TOKENS_FULL_EFFORT if self.options.effort == 100 else DEFAULT_TOKENS_THINKING


def chat_task(request: p.ChatRequest, fetch: Fetch) -> ChatTask:
    """Raises ApiError for what cannot be served together, RequestError for an image that `fetch` cannot get."""
    tools, choice = _tools(request.tools, request.tool_choice)
    thinking, effort = thinking_of(request.reasoning_effort, request.thinking, request.chat_template_kwargs)
    if choice == "required" and thinking:
        raise ApiError(
            "a call can be required only without thinking; add reasoning_effort: 'none'", param="tool_choice"
        )
    schema: dict[str, Any] | None = None
    shown: dict[str, Any] | None = None
    if isinstance(request.response_format, p.SchemaFormat):
        schema = shown = request.response_format.json_schema.schema_
    elif isinstance(request.response_format, p.JsonFormat):
        schema, shown = {"type": "object"}, {"type": "json_object"}
    options = ChatOptions(thinking=thinking, effort=effort, tool_choice=choice, response_schema=shown)
    form: Literal["free", "json", "calls"] = "calls" if choice == "required" else "free" if schema is None else "json"
    return ChatTask(messages_of(request.messages, fetch), tools, options, form, schema)


def _tools(specs: Sequence[p.ToolSpec] | None, wanted: Any) -> tuple[list[Tool], Literal["auto", "none", "required"]]:
    tools = tools_of(specs)
    if wanted == "auto" or wanted == "none":
        return tools, wanted
    if not tools:
        raise ApiError("tool_choice asks for a call, but there are no tools", param="tool_choice")
    if isinstance(wanted, p.NamedTool):
        name = wanted.function.name
        tools = [tool for tool in tools if tool.name == name]
        if not tools:
            raise ApiError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return tools, "required"


def tools_of(specs: Sequence[p.ToolSpec] | None) -> list[Tool]:
    """Raises ApiError for two tools of one name."""
    functions = [spec.function for spec in specs or ()]
    for i, function in enumerate(functions):
        if any(function.name == other.name for other in functions[:i]):
            raise ApiError(f"two tools are named {function.name!r}", param=f"tools[{i}].function.name")
    return [Tool(f.name, f.description, f.parameters or {}) for f in functions]


def thinking_of(
    effort: int | str | None, thinking: p.Thinking | None, template: p.TemplateOptions | None = None
) -> tuple[bool, int | None]:
    """Whether to think, and how thoroughly (1..100, None: the default). Whatever says no wins."""
    if isinstance(effort, str) and effort != "none" and effort not in EFFORTS:
        raise ApiError(
            f"reasoning_effort is {effort!r}; use none, {', '.join(EFFORTS)}, or a number in 1..100",
            param="reasoning_effort",
        )
    switched = () if template is None else (template.thinking, template.enable_thinking)
    if effort == "none" or (thinking is not None and thinking.type == "disabled") or False in switched:
        return False, None
    return True, EFFORTS[effort] if isinstance(effort, str) else effort


def messages_of(messages: Sequence[Any], fetch: Fetch) -> list[Message]:
    """Raises ApiError for an order that means nothing: results without calls, calls without results."""
    out: list[Message] = []
    open_calls: list[str] = []
    asked = False  # the last message that was no tool result has calls
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if isinstance(message, p.ToolMessage):
            if not asked:
                raise ApiError(f"{where} is a tool result, but no call precedes it", param=where)
            if message.tool_call_id not in open_calls:
                raise ApiError(
                    f"{where} answers {message.tool_call_id!r}, which is no open call", param=f"{where}.tool_call_id"
                )
            open_calls.remove(message.tool_call_id)
            out.append(Message("tool", _parts(message.content, fetch, where), call_id=message.tool_call_id))
            continue
        _refuse_open(open_calls, i)
        asked = isinstance(message, p.AssistantMessage) and bool(message.tool_calls)
        if isinstance(message, p.AssistantMessage):
            out.append(_assistant(message, where, last=i == len(messages) - 1))
            open_calls = [call.id for call in message.tool_calls or ()]
        else:
            role = "system" if message.role == "developer" else message.role
            out.append(Message(role, _parts(message.content, fetch, where)))
    _refuse_open(open_calls, len(messages))
    return out


def _refuse_open(calls: Sequence[str], at: int) -> None:
    if calls:
        raise ApiError(
            f"messages[{at - 1}] should be followed by results of the calls {', '.join(map(repr, calls))}",
            param=f"messages[{at - 1}]",
        )


def _assistant(message: p.AssistantMessage, where: str, *, last: bool) -> Message:
    if message.content is None and not message.tool_calls:
        raise ApiError(f"{where} has neither content nor tool_calls", param=f"{where}.content")
    if message.prefix and (message.tool_calls or not last):
        raise ApiError("only a last message without calls can be a prefix", param=f"{where}.prefix")
    calls = tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ())
    if len({call.id for call in calls}) < len(calls):
        raise ApiError("two calls have the same id", param=f"{where}.tool_calls")
    parts = tuple(_text_parts(message.content or ""))
    return Message("assistant", parts, message.reasoning_content or "", calls, prefix=message.prefix)


def _text_parts(content: str | Sequence[Any]) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


def _parts(content: str | Sequence[Any], fetch: Fetch, where: str) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (content,)
    out: list[Part] = []
    for i, part in enumerate(content):
        if isinstance(part, p.TextPart):
            out.append(part.text)
            continue
        try:
            out.append(Image(fetch(part.image_url.url)))
        except RequestError as error:
            raise ApiError(str(error), param=f"{where}.content[{i}].image_url.url") from None
    return tuple(out)


def sampling_params(request: p.Sampling, *, max_tokens: int, logprobs: int | None, **form: Any) -> SamplingParams:
    """The engine's words for a request. DIFF: DeepSeek's service overrides the temperature while thinking; here a value
    that was given is used. Raises RequestError, naming the field."""
    bias = request.logit_bias
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=None if bias is None else {int(token): value for token, value in bias.items()},
        allowed_token_ids=request.allowed_token_ids,
        bad_words=request.bad_words,
        seed=request.seed,
        stop=request.stops,
        stop_token_ids=request.stop_token_ids,
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        **form,
    )
