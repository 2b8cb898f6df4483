"""The chat format of DeepSeek-V3.2: how a conversation is written, and which tokens control it.

    BOS [system text, tools, schema] (User text Assistant (think reasoning end_think | end_think) text calls EOS
    [results] ...)*

What is unusual: the user's turn ends with the opening of the answer, so a system message in between stands bare;
results of calls are no turn of the user but follow the calls in one block; reasoning is kept only since the last
message of the user. Source: the encoder published with the released checkpoint, which has no Jinja template.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from finback.base.runtime import ConfigError, RequestError
from finback.io.chat_deepseek import DeepseekChat
from finback.io.chat_dsml import Dsml, compact, joined, marked
from finback.io.conversation import ChatOptions, Control, Image, Message, Piece, Tool
from finback.io.text import Tokenizer

DSML = Dsml(calls="function_calls", blank="")
TOKENS = {
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "user": "<｜User｜>",
    "assistant": "<｜Assistant｜>",
    "think": "<think>",
    "end_think": "</think>",
    "dsml": "｜DSML｜",
}

# The words the model was trained with; every byte of them matters. {dsml}, {think}, {end_think} are control tokens.
_TOOLS_HEAD = """\
## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{dsml}function_calls>" block like the following as part of your reply to the \
user:
<{dsml}function_calls>
<{dsml}invoke name="$FUNCTION_NAME">
<{dsml}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{dsml}parameter>
...
</{dsml}invoke>
<{dsml}invoke name="$FUNCTION_NAME2">
...
</{dsml}invoke>
</{dsml}function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<{dsml}function_calls>
...
</{dsml}function_calls>

<function_results>
...
</function_results>

{think}...thinking about results{end_think}

Here are the functions available in JSONSchema format:
<functions>
"""
_TOOLS_TAIL = "\n</functions>\n"
_SCHEMA = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


class DeepseekV32Chat(DeepseekChat):
    """`ChatFormat` of DeepSeek-V3.2 for one vocabulary. Raises ConfigError where it lacks a control token."""

    dsml = DSML

    def __init__(self, tokenizer: Tokenizer):
        found = {role: tokenizer.token_to_id(name) for role, name in TOKENS.items()}
        missing = [TOKENS[role] for role, i in found.items() if i not in tokenizer.added_ids]
        if missing:
            raise ConfigError(
                f"the tokenizer has no {', '.join(missing)}, so it cannot write a DeepSeek-V3.2 chat. Use the "
                "checkpoint's own tokenizer files (with a chat_template, if it has one), or the completions endpoint"
            )
        super().__init__(tokenizer, {role: i for role, i in found.items() if i is not None})

    def token_id(self, role: str) -> int:
        """The id of a control token. Raises RequestError for a role that this format does not have."""
        if role not in self._ids:
            raise RequestError(f"a DeepSeek-V3.2 chat has no token for {role}")
        return self._ids[role]

    def pieces(self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatOptions) -> Iterator[Piece]:
        """The prompt. Raises RequestError: images, reminders, results that follow no call, a prefix before the end."""
        self.check_prefixes(messages)
        if any(isinstance(part, Image) for m in messages for part in m.parts):
            raise RequestError("a DeepSeek-V3.2 chat holds no images; send text only")
        return _Prompt(messages, self.callable_tools(tools, options), options).pieces()


class _Prompt:
    """One conversation on its way to a prompt. `tools` is empty where none may be called."""

    def __init__(self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatOptions):
        # Tools and the form of the answer belong to the first system message, which is made up where there is none.
        first = messages[0] if messages and messages[0].role == "system" else Message("system")
        self.head, self.rest = first, list(messages[1:] if first is messages[0] else messages)
        self.tools, self.options = tools, options
        self.last_user = max((i for i, m in enumerate(self.rest) if m.role == "user"), default=-1)

    def pieces(self) -> Iterator[Piece]:
        yield Control("bos")
        yield from joined(self.head.parts)
        if self.tools:
            yield "\n\n"
            yield from marked(_TOOLS_HEAD)
            yield "\n".join(compact(_described(tool)) for tool in self.tools) + _TOOLS_TAIL
        if self.options.response_schema is not None:
            yield "\n\n" + _SCHEMA + compact(self.options.response_schema)
        results = 0  # still to come
        asked = 0
        for i, message in enumerate(self.rest):
            if message.role == "tool":
                if not results:
                    raise RequestError("a tool result follows no call; send the assistant message that made the call")
                yield from self._result(i, message, first=results == asked, last=results == 1)
                results -= 1
                continue
            yield from self._message(i, message)
            results = asked = len(message.calls)
        if not self.rest or (self.rest[-1].role in ("system", "assistant") and not self.rest[-1].prefix):
            # DIFF: the published encoder stops here, and so leaves it to the model whose turn it is.
            yield from (Control("assistant"), self._begin(len(self.rest)))
        if self.tools and self.options.tool_choice == "required":
            yield from DSML.opening()

    def _begin(self, i: int) -> Control:
        """What the answer to message i begins with."""
        return Control("think" if self.options.thinking and i >= self.last_user else "end_think")

    def _message(self, i: int, message: Message) -> Iterator[Piece]:
        if message.role == "user":
            yield Control("user")
            yield from joined(message.parts)
            yield from (Control("assistant"), self._begin(i))
        elif message.role == "assistant":
            if self.options.thinking and i > self.last_user:
                yield message.reasoning
                yield Control("end_think")
            yield from joined(message.parts)
            yield from DSML.block(message.calls)
            if not message.prefix:
                yield Control("eos")
        elif message.role == "system":
            yield from joined(message.parts)
        else:
            raise RequestError(f"a DeepSeek-V3.2 chat has no messages of the role {message.role!r}")

    def _result(self, i: int, message: Message, *, first: bool, last: bool) -> Iterator[Piece]:
        if first:
            yield "\n\n<function_results>"
        yield "\n<result>"
        yield from joined(message.parts)
        yield "</result>"
        if last:
            yield "\n</function_results>\n\n"
            yield self._begin(i)


def _described(tool: Tool) -> dict[str, Any]:
    known = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {key: value for key, value in known.items() if value is not None}
