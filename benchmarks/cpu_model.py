"""finback's V4.1 against a plainly written reference on this machine's CPU.

    python benchmarks/cpu_model.py            the released reference's small default shape, two to four minutes
    python benchmarks/cpu_model.py --quick    a toy shape: does the script work?

Both contenders run in one process, on the same random weights and the same tokens, with the same number of threads, and
take turns step by step, because the machine's other users come and go. Logits are compared before anything is timed.
Quantisers are off in both. See benchmarks/README.md for what the figures mean.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from reference_style import ReferenceStyle
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import finback
from finback.engine.request import SequenceState
from finback.engine.runner import Runner, Slot
from finback.kernels import round_e4m3
from finback.models.deepseek_v41.model import DeepseekV41
from finback.nn.linear import prepare


@dataclass(frozen=True)
class Shape:
    """A text model without Engram, images or drafts. Five layers: window only, two at 2:1, two at 1:1."""

    dim: int = 1024
    heads: int = 16
    head_dim: int = 128
    rope_dim: int = 32
    q_lora: int = 256
    o_groups: int = 8
    o_lora: int = 256
    window: int = 128
    index_heads: int = 16
    index_dim: int = 64
    index_topk: int = 64
    experts: int = 8
    active: int = 2
    inter: int = 1024
    vocabulary: int = 129_280

    def config(self) -> dict[str, Any]:
        """The config.json of this shape; what is not named here has the released reference's default."""
        text = {
            "hidden_size": self.dim, "moe_intermediate_size": self.inter, "num_hidden_layers": 5,
            "num_attention_heads": self.heads, "n_routed_experts": self.experts, "num_experts_per_tok": self.active,
            "q_lora_rank": self.q_lora, "head_dim": self.head_dim, "qk_rope_head_dim": self.rope_dim,
            "o_groups": self.o_groups, "o_lora_rank": self.o_lora, "sliding_window": self.window,
            "compress_ratios": [0, 2, 2, 1, 1], "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3],
            "index_n_heads": self.index_heads, "index_head_dim": self.index_dim, "index_topk": self.index_topk,
            "vocab_size": self.vocabulary, "max_position_embeddings": 4096, "compress_rope_theta": 40000.0,
        }  # fmt: skip
        return {"model_type": "deepseek_v41", "text_config": text}


