"""/v1/responses and /v1/messages against DeepSeek's own package and the official client.

Would catch: a conversation that reaches the model otherwise than DeepSeek's service would write it, an event out of
place or of the wrong shape, a streamed answer that differs from the whole one, a field that is silently dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

recipe = pytest.importorskip("deepseek_recipe")

D = "｜DSML｜"
CALLS = (
    f'hm</think>I call.\n\n<{D} calls>\n<{D} invoke name="f">\n<{D} parameter name="k" string="true">v</{D} parameter>'
    f'\n</{D} invoke>\n<{D} invoke name="f">\n\n</{D} invoke>\n</{D} calls>'
)
MODEL, RESPONSES, MESSAGES = "DeepSeek-V4.1-Flash", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"k": {"type": "string"}}}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}
OTHER_TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}
U: dict[str, Any] = {"role": "user", "content": "u"}
CALLED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"k": "x"}'}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "o"}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {"k": "x"}}


@pytest.fixture(scope="module")
def backend(kit: Any) -> Any:
    return kit.FakeBackend()


@pytest.fixture(scope="module")
def shared(kit: Any, backend: Any) -> Iterator[httpx.Client]:
    with kit.running(backend) as client:
        yield client


@pytest.fixture
def http(shared: httpx.Client, backend: Any, kit: Any) -> httpx.Client:
    backend.tokens, backend.sizes, backend.asked = kit.FakeBackend.spelled(CALLS), (1,), []
    return shared


def result(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "o"}, *content]}


CONVERSATIONS: list[tuple[str, dict[str, Any]]] = [
    (RESPONSES, {"input": "hi"}),
    (RESPONSES, {"input": "hi", "instructions": "I", "reasoning": {"effort": "low"}}),
    (RESPONSES, {"input": [U], "reasoning": {"effort": "none"}}),
    (RESPONSES, {"input": [{"role": "developer", "content": "s"}, U, SAID, U], "instructions": "I"}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}]}),
    (RESPONSES, {"input": [U, SAID, SAID, U]}),
    (RESPONSES, {"input": [U, THOUGHT, SAID, CALLED, OUTPUT], "tools": [TOOL]}),
    (RESPONSES, {"input": [U, CALLED, OUTPUT, THOUGHT, SAID, U], "tools": [TOOL]}),
    (RESPONSES, {"input": [U, CALLED, CALLED | {"call_id": "2"}, OUTPUT | {"call_id": "2"}, OUTPUT], "tools": [TOOL]}),
    (RESPONSES, {"input": [U], "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    (RESPONSES, {"input": [U], "tools": [TOOL], "tool_choice": "required", "reasoning": {"effort": "none"}}),
    (MESSAGES, {"messages": [U]}),
    (MESSAGES, {"messages": [U], "system": [{"type": "text", "text": t} for t in "ab"]}),
    (MESSAGES, {"messages": [U], "thinking": {"type": "disabled"}}),
    (MESSAGES, {"messages": [U], "output_config": {"effort": "max"}}),
    (MESSAGES, {"messages": [U, {"role": "assistant", "content": "a"}]}),
    (MESSAGES, {"messages": [U, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "why", "signature": "s"}, {"type": "text", "text": "a"}, USE]},
        result({"type": "text", "text": "go"})], "tools": [OTHER_TOOL]}),
    (MESSAGES, {"messages": [U, {"role": "assistant", "content": [USE]}, result()]}),
    (MESSAGES, {"messages": [U], "tools": [OTHER_TOOL], "tool_choice": {"type": "tool", "name": "f"},
                "thinking": {"type": "disabled"}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), CONVERSATIONS)
def test_prompts_are_those_of_deepseek(http: httpx.Client, backend: Any, kit: Any, path: str, body: dict[str, Any]):
    kind = recipe.ResponsesRequest if path == RESPONSES else recipe.MessagesRequest
    limit = {} if path == RESPONSES else {"max_tokens": 900}
    converted = kind({"model": MODEL, **limit, **body}).convert(recipe.ConversionOptions())
    wanted = recipe.DeepseekV41Encoding().render_conversation(converted.conversation).prompt
    got = http.post(path, json={**limit, **body})
    assert got.status_code == 200, got.text
    assert kit.TOKENIZER.decode(backend.asked[-1][0]["prompt_token_ids"]) == wanted


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def by_recipe(kind: str, body: dict[str, Any], text: str) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]:
    request, response = getattr(recipe, f"{kind}Request"), getattr(recipe, f"{kind}Response")
    converted = request({"model": MODEL, **body}).convert(recipe.ConversionOptions())
    stream = recipe.StreamProcessor(request.chunk_generator(converted, "ID", MODEL), converted.parsing_options)
    chunks = stream.push(recipe.InferenceChunk.ready()) + stream.push(recipe.InferenceChunk.text(text, 9))
    chunks += stream.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)) + stream.finish()
    whole, events = response("ID", MODEL, 0, 0, 0), []
    for chunk in chunks:
        events.append((response.sse_event_name(chunk), json.loads(chunk.to_json())))
        whole.accumulate(chunk)
    return events, json.loads(whole.to_json())


def names(events: list[tuple[str, Any]]) -> list[str]:
    """The names of events, deltas of one block as one: how they are cut is free."""
    kept = [name for name, _ in events if name != "ping"]
    out: list[str] = []
    for (name, data), last in zip([e for e in events if e[0] != "ping"], [None, *kept], strict=False):
        kind = data.get("delta", {}).get("type") if isinstance(data.get("delta"), dict) else None
        if not (name == last and "delta" in name and kind != "signature_delta"):
            out.append(name)
    return out


def test_responses_events(http: httpx.Client):
    """The events of DeepSeek's package in their order; the whole is what the last one holds."""
    body = {"input": "hi", "tools": [TOOL]}
    got = events_of(http.post(RESPONSES, json={**body, "stream": True}).text)
    wanted, whole = by_recipe("Responses", body, CALLS)
    assert names(got) == names(wanted)
    assert [data["sequence_number"] for _, data in got] == list(range(len(got)))
    response = got[-1][1]["response"]
    assert set(response) <= set(whole)
    for ours, theirs in zip(response["output"], whole["output"], strict=True):
        assert set(ours) <= set(theirs)
        for key in ("type", "status", "content", "name", "arguments"):
            assert ours.get(key) == theirs.get(key)
    plain = http.post(RESPONSES, json=body).json()
    same = ("status", "usage", "incomplete_details", "tools", "tool_choice", "text", "reasoning", "top_p")
    assert [plain[key] for key in same] == [response[key] for key in same]
    assert [(o["type"], o.get("arguments")) for o in plain["output"]] == [
        (o["type"], o.get("arguments")) for o in response["output"]
    ]
    details = response["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < response["usage"]["output_tokens"]


def test_messages_events(http: httpx.Client):
    body = {"messages": [U], "max_tokens": 900, "tools": [OTHER_TOOL]}
    got = events_of(http.post(MESSAGES, json={**body, "stream": True}).text)
    wanted, whole = by_recipe("Messages", body, CALLS)
    assert names(got) == names(wanted)
    plain = http.post(MESSAGES, json=body).json()
    assert [{**block, "id": 0, "signature": 0} for block in plain["content"]] == [
        {**block, "id": 0, "signature": 0} for block in whole["content"]
    ]
    assert plain["stop_reason"] == whole["stop_reason"] == got[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert plain["usage"] == got[-2][1]["usage"]


def test_ends(http: httpx.Client, backend: Any, kit: Any):
    """Cut off, stopped by a string, stopped by the model: each interface has a word of its own."""
    backend.tokens = kit.FakeBackend.spelled("hm</think>one two three")
    body = {"messages": [U], "max_tokens": 900}
    assert http.post(MESSAGES, json=body).json()["stop_reason"] == "end_turn"
    assert http.post(MESSAGES, json={**body, "max_tokens": 3}).json()["stop_reason"] == "max_tokens"
    stopped = http.post(MESSAGES, json={**body, "stop_sequences": ["three", "two"]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert stopped["content"][-1] == {"type": "text", "text": "one "}
    cut = http.post(RESPONSES, json={"input": "hi", "max_output_tokens": 3}).json()
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["output"][-1]["status"] == "incomplete"


ODD = [
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": "x", "store": True}, "store"),
    (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"input": "x", "background": True}, "background"),
    (RESPONSES, {"input": "x", "truncation": "auto"}, "truncation"),
    (RESPONSES, {"input": "x", "include": ["file_search_call.results"]}, "include[0]"),
    (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    (RESPONSES, {"input": "x", "tools": [TOOL, TOOL]}, "tools[1].function.name"),
    (RESPONSES, {"input": "x", "reasoning": {"effort": "banana"}}, "reasoning_effort"),
    (RESPONSES, {"input": [{"type": "wizard"}]}, "input[0]"),
    (RESPONSES, {"input": [U, OUTPUT]}, "input[1]"),
    (RESPONSES, {"input": [U, SAID, CALLED], "tools": [TOOL]}, "input[1]"),
    (RESPONSES, {"input": "x " * 9000}, "input"),
    (RESPONSES, {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
    (MESSAGES, {"max_tokens": 5}, "messages"),
    (MESSAGES, {"messages": [U]}, "max_tokens"),
    (MESSAGES, {"messages": [], "max_tokens": 5}, "messages"),
    (MESSAGES, {"messages": [U], "max_tokens": 5, "mcp_servers": [1]}, "mcp_servers"),
    (MESSAGES, {"messages": [U], "max_tokens": 5, "temperature": 2}, "temperature"),
    (MESSAGES, {"messages": [result()], "max_tokens": 5}, "messages[0]"),
    (MESSAGES, {"messages": [U], "max_tokens": 5, "tool_choice": {"type": "tool"}}, "tool_choice"),
    (MESSAGES, {"messages": [{"role": "user", "content": []}], "max_tokens": 5}, "messages[0].content"),
]  # fmt: skip


def test_odd_requests(http: httpx.Client):
    """Refused with the field's name in the words of the interface, and the server goes on."""
    for path, body, param in ODD:
        got = http.post(path, json=body)
        error = got.json()["error"]
        assert got.status_code == 400 and error["type"] == "invalid_request_error", (body, got.text)
        if path == RESPONSES:
            assert error["param"] == param, (body, error)
        else:
            assert got.json()["type"] == "error" and param in error["message"], (body, error)
    assert http.post(RESPONSES, json={"input": "x"}).status_code == 200


def test_the_official_client(http: httpx.Client, backend: Any, kit: Any):
    """`client.responses`: whole, streamed, logprobs, a tools round trip with the answer's own items."""
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        tools: Any = [{**TOOL, "strict": False}]
        got = client.responses.create(model="fake", input="hi", tools=tools)
        calls = [item for item in got.output if item.type == "function_call"]
        assert [call.arguments for call in calls] == ['{"k": "v"}', "{}"] and got.output_text == "I call."
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": call.name} for call in calls]
        backend.tokens = kit.FakeBackend.spelled("</think>Noon.")
        again: Any = [U, *(item.to_dict() for item in got.output), *outputs]
        assert client.responses.create(model="fake", input=again, tools=tools).output_text == "Noon."
        prompt = kit.TOKENIZER.decode(backend.asked[-1][0]["prompt_token_ids"])
        assert "<think>hm</think>I call.\n\n" in prompt and prompt.count("<tool_result>f</tool_result>") == 2
        with client.responses.stream(model="fake", input="hi", top_logprobs=1) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert "response.output_text.delta" in kinds and final.output_text == "Noon."
        text: Any = final.output[-1]
        assert [entry.token for entry in text.content[0].logprobs] and final.usage is not None


def test_keys_and_counts(kit: Any):
    """Anthropic's clients send x-api-key; counting is the prompt's own length."""
    with kit.running(kit.FakeBackend(), api_keys=("one",)) as http:
        body = {"messages": [U], "max_tokens": 900}
        assert (
            http.post(MESSAGES, json=body, headers={"x-api-key": "two"}).json()["error"]["type"]
            == "authentication_error"
        )
        usage = http.post(MESSAGES, json=body, headers={"x-api-key": "one"}).json()["usage"]
        count = {"messages": [U]}
        found = http.post(f"{MESSAGES}/count_tokens", json=count, headers={"x-api-key": "one"}).json()
        assert found == {"input_tokens": usage["input_tokens"]}


def test_failures_in_the_middle(kit: Any):
    """A stream that cannot be finished says so in its own way."""
    for path, body, last in (
        (RESPONSES, {"input": "x"}, "response.failed"),
        (MESSAGES, {"messages": [U], "max_tokens": 900}, "error"),
    ):
        backend = kit.FakeBackend("</think>" + "word " * 300)
        backend.pause = 0.01
        with kit.running(backend, request_timeout=0.2) as http:
            events = events_of(http.post(path, json={**body, "stream": True}).text)
            assert events[-1][0] == last and "seconds" in json.dumps(events[-1][1])
