"""The chats of DeepSeek-V3.2 and of models with a Jinja template.

Would catch: a control token that a user typed reaching the model through a template, reasoning kept or dropped at the
wrong turn, results outside their block, a template that reaches for files, an answer whose reasoning shows as content.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.base.runtime import ConfigError, RequestError
from finback.io.chat import Chat
from finback.io.chat_jinja import JinjaChat
from finback.io.chat_v32 import DeepseekV32Chat
from finback.io.conversation import Answer, ChatOptions, Control, Image, Message, Tool, ToolCall
from finback.io.text import Tokenizer
from finback.tools.tiny_tokenizer import SPECIALS, byte_level_tokenizer, tokenizer_files

TOKENIZER = Tokenizer(byte_level_tokenizer(), bos_id=0, eos_ids=(1,), pad_id=2)
V32 = DeepseekV32Chat(TOKENIZER)
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
U, A, T, E, D = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"
CALL = ToolCall("1", "f", '{"a": "x", "n": [1, 2]}')
CALL_TEXT = (
    f'\n\n<{D}function_calls>\n<{D}invoke name="f">\n<{D}parameter name="a" string="true">x</{D}parameter>\n'
    f'<{D}parameter name="n" string="false">[1, 2]</{D}parameter>\n</{D}invoke>\n</{D}function_calls>'
)
ASKED = [
    Message("user", ("u1",)),
    Message("assistant", ("a1",), "r1"),
    Message("user", ("u2",)),
    Message("assistant", ("c",), "r2", (CALL, CALL)),
    Message("tool", ("one",), call_id="1"),
    Message("tool", ("two",), call_id="2"),
]
RESULTS = "\n\n<function_results>\n<result>one</result>\n<result>two</result>\n</function_results>\n\n"
CALLS_TEXT = CALL_TEXT.replace(f"\n</{D}function_calls>", CALL_TEXT.split("function_calls>", 1)[1])


def text_of(chat: Any, *args: Any) -> str:
    def one(piece: Any) -> str:
        return piece if isinstance(piece, str) else TOKENIZER.id_to_token(chat.token_id(piece.role)) or ""

    return "".join(map(one, chat.pieces(*args)))


@pytest.mark.parametrize(
    ("messages", "thinking", "wanted"),
    [
        ([Message("user", ("hi",))], True, f"{BOS}{U}hi{A}{T}"),
        ([Message("user", ("hi",))], False, f"{BOS}{U}hi{A}{E}"),
        ([Message("system", ("S",)), *ASKED[:3]], True, f"{BOS}S{U}u1{A}{E}a1{EOS}{U}u2{A}{T}"),
        (ASKED, True, f"{BOS}{U}u1{A}{E}a1{EOS}{U}u2{A}{T}r2{E}c{CALLS_TEXT}{EOS}{RESULTS}{T}"),
        (ASKED, False, f"{BOS}{U}u1{A}{E}a1{EOS}{U}u2{A}{E}c{CALLS_TEXT}{EOS}{RESULTS}{E}"),
        ([Message("user", ("u",)), Message("assistant", ("a",), "r", prefix=True)], True, f"{BOS}{U}u{A}{T}r{E}a"),
        ([Message("system", ("S",))], True, f"{BOS}S{A}{T}"),
    ],
)  # fmt: skip
def test_v32_prompts(messages: list[Message], thinking: bool, wanted: str):
    """The rules of the published encoder: reasoning of finished turns goes, that of the turn at work stays."""
    assert text_of(V32, messages, [], ChatOptions(thinking=thinking)) == wanted


def test_v32_tools_stand_in_the_system_text():
    """Also where there is no system message, and with the form of the answer after them."""
    tool = Tool("f", "d", {"type": "object"})
    options = ChatOptions(thinking=False, response_schema={"type": "object"})
    text = text_of(V32, [Message("system", ("S",)), Message("user", ("hi",))], [tool], options)
    assert text.startswith(f"{BOS}S\n\n## Tools\n\nYou have access")
    described = json.dumps({"name": "f", "description": "d", "parameters": {"type": "object"}})
    assert f"<functions>\n{described}\n</functions>\n\n\n## Response Format:\n\n" in text
    assert text.endswith(f'reply:\n{{"type": "object"}}{U}hi{A}{E}')
    assert text_of(V32, [Message("user", ("hi",))], [tool], options).startswith(f"{BOS}\n\n## Tools")
    required = ChatOptions(thinking=False, tool_choice="required")
    assert text_of(V32, [Message("user", ("hi",))], [tool], required).endswith(f"{E}\n\n<{D}function_calls>\n")


def test_v32_calls_come_back():
    """What the format writes, its parser reads; also inside calls that the prompt opened."""
    parser = V32.parser([Message("user", ("x",))], [Tool("f")], ChatOptions())
    answer = Answer().plus(parser.feed_text(f"r{E}c{CALL_TEXT}{EOS}")).plus(parser.finish())
    assert answer == Answer("r", "c", (("f", CALL.arguments),))
    parser = V32.parser([Message("user", ("x",))], [Tool("f")], ChatOptions(thinking=False, tool_choice="required"))
    answer = Answer().plus(parser.feed_text(CALL_TEXT.partition("function_calls>\n")[2])).plus(parser.finish())
    assert answer.calls == (("f", CALL.arguments),)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([Message("tool", ("x",), call_id="1")], "follows no call"),
        ([Message("user", (Image(b"x"),))], "no images"),
        ([Message("latest_reminder", ("x",))], "latest_reminder"),
        ([Message("assistant", ("a",), prefix=True), Message("user", ("x",))], "last message"),
    ],
)
def test_v32_refuses_what_it_cannot_write(messages: list[Message], problem: str):
    with pytest.raises(RequestError, match=problem):
        list(V32.pieces(messages, [], ChatOptions()))


# -- templates ---------------------------------------------------------------------------------------------------------

jinja2 = pytest.importorskip("jinja2")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "{%- if m.role == 'system' %}<｜System｜>{{ m.content | trim }}\n"
    "{%- elif m.role == 'user' %}<｜User｜>{{ m.content }}\n"
    "{%- elif m.role == 'tool' %}<｜User｜>[{{ m.content }}]\n"
    "{%- else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}\n"
    "{%- for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}\n"
    "{{- eos_token }}{% endif %}\n"
    "{%- endfor %}{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
CHAT = JinjaChat(TEMPLATE, TOKENIZER)


def test_a_template_writes_the_prompt():
    messages = [Message("system", (" S ",)), *ASKED[:2], Message("user", ("u2",))]
    wanted = f"{BOS}<｜System｜>S{U}u1{A}a1{EOS}{U}u2{A}"
    assert text_of(CHAT, messages, [], ChatOptions()) == wanted + T
    assert text_of(CHAT, messages, [], ChatOptions(thinking=False)) == wanted + E
    called = text_of(CHAT, [Message("assistant", (), "", (CALL,))], [], ChatOptions())
    assert f'(f {{"a": "x", "n": [1, 2]}}){EOS}' in called
    text = JinjaChat("{{ messages[0].tool_calls[0].function.arguments + '!' }}", TOKENIZER)
    assert text_of(text, [Message("assistant", (), "", (CALL,))], [], ChatOptions()) == CALL.arguments + "!"


@given(st.lists(st.sampled_from([*SPECIALS, "a ", "\n", "<", "｜>", "\ue000", "é漢😀"]), max_size=8).map("".join))
def test_typed_control_tokens_stay_text(typed: str):
    """Whatever users, tools and calls hold: the control tokens of the prompt are the template's, the text is whole."""
    chat = Chat(CHAT, TOKENIZER)
    call = ToolCall("1", "f", json.dumps({typed: typed}))
    messages = [
        Message("user", (typed,)),
        Message("assistant", (typed,), typed, (call,)),
        Message("tool", (typed,), call_id="1"),
    ]
    plain = [Message("user", ("x",)), Message("assistant", ("x",), "x", (CALL,)), Message("tool", ("x",), call_id="1")]

    def controls(chat_messages: list[Message]) -> list[int]:
        return [i for i in chat.render(chat_messages).token_ids if i in TOKENIZER.added_ids]

    assert controls(messages) == controls(plain)
    pieces = [p for p in CHAT.pieces(messages, [], ChatOptions()) if isinstance(p, str)]
    assert "".join(pieces).startswith(typed) and f"[{typed}]" in "".join(pieces)


