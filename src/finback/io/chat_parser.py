"""The streaming parser of DeepSeek's chat output: reasoning, content and calls in DSML markup.

    reasoning </think> content <DSML calls> <DSML invoke name="f"> <DSML parameter ...> ... </DSML calls>

The input is rewritten so that a control token is one character that text cannot hold (a lone surrogate). Markup and
text that only looks like it are then different letters, and the machine below never has to guess. Where tokens are
known, they decide; where only text is known, spellings do.

Tolerant where models slip: no </think> before the calls, no opening or closing calls tag, a blank after DSML or none,
other releases' tag names, a parameter without its `string` attribute. What follows the calls is dropped. A quoted
opening tag that no call follows is content.

DIFF: DeepSeek's own parser opens the calls at any DSML token, copies names and the values of non-string parameters into
the arguments as they are, and keeps line breaks before markup where a "<" precedes them. Here the arguments of a
complete call are always JSON: names are escaped, and a value that is no JSON becomes a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from finback.io.conversation import CallDelta, ChatDelta
from finback.io.text import Detokenizer, Tokenizer

END_THINK, DSML = "\ud800", "\ud801"  # lone surrogates: no decoded text holds one
_MARKS = {"end_think": END_THINK, "dsml": DSML}
_OUTER = ("calls", "tool_calls", "function_calls")  # V4.1, V4, V3.2
_CALLS = tuple(f"{DSML}{blank}{name}>" for blank in (" ", "") for name in _OUTER)
_INVOKES = tuple(f'<{DSML}{blank}invoke name="' for blank in (" ", ""))
_BLOCKS = tuple("<" + tag for tag in _CALLS)
_BLOCK_ENDS = tuple("</" + tag for tag in _CALLS)
_ENDS = tuple(f"</{DSML}{blank}{name}>" for blank in (" ", "") for name in ("parameter", "invoke")) + _BLOCK_ENDS
_TAG = re.compile(rf"<(/?){DSML} ?(\w+)")
_NAME = re.compile(rf'[^{DSML}]*?name="([^{DSML}]*?)"')
_INVOKE = re.compile(rf'<{DSML} ?invoke name="([^{DSML}]*?)"[^{DSML}>]*>')
_PARAMETER = re.compile(rf'<{DSML} ?parameter name="([^{DSML}]*?)" string="(true|false)"\s*>')


class DsmlParser:
    """`ChatParser` of the DeepSeek formats, and of others that end their reasoning with a control token.

    ids: token ids of "end_think" and "dsml", of those that the vocabulary has. reasoning: the prompt ends inside the
    reasoning. fresh: a new answer, whose leading line breaks are dropped; else the continuation of a text. calls: read
    call markup. in_calls: the prompt has opened the calls already.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ids: Mapping[str, int],
        *,
        reasoning: bool,
        fresh: bool = True,
        calls: bool = True,
        in_calls: bool = False,
    ):
        self._marks = _Marks(tokenizer, {i: _MARKS[role] for role, i in ids.items() if role in _MARKS})
        self.end_think = ids.get("end_think") if reasoning and not in_calls else None
        self._reads_calls = calls
        self._buffer = ""  # marked text that is not understood yet
        self._step: Callable[[], bool] = self._in_calls if in_calls else self._prose
        self._prose_of = "reasoning" if reasoning else "content"
        self._leading = fresh  # dropping line breaks
        self._breaks = ""  # line breaks that belong to the prose unless markup follows
        self._out: dict[str, str] = {"reasoning": "", "content": ""}
        self._pieces: list[CallDelta] = []
        self._count = 0  # calls so far
        self._open = False  # a call is open
        self._arguments = 0  # parameters of the open call so far
        self._is_text = False  # the open parameter is a string

    def feed(self, token_ids: Sequence[int], text: str) -> ChatDelta:
        """See `ChatParser.feed`."""
        return self._take(self._marks.of_tokens(token_ids, text))

    def feed_text(self, text: str) -> ChatDelta:
        """See `ChatParser.feed_text`."""
        return self._take(self._marks.of_text(text))

    def finish(self, *, truncated: bool = False) -> ChatDelta:
        """What was held back. Half a tag is dropped; an open call is closed unless the output was cut off."""
        delta = self._take(self._marks.rest())
        if self._step == self._prose:
            at = self._buffer.find("<" + DSML) if self._reads_calls else -1
            if at < 0:
                self._say(self._buffer)
                self._say_breaks()
        elif self._step == self._value:
            self._end_value(self._buffer[: _held(self._buffer, _ENDS)], complete=not truncated)
        if self._open and not truncated:
            self._end_call()
        self._buffer, self._step = "", self._done
        return _sum(delta, self._drain())

    def _take(self, marked: str) -> ChatDelta:
        self._buffer += marked
        while self._step():
            pass
        return self._drain()

    def _drain(self) -> ChatDelta:
        delta = ChatDelta(self._out["reasoning"], self._out["content"], tuple(_merged(self._pieces)))
        self._out = {"reasoning": "", "content": ""}
        self._pieces = []
        return delta

    # -- states: each returns whether it may be called again with what is left in the buffer --------------------------

    def _done(self) -> bool:
        self._buffer = ""
        return False

    def _prose(self) -> bool:
        """Reasoning or content, up to the end of the reasoning or the first call."""
        buffer = self._buffer
        end = buffer.find(END_THINK)
        start = buffer.find("<" + DSML) if self._reads_calls else -1
        if start >= 0 and (end < 0 or start < end):
            opened, read = _opening(buffer[start:])
            if opened:
                self._say(buffer[:start])
                self._breaks = ""
                self._buffer, self._step = buffer[start + read :], self._in_calls
            else:
                past = start if opened is None else start + 2
                self._say(buffer[:past])
                self._buffer = buffer[past:]
            return opened is not None
        if end >= 0:
            self._say(buffer[:end])
            if self._prose_of == "reasoning":
                self._breaks, self._prose_of, self._leading = "", "content", True
            else:  # a second one vanishes, but counts as text
                self._say_breaks()
                self._leading = False
            self._buffer = buffer[end + 1 :]
            return True
        keep = 1 if self._reads_calls and buffer.endswith("<") else 0
        self._say(buffer[: len(buffer) - keep])
        self._buffer = buffer[len(buffer) - keep :]
        return False

    def _in_calls(self) -> bool:
        """Between tags."""
        match = _TAG.search(self._buffer)
        if match is None:
            return False
        self._buffer = self._buffer[match.start() :]
        rest = self._buffer[match.end() - match.start() :]
        closes, name = match[1] == "/", match[2]
        if closes:
            if not rest:
                return False  # the name may go on
            self._buffer = rest
            if name == "invoke" or name in _OUTER:
                self._end_call()
            if name in _OUTER:
                self._step = self._done
            return True
        if name == "parameter":
            return self._parameter(rest)
        if name == "invoke":
            return self._invoke(rest)
        if not rest:
            return False
        self._buffer = rest
        return True

    def _invoke(self, rest: str) -> bool:
        match = _INVOKE.match(self._buffer)
        if match is None and DSML not in rest:
            return False
        self._end_call()
        if match is None:  # damaged: its parameters have no call
            self._buffer = rest
            return True
        self._buffer = self._buffer[match.end() :]
        self._open, self._arguments = True, 0
        self._pieces.append(CallDelta(self._count, match[1]))
        self._count += 1
        return True

    def _parameter(self, rest: str) -> bool:
        match = _PARAMETER.match(self._buffer)
        if match is not None:
            self._start_value(match[1], match[2] == "true")
            self._buffer = self._buffer[match.end() :]
            return True
        if DSML not in rest:
            return False
        head, closed, after = rest.partition(">")
        name = _NAME.match(head)
        if closed and DSML not in head and name is not None:
            self._start_value(name[1], 'string="true"' in head)
            self._buffer = after
        else:
            self._buffer = rest
        return True

    def _start_value(self, name: str, is_text: bool) -> None:
        self._is_text, self._step = is_text, self._value
        before, quote = ", " if self._arguments else "{", '"' if is_text else ""
        self._argue(f"{before}{_quoted(self._plain(name))}: {quote}")
        self._arguments += 1

    def _value(self) -> bool:
        """Inside a parameter, up to a closing tag."""
        buffer, at = self._buffer, 0
        while (at := buffer.find("</" + DSML, at)) >= 0:
            tail = buffer[at:]
            if (tag := next((t for t in _ENDS if tail.startswith(t)), None)) is not None:
                self._end_value(buffer[:at], complete=True)
                self._buffer = buffer[at + len(tag) :] if "parameter" in tag else tail
                self._step = self._in_calls
                return True
            if _begins(tail, _ENDS):
                break
            at += 1
        if self._is_text:
            cut = _held(buffer, _ENDS)
            self._argue(_quoted(self._plain(buffer[:cut]))[1:-1])
            self._buffer = buffer[cut:]
        return False

    def _end_value(self, text: str, *, complete: bool) -> None:
        text = self._plain(text)
        if self._is_text:
            self._argue(_quoted(text)[1:-1] + ('"' if complete else ""))
        else:
            self._argue(_quoted(text) if complete and not _is_json(text) else text)

    def _end_call(self) -> None:
        if self._open:
            self._argue("}" if self._arguments else "{}")
            self._open = False

    # -- output ----------------------------------------------------------------------------------------------------

    def _argue(self, text: str) -> None:
        if self._open and text:
            self._pieces.append(CallDelta(self._count - 1, None, text))

    def _say(self, text: str) -> None:
        """Add prose. Line breaks wait for what follows them."""
        text = self._plain(text)
        if self._leading:
            text = text.lstrip("\n")
            if not text:
                return
            self._leading = False
        kept = text.rstrip("\n")
        if kept:
            self._out[self._prose_of] += self._breaks + kept
            self._breaks = ""
        self._breaks += text[len(kept) :]

    def _say_breaks(self) -> None:
        self._out[self._prose_of] += self._breaks
        self._breaks = ""

    def _plain(self, marked: str) -> str:
        return self._marks.plain(marked)


