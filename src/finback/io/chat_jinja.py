"""Chats of models that bring a Jinja template along (`chat_template` in tokenizer_config.json, or chat_template.jinja).

A template writes control tokens and what people typed into one string. To tell them apart, every spelling of a control
token in what people typed gets a mark inside it before the template runs: a character that occurs nowhere else. What
still reads as a control token afterwards was written by the template; then the marks are taken out again. Templates may
cut, strip and compare the texts as they like.

Templates are programs from a download: they run in Jinja's sandbox, which gives them no way to files or modules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from finback.base.runtime import ConfigError, RequestError
from finback.io.chat_parser import DsmlParser
from finback.io.conversation import ChatOptions, ChatParser, Control, Image, Message, Piece, Tool, ToolCall
from finback.io.text import Tokenizer

_END_THINK, _THINK = "</think>", "<think>"


class JinjaChat:
    """`ChatFormat` of a template. Roles of its control tokens are their spellings.

    Not known about a template: how its model writes calls, so requests with tools are refused; images. Reasoning is
    parsed where the vocabulary has a token </think> and the prompt ends by opening it. Raises ConfigError: Jinja is not
    installed, the template has a syntax error.
    """

    def __init__(self, template: str, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._template = _compiled(template)
        spelled = {name: i for i in tokenizer.added_ids if (name := tokenizer.id_to_token(i))}
        self._ids = spelled
        # The longest first, as one token's spelling may begin with another's.
        names = "|".join(re.escape(name) for name in sorted(spelled, key=len, reverse=True))
        self._controls = re.compile(f"({names})") if names else None

    def token_id(self, role: str) -> int:
        """The id of a control token, by its spelling or by its role "think" or "end_think"."""
        name = {"think": _THINK, "end_think": _END_THINK}.get(role, role)
        if name not in self._ids:
            raise RequestError(f"this model's vocabulary has no {name} token, which the chat needs")
        return self._ids[name]

    def pieces(self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatOptions) -> Iterator[Piece]:
        """The prompt. Raises RequestError for what the template refuses, images, and tools."""
        if tools:
            raise RequestError(
                "this model's chat template does not say how calls are written, so tools cannot be offered; leave them "
                "out, or describe them in the system message"
            )
        if any(isinstance(part, Image) for m in messages for part in m.parts):
            raise RequestError("this model's chat template holds no images; send text only")
        if options.response_schema is not None:
            messages = _with_schema(messages, options.response_schema)
        return iter(self._split(*self._render(messages, options)))

    def parser(self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatOptions) -> ChatParser:
        """A parser for the answer."""
        reasons = self._opens_reasoning(messages, options)
        ids = {"end_think": self._ids[_END_THINK]} if reasons else {}
        fresh = not (messages and messages[-1].prefix)
        return DsmlParser(self._tokenizer, ids, reasoning=reasons, fresh=fresh, calls=False)

    def _opens_reasoning(self, messages: Sequence[Message], options: ChatOptions) -> bool:
        """Whether the prompt ends with the beginning of the reasoning, whose end the parser would see."""
        written = [piece for piece in self.pieces(messages, (), options) if not isinstance(piece, str) or piece.strip()]
        return _END_THINK in self._ids and bool(written) and written[-1] == Control(_THINK)

    def grammar(self, tools: Sequence[Tool], options: ChatOptions, schema: Mapping[str, Any] | None) -> str:
        """See `ChatFormat.grammar`."""
        if schema is None:
            raise RequestError("this model's chat template does not say how calls are written, so none can be required")
        form = f"json: %json {json.dumps(schema)}\n"
        if not self._opens_reasoning([Message("user", ("x",))], options):
            return f"start: json\n{form}"
        return f"start: REASONING <[{self._ids[_END_THINK]}]> json\nREASONING: /(?s:.*)/\n{form}"

    def _render(self, messages: Sequence[Message], options: ChatOptions) -> tuple[str, str]:
        """What the template writes, and the mark that is in it."""
        mark = _unused(messages)
        guard = self._guard(mark)
        continued = bool(messages) and messages[-1].prefix
        context: dict[str, Any] = {
            "add_generation_prompt": not continued,
            "tools": None,
            **{f"{role}_token": self._name(i) for role, i in self._special()},
            "thinking": options.thinking,
            "enable_thinking": options.thinking,
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        try:
            try:
                text = self._template.render(messages=[_plain(m, guard, _loads) for m in messages], **context)
            except TypeError:  # some templates join the arguments of a call to a text, others read its fields
                text = self._template.render(messages=[_plain(m, guard, str) for m in messages], **context)
        except RequestError:
            raise
        except Exception as error:  # a program that is not ours: whatever goes wrong there is said to the client
            raise RequestError(f"the model's chat template cannot write this conversation: {error}") from None
        if continued:
            text = _up_to(text, guard("".join(str(part) for part in messages[-1].parts)))
        return text, mark

    def _special(self) -> Iterator[tuple[str, int]]:
        tokenizer = self._tokenizer
        found = {"bos": tokenizer.bos_id, "eos": next(iter(tokenizer.eos_ids), None), "pad": tokenizer.pad_id}
        return ((role, i) for role, i in found.items() if i is not None)

    def _name(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def _guard(self, mark: str) -> Callable[[str], str]:
        controls = self._controls
        if controls is None:
            return lambda text: text
        return lambda text: controls.sub(lambda found: found[0][0] + mark + found[0][1:], text)

    def _split(self, text: str, mark: str) -> list[Piece]:
        if self._controls is None:
            return [text]
        parts = self._controls.split(text)
        return [Control(part) if i % 2 else _without(mark, part) for i, part in enumerate(parts) if part]


def _without(mark: str, text: str) -> str:
    """The text as it was typed; a template may have escaped the mark for JSON."""
    return text.replace(mark, "").replace(f"\\u{ord(mark):04x}", "")


def _compiled(template: str) -> Any:
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError(
            "this model's chat format is a Jinja template, which needs jinja2: pip install 'finback[serve]'"
        ) from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise ConfigError(f"the model's chat template cannot be read: {error}") from None


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """As the templates of published models expect it: plain JSON, nothing escaped for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise RequestError(f"the model's chat template refuses this conversation: {message}")


