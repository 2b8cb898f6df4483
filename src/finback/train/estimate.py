"""What a run will need, from its recipe alone: parameters, memory, operations, time. No data are read for it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from finback.base.runtime import ConfigError
from finback.models.base import compute_dtype, family
from finback.train.draft import DraftConfig
from finback.train.families import family_of
from finback.train.optim import parts_of
from finback.train.recipe import Recipe

_UTILISATION = 0.15  # of the measured rate of large matrix products; small models on a CPU reach 10 to 35%
_LOOKED_UP = ("embedding", "engram_table")  # roles that are read by row, not multiplied
_ELSEWHERE = ("vision", "draft")  # roles that see patches, or another stage's tokens
# Dense bfloat16 peak by part of the device's name, FLOP/s: NVIDIA's data sheets, without sparsity.
_PEAKS = {"H100": 989e12, "H200": 989e12}


@dataclass(frozen=True)
class Operations:
    """Counts of a training step's arithmetic. active: parameters that multiply each token. per_token, per_patch: FLOP,
    forward and backward, of a token and of an image patch (its share of the aligner included, attention among patches
    left out). What recomputation does twice counts once."""

    active: int
    per_token: float
    per_patch: float


def operations(model: Any, length: int) -> Operations:
    """For sequences of `length` tokens, whose layers attend to the picks of their indexers."""
    text = getattr(model.config, "text_config", model.config)
    used = text.num_experts_per_tok / max(1, text.n_routed_experts)
    active = patch = 0.0
    for spec, _ in model.weights():
        count = math.prod(spec.shape)
        if spec.optional:  # a second name of the embedding, which multiplies as a head
            active += count
        elif spec.role == "vision":
            joined = model.config.vision_config.downsample_ratio**2 if spec.name.startswith("aligner") else 1
            patch += count / joined
        elif spec.role not in (*_LOOKED_UP, *_ELSEWHERE):
            active += count * (used if spec.role == "expert" else 1)
    products = family_of(model.config.model_type).attention_products(model, length)
    return Operations(round(active), 6 * (active + products), 6 * patch)


def draft_operations(model: Any, length: int, draft: DraftConfig, tokens: int) -> Operations:
    """Of a draft run with forwards of `tokens` tokens: the backbone forward only, the draft stages for its anchors
    forward and backward. active: of the backbone."""
    backbone, c = operations(model, length), model.config.text_config
    slots = draft.anchors * c.dspark_block_size / tokens
    used = c.dspark_num_experts_per_tok / max(1, c.dspark_n_routed_experts)
    keys = c.sliding_window + c.dspark_block_size
    per_token, per_slot = 0.0, 2.0 * keys * c.num_attention_heads * c.head_dim * c.draft_layers
    for spec, _ in model.weights():
        if spec.name.startswith("mtp.") and "embed" not in spec.name:
            count = math.prod(spec.shape) * (used if ".experts." in spec.name else 1)
            per_token += count * spec.name.endswith(("main_proj.weight", "attn.wkv.weight"))  # window rows
            per_slot += count * (not spec.name.endswith("main_proj.weight"))
    head = c.vocab_size * c.hidden_size  # multiplies anchors' slots, the backbone's and the drafts', and is not trained
    total = backbone.per_token / 3 - 2 * head + 6 * per_token + slots * 6 * (per_slot + head)
    return Operations(backbone.active, total, backbone.per_patch / 3)


class Meter:
    """What share of the device's peak a run reaches ("model FLOPs utilisation"). The peak is the published one of the
    GPUs in `_PEAKS` in bfloat16, else the measured rate of large matrix products, which is taken once."""

    def __init__(self, model: Any, device: str, dtype: torch.dtype):
        self.model = model
        self.peak = peak_rate(device, dtype)
        self._counts: dict[int, Operations] = {}

    def utilisation(self, tokens: int, patches: int, length: int, seconds: float) -> float:
        """Of `seconds` spent on tokens in sequences of at most `length`, and on image patches."""
        if length not in self._counts:
            self._counts[length] = operations(self.model, length)
        count = self._counts[length]
        return (count.per_token * tokens + count.per_patch * patches) / (seconds * self.peak)


@dataclass(frozen=True)
class Estimate:
    """parameters: by role. active: parameters that multiply each token. memory: bytes by what holds them.
    flops_per_token: forward and backward. device: the recipe's. machine_rate: its FLOP/s, measured; None where this
    machine lacks it."""

    parameters: dict[str, int]
    active: int
    memory: dict[str, int]
    flops_per_token: float
    flops_per_patch: float
    tokens_per_step: int
    steps: int
    device: str
    machine_rate: float | None

    @property
    def total_flops(self) -> float:
        return self.flops_per_token * self.tokens_per_step * self.steps

    @property
    def seconds(self) -> float | None:
        """Of the whole run, at `_UTILISATION` of the machine's rate."""
        return None if self.machine_rate is None else self.total_flops / (_UTILISATION * self.machine_rate)

    def text(self) -> str:
        parameters = ", ".join(f"{role} {count / 1e6:.2f}M" for role, count in self.parameters.items())
        memory = ", ".join(f"{what} {size / 2**20:,.0f} MiB" for what, size in self.memory.items())
        patch = f" and {self.flops_per_patch / 1e6:,.1f} MFLOP an image patch" if self.flops_per_patch else ""
        return "\n".join(
            [
                f"parameters  {sum(self.parameters.values()) / 1e6:.2f}M ({parameters})",
                f"active      {self.active / 1e6:.2f}M multiply each token",
                f"memory      {sum(self.memory.values()) / 2**20:,.0f} MiB ({memory})",
                f"operations  {self.flops_per_token / 1e6:,.0f} MFLOP a token{patch}, "
                f"{self.total_flops:.2e} in all" + " for text" * bool(patch),
                f"steps       {self.steps:,} of {self.tokens_per_step:,} tokens, "
                f"{self.steps * self.tokens_per_step:,} in all",
                f"time        {self._time()}",
            ]
        )

    def _time(self) -> str:
        if self.seconds is None or self.machine_rate is None:
            return f"unknown: this machine has no {self.device!r} (run.device) to time"
        hours = self.seconds / 3600
        duration = f"{hours:.1f} h" if hours >= 1 else f"{self.seconds / 60:.1f} min"
        return f"about {duration} at {_UTILISATION:.0%} of this machine's {self.machine_rate / 1e9:,.0f} GFLOP/s"


