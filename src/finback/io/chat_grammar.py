"""Grammars (Lark, as `llguidance` reads it) that hold an answer of a DeepSeek chat to the form that was asked for:
JSON after the reasoning, or calls of given tools. Control tokens stand in it by id, so no text can pass for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from finback.io.chat_dsml import Dsml
from finback.io.conversation import Tool

# Lexemes must not be each other's beginning where both may come, or the longer one wins: hence "\n<" in one piece.
_CALLS = r"""
calls: invoke+ "</" {dsml} "{_}{calls}>"
invoke: "<" {dsml} "{_}invoke name=\"" ({names}) "\">\n" parameters? "\n</" {dsml} "{_}invoke>\n"
parameters: "<" parameter ("\n<" parameter)*
parameter: {dsml} "{_}parameter name=\"" KEY "\" string=\"" value
value: "true\">" TEXT {dsml} "{_}parameter>" | "false\">" any "</" {dsml} "{_}parameter>"
any: %json {{}}
KEY: /[^"<>\n]+/
TEXT: /(?s:.*)<\//
"""


def answer_grammar(
    spelling: Dsml,
    *,
    end_think_id: int,
    dsml_id: int,
    thinking: bool,
    schema: Mapping[str, Any] | bool | None = None,
    tools: Sequence[Tool] = (),
    required: bool = False,
) -> str:
    """The grammar of an answer.

    spelling: of the calls. schema: what the content must follow (None: the answer must be calls). tools: those that
    may be called. required: the prompt has opened the calls, so the answer begins with the first one.
    """
    assert schema is not None or required
    dsml = f"<[{dsml_id}]>"
    body = []
    if schema is not None and not required:
        body.append(f"%json {json.dumps(schema)}")
    if tools and not required:
        body.append(rf'"\n\n<" {dsml} "{spelling.blank}{spelling.calls}>\n" calls')
    start = "calls" if required else "answer"
    rules = f"start: REASONING <[{end_think_id}]> {start}\nREASONING: /(?s:.*)/\n" if thinking else f"start: {start}\n"
    if body:
        rules += "answer: " + " | ".join(f"choice{i}" for i in range(len(body))) + "\n"
        rules += "".join(f"choice{i}: {rule}\n" for i, rule in enumerate(body))
    if tools:
        names = " | ".join(json.dumps(tool.name) for tool in tools)
        words = {"{dsml}": dsml, "{_}": spelling.blank, "{calls}": spelling.calls, "{{}}": "{}"}
        calls = _CALLS
        for word, text in words.items():
            calls = calls.replace(word, text)
        rules += calls.replace("{names}", names)  # last: a name may hold anything
    return rules