TINY = Shape(
    dim=64, heads=4, head_dim=32, rope_dim=8, q_lora=32, o_groups=2, o_lora=16, window=8,
    index_heads=16, index_dim=16, index_topk=4, experts=4, inter=32, vocabulary=96,
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """quick: a toy shape, to see that everything runs. threads: torch's, for both. json: write the result there too."""

    quick: bool = False
    threads: int = 2
    json: Path | None = None


def build(shape: Shape, dtype: torch.dtype) -> DeepseekV41:
    """A model with seeded random weights of the sizes that training leaves: products keep their input's scale. Matrices
    that V4.1's checkpoints store in FP8 or FP4 get numbers that FP8 can hold."""
    model = DeepseekV41.from_config(shape.config(), dtype=dtype, rounding=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for spec, tensor in model.weights():
            if spec.role == "norm":
                tensor.fill_(1)
            elif spec.name.endswith("_scale"):
                tensor.fill_(0.5)
            else:
                tensor.normal_(0, 1 if tensor.ndim < 2 else tensor.shape[1] ** -0.5, generator=generator)
                if spec.role in ("attention", "expert", "shared_expert") and tensor.ndim == 2:
                    tensor.copy_(round_e4m3(tensor, 32))
    return model.requires_grad_(False)


class Ours:
    """finback behind the three calls that are timed: its runner with paged rows, weights prepared for this machine."""

    def __init__(self, model: DeepseekV41, batch: int, length: int, chunk: int):
        self.runner, self.batch = Runner(model, [length] * batch, chunk), batch
        self.slots: list[Slot] = []

    def prefill(self, ids: Tensor) -> Tensor:
        for slot in self.slots:
            self.runner.close(slot)
        self.slots = [self.runner.open(SequenceState(line)) for line in ids.tolist()]
        return self._run(ids.shape[1])

    def decode(self, ids: Tensor) -> Tensor:
        for slot, token in zip(self.slots, ids[:, 0].tolist(), strict=True):
            slot.state.tokens.append(token)
        return self._run(1)

    def _run(self, count: int) -> Tensor:
        hidden = self.runner.forward([(slot, count) for slot in self.slots])
        return self.runner.logits(hidden[count - 1 :: count])


class Theirs:
    """The reference-style contender behind the same calls."""

    def __init__(self, contender: ReferenceStyle):
        self.contender, self.length = contender, 0

    def prefill(self, ids: Tensor) -> Tensor:
        self.length = ids.shape[1]
        return self.contender.forward(ids, 0)

    def decode(self, ids: Tensor) -> Tensor:
        self.length += 1
        return self.contender.forward(ids, self.length - 1)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def count_calls(work: Callable[[], object]) -> int:
    """ATen operations that `work` dispatches, views included. Call it under inference_mode, as the timed steps are."""
    with _Counter() as counter:
        work()
    return counter.calls


def take_turns(repeats: int, *contenders: Callable[[], object]) -> list[list[float]]:
    """Seconds of each of `repeats` calls of every contender, in turns A B A B ...; one round before is not counted."""
    seconds: list[list[float]] = [[] for _ in contenders]
    for round_ in range(repeats + 1):
        for times, work in zip(seconds, contenders, strict=True):
            start = time.perf_counter()
            work()
            if round_:
                times.append(time.perf_counter() - start)
    return seconds


@dataclass(frozen=True)
class Figure:
    """One measurement of both. `ratio` > 1: finback is better. Times in ms, median and best of the repeats."""

    name: str
    ratio: float
    ours: float
    theirs: float
    ratio_of_best: float | None = None
    ours_best: float | None = None
    theirs_best: float | None = None


def timed(name: str, repeats: int, ours: Callable[[], object], theirs: Callable[[], object]) -> Figure:
    a, b = ([1000 * s for s in times] for times in take_turns(repeats, ours, theirs))
    median = statistics.median
    return Figure(name, median(b) / median(a), median(a), median(b), min(b) / min(a), min(a), min(b))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative L2 distance of logits."""
    return float((ours - theirs).norm() / theirs.norm())


@torch.inference_mode()
def measure(shape: Shape, prompt: int, steps: int) -> tuple[list[Figure], dict[str, float]]:
    """All figures, and the distances of both contenders' logits."""
    model = build(shape, torch.bfloat16)
    batch, room = 8, 4 * steps + 64
    # Before `prepare`, which packs finback's own copy of the weights and leaves the plain tensors to the contender.
    contenders = {b: ReferenceStyle(model, batch=b, max_len=prompt + room) for b in (1, batch)}
    contenders[batch].weights = contenders[1].weights
    prepare(model)
    ids = torch.randint(shape.vocabulary, (batch, prompt + room), generator=torch.Generator().manual_seed(1))

    figures, distances = [], {}
    for b, repeats in ((1, steps), (batch, max(3, steps // 4))):
        ours, theirs = Ours(model, b, prompt + room, prompt), Theirs(contenders[b])
        start, token = ids[:b, :prompt], ids[:b, prompt : prompt + 1]
        distances[f"prefill, batch {b}"] = distance(ours.prefill(start), theirs.prefill(start))
        distances[f"decode, batch {b}"] = distance(ours.decode(token), theirs.decode(token))
        decode = (lambda o=ours, t=token: o.decode(t)), (lambda o=theirs, t=token: o.decode(t))
        figures.append(timed(f"decode at batch {b}, context {prompt}, ms", repeats, *decode))
        if b == 1:
            calls = [float(count_calls(work)) for work in decode]
            figures.append(Figure("ATen calls a decode step", calls[1] / calls[0], *calls))
            prefill = (lambda o=ours, s=start: o.prefill(s)), (lambda o=theirs, s=start: o.prefill(s))
            figures.append(timed(f"prefill of {prompt}, ms", max(3, steps // 4), *prefill))
    return figures, distances


def machine(options: Options) -> dict[str, Any]:
    """What the figures depend on."""
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    flags = {flag for line in _cpuinfo() if line.startswith("flags") for flag in line.split()}
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "native_bf16": bool(flags & {"avx512_bf16", "amx_bf16"}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "finback": finback.__version__,
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def peak_gib() -> float:
    """Largest resident memory of this process so far; both contenders and the weights of both are in it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2 ** (30 if platform.system() == "Darwin" else 20)


def show(figures: Sequence[Figure], distances: dict[str, float], facts: dict[str, Any]) -> None:
    table = Table("", "ratio", "finback", "reference style", "ratio of best", "best: finback", "best: reference style")
    for f in figures:
        row = [f"{f.ratio:.2f}x", f"{f.ours:.1f}", f"{f.theirs:.1f}"]
        if f.ratio_of_best is not None:
            row += [f"{f.ratio_of_best:.2f}x", f"{f.ours_best:.1f}", f"{f.theirs_best:.1f}"]
        table.add_row(f.name, *row)
    console = Console(width=120)
    console.print(table)
    console.print("relative L2 of the logits: " + ", ".join(f"{k} {v:.1e}" for k, v in distances.items()))
    console.print(", ".join(f"{k} {v}" for k, v in facts.items()))


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    load_before = os.getloadavg()
    figures, distances = measure(TINY, 32, 5) if options.quick else measure(Shape(), 512, 21)
    facts = machine(options) | {
        "peak_rss_gib": round(peak_gib(), 2),
        "load_before": [round(x, 2) for x in load_before],
        "load_after": [round(x, 2) for x in os.getloadavg()],
    }
    show(figures, distances, facts)
    result = json.dumps({"figures": [asdict(f) for f in figures], "relative_l2": distances, **facts})
    if options.json is not None:
        options.json.write_text(result + "\n")
    print(result)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