def estimate(recipe: Recipe) -> Estimate:
    """The needs of a run. The vocabulary is the recipe's tokenizer.vocab_size or the model's own vocab_size."""
    config = sized(recipe)
    with torch.device("meta"):
        model = family(config).from_config(config, dtype=compute_dtype(recipe.run.dtype), trainable=True)
    parameters: dict[str, int] = {}
    for spec, _ in model.weights():
        if not spec.optional:
            parameters[spec.role] = parameters.get(spec.role, 0) + math.prod(spec.shape)
    length = max(s.length or recipe.data.length for s in recipe.stages)
    counts = operations(model, length)
    if recipe.draft is not None:
        counts = draft_operations(model, length, recipe.draft, recipe.data.batch_tokens)
    text = getattr(model.config, "text_config", model.config)
    return Estimate(
        parameters,
        counts.active,
        _memory(model, recipe, text),
        counts.per_token,
        counts.per_patch,
        recipe.data.batch_tokens * recipe.data.accumulate,
        recipe.run.steps,
        recipe.run.device,
        _measure(recipe.run.device, compute_dtype(recipe.run.dtype)),
    )


def sized(recipe: Recipe) -> dict[str, Any]:
    """config.json with the vocabulary's size filled in, without a tokenizer."""
    size = recipe.tokenizer.vocab_size
    config = {**recipe.model}
    text: dict[str, Any] = dict(config.get("text_config", config))
    if size is not None:
        text.setdefault("vocab_size", size)
    if "vocab_size" not in text:
        raise ConfigError("a dry run needs tokenizer.vocab_size, or vocab_size in [model]")
    if "text_config" not in config:
        return text
    config["text_config"] = text
    family_of(config["model_type"]).complete(config, None)
    return config


def _memory(model: Any, recipe: Recipe, text: Any) -> dict[str, int]:
    """Bytes by holder. Activations are a rule of thumb: values kept per token and layer, times the width."""
    parts = parts_of(model, recipe.optim.muon)
    held = sum(p.parameter.numel() for p in parts)
    narrow = sum(p.parameter.numel() for p in parts if p.parameter.dtype == torch.bfloat16)
    parts = [p for p in parts if recipe.draft is None or p.name.startswith("mtp.")]
    values = sum(p.parameter.numel() for p in parts)
    moments = sum(p.parameter.numel() * (1 if p.kind == "muon" else 2) for p in parts)
    size = compute_dtype(recipe.run.dtype).itemsize
    copies = getattr(text, "hc_mult", 1)
    kept = (2 * copies if recipe.run.recompute else 24 + 12 * copies) * text.hidden_size * text.num_hidden_layers
    return {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "masters": 4 * (narrow if recipe.quant is None else held),
        "gradients": 4 * values,
        "optimiser": 4 * (moments + (values if recipe.optim.ema else 0)),
        "activations (roughly)": kept * size * recipe.data.batch_tokens,
    }


def peak_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s that a run's utilisation is measured against."""
    if torch.device(device).type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(torch.device(device))
        for part, peak in _PEAKS.items():
            if part in name:
                return peak
    rate = _measure(device, dtype)
    assert rate is not None, "a run has its device"
    return rate


def _measure(device: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of large matrix products here; a CPU's on the threads that a run would use."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        return None
    n = 4096 if torch.device(device).type == "cuda" else 768
    a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    best = math.inf
    for _ in range(4):
        started = time.perf_counter()
        float((a @ b)[0, 0])
        best = min(best, time.perf_counter() - started)
    return 2 * n**3 / best
