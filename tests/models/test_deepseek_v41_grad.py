"""DeepSeek-V4.1 under autograd: every weight that a loss depends on gets its slope, and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from finback.models.base import Model
from finback.models.deepseek_v41.attention import Compressor
from finback.models.deepseek_v41.config import DeepseekV41Config, TextConfig
from finback.models.deepseek_v41.engram import Engram
from finback.models.deepseek_v41.model import HyperConnection
from finback.nn.moe import Router
from finback.nn.rows import BatchRows, Chunk, ForwardBatch
from finback.nn.tape import Tape


def integer_choices_only(name: str) -> bool:
    """Parameters that the loss depends on through integer picks alone, or not at all: the indexer and its keys, the
    biases that choose experts, and the draft stages, which the backbone does not read."""
    return ".indexer." in name or name.endswith(("gate.bias", "gate.bias_vl")) or name.startswith("mtp.")


def loss_of(logits: Tensor) -> Tensor:
    return logits.logsumexp(1).square().sum()


def illustrated_prompts(lab: Any, model: Model) -> list[Any]:
    """Text long enough that windows, selections and candidates bind, and an image whose features have gradients."""
    return [
        lab.illustrated(model, 44),
        lab.illustrated(model, 3, lab.picture(model, 3, 7), 9, seed=1),
        lab.illustrated(model, 1, seed=2),
    ]


def grads_of(model: Model) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def test_every_weight_gets_its_slope_but_the_indexer(lab: Any) -> None:
    """A detached row, share or query: with the choices held fixed, gradients are the slope of the loss along any
    direction. The parameters without a gradient are exactly those that only pick integers, and the drafts'."""
    model = lab.build(lab.config()).requires_grad_(True)
    tape = Tape(record=True)
    with torch.no_grad():
        lab.score(model, illustrated_prompts(lab, model), tape)

    def loss() -> Tensor:
        return loss_of(lab.score(model, illustrated_prompts(lab, model), Tape(tape.seen)))

    loss().backward()
    generator = torch.Generator().manual_seed(1)
    slope = torch.tensor(0.0, dtype=torch.float64)
    directions: dict[torch.nn.Parameter, Tensor] = {}
    without = set()
    for name, p in model.named_parameters():
        if p.grad is None:
            without.add(name)
            continue
        assert bool(p.grad.isfinite().all()) and bool(p.grad.any()), name
        directions[p] = torch.randn(p.shape, generator=generator, dtype=p.dtype) * p.detach().std()
        slope += (p.grad * directions[p]).sum()
    assert without == {name for name, _ in model.named_parameters() if integer_choices_only(name)}
    ends = []
    for sign in (1, -2):
        with torch.no_grad():
            for p, d in directions.items():
                p += sign * 3e-8 * d  # a short step: the Engram gate is a square root and bends much near 0
            ends.append(loss())
    measured = (ends[0] - ends[1]) / 6e-8
    assert abs(measured - slope) < 1e-5 * abs(slope)


def test_every_expert_and_table_row_in_use_gets_a_gradient(lab: Any) -> None:
    """A stack whose later experts are cut off would pass a test of the whole stack."""
    model = lab.build(lab.config()).requires_grad_(True)
    prompts, tape = illustrated_prompts(lab, model), Tape(trace=True)
    loss_of(lab.score(model, prompts, tape)).backward()
    for i, layer in enumerate(model.layers):
        used = set(tape.seen[f"layer{i}.experts"].flatten().tolist())
        moved = layer.ffn.experts.w2.grad.flatten(1).any(1)
        assert {e for e in range(8) if moved[e]} == used and len(used) > 5
    live = torch.cat([torch.tensor(p.types) < 0 for p in prompts])
    for column, layer in enumerate(("1", "3")):
        rows = tape.seen["engram_hashes"][live][:, column].unique()
        moved = model.engrams[layer].embed.weight.grad.any(1).nonzero().flatten()
        assert moved.equal(rows)