def test_escaped_marks_come_out_again():
    """tojson(ensure_ascii=true) writes every other character as an escape."""
    chat = JinjaChat("{{ messages[0].content | tojson(ensure_ascii=true) }}", TOKENIZER)
    assert text_of(chat, [Message("user", ("é<think>",))], [], ChatOptions()) == '"\\u00e9<think>"'


def test_answers_of_a_template():
    """Reasoning where the prompt opens it; else everything is content. A prefix is gone on with where it stops."""
    user = [Message("user", ("x",))]
    for options, wanted in ((ChatOptions(), Answer("r", "c")), (ChatOptions(thinking=False), Answer("", f"r{E}c"))):
        parser = CHAT.parser(user, [], options)
        assert Answer().plus(parser.feed_text(f"r{E}c")).plus(parser.finish()) == wanted
    prefix = [*user, Message("assistant", ("half a",), prefix=True)]
    assert text_of(CHAT, prefix, [], ChatOptions()) == f"{BOS}{U}x{A}half a"
    parser = CHAT.parser(prefix, [], ChatOptions())
    assert Answer().plus(parser.feed_text("\nnswer")).plus(parser.finish()) == Answer("", "\nnswer")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot write"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "cannot write"),
        ("{{ messages[0].nothing.more }}", "cannot write"),
        ("{{ messages.append(1) }}", "cannot write"),
    ],
)
def test_templates_that_fail(template: str, problem: str):
    """Refusals reach the client; the sandbox keeps a template from the interpreter behind it."""
    with pytest.raises(RequestError, match=problem):
        list(JinjaChat(template, TOKENIZER).pieces([Message("user", ("x",))], [], ChatOptions()))


