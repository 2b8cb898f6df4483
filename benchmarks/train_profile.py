"""Where a training step's time goes: tokens per second, kernels, launches and the share of each part, by stage.

    python benchmarks/train_profile.py --device cuda                     # recipes/v41-45m.toml, 65,536 tokens a step
    python benchmarks/train_profile.py --device cpu --recipe recipes/v41-1m.toml --tokens 2048 --steps 2

Weights are fresh and token ids random. The stages are the recipe form's: "dense" attends to every visible row,
"indexer" also teaches the indexers, "sparse" attends to their picks. Times are of steps without the profiler; launches,
kernels and parts are of profiled ones. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.autograd.profiler import profile, record_function

from finback import kernels
from finback.models.base import compute_dtype, family
from finback.nn.rows import Chunk
from finback.train import objective as objective_module
from finback.train.data import Batch
from finback.train.families import family_of
from finback.train.init import initialise
from finback.train.loss import IGNORE, update_router_bias
from finback.train.objective import Objective, recompute_blocks
from finback.train.optim import Optimiser
from finback.train.recipe import Recipe, Stage, read_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
STAGES = {
    "dense": Stage(select=False, indexer=False),
    "indexer": Stage(select=False, indexer=True),
    "sparse": Stage(select=True, indexer=True),
}
_MARK = "part: "


def build(recipe: Recipe, device: str, dtype: torch.dtype) -> Any:
    """A freshly initialised model of the recipe, ready to train."""
    config: dict[str, Any] = json.loads(json.dumps(recipe.model))
    text = config.get("text_config", config)
    if recipe.tokenizer.vocab_size:
        text.setdefault("vocab_size", recipe.tokenizer.vocab_size)
    family_of(config["model_type"]).complete(config, None)
    with torch.device("meta"):
        model = family(config).from_config(config, dtype=dtype, trainable=True)
    model.to_empty(device=device)
    initialise(model, 0)
    if (sizes := model.token_map_sizes()) is not None:
        model.set_token_map(torch.arange(sizes[1]) % sizes[0])
    return model.train()


def random_batch(vocabulary: int, tokens: int, length: int, seed: int) -> Batch:
    """Sequences of `length` random ids, few of them frequent as in text, and the ids shifted as labels."""
    generator = torch.Generator().manual_seed(seed)
    rare = torch.rand(tokens, generator=generator, dtype=torch.float64)
    ids = (vocabulary**rare - 1).long().clamp_(max=vocabulary - 1)
    labels = ids.roll(-1)
    labels[length - 1 :: length] = IGNORE
    labels[-1] = IGNORE
    return Batch([Chunk(part.tolist()) for part in ids.split(length)], labels, {"random": tokens})


class Step:
    """Optimiser steps as a run makes them, of one forward each."""

    def __init__(self, recipe: Recipe, model: Any):
        self.model = model
        self.objective = Objective(model, recipe.loss)
        self.optimiser = Optimiser(model, recipe.optim)
        self.done = 0

    def __call__(self, batch: Batch, stage: Stage) -> float:
        """One step; returns the loss in nats a token."""
        targets = batch.targets()
        result = self.objective(batch, stage, targets, 1, (0, self.done))
        result.total.backward()
        with record_function(_MARK + "optimiser"):
            self.optimiser.collect()
            self.optimiser.step(self.done, 1000)
            for name, router in self.objective.routers.items():
                update_router_bias(router, result.counts[name], stage.bias_rate)
        self.done += 1
        loss = float(result.nats) / targets
        assert math.isfinite(loss), f"the loss of step {self.done} is {loss}"
        return loss


# -- parts of a step ---------------------------------------------------------------------------------------------------


def _marked(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(_MARK + name):
            return run(*args, **kwargs)

    return marked


@contextmanager
def marks(model: Any) -> Iterator[None]:
    """Name the parts of a forward of `model` in the profiler's trace; the innermost name counts."""
    names = {"attn": "attention", "ffn": "experts", "mtp_block": "multi-token head"}
    with ExitStack() as stack:
        for name in ("hc_mixes", "hc_collapse", "hc_expand"):
            stack.enter_context(mock.patch.object(kernels, name, _marked("hyper-connections", getattr(kernels, name))))
        stack.enter_context(
            mock.patch.object(objective_module, "token_loss", _marked("head and loss", objective_module.token_loss))
        )
        for path, module in model.named_modules():
            last = path.rsplit(".", 1)[-1]
            part = names.get(last) or ("engram" if path.count(".") == 1 and path.startswith("engrams.") else None)
            if part is not None:
                stack.enter_context(mock.patch.object(module, "forward", _marked(part, module.forward)))
            for method in ("indexer_kl",) if part == "attention" else ():
                if hasattr(module, method):
                    kl = _marked("indexer", getattr(module, method))
                    stack.enter_context(mock.patch.object(module, method, kl))
            if last == "indexer":
                stack.enter_context(mock.patch.object(module, "forward", _marked("indexer", module.forward)))
        yield


