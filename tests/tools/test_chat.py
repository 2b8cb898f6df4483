"""The chat in the terminal: what it keeps of a conversation, what its commands do, what Ctrl-C stops.

Would catch: an interrupted answer that ends the program or is lost, a failed message that stays in the conversation.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finback.base.runtime import NonFiniteError, RequestError
from finback.engine.request import Delta, SamplingParams
from finback.io.text import Tokenizer
from finback.tools.chat import Session
from finback.tools.tiny_tokenizer import byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer(), bos_id=0, eos_ids=(1,), pad_id=2)


class ScriptedLLM:
    """Says `says` token by token; an exception in place of a text is raised after two tokens."""

    tokenizer, config = TOKENIZER, {"model_type": "deepseek_v41"}
    engine = SimpleNamespace(max_model_len=600)

    def __init__(self) -> None:
        self.says, self.error, self.prompts = "hm</think>Yes.", None, []
        self.closed = False

    def stream(self, prompt: Any, sampling: SamplingParams) -> Iterator[Delta]:
        self.prompts.append(TOKENIZER.decode(prompt["prompt_token_ids"]))
        try:
            for i, token in enumerate(TOKENIZER.encode(self.says, allow_special=True)):
                if self.error is not None and i == 2:
                    raise self.error
                yield Delta(TOKENIZER.decode([token]), (token,))
            yield Delta("", (1,), "stop")
        finally:
            self.closed = True


@pytest.fixture
def llm() -> ScriptedLLM:
    return ScriptedLLM()


@pytest.fixture
def session(llm: ScriptedLLM) -> Session:
    return Session(llm, SamplingParams(max_tokens=50), out=io.StringIO(), dim="<", plain=">", system="S")  # type: ignore[arg-type]


def said(session: Session) -> str:
    assert isinstance(session.out, io.StringIO)
    return session.out.getvalue()


def test_a_conversation_goes_on(session: Session, llm: ScriptedLLM, tmp_path: Path):
    """Both turns are in the second prompt, reasoning is shown apart and saved, /exit leaves what follows unread."""
    session.run(iter(["one", "", "two", f"/save {tmp_path}/x.json", "/exit", "three"]))
    assert said(session).startswith("<hm>\n\nYes.>\n")
    assert len(llm.prompts) == 2 and "S<｜User｜>one<｜Assistant｜></think>Yes." in llm.prompts[1]
    saved = json.loads((tmp_path / "x.json").read_text())["messages"]
    assert [m["role"] for m in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert saved[2] == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}


def test_ctrl_c_stops_the_answer_only(session: Session, llm: ScriptedLLM):
    llm.says, llm.error = "</think>abcdef", KeyboardInterrupt()
    session.run(iter(["one"]))
    assert session.messages[-1].role == "assistant" and llm.closed
    llm.error = None
    session.run(iter(["two"]))
    assert len(llm.prompts) == 2


def test_a_failed_message_leaves_no_trace(session: Session, llm: ScriptedLLM):
    llm.error = NonFiniteError("NaN in layer 1")
    session.run(iter(["one", "/image /nowhere.png"]))
    assert "error: NaN in layer 1" in said(session) and "nowhere.png" in said(session)
    assert [m.role for m in session.messages] == ["system"]


def test_an_image_that_cannot_be_used_is_let_go(session: Session, llm: ScriptedLLM, tmp_path: Path):
    """It came back with every later message, so that nothing could be said any more."""
    (tmp_path / "x.png").write_bytes(b"no picture")
    session.run(iter([f"/image {tmp_path / 'x.png'}", "what is this", "hello"]))
    assert "error" in said(session) and "Yes." in said(session)
    assert "hello" in llm.prompts[-1]


def test_commands(session: Session, llm: ScriptedLLM):
    """/think changes the prompt, /reset empties it, an unknown command is explained and not sent."""
    session.run(iter(["/think max", "one", "/think off", "/reset", "two", "/think", "three", "/think maybe", "/nope"]))
    assert "Effort: 100" in llm.prompts[0]
    assert llm.prompts[1].endswith("two<｜Assistant｜></think>") and "one" not in llm.prompts[1]
    assert llm.prompts[2].endswith("<think>")
    assert len(llm.prompts) == 3 and "/think takes" in said(session) and "there is no /nope" in said(session)


def test_a_full_context_is_said(session: Session, llm: ScriptedLLM):
    session.run(iter(["x y " * 600]))
    assert "/reset" in said(session) and not llm.prompts
    with pytest.raises(RequestError, match="no tokenizer"):
        Session(SimpleNamespace(tokenizer=None), SamplingParams())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/image", "needs the path"),
        ("/image /no/such.png", "/no/such.png cannot be read: no such file or directory"),
        ("/image /", "/ cannot be read: is a directory"),
        ("/save", "needs the path"),
        ("/save /no/such/chat.json", "cannot be written: no such file or directory"),
        ("/image ~nobody-has-this-name/x", "cannot be read"),
    ],
)
def test_files_that_cannot_be_used(session: Session, line: str, problem: str):
    """An error number of the system, or the end of the program, in place of a sentence."""
    session.run(iter([line]))
    assert problem in said(session) and "Errno" not in said(session)


def test_a_terminal_gets_no_control_characters(session: Session, llm: ScriptedLLM):
    """An answer that clears the screen, changes colours or writes over what stands there; a file gets it as it is."""
    llm.says = "\x1b[2Jhm</think>a\tb\r31m\n\x07"
    session.ask("x")
    assert "<\\x1b[2Jhm" in said(session) and "a\tb\\x0d31m\n\\x07" in said(session)
    plain = Session(llm, SamplingParams(max_tokens=50), out=io.StringIO())  # type: ignore[arg-type]
    plain.ask("x")
    assert "\x1b[2Jhm" in said(plain)