class _Marks:
    """Rewrites control tokens as single characters, and back."""

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[int, str]):
        self._marks = dict(marks)
        self._spelled = {mark: tokenizer.id_to_token(i) or "" for i, mark in marks.items()}
        self._detokenizer = Detokenizer(tokenizer, skip_special=True)
        self._ahead = ""  # marked text of tokens whose text did not come yet
        self._credit = 0  # characters that came and are not handed out: part of a control token
        self._half = ""  # text that may be the beginning of a spelling

    def plain(self, marked: str) -> str:
        """The text that `marked` stands for."""
        for mark, text in self._spelled.items():
            marked = marked.replace(mark, text)
        return marked

    def of_tokens(self, token_ids: Sequence[int], text: str) -> str:
        """As much marked text of all tokens so far as the text so far goes. A control token comes out whole."""
        for token in token_ids:
            piece, mark = self._detokenizer.push(token), self._marks.get(token)
            self._ahead += piece if mark is None else piece.removesuffix(self._spelled[mark]) + mark
        self._credit += len(text)
        if self._credit > len(self.plain(self._ahead)):
            self._ahead += self._detokenizer.finish()
        released = 0
        while released < len(self._ahead):
            cost = len(self._spelled.get(self._ahead[released], " "))
            if cost > self._credit:
                break
            self._credit -= cost
            released += 1
        out, self._ahead = self._ahead[:released], self._ahead[released:]
        return out

    def of_text(self, text: str) -> str:
        """The marked text that is certain now."""
        self._half += text
        for mark, spelled in self._spelled.items():
            self._half = self._half.replace(spelled, mark)
        cut = _held(self._half, tuple(self._spelled.values()))
        out, self._half = self._half[:cut], self._half[cut:]
        return out

    def rest(self) -> str:
        """Text that began like a control token and did not become one (a stop string ended inside it)."""
        out = self._half + self.plain(self._ahead)[: self._credit]
        self._half, self._ahead, self._credit = "", "", 0
        return out


