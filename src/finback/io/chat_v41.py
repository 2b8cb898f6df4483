"""The chat format of DeepSeek-V4.1: how a conversation is written, and which tokens control it.

    BOS [System effort, system text, tools, schema] (User text | System text | Assistant [think] ... EOS)* Assistant
    think

What is unusual: the effort of the reasoning is a sentence in the system text; consecutive user messages and tool
results are one user turn; results are put into the order of their calls; earlier reasoning is dropped unless there are
tools; calls are written in an XML-like markup around the token DSML. Source: DeepSeek's package `deepseek-recipe`,
whose prompts this module equals byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finback.base.runtime import ConfigError, RequestError
from finback.io.chat_deepseek import DeepseekChat
from finback.io.chat_dsml import Dsml, compact, joined, marked
from finback.io.conversation import ChatOptions, Control, Message, Piece, Tool
from finback.io.text import Tokenizer

DEFAULT_EFFORT = 75
DSML = Dsml(calls="calls", blank=" ")

# role -> (spellings from the newest to the oldest, id in the released vocabulary)
TOKENS: dict[str, tuple[tuple[str, ...], int]] = {
    "bos": (("<｜begin▁of▁sentence｜>",), 0),
    "eos": (("<｜end▁of▁sentence｜>",), 1),
    "system": (("<｜System｜>",), 128799),
    "user": (("<｜User｜>",), 128803),
    "assistant": (("<｜Assistant｜>",), 128804),
    "think": (("<think>",), 128821),
    "end_think": (("</think>",), 128822),
    "dsml": (("｜DSML｜",), 128825),
    "latest_reminder": (("<｜latest_reminder｜>",), 128828),
    "image": (("<｜deepseek_image｜>", "<｜image2｜>"), 129264),
}
_RELEASED_VOCABULARY = 129280

# The words the model was trained with; every byte of them matters. {dsml}, {think}, {end} are control tokens.
_EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
_TOOLS_HEAD = """

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{dsml} calls>" block like the following:

<{dsml} calls>
<{dsml} invoke name="$TOOL_NAME">
<{dsml} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{dsml} parameter>
...
</{dsml} invoke>
<{dsml} invoke name="$TOOL_NAME2">
...
</{dsml} invoke>
</{dsml} calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {think}), you MUST output your complete reasoning inside \
{think}...{end_think} BEFORE any tool calls or final response.

Otherwise, output directly after {end_think} with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_TAIL = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
_SCHEMA = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


class DeepseekV41Chat(DeepseekChat):
    """`ChatFormat` of DeepSeek-V4.1 for one vocabulary.

    image_token_id: the config's; None takes the vocabulary's own image token, if it has one. Raises ConfigError where
    the vocabulary lacks a control token.
    """

    dsml = DSML

    def __init__(self, tokenizer: Tokenizer, *, image_token_id: int | None = None):
        found = {role: _find(tokenizer, names, released) for role, (names, released) in TOKENS.items()}
        found["bos"] = tokenizer.bos_id if tokenizer.bos_id is not None else found["bos"]
        found["eos"] = tokenizer.eos_ids[0] if tokenizer.eos_ids else found["eos"]
        found["image"] = image_token_id if image_token_id is not None else found["image"]
        missing = [TOKENS[role][0][0] for role, i in found.items() if i is None and role not in _OPTIONAL]
        if missing:
            raise ConfigError(
                f"the tokenizer has no {', '.join(missing)}, so it cannot write a DeepSeek-V4.1 chat. Use the "
                "checkpoint's own tokenizer.json, or the completions endpoint, which needs no chat format"
            )
        super().__init__(tokenizer, {role: i for role, i in found.items() if i is not None})

    def token_id(self, role: str) -> int:
        """The id of a control token. Raises RequestError for one that this vocabulary does not have."""
        if role not in self._ids:
            raise RequestError(f"this model's vocabulary has no {TOKENS[role][0][0]} token, which the chat needs")
        return self._ids[role]

    def pieces(self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatOptions) -> Iterator[Piece]:
        """The prompt. Raises RequestError where a message with `prefix` is not the last one."""
        self.check_prefixes(messages)
        return _Prompt(messages, self.callable_tools(tools, options), options).pieces()


