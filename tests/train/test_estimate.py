"""Counts of operations, and the share of the device's peak that a run reaches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finback.models.base import family
from finback.train import estimate as module
from finback.train.estimate import Meter, estimate, operations
from finback.train.recipe import read_recipe

DEMO = Path(__file__).parents[2] / "recipes" / "v41-1m.toml"
VISION = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "patch_size": 4,
    "downsample_ratio": 2,
}  # fmt: skip


def test_operations_are_those_of_the_products(tiny_model):
    """Against torch's own counter of one forward and backward, for a family whose every product it sees: a factor
    that is off (experts that are not picked, the head, three times instead of twice) makes every later figure wrong."""
    from torch.utils.flop_counter import FlopCounterMode

    from finback.nn.rows import BatchRows, Chunk, ForwardBatch

    model = tiny_model("v32", first_k_dense_replace=2, index_topk=32, index_n_heads=1, intermediate_size=256)
    length = 32
    batch = ForwardBatch([Chunk(list(range(length)))])
    with FlopCounterMode(display=False) as counter:
        model.logits(model(batch, BatchRows(model.row_groups()).view(batch))).sum().backward()
    counted = operations(model, length).per_token * length
    # Not the same: the indexer learns nothing here, and scores are made of the whole square of which half is visible.
    assert 0.93 < counted / counter.get_total_flops() < 1.05


def test_experts_and_images_count_where_they_work(tiny_config):
    """Only the picked experts multiply a token; the tower multiplies patches, the aligner once for four of them."""

    def counts(experts: int, **more: object) -> module.Operations:
        config = {**tiny_config("v41", n_routed_experts=experts), **more}
        return operations(family(config).from_config(config, dtype=torch.float32, trainable=True), 64)

    gates = 5 * 4 * 32  # of four more experts in five layers: the router's rows alone
    assert counts(8).active - counts(4).active == gates + 5 * 4  # and their biases
    seeing = counts(4, vision_config=VISION, image_token_id=1)
    assert seeing.active - counts(4).active <= 5 * 4 and seeing.per_patch > 0 == counts(4).per_patch
    tower = 16 * 48 + 48 + 2 * (16 * 48 + 48 + 16 * 16 + 16 + 3 * 16 * 24 + 2 * 16) + 16 + 16
    aligner = (64 * 32 + 32 + 32 * 32 + 32) / 4
    assert seeing.per_patch == pytest.approx(6 * (tower + aligner), rel=0.05)


def test_utilisation_is_operations_over_the_peak(tiny_model, monkeypatch: pytest.MonkeyPatch):
    """Twice the time is half the share; patches add theirs; the peak of a known GPU is its published one."""
    model = tiny_model("v41")
    monkeypatch.setattr(module, "_measure", lambda device, dtype: 1e9)
    meter = Meter(model, "cpu", torch.bfloat16)
    one = meter.utilisation(1000, 0, 64, 1.0)
    assert one == pytest.approx(operations(model, 64).per_token * 1000 / 1e9)
    assert meter.utilisation(1000, 0, 64, 2.0) == pytest.approx(one / 2)
    assert meter.utilisation(1000, 0, 256, 1.0) > one
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert Meter(model, "cuda", torch.bfloat16).peak == 989e12
    assert Meter(model, "cuda", torch.float32).peak == 1e9  # measured: what float32 reaches depends on settings


def test_a_dry_run_names_the_device_that_it_cannot_time(monkeypatch: pytest.MonkeyPatch):
    """ "unknown" alone leaves people looking for the mistake in their recipe."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = estimate(read_recipe(DEMO, ["run.device=cuda:1"])).text()
    assert "this machine has no 'cuda:1' (run.device)" in text and "parameters" in text
