"""The official `openai` client against a real server: plain, streaming, tools, forms, logprobs, images, several
choices.

Would catch: a chunk that the client cannot read, a call that does not survive the round trip, a streamed answer that
differs from the whole one.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

TOOL: Any = {"type": "function", "function": {"name": "get_time", "description": "d", "parameters": {"type": "object"}}}
D = "｜DSML｜"
CALLS = (
    f'look</think>I call.\n\n<{D} calls>\n<{D} invoke name="get_time">\n<{D} parameter name="zone" string="true">'
    f'U "T" C</{D} parameter>\n<{D} parameter name="n" string="false">[1, 2]</{D} parameter>\n</{D} invoke>\n'
    f'<{D} invoke name="get_time">\n\n</{D} invoke>\n</{D} calls>'
)
USER: Any = [{"role": "user", "content": "What time?"}]


@pytest.fixture(scope="module")
def backend(kit: Any) -> Any:
    return kit.FakeBackend()


@pytest.fixture(scope="module")
def http(kit: Any, backend: Any) -> Iterator[httpx.Client]:
    with kit.running(backend) as client:
        yield client


@pytest.fixture
def client(http: httpx.Client, backend: Any, kit: Any) -> Iterator[openai.OpenAI]:
    backend.tokens, backend.sizes, backend.asked, backend.error = (
        kit.FakeBackend.spelled("hm</think>Hello."),
        (1,),
        [],
        None,
    )
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_plain(client: openai.OpenAI, backend: Any):
    got = client.chat.completions.create(model="fake", messages=USER)
    message = got.choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello.", "hm")  # type: ignore[attr-defined]
    assert (message.role, got.choices[0].finish_reason, got.model) == ("assistant", "stop", "fake")
    prompt, sampling = backend.asked[0]
    assert got.usage is not None
    assert got.usage.prompt_tokens == len(prompt["prompt_token_ids"])
    assert got.usage.completion_tokens == len(backend.tokens)
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)
    assert sampling.max_tokens == backend.max_model_len - got.usage.prompt_tokens


def test_streaming_adds_up(client: openai.OpenAI, backend: Any):
    chunks = list(
        client.chat.completions.create(model="fake", messages=USER, stream=True, stream_options={"include_usage": True})
    )
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == "Hello."
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "hm"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(backend.tokens)
    assert len({c.id for c in chunks}) == 1


def test_tools_round_trip(client: openai.OpenAI, backend: Any, kit: Any):
    """Two parallel calls, streamed and whole; their results go back and the model answers."""
    backend.tokens = kit.FakeBackend.spelled(CALLS)
    got = client.chat.completions.create(model="fake", messages=USER, tools=[TOOL])
    message, calls = got.choices[0].message, got.choices[0].message.tool_calls
    assert calls is not None and got.choices[0].finish_reason == "tool_calls" and message.content == "I call."
    arguments = [json.loads(call.function.arguments) for call in calls]  # type: ignore[union-attr]
    assert arguments == [{"zone": 'U "T" C', "n": [1, 2]}, {}]
    with client.chat.completions.stream(model="fake", messages=USER, tools=[TOOL]) as stream:
        whole = stream.get_final_completion().choices[0].message
    assert whole.tool_calls is not None and whole.content == message.content
    for ours, theirs in zip(whole.tool_calls, calls, strict=True):
        assert ours.function.arguments == theirs.function.arguments  # type: ignore[union-attr]
        assert ours.function.name == theirs.function.name  # type: ignore[union-attr]
    backend.tokens = kit.FakeBackend.spelled("</think>Noon.")
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": f"r{i}"} for i, call in enumerate(calls)]
    got = client.chat.completions.create(model="fake", messages=[*USER, message, *results], tools=[TOOL])
    assert got.choices[0].message.content == "Noon."
    prompt = kit.TOKENIZER.decode(backend.asked[-1][0]["prompt_token_ids"])
    assert "<think>look</think>I call." in prompt and prompt.index("r0") < prompt.index("r1")


def test_one_call_only(client: openai.OpenAI, backend: Any, kit: Any):
    backend.tokens, backend.sizes = kit.FakeBackend.spelled(CALLS), (1000,)
    got = client.chat.completions.create(model="fake", messages=USER, tools=[TOOL], parallel_tool_calls=False)
    assert len(got.choices[0].message.tool_calls or ()) == 1 and got.choices[0].finish_reason == "tool_calls"


def test_a_call_that_was_cut_off_is_not_to_be_run(client: openai.OpenAI, backend: Any, kit: Any):
    backend.tokens = kit.FakeBackend.spelled(CALLS)
    got = client.chat.completions.create(model="fake", messages=USER, tools=[TOOL], max_tokens=len(backend.tokens) // 2)
    assert got.choices[0].finish_reason == "length"


def test_forms_reach_the_engine(client: openai.OpenAI, backend: Any):
    """A schema alone is the engine's own; after reasoning, or with calls, it is a grammar."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    client.chat.completions.create(model="fake", messages=USER, response_format=form, reasoning_effort="none")
    client.chat.completions.create(model="fake", messages=USER, response_format=form)
    client.chat.completions.create(
        model="fake", messages=USER, tools=[TOOL], tool_choice="required", reasoning_effort="none"
    )
    (_, plain), (_, thinking), (prompt, called) = backend.asked
    assert plain.json_schema == schema and plain.grammar is None
    assert "REASONING" in thinking.grammar and json.dumps(schema) in thinking.grammar
    assert '"get_time"' in called.grammar and len(prompt["prompt_token_ids"]) > 0


