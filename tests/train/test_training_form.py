"""Training runs the very modules that serve: same logits, and they learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from finback.engine.llm import LLM
from finback.nn.rows import BatchRows
from finback.train.objective import Objective
from finback.train.optim import OptimConfig, Optimiser
from finback.train.recipe import LossConfig, Stage
from finback.train.state import load_weights, save_weights

FAMILIES = ["v41", "v32", "spikewhale"]


def save(folder: Path, model, optimiser: Optimiser, config: dict, dtype: str) -> None:
    token_map = json.dumps(list(range(model.vocab_size))).encode()
    save_weights(folder, model, {**config, "dtype": dtype}, optimiser.masters(), {"token_map.json": token_map})


def stir(model) -> None:
    """Move every weight off its fresh value, so that no branch is silent, to one that float32 holds."""
    with torch.no_grad():
        for p in model.state_dict().values():
            if p.is_floating_point():
                p.copy_((p + 0.05 * torch.randn(p.shape)).float())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 5e-5)])
def test_training_logits_are_those_of_score(name, dtype, bound, tiny_model, tiny_config, random_batch, tmp_path):
    """A packed batch with gradients, in the dense and the recomputing forms that training takes, against serving from
    the checkpoint that training wrote."""
    model = tiny_model(name, dtype)
    stir(model)
    batch = random_batch(45, 28)
    packed = batch.forward_batch("cpu")
    hidden = model(packed, BatchRows(model.row_groups()).view(packed))
    assert hidden.requires_grad
    logits = model.logits(hidden).detach()
    optimiser = Optimiser(model, OptimConfig())
    save(tmp_path / "m", model, optimiser, tiny_config(name), str(dtype).removeprefix("torch."))
    scored = LLM(tmp_path / "m", draft=None).score([list(c.ids) for c in batch.chunks])
    assert float((torch.cat(scored) - logits).abs().max()) < bound


@pytest.mark.parametrize("name", FAMILIES)
def test_one_batch_is_learned_by_heart(name, tiny_model, random_batch):
    """Random tokens can only be memorised: a loss below 0.05 needs every part of the path to carry its gradient. Half
    of the steps are dense, half attend to what the indexers pick."""
    model, batch = tiny_model(name), random_batch(24, 24, 17)
    run = Objective(model, LossConfig(mtp=0))
    config = OptimConfig(matrix_lr=2e-2, lr=1e-2, head_lr=1e-2, weight_decay=0, warmup=5, decay=0)
    optimiser = Optimiser(model, config)
    loss = 9.0
    for step in range(100):
        result = run(batch, Stage(select=step >= 8), batch.targets())
        result.total.backward()
        optimiser.collect()
        optimiser.step(step, 100)
        loss = float(result.nats) / result.targets
        if loss < 0.05:
            break
    assert loss < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_back_to_the_bit(dtype, tiny_model, tiny_config, tmp_path):
    """Masters are saved and loaded in float32: going through bfloat16 parameters would lose what training gained. Views
    of stacked experts must land in their own place."""
    model = tiny_model("v41", getattr(torch, dtype))
    optimiser = Optimiser(model, OptimConfig())
    for part in optimiser.parts:
        part.master.copy_(torch.randn(part.master.shape))
    save(tmp_path / "m", model, optimiser, tiny_config("v41"), dtype)
    other = tiny_model("v41", getattr(torch, dtype))
    twin = Optimiser(other, OptimConfig())
    load_weights(other, tmp_path / "m", twin)
    for one, two in zip(optimiser.parts, twin.parts, strict=True):
        assert torch.equal(one.master, two.master), one.name
        assert torch.equal(two.parameter, two.master.to(two.parameter.dtype)), one.name
