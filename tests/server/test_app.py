"""What must hold whatever clients do: odd requests, clients that go away, limits, keys, stopping.

Would catch: a 500 for a malformed request, a slot that a vanished client keeps, an answer that depends on how the
engine cut it, a prompt in the log, a server that drops its open requests silently.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from importlib import resources
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.io.conversation import ChatOptions, Message, Tool
from finback.server.answers import Reply
from finback.server.generation import chat_events

USER = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLER = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "x", "tool_call_id": "1"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def backend(kit: Any) -> Any:
    return kit.FakeBackend()


@pytest.fixture(scope="module")
def http(kit: Any, backend: Any) -> Any:
    with kit.running(backend, max_body_bytes=2**20) as client:
        yield client


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


ODD = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ""}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [None]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"messages": [RESULT]}, "messages[0]"),
    ({"messages": [CALLER]}, "messages[0]"),
    ({"messages": [CALLER, *USER]}, "messages[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL, CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [CALLER, {**RESULT, "tool_call_id": "9"}]}, "messages[1].tool_call_id"),
    ({"messages": [{"role": "assistant", "content": "a", "prefix": True}, *USER]}, "messages[0].prefix"),
    ({"messages": [{"role": "user", "content": " " * 100_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
    ({"messages": USER, "temperature": "hot"}, "temperature"),
    ({"messages": USER, "temperature": -1}, "temperature"),
    ({"messages": USER, "top_p": 0}, "top_p"),
    ({"messages": USER, "n": 0}, "n"),
    ({"messages": USER, "n": 10**9}, "n"),
    ({"messages": USER, "seed": 10**400}, "seed"),
    ({"messages": USER, "max_tokens": 10**8}, "messages"),
    ({"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"messages": USER, "stop": [""]}, "stop[0]"),
    ({"messages": USER, "logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"messages": USER, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": USER, "store": True}, "store"),
    ({"messages": USER, "mystery": 1}, "mystery"),
    ({"messages": USER, "tool_choice": "required", "reasoning_effort": "none"}, "tool_choice"),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools[1].function.name"),
    ({"messages": USER, "response_format": {"type": "xml"}}, "response_format"),
    ({"messages": USER, "metadata": deep(200)}, None),
    ({"messages": USER, "reasoning_effort": 0}, "reasoning_effort"),
    ({"messages": USER, "reasoning_effort": 101}, "reasoning_effort"),
    ({"messages": USER, "reasoning_effort": "banana"}, "reasoning_effort"),
]  # fmt: skip


def test_odd_requests_get_a_400_that_names_the_field(http: httpx.Client):
    """Every row, and after all of them an ordinary request."""
    for body, param in ODD:
        got = http.post(CHAT, content=json.dumps(body), headers={"content-type": "application/json"})
        error = got.json().get("error", {})
        assert (got.status_code, error.get("type")) == (400, "invalid_request_error"), (body, got.text)
        assert error["param"] == param, (body, error)
    assert http.post(CHAT, json={"messages": USER}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b'{"messages": [], "messages": []}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "top_p": NaN}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": 1e999}', 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "' + b"x" * 2**20 + b'"}', 413),
    ],
)
def test_bodies_that_are_no_request(http: httpx.Client, body: bytes, status: int):
    for path in (CHAT, TEXT, "/tokenize"):
        got = http.post(path, content=body)
        assert got.status_code == status and "message" in got.json()["error"], got.text
    assert http.post(TEXT, json={"prompt": "x"}).status_code == 200


def test_unusual_requests_that_are_served(http: httpx.Client, backend: Any, kit: Any):
    """Documented renderings: only a system message, turns of one role in a row, a trailing assistant, parts,
    developer."""
    for messages, wanted in (
        ([{"role": "system", "content": "S"}], "S<｜Assistant｜><think>"),
        ([{"role": "developer", "content": "S"}], "S<｜Assistant｜><think>"),
        (USER * 2, "<｜User｜>hi\n\nhi<｜Assistant｜><think>"),
        ([*USER, {"role": "assistant", "content": "a"}], "</think>a<｜end▁of▁sentence｜><｜Assistant｜><think>"),
        ([*USER, {"role": "assistant", "content": "a", "prefix": True}], "<think></think>a"),
        ([{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}], "a\n\nb<｜Assistant｜><think>"),
        ([{"role": "user", "content": ""}], "<｜User｜><｜Assistant｜><think>"),
    ):  # fmt: skip
        got = http.post(CHAT, json={"messages": messages, "temperature": None, "n": 1, "store": False})
        assert got.status_code == 200, got.text
        assert kit.TOKENIZER.decode(backend.asked[-1][0]["prompt_token_ids"]).endswith(wanted)


@pytest.mark.parametrize(
    ("fields", "number"),
    [({}, 75),
     *(({"reasoning_effort": word}, n) for word, n in (("low", 50), ("high", 75), ("xhigh", 75), ("max", 100))),
     ({"reasoning_effort": "none"}, None),
     ({"reasoning_effort": 1}, 1), ({"reasoning_effort": 100}, 100),
     ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, None),
     ({"chat_template_kwargs": {"thinking": False}}, None)],
)  # fmt: skip
def test_reasoning_effort(http: httpx.Client, backend: Any, kit: Any, fields: Any, number: int | None):
    """Every word for it reaches the prompt; off wins."""
    assert http.post(CHAT, json={"messages": USER, **fields}).status_code == 200
    prompt = kit.TOKENIZER.decode(backend.asked[-1][0]["prompt_token_ids"])
    assert (f"Reasoning Effort: {number} " in prompt) == (number is not None)
    assert prompt.endswith("</think>" if number is None else "<think>")


# -- splits ------------------------------------------------------------------------------------------------------------

D = "｜DSML｜"
FRAGMENTS = [
    "a", "\n", "é漢😀", "</think>", "STOP", "ST", "<", '"',
    f"<{D} calls>\n", f'<{D} invoke name="f">\n', f"</{D} invoke>",
    f'<{D} parameter name="k" string="true">', f"</{D} parameter>\n", f"</{D} calls>",
]  # fmt: skip
SPELLED = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


def merge(whole: dict[str, Any], chunk: dict[str, Any]) -> None:
    """What a client does with a chunk."""
    for choice in chunk["choices"]:
        message = whole.setdefault(
            choice["index"], {"reasoning_content": "", "content": "", "calls": [], "logprobs": []}
        )
        delta = choice["delta"]
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            if call["index"] == len(message["calls"]):
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
        message["logprobs"] += (choice["logprobs"] or {}).get("content") or []
        message["finish_reason"] = choice["finish_reason"]


@settings(max_examples=60)
@given(SPELLED, st.lists(st.integers(1, 5), min_size=1, max_size=20), st.integers(1, 60), st.booleans(), st.booleans())
def test_streamed_equals_whole_for_every_split(
    kit: Any, text: str, sizes: list[int], most: int, stop: bool, one_call: bool
):
    """Multi-byte characters, stop strings, markup, thinking tags, cut-off output: one token or many a step."""
    import asyncio

    from finback.engine.request import SamplingParams

    backend = kit.FakeBackend(text)
    prompt, tools, options = [Message("user", ("x",))], [Tool("f")], ChatOptions()
    sampling = SamplingParams(max_tokens=most, stop=["STOP"] if stop else [], logprobs=1)

    async def run(sizes: list[int]) -> tuple[Any, Any]:
        backend.sizes = sizes
        reply, streamed = Reply("m", kit.TOKENIZER, 1, logprobs=True), {}
        parser = backend.chat.parser(prompt, tools, options)
        async for event in chat_events(0, backend.generate({}, sampling), parser, one_call=one_call):
            reply.take(event)
            if chunks := [json.loads(data) for _, data in reply.frames(event)]:
                merge(streamed, chunks[0])
        return streamed[0], reply.whole()["choices"][0]

    def flat(whole: Any) -> Any:
        message = whole["message"]
        calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])]
        return {
            "reasoning_content": message.get("reasoning_content", ""), "content": message["content"] or "",
            "calls": calls, "logprobs": whole["logprobs"]["content"], "finish_reason": whole["finish_reason"],
        }  # fmt: skip

    streamed, whole = asyncio.run(run(sizes))
    _, at_once = asyncio.run(run([1000]))
    assert streamed == flat(whole)
    if not one_call:  # that one ends the engine's work at the step that began a second call
        assert flat(whole) == flat(at_once)


# -- clients that go away, limits, stopping ----------------------------------------------------------------------------


def send(http: httpx.Client, body: Any, path: str = CHAT) -> socket.socket:
    """A request over a bare socket, which can be dropped at any moment."""
    data = json.dumps(body).encode()
    connection = socket.create_connection((http.base_url.host, http.base_url.port or 80))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_fifty_clients_go_away(kit: Any):
    """After the first chunk, before the first token, without streaming: the work ends at once, no slot stays taken."""
    backend = kit.FakeBackend("x" * 3000)
    backend.pause = 0.01
    with kit.running(backend, max_concurrent=8) as http:
        for number in range(50):
            connection = send(http, {"messages": USER, "stream": number % 2 == 0})
            assert kit.wait(lambda: backend.open == 1)
            if number % 4 == 0:
                assert connection.recv(64).startswith(b"HTTP/1.1 200")
            connection.close()
            assert kit.wait(lambda: backend.open == 0), number
        backend.tokens, backend.pause = kit.FakeBackend.spelled("</think>fine"), 0.0
        got = http.post(CHAT, json={"messages": USER})
        assert got.json()["choices"][0]["message"]["content"] == "fine"


def test_a_full_server_says_when_to_come_back(kit: Any):
    backend = kit.FakeBackend("x" * 3000)
    backend.pause = 0.01
    with kit.running(backend, max_concurrent=2) as http:
        connection = send(http, {"messages": USER, "n": 2})
        assert kit.wait(lambda: backend.open == 2)
        got = http.post(CHAT, json={"messages": USER})
        assert got.status_code == 429 and int(got.headers["retry-after"]) >= 1
        assert got.json()["error"]["type"] == "rate_limit_error"
        connection.close()
        assert kit.wait(lambda: backend.open == 0)
        backend.tokens = kit.FakeBackend.spelled("x")
        assert http.post(CHAT, json={"messages": USER}).status_code == 200
        assert http.post(CHAT, json={"messages": USER, "n": 3}).status_code == 400


def test_time_runs_out(kit: Any):
    """Whole: 504. Streaming: an error event after what came."""
    backend = kit.FakeBackend("</think>" + "word " * 500)
    backend.pause = 0.01
    with kit.running(backend, request_timeout=0.15) as http:
        assert http.post(CHAT, json={"messages": USER}).status_code == 504
        lines = [line for line in http.post(CHAT, json={"messages": USER, "stream": True}).text.split("\n\n") if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        assert len(lines) > 2
        assert kit.wait(lambda: backend.open == 0)


def test_keys(kit: Any):
    with kit.running(kit.FakeBackend(), api_keys=("one", "two")) as http:
        for path in (CHAT, "/tokenize"):
            for header in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}):
                assert http.post(path, json={"messages": USER}, headers=header).status_code == 401
        assert http.get("/v1/models").status_code == 401
        ok = http.post(CHAT, json={"messages": USER}, headers={"authorization": "Bearer two"})
        assert ok.status_code == 200
        for path in ("/health", "/ready", "/version", "/metrics", "/"):
            assert http.get(path).status_code == 200, path


def test_a_stop_ends_open_streams_with_an_error(kit: Any):
    """Whoever reads a stream learns that it was not finished."""
    backend = kit.FakeBackend("</think>" + "word " * 500)
    backend.pause = 0.01
    with kit.running(backend) as http:
        parts: list[str] = []
        reader = threading.Thread(
            target=lambda: parts.append(http.post(CHAT, json={"messages": USER, "stream": True}).text)
        )
        reader.start()
        assert kit.wait(lambda: backend.open == 1)
        time.sleep(0.05)
        backend.alive = False
        assert http.get("/health").status_code == 503
        assert http.post(CHAT, json={"messages": USER}).status_code == 503
        backend.error = RuntimeError("secret")
        reader.join(10)
        last = [line for line in parts[0].split("\n\n") if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "server_error" and "secret" not in last


def test_the_log_holds_no_prompt(kit: Any, caplog: pytest.LogCaptureFixture):
    """One line a request, as JSON, without what was said; with it only where that was asked for."""
    for asked in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, "finback.server"), kit.running(kit.FakeBackend(), log_prompts=asked) as http:
            http.post(CHAT, json={"messages": [{"role": "user", "content": "my secret"}]})
        entries = [json.loads(r.getMessage()) for r in caplog.records if r.name == "finback.server"]
        entry = next(e for e in entries if e["event"] == "request")
        assert entry["status"] == 200 and entry["finish"] == ["stop"] and entry["completion_tokens"] > 0
        assert ("my secret" in caplog.text) == asked


def test_metrics(http: httpx.Client, backend: Any, kit: Any):
    """Names that dashboards made for vLLM find after a change of prefix."""
    backend.stats.generated_tokens, backend.stats.running = 41, 2
    backend.stats.finished["stop"] = 3
    http.post(CHAT, json={"messages": USER})
    page = http.get("/metrics").text
    for line in (
        'finback:generation_tokens_total{model_name="fake"} 41.0',
        'finback:num_requests_running{model_name="fake"} 2.0',
        'finback:request_success_total{finished_reason="stop",model_name="fake"} 3.0',
    ):
        assert line in page
    count = 'finback:time_to_first_token_seconds_count{model_name="fake"} '

    def counted() -> bool:  # a request is accounted for just after its last byte was sent
        return float(http.get("/metrics").text.split(count)[1].split()[0]) >= 1

    assert kit.wait(counted)


def test_the_document_describes_every_endpoint(http: httpx.Client):
    """A reference that leads nowhere makes generated clients and fuzzers fail."""
    document = http.get("/openapi.json").json()
    assert {CHAT, TEXT, "/v1/models", "/tokenize", "/detokenize", "/health", "/metrics"} <= set(document["paths"])
    text = json.dumps(document)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(document["components"]["schemas"])


def test_unknown_paths_have_errors_of_the_same_shape(http: httpx.Client):
    for got in (http.get("/v2"), http.get(CHAT)):
        assert got.status_code in (404, 405) and "message" in got.json()["error"]


def test_the_page_loads_nothing_from_elsewhere():
    """It has to work without a network, and the policy it is sent with forbids everything else anyway."""
    page = resources.files("finback.server").joinpath("static/chat.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|<link|@import|<script src|innerHTML|eval\(", page)
    ids = set(re.findall(r'id="(\w+)"', page))
    assert set(re.findall(r'\$\("(\w+)"\)', page)) <= ids
    assert set(re.findall(r"FIELDS = \[(.*)\]", page)[0].replace('"', "").split(", ")) <= ids


def test_every_field_of_the_official_client_is_served_or_refused(http: httpx.Client):
    """A field that OpenAI's interface has and this server does not know how to honour: 400 that names it, never
    silence. Sent with a value that is wrong for every field, so that known ones are refused too, by their type."""
    from openai.types.chat import completion_create_params as chat
    from openai.types.completion_create_params import CompletionCreateParamsBase as Text
    from openai.types.responses.response_create_params import ResponseCreateParamsBase as Responses

    strings = {"user", "model", "instructions", "input", "prompt", "stop", "safety_identifier", "prompt_cache_key"}
    base = {CHAT: {"messages": USER}, TEXT: {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    for path, params in ((CHAT, chat.CompletionCreateParamsBase), (TEXT, Text), ("/v1/responses", Responses)):
        for name in params.__annotations__:
            if name in strings and path != CHAT:
                continue
            got = http.post(path, json={**base[path], name: {"no such": 1}})
            assert got.status_code == 400, (path, name, got.text)
            assert (got.json()["error"]["param"] or "").split("[")[0].split(".")[0] == name, (path, name, got.text)


def test_a_bad_image_is_refused_in_words(http: httpx.Client):
    """The decoder's own complaint names Python objects and their addresses."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    got = http.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]})
    assert got.status_code == 400 and "decoded" in got.json()["error"]["message"]
    assert "object at" not in got.text and "<" not in got.json()["error"]["message"]
