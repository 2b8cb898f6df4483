"""The training benchmarks run, and their contender computes what finback computes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def scripts(monkeypatch):
    """(train_profile, train_cpu, plain_training), imported as the scripts themselves import each other."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads = torch.get_num_threads()
    import plain_training
    import train_cpu
    import train_profile

    yield train_profile, train_cpu, plain_training
    torch.set_num_threads(threads)
    for name in ("train_profile", "train_cpu", "plain_training"):
        sys.modules.pop(name, None)


def test_contender_has_the_same_loss_and_gradients(scripts):
    """Catches a contender that is slow because it computes something else, or fast because it leaves something out:
    weights away from their start, sequences past the window, every parameter."""
    train_profile, train_cpu, plain_training = scripts
    recipe = train_cpu.toy()
    recipe.model["text_config"].update(num_hidden_layers=4, compress_ratios=[0, 2, 2, 1])
    recipe.model["text_config"].update(kv_source_layer_ids=[1, 3], index_source_layer_ids=[1, 3])
    step = train_profile.Step(recipe, train_profile.build(recipe, "cpu", torch.float32))
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    batch = train_profile.random_batch(64, 96, 48, 0)
    plain = plain_training.PlainTraining(step.model, z=recipe.loss.z, balance=recipe.loss.balance)
    ours = step.objective(batch, train_profile.STAGES["dense"], batch.targets()).total
    theirs = plain.loss(batch.forward_batch("cpu"), batch.labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    named = {n: p for n, p in step.model.named_parameters() if p.requires_grad}
    found = [torch.autograd.grad(loss, named.values(), allow_unused=True) for loss in (ours, theirs)]
    for name, a, b in zip(named, *found, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert (a - b).norm() <= 1e-4 * b.norm() + 1e-9, name


def test_quick_run_prints_one_line_of_figures(scripts, capsys):
    """Catches a script that no longer runs, and losses of the contenders that have drifted apart."""
    _, train_cpu, _ = scripts
    train_cpu.main(["--quick", "--threads", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["loss"]["finback"] == pytest.approx(result["loss"]["plain"], rel=1e-5)
    assert result["ratio"] == pytest.approx(
        result["tokens_per_second"]["finback"] / result["tokens_per_second"]["plain"]
    )
    assert sum(result["shares"].values()) == pytest.approx(1)
    named = {"attention", "experts", "hyper-connections", "head and loss", "optimiser", "engram"}
    assert named <= set(result["shares"]) and result["shares"].get("rest", 0) < 0.3


def test_the_backward_pass_belongs_to_its_parts(scripts):
    """Catches shares that hold forwards only: each matrix product of a forward has two in the backward pass."""
    train_profile, train_cpu, _ = scripts
    recipe = train_cpu.toy()
    step = train_profile.Step(recipe, train_profile.build(recipe, "cpu", torch.float32))
    batch, stage = train_profile.random_batch(64, 128, 64, 0), train_profile.STAGES["dense"]

    def products(run) -> int:
        with train_profile.marks(step.model), torch.autograd.profiler.profile() as trace:
            run()
        found = [part for event, part in train_profile.parts_of(trace.function_events) if event.name == "aten::bmm"]
        return found.count("attention")

    with torch.no_grad():
        forward = products(lambda: step.objective(batch, stage, batch.targets()))
    assert products(lambda: step(batch, stage)) >= 3 * forward > 0
