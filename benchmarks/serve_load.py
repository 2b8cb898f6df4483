"""How even the streams of a loaded server are.

    python benchmarks/serve_load.py                      64 clients for 60 seconds against a tiny checkpoint
    python benchmarks/serve_load.py --model DIR --seconds 20
    python benchmarks/serve_load.py --quick              a few seconds: does the script work?

A server runs as `finback serve` in a process of its own. First one client streams alone; then `clients` of them stream
at once, each sending the next request as soon as its last one ended, and a share of the requests is dropped in the
middle. Log probabilities are asked for, so that tokens without a text of their own (half a character) have an event
too. The figure is the time between two tokens of one stream: the 99th percentile under load divided by the median
alone. Events that carry several tokens count once, as a reader sees them. Afterwards the server must be empty: nothing
running, no page in use. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tyro

WORDS = "The fin whale is faster than every larger one and dives for ten minutes before it breathes again".split()


@dataclass(frozen=True)
class Options:
    """model: checkpoint folder, "" makes a tiny one. clients, seconds: of the load. cancelled: share of the requests
    that are dropped half way. tokens: of an answer at most (at least half of that); prompt: words of a prompt at most.
    threads: of torch, in the server. flags: more flags for `finback serve`, in one
    string. json: also write the result there."""

    model: str = ""
    clients: int = 64
    seconds: float = 60.0
    cancelled: float = 0.2
    tokens: int = 100
    prompt: int = 60
    threads: int = 1
    flags: str = ""
    quick: bool = False
    json: Path | None = None


@dataclass
class Seen:
    """What clients saw: seconds between events of a stream, seconds to the first one, ends, errors."""

    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    finished: int = 0
    dropped: int = 0
    errors: list[str] = field(default_factory=list)


@contextlib.contextmanager
def server(model: str, options: Options) -> Iterator[str]:
    """The address of a server that runs meanwhile."""
    source = str(Path(__file__).parents[1] / "src")
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": source}
    flags = ["--port", "0", "--log-level", "warning", *shlex.split(options.flags)]
    command = [sys.executable, "-m", "finback", "serve", "--model", model, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            process.wait(60)


async def stream(url: str, body: dict[str, Any], seen: Seen, drop_after: int | None) -> None:
    """One request over a connection of its own. drop_after: events after which the client goes away."""
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    sent = last = time.perf_counter()
    writer.write(head.encode() + data)
    events, ended = 0, False
    try:
        while line := await reader.readline():
            if line.startswith(b"HTTP/1.1") and b" 200 " not in line:
                seen.errors.append(line.decode().strip())
                return
            if line.startswith(b'data: {"error"'):
                seen.errors.append(line.decode().strip())
            if line.startswith(b"data: [DONE]"):
                ended = True
            if not line.startswith(b"data: {"):
                continue
            now, events = time.perf_counter(), events + 1
            if events == 1:
                seen.firsts.append(now - sent)
            else:
                seen.gaps.append(now - last)
            last = now
            if events == drop_after:
                seen.dropped += 1
                return
        seen.finished += ended
        if not ended and not seen.errors:
            seen.errors.append("a stream ended without [DONE]")
    finally:
        writer.close()


async def load(url: str, clients: int, seconds: float, options: Options, *, cancelled: float) -> Seen:
    """What `clients` see that send one request after another."""
    seen, end = Seen(), time.perf_counter() + seconds

    async def client(number: int) -> None:
        draw = random.Random(number)
        while time.perf_counter() < end:
            words = draw.choices(WORDS, k=draw.randint(1, options.prompt))
            tokens = draw.randint(options.tokens // 2, options.tokens)
            body = {
                "prompt": " ".join(words), "max_tokens": tokens, "stream": True, "ignore_eos": True, "seed": number,
                "logprobs": 0,
            }  # fmt: skip
            drop = draw.randint(1, tokens // 2) if draw.random() < cancelled else None
            await stream(url, body, seen, drop)

    await asyncio.gather(*(client(number) for number in range(clients)))
    return seen


def page(url: str) -> str:
    """The server's /metrics."""
    return urllib.request.urlopen(url + "/metrics").read().decode()


def gauge(text: str, name: str) -> float:
    """One value of /metrics."""
    return float(re.findall(rf"finback:{name}{{.*}} (\S+)", text)[0])


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(model: str, options: Options) -> dict[str, Any]:
    """Both loads against one server."""
    with server(model, options) as url:
        short = min(5.0, options.seconds)
        asyncio.run(load(url, 1, short / 3, options, cancelled=0.0))  # warm-up
        alone = asyncio.run(load(url, 1, short, options, cancelled=0.0))
        busy = asyncio.run(load(url, options.clients, options.seconds, options, cancelled=options.cancelled))
        for _ in range(100):
            left = {name: gauge(page(url), name) for name in ("num_requests_running", "kv_cache_usage_perc")}
            if not any(left.values()):
                break
            time.sleep(0.05)
    median = statistics.median(alone.gaps)
    return {
        "alone_median_ms": 1e3 * median,
        "load_median_ms": 1e3 * statistics.median(busy.gaps),
        "load_p99_ms": 1e3 * quantile(busy.gaps, 0.99),
        "load_max_ms": 1e3 * max(busy.gaps),
        "p99_over_alone": quantile(busy.gaps, 0.99) / median,
        "load_first_token_p99_ms": 1e3 * quantile(busy.firsts, 0.99),
        "events_per_second": len(busy.gaps) / options.seconds,
        "finished": busy.finished,
        "dropped": busy.dropped,
        "errors": len(alone.errors + busy.errors),
        "first_errors": (alone.errors + busy.errors)[:3],
        "left_running": left["num_requests_running"],
        "left_pages": left["kv_cache_usage_perc"],
    }


def main(options: Options) -> dict[str, Any]:
    """Print one figure a line, and all of them as JSON."""
    if options.quick:
        options = Options(model=options.model, clients=8, seconds=2.0, tokens=20, threads=options.threads)
    with tempfile.TemporaryDirectory() as folder:
        if not options.model:
            from finback.tools import fixtures

            fixtures.make(Path(folder) / "tiny", preset="tiny-v41-plain")
        result = measure(options.model or f"{folder}/tiny", options)
    for name, value in result.items():
        print(f"{name:24} {value:.2f}" if isinstance(value, float) else f"{name:24} {value}")
    print(json.dumps(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