_OPTIONAL = ("latest_reminder", "image")


def _find(tokenizer: Tokenizer, names: Sequence[str], released: int) -> int | None:
    """The id of a control token: by name, else by its place in a vocabulary as large as the released one."""
    for name in names:
        if (i := tokenizer.token_to_id(name)) in tokenizer.added_ids:
            return i
    return released if tokenizer.vocab_size >= _RELEASED_VOCABULARY and released in tokenizer.added_ids else None


class _Prompt:
    """One conversation on its way to a prompt. `tools` is empty where none may be called."""

    def __init__(self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatOptions):
        # An empty system message says nothing. REF: of reminders in a row, the first one stands.
        said = [m for m in messages if m.role != "system" or m.parts not in ((), ("",))]
        reminders = [m.role == "latest_reminder" for m in said]
        self.messages = [m for i, m in enumerate(said) if not (i and reminders[i - 1] and reminders[i])]
        self.tools, self.options = tools, options

    def pieces(self) -> Iterator[Piece]:
        yield Control("bos")
        rest = self.messages
        first = rest[0] if rest and rest[0].role == "system" else None
        rest = rest[1:] if first is not None else rest
        yield from self._opening(first)
        # REF: the reasoning of a prefix that stands alone is dropped.
        alone = len(self.messages) == 1 and self.options.response_schema is None
        order: dict[str, int] = {}
        at = 0
        while at < len(rest):
            message = rest[at]
            if message.role in ("user", "tool"):
                end = next((i for i in range(at, len(rest)) if rest[i].role not in ("user", "tool")), len(rest))
                yield Control("user")
                yield from _user_turn(rest[at:end], order)
                at = end
                continue
            if message.role == "assistant":
                yield from self._assistant(message, bool(self.tools) or (message.prefix and not alone))
                order = {call.id: i for i, call in enumerate(message.calls)} or order
            else:
                yield Control(message.role)
                yield from joined(message.parts)
            at += 1
        if not (rest and rest[-1].prefix):
            yield Control("assistant")
            yield Control("think" if self.options.thinking else "end_think")
        if self.tools and self.options.tool_choice == "required":
            yield from DSML.opening()

    def _opening(self, system: Message | None) -> Iterator[Piece]:
        """The system turn in front: effort, the first system message, tools, the form of the answer."""
        schema = self.options.response_schema
        if not (system or self.options.thinking or self.tools or schema is not None):
            return
        yield Control("system")
        if self.options.thinking:
            yield _EFFORT.format(DEFAULT_EFFORT if self.options.effort is None else self.options.effort)
        if system is not None:
            yield from joined(system.parts)
        if self.tools:
            yield from marked(_TOOLS_HEAD)
            yield "\n".join(compact(_described(tool)) for tool in self.tools) + _TOOLS_TAIL
        if schema is not None:
            yield _SCHEMA + compact(schema)

    def _assistant(self, message: Message, keeps_reasoning: bool) -> Iterator[Piece]:
        yield Control("assistant")
        if self.options.thinking and keeps_reasoning:
            yield Control("think")
            yield message.reasoning
        yield Control("end_think")
        yield from joined(message.parts)
        yield from DSML.block(message.calls)
        if not message.prefix:
            yield Control("eos")


def _user_turn(messages: Sequence[Message], order: Mapping[str, int]) -> Iterator[Piece]:
    """User messages and tool results as one turn. Results trade places so that they follow the order of their calls;
    results of unknown calls come first."""
    results = iter(sorted((m for m in messages if m.role == "tool"), key=lambda m: order.get(m.call_id or "", 0)))
    for i, message in enumerate(messages):
        if i:
            yield "\n\n"
        if message.role == "user":
            yield from joined(message.parts)
        else:
            yield "<tool_result>"
            yield from joined(next(results).parts)
            yield "</tool_result>"


def _described(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters}
