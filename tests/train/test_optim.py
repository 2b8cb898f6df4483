"""Optimisers: Muon against the singular value decomposition, groups by role, schedules, state."""

from __future__ import annotations

import math

import pytest
import torch

from finback.base.runtime import ConfigError
from finback.train.optim import OptimConfig, Optimiser, orthogonalise, parts_of, schedule


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_orthogonalise_gives_the_polar_factor(rng: torch.Generator, shape: tuple[int, int]):
    """U V^T of the singular value decomposition, for a stack, wide and tall; a transposed result has the right shape
    for square matrices only, and a norm over the whole stack shrinks all but the largest."""
    x = torch.randn(3, *shape, generator=rng, dtype=torch.float64) * torch.tensor([1.0, 50.0, 1e-3]).view(3, 1, 1)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    assert torch.allclose(orthogonalise(x), u @ v, atol=5e-3)
    assert not orthogonalise(torch.zeros(1, *shape)).any()


def test_ten_steps_settle_small_singular_values():
    """The fast polynomial alone leaves singular values between 0.7 and 1.2; the last two steps bring them to 1."""
    x = torch.diag(torch.tensor([1.0, 0.3, 0.05, 0.01], dtype=torch.float64)).unsqueeze(0)
    assert torch.allclose(torch.linalg.svdvals(orthogonalise(x)), torch.ones(4, dtype=torch.float64), atol=1e-2)


def test_one_muon_step_on_experts_is_a_step_on_each_matrix(tiny_model, rng):
    """Experts are stacked and gate and up are fused: each matrix of the checkpoint must be orthogonalised on its own,
    each head of the query projection too, and scaled to an RMS of 0.2 times the rate."""
    model = tiny_model("v41", torch.float64)
    config = OptimConfig(matrix_lr=0.01, weight_decay=0.1, clip=0, warmup=0, momentum_start=0.9)
    optimiser = Optimiser(model, config)
    block = model.layers[0]
    watched = {"w13": block.ffn.experts.w13, "wq_b": block.attn.wq_b.weight}
    before = {k: p.detach().clone() for k, p in watched.items()}
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=rng, dtype=p.dtype)
    grads = {k: p.grad.clone() for k, p in watched.items()}
    optimiser.collect()
    optimiser.step(0, 10)
    for name, cuts in (("w13", 4 * 2), ("wq_b", 4)):
        stack = grads[name].reshape(cuts, -1, grads[name].shape[-1])
        u, _, v = torch.linalg.svd(stack, full_matrices=False)
        step = 0.01 * 0.2 * math.sqrt(max(stack.shape[1:])) * (u @ v)
        expected = before[name] * (1 - 0.01 * 0.1) - step.view_as(before[name])
        assert torch.allclose(watched[name], expected, atol=2e-4), name


