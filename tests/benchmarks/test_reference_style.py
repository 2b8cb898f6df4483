"""The benchmark's contender computes what finback computes: a ratio against a wrong model would mean nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from finback.engine.request import SequenceState
from finback.engine.runner import Runner

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def benchmark_modules(monkeypatch):
    """(cpu_model, reference_style), imported as the script itself imports them."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import cpu_model
    import reference_style

    yield cpu_model, reference_style
    for name in ("cpu_model", "reference_style"):
        sys.modules.pop(name, None)


@torch.inference_mode()
def test_contender_equals_finback_in_prefill_and_decode(benchmark_modules):
    """Catches a contender that is fast because it leaves something out, or slow because it computes something else:
    prompts around the compression ratio and the window, then single tokens over the borders of window and group."""
    cpu_model, reference_style = benchmark_modules
    shape = cpu_model.TINY
    model = cpu_model.build(shape, torch.float32)
    ids = torch.randint(shape.vocabulary, (2, 44))
    for prompt in (1, 2, 7, 8, 9, 21, 32):
        contender = reference_style.ReferenceStyle(model, batch=2, max_len=64)
        runner = Runner(model, [44, 44], 44)
        slots = [runner.open(SequenceState(line.tolist())) for line in ids]
        start = 0
        for count in [prompt, *[1] * 12]:
            theirs = contender.forward(ids[:, start : start + count], start, every=True)
            ours = runner.logits(runner.forward([(slot, count) for slot in slots])).view_as(theirs)
            start += count
            assert (ours - theirs).abs().max() <= 1e-4, f"prompt {prompt}, up to position {start}"


@torch.inference_mode()
def test_contender_holds_the_models_tensors_not_faster_copies(benchmark_modules):
    """The contender's weights are plain: bf16 as loaded, float32 for the head and the pooling projections only."""
    cpu_model, reference_style = benchmark_modules
    model = cpu_model.build(cpu_model.TINY, torch.bfloat16)
    own = {spec.name: tensor for spec, tensor in model.weights()}
    contender = reference_style.ReferenceStyle(model, batch=1, max_len=16)
    copies = {name for name, tensor in contender.weights.items() if tensor.data_ptr() != own[name].data_ptr()}
    assert copies == {
        "head.weight",
        "layers.1.attn.compressor.wkv.weight",
        "layers.1.attn.compressor.wgate.weight",
    }
    assert all(contender.weights[name].dtype == torch.float32 for name in copies)


def test_counts_every_operation(benchmark_modules):
    """Catches a counter that misses views or what runs under inference_mode."""
    cpu_model, _ = benchmark_modules

    def work() -> None:
        x = torch.ones(2, 3)
        x.t().add_(1)

    with torch.inference_mode():
        assert cpu_model.count_calls(work) == 3
