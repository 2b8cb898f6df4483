"""A chat in the terminal: one line a message, commands that begin with a slash, Ctrl-C stops the answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from finback.base.runtime import FinbackError, RequestError
from finback.engine.request import Delta, SamplingParams
from finback.io.chat import Chat
from finback.io.conversation import Answer, ChatDelta, ChatOptions, Image, Message
from finback.tools.terminal import visible

if TYPE_CHECKING:
    from finback.engine.llm import LLM

EFFORTS = {"low": 50, "high": 75, "max": 100}
HELP = """\
/think [off|low|high|max]  how thoroughly to think; alone: on or off
/image PATH                add an image to the next message
/reset                     forget the conversation
/save PATH                 write the conversation as JSON
/help, /exit
Ctrl-C stops an answer, Ctrl-D leaves."""


@dataclass
class Session:
    """One conversation.

    out: where answers go. dim, plain: what to write before and after reasoning, for a terminal; "" for a file.
    """

    llm: LLM
    sampling: SamplingParams
    options: ChatOptions = field(default_factory=ChatOptions)
    system: str = ""
    out: TextIO = field(default_factory=lambda: sys.stdout)
    dim: str = ""
    plain: str = ""

    def __post_init__(self) -> None:
        if self.llm.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json, so it cannot chat; use finback generate")
        self._chat = Chat.of(self.llm.config, self.llm.tokenizer)
        self._images: list[Image] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [Message("system", (self.system,))] if self.system else []
        self._images = []

    def run(self, lines: Iterator[str]) -> None:
        """Take lines until they end or /exit."""
        for line in lines:
            line = line.strip()
            if line == "/exit":
                return
            try:
                if line.startswith("/"):
                    self._say(self._command(*line[1:].partition(" ")[::2]))
                elif line:
                    self.ask(line)
            except FinbackError as error:
                self._say(f"error: {error}")

    def ask(self, text: str) -> Answer:
        """Send a message and print its answer. What came before Ctrl-C stays in the conversation. Raises FinbackError,
        and leaves the conversation as it was, without the images that were waiting."""
        images, self._images = self._images, []  # dropped on an error, which would come again with every message
        asked = [*self.messages, Message("user", (*images, text))]
        prompt = self._chat.render(asked, options=self.options)
        room = self.llm.engine.max_model_len - len(prompt.token_ids)
        if room < 1:
            raise RequestError("the conversation fills the model's context; /reset begins a new one")
        sampling = replace(self.sampling, max_tokens=min(self.sampling.max_tokens, room))
        answer = self._print(self.llm.stream(prompt.as_prompt(), sampling), asked)
        self.messages = [*asked, Message("assistant", (answer.content,), answer.reasoning)]
        return answer

    def _print(self, stream: Iterator[Delta], asked: list[Message]) -> Answer:
        parser, answer = self._chat.parser(asked, options=self.options), Answer()
        with suppress(KeyboardInterrupt):
            for delta in stream:
                self._show(said := parser.feed(delta.token_ids, delta.text), answer)
                answer = answer.plus(said)
        self._show(said := parser.finish(), answer)
        answer = answer.plus(said)
        self.out.write(self.plain + "\n")
        self.out.flush()
        return answer

    def _show(self, delta: ChatDelta, before: Answer) -> None:
        if delta.reasoning:
            self.out.write(("" if before.reasoning else self.dim) + self._shown(delta.reasoning))
        if delta.content:
            thought = before.reasoning or delta.reasoning
            self.out.write((self.plain + "\n\n" if thought and not before.content else "") + self._shown(delta.content))
        self.out.flush()

    def _shown(self, text: str) -> str:
        return visible(text) if self.dim else text

    def _command(self, name: str, rest: str) -> str:
        rest = rest.strip()
        if name == "reset":
            self.reset()
            return "a new conversation"
        if name == "think":
            return self._think(rest)
        if name == "image":
            self._images.append(Image(_read(rest)))
            return f"{len(self._images)} image(s) go with the next message"
        if name == "save":
            _write(rest, self.as_json())
            return f"wrote {rest}"
        return HELP if name == "help" else f"there is no /{name}\n{HELP}"

    def _think(self, word: str) -> str:
        if word not in ("", "off", *EFFORTS):
            return f"/think takes off, {', '.join(EFFORTS)}, or nothing"
        on = not self.options.thinking if not word else word != "off"
        self.options = replace(self.options, thinking=on, effort=EFFORTS.get(word, self.options.effort))
        return f"thinking is {'on' if on else 'off'}"

    def _say(self, text: str) -> None:
        self.out.write(text + "\n")
        self.out.flush()

    def as_json(self) -> str:
        """The conversation as OpenAI's messages; images are left out."""
        messages = []
        for message in self.messages:
            text = "\n\n".join(part for part in message.parts if isinstance(part, str))
            thoughts = {"reasoning_content": message.reasoning} if message.reasoning else {}
            messages.append({"role": message.role, "content": text, **thoughts})
        return json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n"


def _read(path: str) -> bytes:
    """A file that a person names. Raises RequestError."""
    if not path:
        raise RequestError("/image needs the path of an image file: /image whale.png")
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, RuntimeError) as error:
        raise RequestError(f"{path} cannot be read: {_why(error)}") from None


def _write(path: str, text: str) -> None:
    """Write a file that a person names. Raises RequestError."""
    if not path:
        raise RequestError("/save needs the path of the file to write: /save chat.json")
    try:
        Path(path).expanduser().write_text(text, encoding="utf-8")
    except (OSError, RuntimeError) as error:
        raise RequestError(f"{path} cannot be written: {_why(error)}") from None


def _why(error: Exception) -> str:
    """What the system says about a file, in words alone."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text[:1].lower() + text[1:]


def lines_of_terminal(prompt: str = "> ") -> Iterator[str]:
    """Lines that a person types, with editing and history where Python has readline. Ctrl-C begins the line anew."""
    with suppress(ImportError):
        import readline  # noqa: F401  # importing it is what gives `input` its history
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return
