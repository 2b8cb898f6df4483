"""Mistakes that runs of others were lost to and that show in no loss for a long time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finback.models.base import family
from finback.nn.norm_rope import RMSNorm
from finback.train.estimate import sized
from finback.train.families import routers
from finback.train.loss import update_router_bias
from finback.train.objective import Objective
from finback.train.optim import OptimConfig, Optimiser
from finback.train.recipe import LossConfig, Stage, read_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("v*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_sparse_stages_are_sparse(path: Path):
    """A top-k that holds nearly every row of a sequence selects nothing: the indexer looks trained and is not, and a
    window as long as the sequences lets the compressed rows go unused."""
    recipe = read_recipe(path)
    config = sized(recipe)
    with torch.device("meta"):
        model = family(config).from_config(config, dtype=torch.float32, trainable=True)
    c = getattr(model.config, "text_config", model.config)
    longest = max(s.length or recipe.data.length for s in recipe.stages if s.select)
    ratio = max((r for r in getattr(c, "compress_ratios", [1]) if r), default=1)
    assert longest / ratio >= 2 * c.index_topk, (longest, ratio, c.index_topk)
    assert longest >= 4 * getattr(c, "sliding_window", 0)


def test_norms_keep_float32_in_a_bfloat16_model(rng: torch.Generator, tiny_model):
    """Squares, their mean and an eps of 1e-20 in a narrow type: rounding of 1% in every norm, and 1 / 0 in float16.
    What the norm of the narrow model gives is the float32 result, rounded once; so is its gradient."""
    x = (1e-3 * torch.randn(50, 64, generator=rng)).bfloat16()
    up = torch.randn(50, 64, generator=rng).bfloat16()
    found = []
    norm = RMSNorm(64, 1e-20)
    torch.nn.init.ones_(norm.weight)
    for dtype in (torch.bfloat16, torch.float32):
        given = x.to(dtype).clone().requires_grad_()
        out = norm(given)
        out.backward(up.to(dtype))
        found.append((out.detach(), given.grad))
    for narrow, wide in zip(*found, strict=True):
        assert narrow is not None and wide is not None and narrow.dtype == torch.bfloat16
        torch.testing.assert_close(narrow, wide.bfloat16(), rtol=2**-8, atol=0)
    kept = [p.dtype for name, p in tiny_model("v41", torch.bfloat16).named_parameters() if name.endswith("norm.weight")]
    assert kept and set(kept) == {torch.float32}


def test_a_small_v32_balances_its_experts(tiny_model, random_batch):
    """The reference makes the correction bias at one width only: a small model has none, and no balancing without an
    auxiliary loss. Here every size has it, and it moves."""
    model, batch = tiny_model("v32"), random_batch(30, 20)
    found = routers(model)
    assert list(found) == ["layer1"]
    result = Objective(model, LossConfig())(batch, Stage(), batch.targets())
    before = found["layer1"].bias.clone()
    update_router_bias(found["layer1"], result.counts["layer1"], 1e-2)
    assert not torch.equal(before, found["layer1"].bias)


@pytest.mark.parametrize("name", ["v41", "v32"])
def test_a_frozen_bias_stays_to_the_bit(name: str, tiny_model, random_batch):
    """Frozen means frozen for the optimiser, its decay and its averages too, not only for the update by sign."""
    model, batch = tiny_model(name), random_batch(30, 20)
    found = routers(model)
    for router in found.values():
        router.bias.normal_()
    before = {key: router.bias.clone() for key, router in found.items()}
    optimiser = Optimiser(model, OptimConfig(weight_decay=10.0, warmup=1, ema=0.5))
    result = Objective(model, LossConfig())(batch, Stage(), batch.targets())
    result.total.backward()
    optimiser.collect()
    optimiser.step(0, 2)
    for key, router in found.items():
        update_router_bias(router, result.counts[key], 0.0)
        assert torch.equal(before[key], router.bias)
        assert all(part.parameter is not router.bias for part in optimiser.parts)