def test_logprobs(client: openai.OpenAI, backend: Any):
    """One entry a token, in the stream too; -inf has no JSON and becomes null."""
    got = client.chat.completions.create(model="fake", messages=USER, logprobs=True, top_logprobs=2)
    found = got.choices[0].logprobs
    assert found is not None and found.content is not None
    assert len(found.content) == len(backend.tokens)
    assert found.content[0].bytes == list(b"h") or found.content[0].token.startswith("h")
    assert found.content[0].top_logprobs[1].logprob is None
    streamed = client.chat.completions.create(model="fake", messages=USER, logprobs=True, top_logprobs=2, stream=True)
    parts = [c.choices[0].logprobs.content or [] for c in streamed if c.choices and c.choices[0].logprobs]
    assert [entry for part in parts for entry in part] == found.content


def test_several_choices_differ_by_their_seed(client: openai.OpenAI, backend: Any):
    got = client.chat.completions.create(model="fake", messages=USER, n=3, seed=7, stop=["lo"])
    assert [(c.index, c.message.content) for c in got.choices] == [(i, "Hel") for i in range(3)]
    assert sorted(sampling.seed for _, sampling in backend.asked) == [7, 8, 9]


def test_images(client: openai.OpenAI, backend: Any):
    pillow = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pillow.new("RGB", (40, 40), (9, 9, 9)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts: Any = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
    client.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}])
    prompt, _ = backend.asked[0]
    assert [image.grid_h for image in prompt["images"]] == [10]


def test_completions(client: openai.OpenAI, backend: Any, kit: Any):
    """Texts and ids, several prompts, echo with log probabilities and offsets into the text."""
    ids = kit.TOKENIZER.encode("The whale", add_bos=True)
    got = client.completions.create(model="fake", prompt=["The whale", "x"], n=2, max_tokens=3)
    assert [c.index for c in got.choices] == [0, 1, 2, 3] and got.choices[0].finish_reason == "length"
    got = client.completions.create(model="fake", prompt=ids, max_tokens=2, echo=True, logprobs=1)
    choice = got.choices[0]
    assert choice.text == "The whale" + kit.TOKENIZER.decode(backend.tokens[:2]) and choice.logprobs is not None
    offsets, tokens = choice.logprobs.text_offset or [], choice.logprobs.tokens or []
    assert choice.logprobs.token_logprobs is not None and choice.logprobs.token_logprobs[0] is None
    assert len(tokens) == len(ids) + 2
    assert all(choice.text[at:].startswith(token) for at, token in zip(offsets[1:], tokens[1:], strict=True))
    streamed = client.completions.create(model="fake", prompt=ids, max_tokens=2, echo=True, stream=True)
    assert "".join(c.choices[0].text for c in streamed if c.choices) == choice.text


def test_models_and_tokens(client: openai.OpenAI, http: httpx.Client, kit: Any):
    assert [m.id for m in client.models.list()] == ["fake"] == [client.models.retrieve("fake").id]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    found = http.post("/tokenize", json={"prompt": "A <think> whale"}).json()
    assert found["tokens"] == kit.TOKENIZER.encode("A <think> whale", add_bos=True) and found["count"] == len(
        found["tokens"]
    )
    assert http.post("/detokenize", json={"tokens": found["tokens"][1:]}).json() == {"prompt": "A <think> whale"}
    chat = http.post("/tokenize", json={"messages": USER}).json()["tokens"]
    assert kit.TOKENIZER.decode(chat).endswith("<｜User｜>What time?<｜Assistant｜><think>")


def test_errors_reach_the_client_as_its_own_kinds(client: openai.OpenAI, backend: Any):
    """Before the first byte: a status. After it: an event that the client raises. Never a silent end."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=USER, extra_body={"best_guess": 1})
    assert caught.value.param == "best_guess"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=USER)
    backend.error = RuntimeError("secret path")
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(model="fake", messages=USER)
    assert "secret" not in str(failed.value)