def test_packed_documents_have_the_gradients_of_separate_ones(lab: Any) -> None:
    """Documents packed into one forward must not see each other, backwards neither."""
    model = lab.build(lab.config()).requires_grad_(True)
    prompts = illustrated_prompts(lab, model)
    loss_of(lab.score(model, prompts)).backward()
    packed = grads_of(model)
    model.zero_grad()
    for i in range(len(prompts)):
        loss_of(lab.score(model, [illustrated_prompts(lab, model)[i]])).backward()
    for name, grad in grads_of(model).items():
        other = packed[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert (grad - other).abs().max() < 1e-9 * max(1.0, float(grad.abs().max())), name


def test_earlier_losses_do_not_depend_on_later_tokens(lab: Any) -> None:
    """A leak from the future that no selection shows: through a pooled group or a shared share."""
    model = lab.build(lab.config())
    rows = torch.randn(24, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    prompt = lab.illustrated(model, 24)
    batch = ForwardBatch([Chunk(prompt.ids)], inserted=(torch.arange(24), rows))
    logits = model.logits(model(batch, BatchRows(model.row_groups()).view(batch)))
    for last in (7, 12, 13):
        (grad,) = torch.autograd.grad(loss_of(logits[: last + 1]), rows, retain_graph=True)
        assert bool(grad[: last + 1].any(1).all()) and not bool(grad[last + 1 :].any())


def test_training_in_float32_is_close_to_float64(lab: Any) -> None:
    """A gradient that passes through a narrower type than the weights have. Without Engram: near 0 its gate magnifies
    rounding a thousandfold."""
    grads = []
    for dtype in ("float32", "float64"):
        model = lab.build(lab.config(engram_layer_ids=[], engram_num_embeddings=[]), dtype).requires_grad_(True)
        loss_of(lab.score(model, [lab.illustrated(model, 20)])).backward()
        grads.append(grads_of(model))
    for name, narrow in grads[0].items():
        if narrow is None:
            continue
        wide = grads[1][name]
        assert wide is not None and narrow.dtype == torch.float32, name
        assert (narrow.double() - wide).norm() <= 1e-4 * wide.norm(), name


# -- parts -------------------------------------------------------------------------------------------------------------


def gradcheck(module: torch.nn.Module, run: Callable[..., Any], *inputs: Tensor) -> bool:
    """Of the inputs and of all parameters that `module` has."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.5)
    weights = [p for p in module.parameters() if p.requires_grad]
    return torch.autograd.gradcheck(lambda *_: run(*inputs), (*inputs, *weights))


@pytest.fixture
def double() -> Iterator[None]:
    """Parts made inside compute in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def c(lab: Any, double: None) -> TextConfig:
    """The text config of a model whose parts are small enough to differentiate number by number."""
    config = lab.config(
        hidden_size=4, head_dim=4, qk_rope_head_dim=2, hc_mult=2, hc_sinkhorn_iters=3, engram_head_dim=2
    )
    return DeepseekV41Config.from_dict(config).text_config


def test_gradcheck_hyper_connection(c: TextConfig, rng: torch.Generator) -> None:
    """The fast path on plain tensors is not differentiable, and must not be taken when a gradient is wanted."""
    hc = HyperConnection(c)
    assert gradcheck(hc, hc, torch.randn(2, 2, 4, generator=rng).requires_grad_())


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_gradcheck_compressor(c: TextConfig, ratio: int, rng: torch.Generator) -> None:
    """Pooling that drops the softmax's own gradient, or the tokens of an unfinished group leaking in."""
    compressor = Compressor(c, ratio)
    x = torch.randn(7, 4, generator=rng).requires_grad_()

    class View:
        batch = ForwardBatch([Chunk(range(5)), Chunk(range(2))])

        def append(self, _group: str, _layer: int, values: Tensor) -> Tensor:
            return values

        def locate(self, _group: str, seq: Tensor, rows: Tensor) -> Tensor:
            return rows + 5 * seq

    class Here:
        view, batch = View(), View.batch

    assert gradcheck(compressor, lambda x: compressor(x, Here(), 0), x)
    x.grad = None
    compressor(x, Here(), 0).sum().backward()
    finished = [t < 5 // ratio * ratio for t in range(5)] + [t < 2 // ratio * ratio for t in range(2)]
    assert x.grad is not None and x.grad.any(1).tolist() == finished


def test_gradcheck_engram(c: TextConfig, rng: torch.Generator) -> None:
    """The gate's signed square root has no slope at 0; away from it table, key, value and both weights have theirs."""
    engram = Engram(c, 5, None, trainable=True)
    rows = torch.randint(5, (2, 6), generator=rng)
    streams = torch.randn(2, 2, 4, generator=rng).requires_grad_()
    assert gradcheck(engram, lambda s: engram(s, rows, None), streams)
    image = torch.tensor([True, False])
    assert gradcheck(engram, lambda s: engram(s, rows, image), streams)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_gradcheck_router_weights(score: str, rng: torch.Generator) -> None:
    """Weights are differentiable, the choice is not: the bias must get no gradient through the weights."""
    router = Router(3, 5, 2, score=score, scale=1.5, normalise=True, bias=True)
    x = torch.randn(4, 3, generator=rng).requires_grad_()
    assert gradcheck(router, lambda x: router(x, None, Tape(), "layer0")[0], x)
    assert router.bias is not None and not router.bias.requires_grad
