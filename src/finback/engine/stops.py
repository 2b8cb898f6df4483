"""Stop strings over text that comes in pieces. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, holding back what may still become one.

    The text given out never contains a stop string (but at its end where `include` keeps it) or anything after it,
    whatever pieces it came in.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self._stops, self._include = tuple(stops), include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is now certain."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda pair: pair[0])
            out, self._held = self._held[: at + len(self.matched) * self._include], ""
            return out
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        out, self._held = self._held, ""
        return out if self.matched is None else ""

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