def _opening(text: str) -> tuple[bool | None, int]:
    """Whether `text`, which starts with a DSML tag, opens the calls (None: that is open), and how much of it then is
    read. A calls tag opens them only if a call or its own end follows, since prose may quote it."""
    block = next((tag for tag in _BLOCKS if text.startswith(tag)), "")
    rest = text[len(block) :].lstrip() if block else text
    followers = _INVOKES + (_BLOCK_ENDS if block else _BLOCKS)
    if rest.startswith(followers):
        return True, len(text) - len(rest)
    return (None if _begins(rest, followers) else False), 0


def _begins(text: str, tags: Sequence[str]) -> bool:
    """Whether more text could make one of `tags` out of `text`."""
    return any(tag.startswith(text) for tag in tags)


def _held(text: str, tags: Sequence[str]) -> int:
    """Where the longest end of `text` begins that may still become one of `tags`; len(text) where none does."""
    longest = max((len(tag) for tag in tags), default=1) - 1
    start = max(0, len(text) - longest)
    return next((i for i in range(start, len(text)) if _begins(text[i:], tags)), len(text))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _merged(pieces: Sequence[CallDelta]) -> list[CallDelta]:
    """Neighbouring pieces of one call as one."""
    out: list[CallDelta] = []
    for piece in pieces:
        if out and out[-1].index == piece.index:
            out[-1] = CallDelta(piece.index, out[-1].name, out[-1].arguments + piece.arguments)
        else:
            out.append(piece)
    return out


def _sum(one: ChatDelta, other: ChatDelta) -> ChatDelta:
    return ChatDelta(
        one.reasoning + other.reasoning, one.content + other.content, tuple(_merged([*one.calls, *other.calls]))
    )
