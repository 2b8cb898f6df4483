"""What a training step costs on a CPU: finback's against a plainly written eager one, at 20 million parameters.

    python benchmarks/train_cpu.py                 # three to six minutes on two cores, 5 GiB of memory
    python benchmarks/train_cpu.py --quick         # a toy shape, seconds: does the script run?
    python benchmarks/train_cpu.py --threads 1 --json result.json

Both contenders train the same model (recipes/v41-20m.toml, float32) on the same random tokens with finback's optimiser,
in turns, step by step; their first losses are compared. The contender is `plain_training.py`: a loop over experts,
Sinkhorn left to autograd, all pairs of positions scored under a mask. Shares of finback's step are of a profiled one.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from plain_training import PlainTraining
from train_profile import RECIPES, STAGES, Step, build, profiled, random_batch

from finback.train.data import Batch
from finback.train.recipe import Recipe, read_recipe

_STAGE = STAGES["dense"]


def toy() -> Recipe:
    """recipes/v41-1m.toml cut down to two layers and a small vocabulary."""
    recipe = read_recipe(RECIPES / "v41-1m.toml")
    recipe.model["text_config"].update(
        num_hidden_layers=2, compress_ratios=[0, 2], kv_source_layer_ids=[1], index_source_layer_ids=[1],
        candidate_source_layer_id=-1, num_experts_per_tok=2, engram_vocab_size=64, vocab_size=64,
    )  # fmt: skip
    return recipe


class PlainStep:
    """A step of the contender on `step`'s model, with its optimiser."""

    def __init__(self, step: Step):
        self.step = step
        loss = step.objective.config
        self.plain = PlainTraining(step.model, z=loss.z, balance=loss.balance)

    def __call__(self, batch: Batch) -> float:
        loss = self.plain.loss(batch.forward_batch("cpu"), batch.labels)
        loss.backward()
        self.step.optimiser.collect()
        self.step.optimiser.step(self.step.done, 1000)
        return float(loss.detach())


def first_losses(step: Step, plain: PlainStep, batch: Batch) -> tuple[float, float]:
    """The whole loss of one batch by both, before anything is trained."""
    with torch.no_grad():
        ours = step.objective(batch, _STAGE, batch.targets()).total
        theirs = plain.plain.loss(batch.forward_batch("cpu"), batch.labels)
    return float(ours), float(theirs)


def measure(
    step: Step, plain: PlainStep, batches: Sequence[Batch]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of every step of both, in turns, by the clock and of this process's threads; the first of each is not
    counted."""
    wall: dict[str, list[float]] = {"finback": [], "plain": []}
    own: dict[str, list[float]] = {"finback": [], "plain": []}
    for batch in batches:
        for name in wall:
            started, used = time.perf_counter(), time.process_time()
            if name == "finback":
                step(batch, _STAGE)
            else:
                plain(batch)
            wall[name].append(time.perf_counter() - started)
            own[name].append(time.process_time() - used)
    return {name: spent[1:] for name, spent in wall.items()}, {name: spent[1:] for name, spent in own.items()}


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="a toy shape: does it run?")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--tokens", type=int, default=4096, help="of a step")
    p.add_argument("--length", type=int, default=1024, help="of a sequence")
    p.add_argument("--steps", type=int, default=3, help="timed steps of each")
    p.add_argument("--json", type=Path, default=None, help="also write the result here")
    return p.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    o = options(arguments)
    torch.set_num_threads(o.threads)
    recipe, tokens, length, steps = read_recipe(RECIPES / "v41-20m.toml"), o.tokens, o.length, o.steps
    if o.quick:
        recipe, tokens, length, steps = toy(), 128, 64, 1
    step = Step(recipe, build(recipe, "cpu", torch.float32))
    plain = PlainStep(step)
    batches = [random_batch(step.model.vocab_size, tokens, length, seed) for seed in range(steps + 1)]
    ours, theirs = first_losses(step, plain, batches[0])
    load = os.getloadavg()[0]
    times, own = measure(step, plain, batches)
    speed = {who: tokens / statistics.median(spent) for who, spent in times.items()}
    best = {who: tokens / min(spent) for who, spent in times.items()}
    parts = profiled(step, batches[:1], _STAGE, False, 10)["parts"]
    total = sum(parts.values())
    result: dict[str, Any] = {
        "recipe": "toy" if o.quick else recipe.name,
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "tokens": tokens,
        "length": length,
        "threads": o.threads,
        "torch": torch.__version__,
        "load_before": load,
        "loss": {"finback": ours, "plain": theirs},
        "tokens_per_second": speed,
        "best_tokens_per_second": best,
        "ratio": speed["finback"] / speed["plain"],
        "best_ratio": best["finback"] / best["plain"],
        "processor_ratio": statistics.median(own["plain"]) / statistics.median(own["finback"]),
        "shares": {part: seconds / total for part, seconds in parts.items()},
    }
    print(report(result), file=sys.stderr)
    line = json.dumps(result)
    if o.json is not None:
        o.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return result


def report(r: dict[str, Any]) -> str:
    speed = r["tokens_per_second"]
    return "\n".join(
        [
            f"{r['recipe']}: {r['parameters'] / 1e6:.1f}M parameters, {r['tokens']} tokens a step in sequences of "
            f"{r['length']}, {r['threads']} threads, load {r['load_before']:.1f}",
            f"first loss   finback {r['loss']['finback']:.6f}   plain {r['loss']['plain']:.6f}",
            f"tokens/s     finback {speed['finback']:,.0f}   plain {speed['plain']:,.0f}   "
            f"ratio {r['ratio']:.2f} (best of each: {r['best_ratio']:.2f}, "
            f"in processor time: {r['processor_ratio']:.2f})",
            "finback's step: " + ", ".join(f"{part} {share:.1%}" for part, share in r["shares"].items()),
        ]
    )


if __name__ == "__main__":
    main()
