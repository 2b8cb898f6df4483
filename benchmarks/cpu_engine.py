"""What the engine adds to the model on this machine's CPU.

    python benchmarks/cpu_engine.py            the default CPU model, about three minutes
    python benchmarks/cpu_engine.py --quick    a toy shape: does the script work?

Figures: tokens per second of a batch of 16 against the same requests one after another; time to first token of a
prompt behind a shared prefix of 1,000 tokens, cold and warm; the share of a step that is not the model; the exact tail
against the full prefill on ten layers. Weights are random bf16, tokens too. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from cpu_model import TINY, Shape, build, machine
from cpu_model import Options as ModelOptions

from finback.engine.args import EngineArgs
from finback.engine.core import Engine
from finback.engine.request import SamplingParams, SequenceState
from finback.nn.linear import prepare


@dataclass(frozen=True)
class Options:
    """quick: a toy shape, to see that everything runs. threads: of torch. json: also write the result there."""

    quick: bool = False
    threads: int = 2
    json: Path | None = None


@dataclass(frozen=True)
class Deep(Shape):
    """Ten layers, compressed rows from layers 1 and 3: six upper layers can run on the tail of a prompt."""

    def config(self) -> dict[str, Any]:
        config = super().config()
        layers = {"num_hidden_layers": 10, "compress_ratios": [0, 2, 2, 1, 1, 1, 1, 1, 1, 1]}
        return {**config, "text_config": {**config["text_config"], **layers}}


class Bench:
    """One model, engines of any setting. Prompts are random and never repeat unless asked to."""

    def __init__(self, shape: Shape):
        self.model = build(shape, torch.bfloat16)
        prepare(self.model)
        self.vocabulary = shape.vocabulary
        self.generator = torch.Generator().manual_seed(1)

    def prompt(self, length: int) -> list[int]:
        return torch.randint(self.vocabulary, (length,), generator=self.generator).tolist()

    def engine(self, **args: Any) -> Engine:
        return Engine(self.model, None, EngineArgs(**args))

    @staticmethod
    def run(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
        """Seconds from the first request to the last token."""
        start = time.perf_counter()
        for prompt in prompts:
            engine.add(SequenceState(prompt), SamplingParams(max_tokens=tokens, ignore_eos=True))
        while engine.unfinished:
            engine.step()
        return time.perf_counter() - start


def batching(bench: Bench, prompt: int, tokens: int, repeats: int) -> dict[str, float]:
    """Sixteen requests together and one after another, in turns."""
    engine, size, together, apart = bench.engine(enable_prefix_caching=False), 16, [], []
    for _ in range(repeats):
        prompts = [bench.prompt(prompt) for _ in range(size)]
        together.append(bench.run(engine, prompts, tokens))
        apart.append(sum(bench.run(engine, [p], tokens) for p in prompts))
    a, b = statistics.median(together), statistics.median(apart)
    return {
        "batch16_tokens_per_s": size * tokens / a,
        "one_by_one_tokens_per_s": size * tokens / b,
        "batch16_ratio": b / a,
    }


def shared_prefix(bench: Bench, shared: int, own: int, repeats: int) -> dict[str, float]:
    """Time to first token of the first and of the second request with a new shared prefix."""
    engine, cold, warm = bench.engine(), [], []
    bench.run(engine, [bench.prompt(shared + own)], 1)
    for _ in range(repeats):
        prefix = bench.prompt(shared)
        cold.append(bench.run(engine, [prefix + bench.prompt(own)], 1))
        warm.append(bench.run(engine, [prefix + bench.prompt(own)], 1))
    assert engine.stats.prefix_hits == repeats
    a, b = statistics.median(cold), statistics.median(warm)
    return {"prefix_cold_ms": 1000 * a, "prefix_warm_ms": 1000 * b, "prefix_ratio": a / b}


def overhead(bench: Bench, sizes: tuple[int, ...], prompt: int, steps: int) -> dict[str, float]:
    """Share of decode steps spent outside the model, by batch size."""
    out = {}
    for size in sizes:
        engine = bench.engine()
        for _ in range(size):
            params = SamplingParams(max_tokens=steps + 8, ignore_eos=True)
            engine.add(SequenceState(bench.prompt(prompt)), params)
        while engine.stats.generated_tokens < 2 * size:
            engine.step()
        inside, start = engine.stats.model_seconds, time.perf_counter()
        for _ in range(steps):
            engine.step()
        whole = time.perf_counter() - start
        out[f"overhead_batch{size}"] = 1 - (engine.stats.model_seconds - inside) / whole
        out[f"step_ms_batch{size}"] = 1000 * whole / steps
    return out


def exact_tail(bench: Bench, length: int, repeats: int) -> dict[str, float]:
    """Prefill of one prompt and its first token, both ways in turns."""
    engines = {p: bench.engine(prefill=p, enable_prefix_caching=False) for p in ("full", "exact_tail")}
    seconds: dict[str, list[float]] = {p: [] for p in engines}
    for _ in range(repeats):
        prompt = bench.prompt(length)
        for name, engine in engines.items():
            seconds[name].append(bench.run(engine, [prompt], 1))
    full, tail = (statistics.median(seconds[p]) for p in engines)
    return {"full_prefill_ms": 1000 * full, "exact_tail_ms": 1000 * tail, "exact_tail_ratio": full / tail}


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    shape = TINY if options.quick else Shape()
    deep = Deep(**vars(replace(shape)))
    bench = Bench(shape)
    quick = options.quick
    figures: dict[str, float] = {}
    parts: list[Callable[[], dict[str, float]]] = [
        lambda: batching(bench, 64, 8 if quick else 64, 1 if quick else 3),
        lambda: shared_prefix(bench, 1000, 16, 2 if quick else 5),
        lambda: overhead(bench, (1, 16), 64, 5 if quick else 40),
        lambda: exact_tail(Bench(deep), 2048, 1 if quick else 3),
    ]
    for part in parts:
        found = part()
        print(", ".join(f"{name} {value:.3g}" for name, value in found.items()), flush=True)
        figures |= found
    facts = {**machine(ModelOptions(threads=options.threads)), "load": [round(x, 2) for x in os.getloadavg()]}
    result = json.dumps({"figures": {k: round(v, 4) for k, v in figures.items()}, **facts})
    if options.json is not None:
        options.json.write_text(result + "\n")
    print(result)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
