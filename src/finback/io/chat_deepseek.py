"""What the chat formats of DeepSeek's releases share: their answers are read and constrained alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from finback.base.runtime import RequestError
from finback.io.chat_dsml import Dsml
from finback.io.chat_grammar import answer_grammar
from finback.io.chat_parser import DsmlParser
from finback.io.conversation import ChatOptions, ChatParser, Message, Tool
from finback.io.text import Tokenizer

_MARKUP = ("think", "end_think", "dsml")  # what the model itself writes


class DeepseekChat:
    """Base of the `ChatFormat`s. dsml: how the release spells calls. ids: of its control tokens, by role."""

    dsml: ClassVar[Dsml]

    def __init__(self, tokenizer: Tokenizer, ids: Mapping[str, int]):
        self._tokenizer, self._ids = tokenizer, ids

    def callable_tools(self, tools: Sequence[Tool], options: ChatOptions) -> Sequence[Tool]:
        """The tools that the answer may call."""
        return tools if options.tool_choice != "none" else ()

    def check_prefixes(self, messages: Sequence[Message]) -> None:
        """RequestError where a message with `prefix` is not the last one."""
        if any(m.prefix for m in messages[:-1]):
            raise RequestError("only the last message can be a prefix that the model goes on with")

    def parser(self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatOptions) -> ChatParser:
        """A parser for the answer. Without tools, or with tool_choice "none", call markup is content."""
        continued = bool(messages) and messages[-1].prefix
        takes_calls = bool(self.callable_tools(tools, options))
        return DsmlParser(
            self._tokenizer,
            {role: self._ids[role] for role in _MARKUP},
            reasoning=options.thinking and not continued,
            fresh=not continued,
            calls=takes_calls,
            in_calls=takes_calls and options.tool_choice == "required",
        )

    def grammar(self, tools: Sequence[Tool], options: ChatOptions, schema: Mapping[str, Any] | None) -> str:
        """See `ChatFormat.grammar`."""
        return answer_grammar(
            self.dsml,
            end_think_id=self._ids["end_think"],
            dsml_id=self._ids["dsml"],
            thinking=options.thinking,
            schema=schema,
            tools=self.callable_tools(tools, options),
            required=options.tool_choice == "required",
        )