def parts_of(events: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Each event of the host with its part. An operation of the backward pass belongs to the part whose forward made
    its node: the profiler gives both the same sequence number."""
    events = [e for e in events if e.device_type == torch.autograd.DeviceType.CPU]
    makers: dict[int, tuple[float, str]] = {}
    for event in events:
        if event.sequence_nr >= 0 and not event.name.startswith("autograd::") and (part := _marked_part(event)):
            start = event.time_range.start
            if event.sequence_nr not in makers or makers[event.sequence_nr][0] <= start:
                makers[event.sequence_nr] = start, part
    for event in events:
        yield event, _marked_part(event) or _part_of_node(event, makers) or "rest"


def _marked_part(event: Any) -> str | None:
    while event is not None:
        if event.name.startswith(_MARK):
            return event.name[len(_MARK) :]
        event = event.cpu_parent
    return None


def _part_of_node(event: Any, makers: dict[int, tuple[float, str]]) -> str | None:
    while event is not None:
        if event.name.startswith("autograd::engine::evaluate_function") and event.sequence_nr in makers:
            return makers[event.sequence_nr][1]
        event = event.cpu_parent
    return None


def shares(events: Sequence[Any], on_gpu: bool) -> dict[str, float]:
    """Seconds by part, of the kernels on a GPU."""
    seconds: dict[str, float] = defaultdict(float)
    for event, part in parts_of(events):
        seconds[part] += 1e-6 * (event.self_device_time_total if on_gpu else event.self_cpu_time_total)
    return dict(sorted(((part, s) for part, s in seconds.items() if s), key=lambda item: -item[1]))


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Seconds of a step: wall, and until Python had nothing left to launch."""

    wall: float
    host: float


def timed(step: Step, batches: Sequence[Batch], stage: Stage, on_gpu: bool) -> list[Timing]:
    found = []
    for batch in batches:
        started = time.perf_counter()
        step(batch, stage)
        host = time.perf_counter() - started
        if on_gpu:
            torch.cuda.synchronize()
        found.append(Timing(time.perf_counter() - started, host))
    return found


def profiled(step: Step, batches: Sequence[Batch], stage: Stage, on_gpu: bool, top: int) -> dict[str, Any]:
    """Launches, synchronisations, the dearest kernels (operations on a CPU) and the parts, each per step."""
    with marks(step.model), profile(use_device="cuda" if on_gpu else None) as found:
        for batch in batches:
            step(batch, stage)
        if on_gpu:
            torch.cuda.synchronize()
    n, events = len(batches), list(found.function_events or [])
    calls = Counter(e.name for e in events if e.device_type == torch.autograd.DeviceType.CPU)
    spent: dict[str, list[float]] = {}
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    for event in events:
        if event.device_type != kind or event.name.startswith((_MARK, "autograd::")):
            continue
        used = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        line = spent.setdefault(event.name, [0.0, 0])
        line[0] += used * 1e-6 / n
        line[1] += 1 / n
    dearest = sorted(spent.items(), key=lambda item: -item[1][0])[:top]
    parts = {name: seconds / n for name, seconds in shares(events, on_gpu).items()}
    return {
        "launches": sum(c for name, c in calls.items() if "LaunchKernel" in name) / n,
        "operations": sum(c for name, c in calls.items() if name.startswith("aten::")) / n,
        "synchronisations": sum(c for name, c in calls.items() if "Synchronize" in name) / n,
        "device_to_host_copies": spent.get("Memcpy DtoH (Device -> Pageable)", [0, 0])[1],
        "kernel_seconds": sum(seconds for seconds, _ in spent.values()),
        "dearest": [{"name": name[:150], "seconds": s, "calls": c} for name, (s, c) in dearest],
        "parts": parts,
    }


def measure(step: Step, recipe: Recipe, stage: str, o: argparse.Namespace) -> dict[str, Any]:
    on_gpu = torch.device(o.device).type == "cuda"
    length = o.length or (2 * recipe.data.length if stage == "sparse" else recipe.data.length)
    count = o.warmup + o.steps + o.profiled
    batches = [random_batch(step.model.vocab_size, o.tokens, length, seed) for seed in range(count)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for batch in batches[: o.warmup]:
        step(batch, STAGES[stage])
    times = timed(step, batches[o.warmup : o.warmup + o.steps], STAGES[stage], on_gpu)
    wall = statistics.median(t.wall for t in times)
    result: dict[str, Any] = {
        "stage": stage,
        "length": length,
        "tokens_per_second": o.tokens / wall,
        "step_seconds": wall,
        "host_seconds": statistics.median(t.host for t in times),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }
    if o.profiled:
        result |= profiled(step, batches[o.warmup + o.steps :], STAGES[stage], on_gpu, o.top)
    return result


def report(r: dict[str, Any]) -> str:
    lines = [
        f"\n== {r['stage']}, sequences of {r['length']} ==",
        f"{r['tokens_per_second']:,.0f} tok/s   step {r['step_seconds'] * 1e3:,.1f} ms   "
        f"Python done after {r['host_seconds'] * 1e3:,.1f} ms"
        + (f"   peak {r['peak_bytes'] / 2**30:.1f} GiB" if r["peak_bytes"] else ""),
    ]
    if "parts" in r:
        total = sum(r["parts"].values()) or 1.0
        lines += [
            f"per step: {r['kernel_seconds'] * 1e3:,.1f} ms in kernels, {r['launches']:,.0f} launches, "
            f"{r['operations']:,.0f} operations, {r['synchronisations']:,.0f} synchronisations, "
            f"{r['device_to_host_copies']:,.0f} copies to the host",
            "parts: " + ", ".join(f"{name} {s / total:.1%}" for name, s in r["parts"].items()),
            *(f"{d['seconds'] * 1e3:9.2f} ms {d['calls']:7.0f}x  {d['name']}" for d in r["dearest"]),
        ]
    return "\n".join(lines)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--recipe", type=Path, default=RECIPES / "v41-45m.toml")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", default=None, help="float32 or bfloat16 (default: the recipe's)")
    p.add_argument("--stages", default="dense,indexer,sparse", help="comma-separated")
    p.add_argument("--tokens", type=int, default=65_536, help="of a step")
    p.add_argument("--length", type=int, default=0, help="of a sequence; 0: the recipe's, twice that when sparse")
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--steps", type=int, default=5, help="timed without the profiler")
    p.add_argument("--profiled", type=int, default=1, help="steps under the profiler")
    p.add_argument("--top", type=int, default=25, help="kernels to list")
    p.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=None, help="default: the recipe's")
    p.add_argument("--backend", default="auto", help="of the kernels")
    p.add_argument("--threads", type=int, default=0, help="of torch on a CPU; 0: as it decides")
    p.add_argument("--json", type=Path, default=None, help="also write the result here")
    return p.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    o = options(arguments)
    if o.threads:
        torch.set_num_threads(o.threads)
    recipe = read_recipe(o.recipe)
    run = replace(recipe.run, dtype=o.dtype or recipe.run.dtype)
    run = run if o.recompute is None else replace(run, recompute=o.recompute)
    model = build(recipe, o.device, compute_dtype(run.dtype))
    step = Step(replace(recipe, run=run), model)
    if run.recompute:
        recompute_blocks(model)
    name = torch.cuda.get_device_name() if torch.device(o.device).type == "cuda" else "cpu"
    result: dict[str, Any] = {
        "recipe": recipe.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": name,
        "torch": torch.__version__,
        "dtype": run.dtype,
        "recompute": run.recompute,
        "tokens": o.tokens,
        "backend": o.backend,
        "stages": {},
    }
    print({k: v for k, v in result.items() if k != "stages"}, file=sys.stderr)
    with kernels.backend(o.backend):
        for stage in o.stages.split(","):
            result["stages"][stage] = found = measure(step, recipe, stage, o)
            print(report(found), flush=True)
    line = json.dumps(result)
    if o.json is not None:
        o.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return result


if __name__ == "__main__":
    main()
