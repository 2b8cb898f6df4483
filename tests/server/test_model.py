"""A real model behind the server: a tiny DeepSeek-V4.1 in this process, and the command in one of its own.

Would catch: a prompt that reaches the engine changed, a form that is not enforced, an engine that keeps a dead request,
a command that drops its open streams on SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from finback.engine.async_engine import AsyncEngine
from finback.engine.llm import LLM
from finback.engine.request import SamplingParams
from finback.io.text import Tokenizer
from finback.server.backend import LocalBackend
from finback.tools import fixtures

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("tiny")
    fixtures.make(made, preset="tiny-v41-plain")
    return str(made)


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    return LLM(folder, dtype="float64", draft=None, max_num_seqs=8)


@pytest.fixture(scope="module")
def http(kit: Any, llm: LLM) -> Iterator[httpx.Client]:
    with kit.running(LocalBackend(llm, "tiny")) as client:
        yield client


@pytest.fixture(scope="module")
def alone(folder: str) -> LLM:
    return LLM(folder, dtype="float64", draft=None)


def test_completions_are_those_of_the_model(http: httpx.Client, alone: LLM):
    """The same tokens as without a server, and log probabilities of an echoed prompt that are the model's own."""
    wanted = alone.generate(["The whale"], SamplingParams(max_tokens=12, logprobs=2))[0]
    body = {"prompt": "The whale", "max_tokens": 12, "temperature": 0, "logprobs": 2, "echo": True}
    choice = http.post(TEXT, json=body).json()["choices"][0]
    assert choice["text"] == "The whale" + wanted.text
    ids = wanted.prompt_token_ids
    scored = alone.score(ids).log_softmax(-1)
    expected = [None, *(float(scored[i, t]) for i, t in enumerate(ids[1:]))]
    expected += [entry.logprob for entry in wanted.logprobs or ()]
    for got, want in zip(choice["logprobs"]["token_logprobs"], expected, strict=True):
        assert got == want or got == pytest.approx(want, abs=1e-5)