def _plain(message: Message, guard: Callable[[str], str], arguments: Callable[[str], Any]) -> dict[str, Any]:
    """A message as templates read it."""
    text = "\n\n".join(part for part in message.parts if isinstance(part, str))
    found: dict[str, Any] = {"role": message.role, "content": guard(text)}
    if message.reasoning:
        found["reasoning_content"] = guard(message.reasoning)
    if message.calls:
        found["tool_calls"] = [_call(call, guard, arguments) for call in message.calls]
    if message.call_id is not None:
        found["tool_call_id"] = guard(message.call_id)
    return found


def _call(call: ToolCall, guard: Callable[[str], str], arguments: Callable[[str], Any]) -> dict[str, Any]:
    function = {"name": guard(call.name), "arguments": _guarded(arguments(call.arguments), guard)}
    return {"id": guard(call.id), "type": "function", "function": function}


def _guarded(value: Any, guard: Callable[[str], str]) -> Any:
    """The value with every text in it guarded; only now, because JSON may spell a control token in escapes."""
    if isinstance(value, dict):
        return {guard(key): _guarded(entry, guard) for key, entry in value.items()}
    if isinstance(value, list):
        return [_guarded(entry, guard) for entry in value]
    return guard(value) if isinstance(value, str) else value


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_schema(messages: Sequence[Message], schema: Mapping[str, Any]) -> list[Message]:
    """The messages with the form of the answer at the end of the system message, since templates have no place for
    it."""
    asked = f"Answer with JSON that follows this schema:\n{json.dumps(schema, ensure_ascii=False)}"
    if messages and messages[0].role == "system":
        return [Message("system", (*messages[0].parts, asked)), *messages[1:]]
    return [Message("system", (asked,)), *messages]


def _unused(messages: Sequence[Message]) -> str:
    """A character for private use that no message holds."""
    text = repr([(m.parts, m.reasoning, m.calls, m.call_id) for m in messages])
    return next(c for c in map(chr, range(0xE000, 0xF8FF)) if c not in text and f"\\u{ord(c):04x}" not in text)


def _up_to(text: str, end: str) -> str:
    """`text` up to its last `end`: a prefix goes on where it stops, before anything that closes the message."""
    at = text.rfind(end.strip())
    if at < 0 or not end.strip():
        raise RequestError("this model's chat template changes the last message, so it cannot be gone on from")
    return text[: at + len(end.strip())]
