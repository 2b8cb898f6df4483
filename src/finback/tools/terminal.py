"""What a model writes, on its way to a terminal."""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """The text with control characters spelled out, line breaks and tabs excepted: raw ones would move the cursor,
    change colours or set the window's title."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