def test_streamed_equals_whole(http: httpx.Client):
    body = {"messages": USER, "max_tokens": 24, "temperature": 0, "seed": 1}
    whole = http.post(CHAT, json=body).json()["choices"][0]["message"]
    lines = http.post(CHAT, json={**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for key in ("reasoning_content", "content"):
        assert "".join(c["choices"][0]["delta"].get(key) or "" for c in chunks) == (whole.get(key) or "")
    assert lines[-2] == "data: [DONE]"


@pytest.mark.parametrize("effort", ["none", "low"])
def test_a_schema_is_kept_to(http: httpx.Client, effort: str):
    """Also after reasoning, which random weights would never end by themselves: there the bias ends it."""
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    end = http.post("/tokenize", json={"messages": USER, "reasoning_effort": "none"}).json()["tokens"][-1]
    body = {
        "messages": USER, "max_tokens": 60, "reasoning_effort": effort, "seed": 3,
        "logit_bias": {str(end): 100} if effort == "low" else {},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }  # fmt: skip
    choice = http.post(CHAT, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"])["a"], bool)


def test_a_required_call_is_made(http: httpx.Client):
    """Random weights call the named tool, with arguments that are JSON. The bias keeps them from many arguments."""
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    [line_break] = http.post("/tokenize", json={"prompt": "\n", "add_special_tokens": False}).json()["tokens"]
    body = {
        "messages": USER, "max_tokens": 80, "reasoning_effort": "none", "tools": tools, "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "g"}}, "logit_bias": {str(line_break): 100},
    }  # fmt: skip
    choice = http.post(CHAT, json=body).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["function"]["name"] == "g" and isinstance(json.loads(call["function"]["arguments"]), dict)


def test_clients_that_leave_free_the_engine(http: httpx.Client, llm: LLM, kit: Any):
    """Twenty streams are dropped; pages and places are free again, and the next answer is right."""

    def used() -> int:
        return sum(llm.stats.pages_used.values())

    assert kit.wait(lambda: used() == 0 and llm.stats.running == 0)
    for _ in range(20):
        with http.stream("POST", CHAT, json={"messages": USER, "max_tokens": 900, "stream": True}) as stream:
            next(stream.iter_lines())
        assert kit.wait(lambda: llm.stats.running == 0 and llm.stats.waiting == 0)
    assert kit.wait(lambda: used() == 0)
    assert http.post(CHAT, json={"messages": USER, "max_tokens": 4}).status_code == 200


def test_what_does_not_fit_is_refused(http: httpx.Client):
    got = http.post(TEXT, json={"prompt": [5] * 2000, "max_tokens": 1})
    assert got.status_code == 400 and got.json()["error"]["code"] == "context_length_exceeded"
    got = http.post(TEXT, json={"prompt": [10**6], "max_tokens": 1})
    assert got.status_code == 400 and "vocabulary" in got.json()["error"]["message"]


@contextmanager
def command(folder: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`finback serve` and its address."""
    line = [sys.executable, "-m", "finback", "serve", "--model", folder, "--draft", "none", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.kill()


def streams(url: str, lengths: list[int]) -> tuple[list[threading.Thread], dict[int, str]]:
    """Open streams, all of which have begun; the second fills with what each of them ended with."""
    ends: dict[int, str] = {}
    begun: set[int] = set()

    def read(number: int, length: int) -> None:
        body = {"messages": USER, "max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": True}
        last = ""
        try:
            with httpx.stream("POST", url + CHAT, json=body, timeout=90) as response:
                for text in response.iter_lines():
                    last = text or last
                    begun.add(number)
        except httpx.HTTPError as error:
            last = type(error).__name__
        ends[number] = last

    readers = [threading.Thread(target=read, args=pair) for pair in enumerate(lengths)]
    for reader in readers:
        reader.start()
    while len(begun) < len(lengths):
        assert any(reader.is_alive() for reader in readers)
        time.sleep(0.005)
    return readers, ends


def test_the_command_drains(folder: str):
    """SIGTERM during 32 streams: those that can end in time do, the others are told, nothing is cut off silently, and
    the exit code is 0."""
    with command(folder, "--port", "0", "--drain-timeout", "4") as (process, url):
        lengths = [25] * 16 + [900] * 16
        readers, ends = streams(url, lengths)
        process.send_signal(signal.SIGTERM)
        for reader in readers:
            reader.join(90)
        for number, length in enumerate(lengths):
            last = ends[number].removeprefix("data: ")
            assert last == "[DONE]" or json.loads(last)["error"]["code"] == "shutting_down", (length, last)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_the_command_is_killed_and_comes_back(folder: str):
    """kill -9: clients see a broken stream, never one that looks complete, and the same port serves again at once."""
    with command(folder, "--port", "0") as (process, url):
        readers, ends = streams(url, [900, 900])
        process.kill()
        for reader in readers:
            reader.join(60)
        assert all(end == "RemoteProtocolError" or end.startswith("Read") for end in ends.values())
    with command(folder, "--port", url.rpartition(":")[2]) as (_, url):
        assert httpx.post(url + CHAT, json={"messages": USER, "max_tokens": 4}, timeout=60).status_code == 200


def test_cached_tokens_are_counted(http: httpx.Client):
    """A prompt that was just computed, once more: whole pages of it come from the cache, and the usage says so."""
    body = {"messages": [{"role": "user", "content": "the fin whale " * 60}], "max_tokens": 2}
    first, second = (http.post(CHAT, json=body).json()["usage"] for _ in range(2))
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 64 <= cached < second["prompt_tokens"] and cached % 64 == 0
    lines = http.post(CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}}).text.split("\n\n")
    usage = json.loads(lines[-3].removeprefix("data: "))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    other = http.post("/v1/messages", json={"messages": body["messages"], "max_tokens": 2}).json()["usage"]
    assert other["cache_read_input_tokens"] == cached and other["input_tokens"] == second["prompt_tokens"] - cached


def test_a_client_that_leaves_is_gone_before_the_next_step(llm: LLM):
    """Counted in steps: after the stream is closed, at most the step that is running still has the request in it."""

    async def run() -> int:
        engine = AsyncEngine(llm)
        try:
            stream = engine.generate("the fin whale", SamplingParams(max_tokens=900, ignore_eos=True))
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            before = llm.stats.steps
            while llm.stats.running:
                await asyncio.sleep(0.001)
            return llm.stats.steps - before
        finally:
            await asyncio.to_thread(engine.close)

    assert asyncio.run(run()) <= 1


def test_ids_are_those_of_the_checkpoint(http: httpx.Client, folder: str):
    found = http.post("/tokenize", json={"prompt": "x<think>"}).json()["tokens"]
    assert found == Tokenizer.load(folder).encode("x<think>", add_bos=True)