def test_adam_is_torchs(tiny_model, rng):
    """Norms, embeddings and the like over five steps, against torch.optim.AdamW."""
    model = tiny_model("v41", torch.float64)
    optimiser = Optimiser(model, OptimConfig(clip=0, warmup=0, decay=0, lr=0.01, muon=False, eps=1e-8))
    p = model.norm.weight
    other = torch.nn.Parameter(p.detach().clone())
    reference = torch.optim.AdamW([other], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    for number in range(5):
        p.grad = torch.randn(p.shape, generator=rng, dtype=p.dtype)
        other.grad = p.grad.clone()
        optimiser.collect()
        optimiser.step(number, 5)
        reference.step()
    assert torch.allclose(p, other, atol=1e-12)


def test_groups_by_role(tiny_model):
    """A router or a norm under Muon is pulled towards orthogonality, which means nothing for it; Engram tables have
    their own rate; router biases are moved by the load and by no optimiser."""
    kinds = {p.name: p.kind for p in parts_of(tiny_model("v41"))}
    expected = {
        "embed.weight": "adam", "head.weight": "head", "engrams.1.embed.weight": "table",
        "engrams.1.wkv.weight": "muon", "engrams.1.q_weight": "adam", "layers.0.ffn.gate.weight": "adam",
        "layers.0.ffn.experts.w13": "muon", "layers.0.attn.attn_sink": "adam", "layers.0.hc_attn.fn": "adam",
        "layers.1.attn.indexer.wq_b.weight": "indexer", "layers.1.attn.indexer.k_norm.weight": "indexer",
        "layers.1.attn.compressor.wkv.weight": "muon", "layers.0.attn.wo_a.weight": "muon",
    }  # fmt: skip
    assert {name: kinds[name] for name in expected} == expected
    assert not any(name.endswith("gate.bias") for name in kinds)
    model = tiny_model("spikewhale")  # the head is the embedding
    kinds = {p.name: p.kind for p in parts_of(model)}
    assert kinds["model.embed_tokens.weight"] == "adam"
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert set(kinds) == trained, "a parameter that no group holds stays as it was drawn"


def test_schedules():
    """Warm-up reaches the peak, wsd holds it and falls in a line to the end, cosine passes half way at half time."""
    wsd = OptimConfig(warmup=10, decay=0.4, final=0.1)
    assert [schedule(wsd, s, 100) for s in (0, 4, 9, 60)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert [schedule(wsd, s, 100) for s in (80, 100)] == pytest.approx([0.55, 0.1])
    cosine = OptimConfig(schedule="cosine", warmup=20)
    assert [schedule(cosine, s, 100) for s in (9, 20, 60, 100)] == pytest.approx([0.5, 1.0, 0.5, 0.0])
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        OptimConfig(schedule="cosin")


def test_clipping_and_accumulation(tiny_model, rng):
    """The norm is that of all gradients together; two forwards collect to their sum; a gradient that is not finite
    changes nothing."""
    model = tiny_model("v32", torch.float64)
    optimiser = Optimiser(model, OptimConfig(clip=0.5, warmup=0, muon=False))
    p = model.norm.weight
    for _ in range(2):
        p.grad = torch.full_like(p, 3.0)
        optimiser.collect()
    assert optimiser.step(0, 2, scale=0.5) == pytest.approx(3 * math.sqrt(32))
    first = next(q for q in optimiser.parts if q.parameter is p).state["first"]
    assert torch.allclose(first.norm(), torch.tensor(0.05, dtype=torch.float64))  # (1 - beta1) * clip
    before = p.detach().clone()
    p.grad = torch.full_like(p, float("nan"))
    optimiser.collect()
    assert math.isnan(optimiser.step(1, 2)) and torch.equal(p, before)


def test_bfloat16_parameters_have_float32_masters(tiny_model):
    """A step far below a bfloat16's spacing must not be lost: hundreds of them add up in the master."""
    model = tiny_model("v41", torch.bfloat16)
    optimiser = Optimiser(model, OptimConfig(lr=1e-5, warmup=0, decay=0, clip=0))
    weight, norm = model.embed.weight, model.norm.weight
    assert weight.dtype == torch.bfloat16 and norm.dtype == torch.float32
    with torch.no_grad():
        weight.fill_(1.0)
    part = next(p for p in optimiser.parts if p.parameter is weight)
    part.master.fill_(1.0)
    for number in range(300):
        weight.grad = torch.ones_like(weight)
        optimiser.collect()
        optimiser.step(number, 1000)
    assert torch.allclose(part.master, torch.tensor(1 - 300e-5), atol=1e-5)
    assert torch.equal(weight, part.master.bfloat16()) and float(weight.detach()[0, 0]) < 1


def test_state_goes_round(tiny_model, rng):
    """Moments, momentum and averages: after a restart the next step is the same to the bit; a foreign state is
    refused."""
    model, twin = tiny_model("v41"), tiny_model("v41")
    config = OptimConfig(ema=0.9, warmup=0)
    one, two = Optimiser(model, config), Optimiser(twin, config)

    def step(m, optimiser, number, seed):
        g = torch.Generator().manual_seed(seed)
        for p in m.parameters():
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
        optimiser.collect()
        optimiser.step(number, 10)

    step(model, one, 0, 1)
    twin.load_state_dict(model.state_dict())
    two.load_state_dict({k: v.clone() for k, v in one.state_dict().items()})
    step(model, one, 1, 2)
    step(twin, two, 1, 2)
    for key, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[key]), key
    for key, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[key]), key
    with pytest.raises(ConfigError, match="does not have"):
        two.load_state_dict({"nothing/first": torch.zeros(1)})
