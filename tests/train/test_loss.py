"""Losses: against the textbook formulas, and where their gradients may go."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from finback.nn.rows import Chunk, ForwardBatch
from finback.train.loss import (
    IGNORE,
    balance_loss,
    expert_counts,
    shifted_labels,
    token_loss,
    update_router_bias,
)
from finback.train.objective import Objective, recompute_blocks
from finback.train.recipe import LossConfig, Stage


def test_chunked_cross_entropy_is_the_whole_one(rng: torch.Generator):
    """Blocks that do not divide the tokens, targets that are left out, and the z term."""
    hidden = torch.randn(11, 6, dtype=torch.float64, generator=rng)
    weight = torch.randn(9, 6, dtype=torch.float64, generator=rng)
    labels = torch.randint(0, 9, (11,), generator=rng)
    labels[[0, 7]] = IGNORE
    found = token_loss(hidden, weight, labels, z=0.3, rows=4)
    logits = hidden @ weight.T
    nats = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    z = logits.logsumexp(1)[labels != IGNORE].square().sum()
    assert found.targets == 9
    assert torch.allclose(found.nats, nats) and torch.allclose(found.total, nats + 0.3 * z)


def test_chunked_cross_entropy_gradients(rng: torch.Generator):
    """The backward pass is written by hand."""
    hidden = torch.randn(5, 4, dtype=torch.float64, generator=rng, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, generator=rng, requires_grad=True)
    labels = torch.tensor([1, IGNORE, 6, 0, 2])
    assert torch.autograd.gradcheck(lambda h, w: token_loss(h, w, labels, z=0.2, rows=2).total, (hidden, weight))


def test_chunked_cross_entropy_holds_a_block_of_logits_only(rng: torch.Generator):
    """Logits of all tokens at once are the largest tensor of a step: 4096 tokens of 129k words are 2 GiB."""
    sizes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.append(out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    hidden = torch.randn(256, 4, generator=rng, requires_grad=True)
    weight = torch.randn(1000, 4, generator=rng)
    with Watch():
        token_loss(hidden, weight, torch.randint(0, 1000, (256,), generator=rng), rows=8).total.backward()
    assert 8000 <= max(sizes) < 16_000


def test_labels_further_on_stay_in_their_sequence():
    """The second multi-token head of one document must not learn the first words of the next."""
    batch = ForwardBatch([Chunk([1, 2, 3]), Chunk([7, 8])])
    labels = torch.tensor([2, 3, 4, 8, 9])
    assert shifted_labels(batch, labels, 1).tolist() == [3, 4, IGNORE, 9, IGNORE]


def test_balance_is_one_for_an_even_router_and_grows(rng: torch.Generator):
    """Per sequence: two sequences that each use one expert are not balanced by their sum."""
    batch = ForwardBatch([Chunk([0] * 4), Chunk([0] * 4)])
    even = torch.ones(8, 4, requires_grad=True)
    picks = torch.arange(8).unsqueeze(1) % 4
    assert torch.allclose(balance_loss(even, picks, batch), torch.tensor(1.0))
    skewed = torch.full((8, 4), 1e-3)
    skewed[:4, 0] = skewed[4:, 1] = 1
    skewed.requires_grad_()
    worst = balance_loss(skewed, torch.tensor([[0]] * 4 + [[1]] * 4), batch)
    assert float(worst.detach()) > 3.9
    worst.backward()
    assert skewed.grad is not None and float(skewed.grad[0, 0]) > 0


def test_bias_follows_the_sign_of_the_load_error_per_modality(tiny_model):
    """Image tokens have a bias of their own; a frozen phase freezes; the step's size does not depend on the error's."""
    gate = tiny_model("v41").layers[0].ffn.gate
    gate.bias_vl = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    experts = torch.tensor([[0, 1], [0, 2], [0, 1], [3, 2]])
    counts = expert_counts(experts, 4, torch.tensor([False, False, False, True]))
    assert counts.tolist() == [[3, 2, 1, 0], [0, 0, 1, 1]]
    update_router_bias(gate, counts, 0.5)
    assert gate.bias.tolist() == [-0.5, -0.5, 0.5, 0.5] and gate.bias_vl.tolist() == [0.5, 0.5, -0.5, -0.5]
    update_router_bias(gate, counts, 0.0)
    assert gate.bias.tolist() == [-0.5, -0.5, 0.5, 0.5]


def gradients(model, loss):
    model.zero_grad()
    loss.backward(retain_graph=True)
    return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


@pytest.mark.parametrize("name", ["v41", "v32"])
@pytest.mark.parametrize("select", [False, True])
def test_indexers_learn_from_the_kl_alone(tiny_model, random_batch, name: str, select: bool):
    """Integer picks carry no gradient, so without the KL an indexer is never trained; and a KL whose inputs are not
    detached would bend the backbone towards what is easy to index."""
    model, batch = tiny_model(name), random_batch(40, 23)
    run = Objective(model, LossConfig(z=0, balance=0, indexer=1.0, indexer_queries=0))
    without = gradients(model, run(batch, Stage(select=select, indexer=False), 1).total)
    assert without and not any("indexer" in key for key in without)
    both = gradients(model, run(batch, Stage(select=select), 1).total)
    learned = both - without
    owners = {"v41": ("layers.1.", "layers.3.", "layers.4."), "v32": ("layers.0.", "layers.1.")}[name]
    assert all("indexer" in key for key in learned)
    assert all(any(key.startswith(o) and "wq_b" in key for key in learned) for o in owners)
    assert any("wk" in key for key in learned)

    # The backbone's gradients are those without the KL, value by value.
    run(batch, Stage(select=select, indexer=False), 1).total.backward()
    model.zero_grad()
    torch.manual_seed(0)
    run(batch, Stage(select=select, indexer=False), 1).total.backward()
    plain = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    run(batch, Stage(select=select), 1).total.backward()
    for key, parameter in model.named_parameters():
        if key in plain and "indexer" not in key:
            assert torch.equal(parameter.grad, plain[key]), key


def test_dense_stage_attends_to_every_visible_row(tiny_model, random_batch):
    """A warm-up that already selected would teach the indexer its own mistakes."""
    model, batch = tiny_model("v41"), random_batch(40, 23)
    run = Objective(model, LossConfig())
    tape = run._tape(batch.forward_batch("cpu"), Stage(select=False), (0,))
    packed = batch.forward_batch("cpu")
    for layer, ratio in ((1, 2), (3, 1), (4, 1)):
        rows = tape.replay[f"layer{layer}.selected"]
        assert torch.equal((rows >= 0).sum(1), (packed.positions + 1) // ratio)


@pytest.mark.parametrize("name", ["v41", "v32", "spikewhale"])
def test_recomputing_blocks_changes_nothing(tiny_model, random_batch, name: str):
    """What blocks hand each other must be arguments: state on an object would be another one in the second run."""
    model, batch = tiny_model(name, torch.float64), random_batch(30, 17)
    run = Objective(model, LossConfig())
    run(batch, Stage(), batch.targets()).total.backward()
    plain = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    recompute_blocks(model)
    run(batch, Stage(), batch.targets()).total.backward()
    for key, parameter in model.named_parameters():
        if key in plain:
            assert torch.allclose(parameter.grad, plain[key], atol=1e-12), key


@pytest.mark.parametrize("name", ["v41", "v32", "spikewhale"])
def test_packed_documents_do_not_see_each_other(tiny_model, random_batch, name: str):
    """The loss of two documents in one batch is the sum of their losses alone: no attention, n-gram, label or pooled
    group may cross the border. 31 tokens, so that a group of two is left unfinished there."""
    model = tiny_model(name, torch.float64)
    both = random_batch(31, 18)
    run = Objective(model, LossConfig(z=0, balance=0, indexer=0, mtp=0))
    alone = [
        type(both)([chunk], labels, {}) for chunk, labels in zip(both.chunks, both.labels.split([31, 18]), strict=True)
    ]
    together = run(both, Stage(), 1).nats
    assert torch.allclose(together, sum(run(one, Stage(), 1).nats for one in alone), atol=1e-9)
