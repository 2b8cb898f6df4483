"""What a run will need, from its recipe alone: parameters, memory, operations, time. No data are read for it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from finback.base.runtime import ConfigError
from finback.models.base import compute_dtype, family
from finback.train.families import family_of
from finback.train.optim import parts_of
from finback.train.recipe import Recipe

_UTILISATION = 0.15  # of the measured rate of large matrix products; small models on a CPU reach 10 to 35%
_LOOKED_UP = ("embedding", "engram_table")  # roles that are read by row, not multiplied


@dataclass(frozen=True)
class Estimate:
    """parameters: by role. active: parameters that multiply each token. memory: bytes by what holds them.
    flops_per_token: forward and backward. machine_rate: FLOP/s of this machine, measured; None where it lacks the
    device."""

    parameters: dict[str, int]
    active: int
    memory: dict[str, int]
    flops_per_token: float
    tokens_per_step: int
    steps: int
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
        return "\n".join(
            [
                f"parameters  {sum(self.parameters.values()) / 1e6:.2f}M ({parameters})",
                f"active      {self.active / 1e6:.2f}M multiply each token",
                f"memory      {sum(self.memory.values()) / 2**20:,.0f} MiB ({memory})",
                f"operations  {self.flops_per_token / 1e6:,.0f} MFLOP a token, {self.total_flops:.2e} in all",
                f"steps       {self.steps:,} of {self.tokens_per_step:,} tokens, "
                f"{self.steps * self.tokens_per_step:,} in all",
                f"time        {self._time()}",
            ]
        )

    def _time(self) -> str:
        if self.seconds is None or self.machine_rate is None:
            return "unknown: the recipe's device is not in this machine"
        hours = self.seconds / 3600
        duration = f"{hours:.1f} h" if hours >= 1 else f"{self.seconds / 60:.1f} min"
        return f"about {duration} at {_UTILISATION:.0%} of this machine's {self.machine_rate / 1e9:,.0f} GFLOP/s"


def estimate(recipe: Recipe) -> Estimate:
    """The needs of a run. The vocabulary is the recipe's tokenizer.vocab_size or the model's own vocab_size."""
    config = _sized(recipe)
    with torch.device("meta"):
        model = family(config).from_config(config, dtype=compute_dtype(recipe.run.dtype), trainable=True)
    parameters: dict[str, int] = {}
    active = 0.0
    text = getattr(model.config, "text_config", model.config)
    used = text.num_experts_per_tok / max(1, text.n_routed_experts)
    for spec, _ in model.weights():
        count = math.prod(spec.shape)
        if spec.optional:  # a second name of the embedding, which multiplies as a head
            active += count
            continue
        parameters[spec.role] = parameters.get(spec.role, 0) + count
        if spec.role not in _LOOKED_UP:
            active += count * (used if spec.role == "expert" else 1)
    length = max(s.length or recipe.data.length for s in recipe.stages)
    products = family_of(config["model_type"]).attention_products(model, length)
    return Estimate(
        parameters,
        round(active),
        _memory(model, recipe, text),
        6 * (active + products),
        recipe.data.batch_tokens * recipe.data.accumulate,
        recipe.run.steps,
        _measure(recipe.run.device, compute_dtype(recipe.run.dtype)),
    )


def _sized(recipe: Recipe) -> dict[str, Any]:
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
    values = sum(p.parameter.numel() for p in parts)
    narrow = sum(p.parameter.numel() for p in parts if p.parameter.dtype == torch.bfloat16)
    moments = sum(p.parameter.numel() * (1 if p.kind == "muon" else 2) for p in parts)
    size = compute_dtype(recipe.run.dtype).itemsize
    copies = getattr(text, "hc_mult", 1)
    kept = (2 * copies if recipe.run.recompute else 24 + 12 * copies) * text.hidden_size * text.num_hidden_layers
    return {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "masters": 4 * narrow,
        "gradients": 4 * values,
        "optimiser": 4 * (moments + (values if recipe.optim.ema else 0)),
        "activations (roughly)": kept * size * recipe.data.batch_tokens,
    }


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