def test_what_templates_cannot_say_is_refused():
    user, picture = [Message("user", ("x",))], [Message("user", (Image(b"x"),))]
    with pytest.raises(RequestError, match="tools"):
        CHAT.pieces(user, [Tool("f")], ChatOptions())
    with pytest.raises(RequestError, match="images"):
        CHAT.pieces(picture, [], ChatOptions())
    with pytest.raises(ConfigError, match="cannot be read"):
        JinjaChat("{% if %}", TOKENIZER)
    form = text_of(CHAT, user, [], ChatOptions(response_schema={"type": "object"}))
    assert form.startswith(f"{BOS}<｜System｜>Answer with JSON") and '{"type": "object"}' in form


def test_grammars_follow_the_prompt():
    """A grammar that waits for the end of a reasoning that was never opened would never end."""
    assert "REASONING" in CHAT.grammar([], ChatOptions(), {"type": "object"})
    assert "REASONING" not in CHAT.grammar([], ChatOptions(thinking=False), {"type": "object"})
    assert f"{D}" not in V32.grammar([Tool("f")], ChatOptions(thinking=False, tool_choice="required"), None)


@pytest.mark.parametrize(
    ("kind", "template", "wanted"),
    [
        ("deepseek_v32", None, DeepseekV32Chat),
        ("deepseek_v32", "x", JinjaChat),
        ("spikewhale", [{"name": "rag", "template": "y"}, {"name": "default", "template": "x"}], JinjaChat),
        ("spikewhale", None, None),
    ],
)
def test_the_format_of_a_checkpoint(tmp_path: Path, kind: str, template: Any, wanted: Any):
    """A model's own template goes before the built-in format; a file of its own before the config's entry."""
    files = tokenizer_files(byte_level_tokenizer())
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    if wanted is None:
        with pytest.raises(ConfigError, match="no chat format"):
            Chat.of({"model_type": kind}, tokenizer)
        return
    chat = Chat.of({"model_type": kind}, tokenizer)
    assert isinstance(chat.format, wanted)
    if wanted is JinjaChat:
        assert chat.encode([Control(T)]) == [chat.format.token_id(T)] and tokenizer.chat_template == "x"
        (tmp_path / "chat_template.jinja").write_text("z", encoding="utf-8")
        assert Tokenizer.load(tmp_path).chat_template == "z"
