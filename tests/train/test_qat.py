"""Training on rounded weights and activations: what trains is what is served, and what learns is the masters."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from finback import kernels
from finback.base.runtime import ConfigError
from finback.engine.llm import LLM
from finback.io.checkpoint import Checkpoint
from finback.io.load import load_model
from finback.nn.rows import BatchRows
from finback.train import quantise
from finback.train.objective import Objective, recompute_blocks
from finback.train.optim import OptimConfig, Optimiser
from finback.train.quantise import QuantConfig, Quantiser
from finback.train.recipe import LossConfig, Stage, read_recipe
from finback.train.trainer import Trainer

DRAFTS = {
    "num_nextn_predict_layers": 1, "dspark_block_size": 3, "dspark_target_layer_ids": [2, 4], "dspark_markov_rank": 8
}  # fmt: skip
WIDE = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank"), 128)
CHANGES = {"v41": DRAFTS, "v32": {**WIDE, "kv_lora_rank": 128, "v_head_dim": 64, "index_head_dim": 128}}
FAMILIES = list(CHANGES)
TOKEN_MAP = json.dumps(list(range(48))).encode()  # of the tiny models' vocabulary


@pytest.fixture
def qat(tiny_model, tiny_config, tmp_path: Path) -> Callable[..., Any]:
    """qat(family, dtype, **options of [quant]) -> (model, optimiser, quantiser, save), with weights stirred so that no
    branch is silent; save() writes the quantised checkpoint."""

    def build(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        model = tiny_model(name, dtype, **CHANGES[name])
        with torch.no_grad():
            for p in model.state_dict().values():
                if p.is_floating_point():
                    p.copy_((p + 0.05 * torch.randn(p.shape)).float())
        optimiser = Optimiser(model, OptimConfig(warmup=1))
        quantiser = Quantiser(model, tiny_config(name, **CHANGES[name]), QuantConfig(**options), optimiser)

        def save() -> Path:
            quantiser.save(tmp_path / "served", optimiser.masters(), {"token_map.json": TOKEN_MAP})
            return tmp_path / "served"

        return model, optimiser, quantiser, save

    return build


def gradients(model, batch, **loss: Any) -> dict[str, torch.Tensor]:
    """Of the whole loss, indexers included, by parameter; the parameters' own are cleared."""
    Objective(model, LossConfig(mtp=0, **loss))(batch, Stage(), batch.targets()).total.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parameters_are_what_the_checkpoint_holds(name, dtype, qat, random_batch):
    """To the bit, also after a step: a tensor that is rounded in another format or block than it is written in, or one
    (norm, router, drafts) that is not rounded at all, is served with other values than it was trained with."""
    model, optimiser, quantiser, save = qat(name, dtype)
    quantiser.start()
    batch = random_batch(20)
    for step in range(2):
        if step:
            Objective(model, LossConfig(mtp=0))(batch, Stage(), batch.targets()).total.backward()
            optimiser.collect()
            optimiser.step(0, 10)
            quantiser.refresh()
        served = load_model(save(), dtype=dtype, trainable=True)
        for (spec, ours), (_, theirs) in zip(model.weights(), served.weights(), strict=True):
            assert torch.equal(ours, theirs), (step, spec.name)
    for part in optimiser.parts:  # its own values stay finer than what is served
        assert part.kind != "muon" or not torch.equal(part.master, part.parameter.to(part.master.dtype)), part.name


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 5e-5)])
def test_logits_are_those_of_serving(name, dtype, bound, qat, random_batch):
    """With gradients on, against the checkpoint: a rounding of rows, queries, keys, inputs or attention weights that
    only one of the two sides has is a thousand times larger than this."""
    model, _, quantiser, save = qat(name, dtype)
    quantiser.start()
    batch = random_batch(45, 28)
    packed = batch.forward_batch("cpu")
    hidden = model(packed, BatchRows(model.row_groups()).view(packed))
    assert hidden.requires_grad
    scored = LLM(save(), dtype=str(dtype).removeprefix("torch."), draft=None).score([list(c.ids) for c in batch.chunks])
    assert float((torch.cat(scored) - model.logits(hidden).detach()).abs().max()) < bound


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_at_the_rounded_point(name, qat, random_batch):
    """Straight through: the gradient is that of the served model, and the masters take the very step that it gives,
    from where they were and not from the rounded values. Recomputed blocks give the same."""
    model, optimiser, quantiser, save = qat(name, torch.float64)
    quantiser.start()
    batch = random_batch(24, 13)
    found = gradients(model, batch)
    served = load_model(save(), dtype="float64", trainable=True)
    expected = gradients(served, batch)
    assert found.keys() == expected.keys()
    for key, grad in found.items():
        assert torch.allclose(grad, expected[key], atol=1e-12, rtol=1e-9), key
    recompute_blocks(model)
    again = gradients(model, batch)
    assert all(torch.equal(again[key], grad) for key, grad in found.items())

    masters = {part.name: part.master.clone() for part in optimiser.parts}
    twin = Optimiser(served, OptimConfig(warmup=1))
    for part, other in zip(optimiser.parts, twin.parts, strict=True):
        other.master = masters[part.name]
        part.grad = None if part.name not in found else found[part.name].clone()
        other.grad = None if part.grad is None else part.grad.clone()
    optimiser.step(0, 10)
    twin.step(0, 10)
    for part, other in zip(optimiser.parts, twin.parts, strict=True):
        assert torch.equal(part.master, other.master), part.name


