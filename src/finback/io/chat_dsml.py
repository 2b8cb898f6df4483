"""How DeepSeek's chats write calls of tools: XML-like tags, each of them marked by the control token DSML.

    <DSML calls> <DSML invoke name="f"> <DSML parameter name="k" string="true"> value </DSML parameter>
    ... </DSML invoke> ... </DSML calls>

Releases differ in the name of the outer tag and in a blank after the token; the rest is shared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finback.io.conversation import Control, Image, Piece, ToolCall


@dataclass(frozen=True)
class Dsml:
    """One release's spelling. calls: name of the outer tag. blank: what stands between the token and a tag's name."""

    calls: str
    blank: str

    def tag(self, inside: str, *, closes: bool = False) -> Iterator[Piece]:
        """One tag, its name and attributes given as they stand in it."""
        yield "</" if closes else "<"
        yield Control("dsml")
        yield f"{self.blank}{inside}>"

    def opening(self) -> Iterator[Piece]:
        """What stands in front of the first call: an empty line and the outer tag."""
        yield "\n\n"
        yield from self.tag(self.calls)
        yield "\n"

    def block(self, calls: Sequence[ToolCall]) -> Iterator[Piece]:
        """Calls with all that surrounds them; nothing where there are none."""
        if not calls:
            return
        yield from self.opening()
        for call in calls:
            yield from self._call(call)
        yield from self.tag(self.calls, closes=True)

    def _call(self, call: ToolCall) -> Iterator[Piece]:
        """One call. Arguments that are no JSON object are passed as one string named "arguments"."""
        arguments = _loads(call.arguments)
        if not isinstance(arguments, dict):
            arguments = {"arguments": call.arguments}
        yield from self.tag(f'invoke name="{call.name}"')
        yield "\n"
        for i, (name, value) in enumerate(arguments.items()):
            is_text = isinstance(value, str)
            yield "\n" if i else ""
            yield from self.tag(f'parameter name="{name}" string="{"true" if is_text else "false"}"')
            yield value if is_text else compact(value)
            yield from self.tag("parameter", closes=True)
        yield "\n"
        yield from self.tag("invoke", closes=True)
        yield "\n"


def compact(value: Any) -> str:
    """JSON as DeepSeek's prompts write it: one line, blanks after separators, no escapes where none are needed."""
    return json.dumps(value, ensure_ascii=False)


def joined(parts: Sequence[str | Image]) -> Iterator[Piece]:
    """The parts of a message with an empty line between them."""
    for i, part in enumerate(parts):
        if i:
            yield "\n\n"
        yield part


def marked(template: str) -> Iterator[Piece]:
    """The pieces of a text in which {role} stands for a control token."""
    for i, piece in enumerate(re.split(r"\{(\w+)\}", template)):
        yield Control(piece) if i % 2 else piece


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