@pytest.mark.parametrize("name", FAMILIES)
def test_roundings_of_activations_let_gradients_through(name, qat, random_batch, monkeypatch):
    """Every gradient is that of a model in which each rounding adds a constant: none of the roundings of inputs, rows,
    queries and keys cuts it, in the indexers' own loss either."""
    model, _, quantiser, _ = qat(name, torch.float64)
    quantiser.start()
    batch = random_batch(24, 13)
    found = gradients(model, batch)
    calls = []

    def shifted(rule: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(rule)
        return x + (rule(x.detach(), *args) - x).detach()

    for rounding in ("round_e4m3", "round_e2m1"):
        monkeypatch.setattr(kernels, rounding, partial(shifted, getattr(kernels, rounding)))
    expected = gradients(model, batch)
    assert len(calls) > 10
    for key, grad in found.items():
        assert grad.any() or not expected[key].any(), key
        assert torch.allclose(grad, expected[key], atol=1e-10, rtol=1e-6), key


def test_weights_are_rounded_once_a_step(qat, random_batch, monkeypatch):
    """Rounding in the forward would be repeated by every recomputed block and every expert's call."""
    model, _, quantiser, _ = qat("v41")
    quantiser.start()
    monkeypatch.setattr(quantise, "round_weight", lambda *_: pytest.fail("a weight was rounded in the forward"))
    assert gradients(model, random_batch(12))


def test_weights_that_are_not_trained_are_rounded_too(tiny_model, tiny_config, tmp_path):
    """Drafts are trained beside a frozen backbone: it has no masters, and must still be the one that will be served."""
    model = tiny_model("v41")
    model.layers.requires_grad_(False)
    optimiser = Optimiser(model, OptimConfig())
    quantiser = Quantiser(model, tiny_config("v41"), QuantConfig(), optimiser)
    quantiser.start()
    quantiser.save(tmp_path / "served", optimiser.masters(), {"token_map.json": TOKEN_MAP})
    served = load_model(tmp_path / "served", dtype="float32", trainable=True)
    for (spec, ours), (_, theirs) in zip(model.weights(), served.weights(), strict=True):
        assert torch.equal(ours, theirs), spec.name


@torch.no_grad()
def test_lifting_shows_the_unrounded_model(qat, random_batch):
    """Inside the block the model is the one without quantisation, to the bit; afterwards it rounds as before."""
    model, _, quantiser, _ = qat("v41")
    batch = random_batch(30).forward_batch("cpu")

    def logits() -> torch.Tensor:
        return model.logits(model(batch, BatchRows(model.row_groups()).view(batch)))

    plain = logits()
    quantiser.start()
    rounded = logits()
    with quantiser.lifted():
        assert torch.equal(logits(), plain)
    assert torch.equal(logits(), rounded) and (rounded - plain).abs().max() > 0.01


@torch.no_grad()
def test_parts_of_the_rounding_can_be_left_out(qat, random_batch):
    """`attention_weights = false` leaves the masked form of attention to training, and rounds everything else."""
    batch = random_batch(30).forward_batch("cpu")
    results = []
    for options in ({}, {"attention_weights": False}, {"attention_weights": False, "activations": False}):
        torch.manual_seed(0)
        model, _, quantiser, _ = qat("v41", **options)
        quantiser.start()
        results.append(model.logits(model(batch, BatchRows(model.row_groups()).view(batch))))
    everything, rows, weights = results
    assert 0 < (everything - rows).abs().max() and 0.01 < (rows - weights).abs().max()


def test_one_batch_is_learned_by_heart_while_rounded(tiny_model, tiny_config, random_batch):
    """FP4 experts, FP8 matrices and tables and rounded rows from the first step on: steps smaller than the distance of
    two FP4 numbers must add up in the masters. What rounding costs at the end is below the bound for shipping."""
    model, batch = tiny_model("v41"), random_batch(24, 24, 17)
    config = OptimConfig(matrix_lr=2e-2, lr=1e-2, head_lr=1e-2, weight_decay=0, warmup=5, decay=0)
    optimiser = Optimiser(model, config)
    quantiser = Quantiser(model, tiny_config("v41"), QuantConfig(), optimiser)
    quantiser.start()
    run, loss = Objective(model, LossConfig(mtp=0)), 9.0
    for step in range(60):
        result = run(batch, Stage(select=step >= 8), batch.targets())
        result.total.backward()
        optimiser.collect()
        optimiser.step(step, 60)
        quantiser.refresh()
        loss = float(result.nats) / result.targets
        if loss < 0.05:
            break
    assert loss < 0.05
    with torch.no_grad():
        rounded = float(run(batch, Stage(), batch.targets()).nats)
        with quantiser.lifted():
            plain = float(run(batch, Stage(), batch.targets()).nats)
    assert abs(rounded - plain) / batch.targets() < 0.02


# -- whole runs --------------------------------------------------------------------------------------------------------

WORDS = "the fin whale swims fast and far while the sea sings one low note after another in the dark".split()


@pytest.fixture
def recipe(tmp_path: Path, tiny_config) -> Path:
    """Six steps, rounded from the fourth on."""
    lines = [" ".join(WORDS[(i * 7 + k) % len(WORDS)] for k in range(12 + i)) for i in range(30)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    text = tiny_config("v41")["text_config"]
    for key in ("vocab_size", "engram_num_embeddings", "engram_compressed_vocab_size"):
        del text[key]
    model = "\n".join(f"{key} = {json.dumps(value)}" for key, value in text.items())
    file = tmp_path / "tiny.toml"
    file.write_text(f"""
name = "tiny"
tokenizer = {{ vocab_size = 352 }}
optim = {{ warmup = 2, ema = 0.5 }}
quant = {{ start = 0.5, shard_mib = 1 }}
[data]
batch_tokens = 48
length = 24
held_out = 0.2
sources = [{{name = "text", path = "text.jsonl", kind = "jsonl"}}]
[run]
steps = 6
threads = 1
save_every = 0
eval_every = 2
eval_tokens = 100
recompute = true
[model]
model_type = "deepseek_v41"
[model.text_config]
{model}
""")
    return file


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_run_leaves_the_model_that_it_trained(recipe: Path, tmp_path: Path):
    """`model-quantised` has the values of the last forward and serves; `model` keeps the float32 masters; the held-out
    loss is that with rounding, and the one without stands beside it from the start of rounding on. A run that is
    interrupted while rounding ends like the straight one, to the byte."""
    straight = Trainer(read_recipe(recipe), tmp_path / "straight")
    assert straight.run() == tmp_path / "straight" / "model"
    folder = tmp_path / "straight" / "model-quantised"
    served = load_model(folder, dtype="float32", trainable=True)
    for (spec, ours), (_, theirs) in zip(straight.model.weights(), served.weights(), strict=True):
        assert torch.equal(ours, theirs), spec.name
    kept = Checkpoint.open(tmp_path / "straight" / "model").read("head.weight")
    assert torch.equal(kept, next(p.master for p in straight.optimiser.parts if p.name == "head.weight"))
    assert kept.dtype == torch.float32 and not torch.equal(kept, straight.model.head.weight)
    assert LLM(folder).score([1, 2, 3]).isfinite().all()
    lines = [json.loads(line) for line in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
    held = {line["step"]: line for line in lines if "held_out" in line}
    assert [step for step, line in held.items() if "held_out_unrounded" in line] == [4, 6]
    assert held[6]["held_out"] != held[6]["held_out_unrounded"]

    broken = Trainer(read_recipe(recipe), tmp_path / "broken")
    while broken.step < 4:
        broken.advance()
    broken.save()
    Trainer(read_recipe(recipe), tmp_path / "broken").run()
    for name in ("model", "model-ema", "model-quantised", "model-ema-quantised"):
        assert files(tmp_path / "broken" / name) == files(tmp_path / "straight" / name), name


def test_a_start_at_the_end_only_writes_the_checkpoint(recipe: Path, tmp_path: Path):
    """Nothing is rounded while training, but the quantised checkpoint is there."""
    trainer = Trainer(read_recipe(recipe, ["quant.start=1", "run.steps=2"]), tmp_path / "run")
    trainer.run()
    assert not trainer.quantiser.on
    assert LLM(tmp_path / "run" / "model-quantised").score([1, 2, 3]).isfinite().all()


def test_mistakes_in_the_section_are_told_at_once(recipe: Path, tmp_path: Path):
    """Before data are read, let alone after an hour of training."""
    for change, text in {
        "quant.start=1.5": "quant.start 1.5.*from 0 to 1",
        "quant.expert='fp6'": "expert 'fp6'.*fp4 or fp8",
        "quant.experts='fp4'": "unknown key 'experts'.*did you mean 'expert'",
        "quant.shard_mib=0": "quant.shard_mib 0 must be at least 1",
        "quant.activations=false": "quant.attention_weights needs quant.activations",
        "model.quantization_config={quant_method='fp8'}": r"use the section \[quant\]",
    }.items():
        with pytest.raises(ConfigError, match=text):
            read_recipe(recipe, [change])
    with pytest.raises(ConfigError, match="multiples of 32"):
        Trainer(read_recipe(recipe, ["model.text_config.moe_intermediate_size=48"]), tmp_path / "run")
    assert not (tmp_path / "run" / "cache").exists()
