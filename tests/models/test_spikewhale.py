"""SpikeWhale against the published implementation's results, against itself under every cut, and its mended defects."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from finback.base.runtime import ConfigError
from finback.io.load import load_model
from finback.models.spikewhale.config import SpikeWhaleConfig
from finback.models.spikewhale.model import SpikeWhale
from finback.nn.rows import BatchRows, Chunk, ForwardBatch, PagedRows, RowView, page_class
from finback.nn.tape import Tape

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
SETS = ("spikewhale-dense", "spikewhale-derf", "spikewhale-full")
PAGE = 4
SIZES: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8, "qk_rope_head_dim": 4,
    "q_lora_rank": 12, "o_lora_rank": 12, "moe_intermediate_size": 16, "vocab_size": 40, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"use_moe": True, "n_routed_experts": 5, "num_experts_per_tok": 2}
EVERYTHING: dict[str, Any] = {
    **SIZES, **EXPERTS, "moe_layers": (0, 2), "num_hash_layers": 1, "n_shared_experts": 2, "use_xsa": True,
    "use_hyper_connections": True, "hc_mult": 3, "use_engram": True, "engram_compress_dim": 8, "engram_table_size": 16,
    "use_hrm_refine": True, "hrm_refine_dim": 8, "hrm_refine_steps": 2, "num_nextn_predict_layers": 2,
    "use_value_embed": True,
}  # fmt: skip
DERF: dict[str, Any] = {
    **SIZES, **EXPERTS, "moe_layers": (1,), "n_shared_experts": 0, "scoring_func": "softmax", "norm_topk_prob": False,
    "use_derf": True, "use_qk_norm": False, "num_key_value_heads": 2, "tie_word_embeddings": True, "use_engram": True,
    "engram_hash": "released", "engram_compress_dim": 8, "engram_table_size": 16, "engram_max_ngram": 4,
}  # fmt: skip
VARIANTS = {"everything": EVERYTHING, "derf": DERF, "plain": SIZES}


def build(settings: dict[str, Any], dtype: torch.dtype = torch.float64, *, lively: bool = True) -> SpikeWhale:
    """A small model. lively: weights large enough that every part matters, also those that begin as zero."""
    config = SpikeWhaleConfig(**settings)
    model = SpikeWhale.from_config(config.to_dict(), dtype=dtype)
    model.init_weights()
    if lively:
        draws = torch.Generator().manual_seed(7)
        for name, tensor in model.state_dict().items():
            scale = 2.0 if "hash_proj" in name else 1.0 if "embed" in name else 0.2
            noise = torch.randn(tensor.shape, generator=draws, dtype=torch.float64) * scale
            tensor.copy_(1 + noise if "norm" in name else noise)
    return model.eval()


def alone(model: SpikeWhale, ids: list[int]) -> Tensor:
    """Logits of one whole sequence in one forward on `BatchRows`."""
    batch = ForwardBatch([Chunk(ids)])
    with torch.no_grad():
        return model.logits(model(batch, BatchRows(model.row_groups()).view(batch)))


class Paged:
    """Sequences on one `PagedRows`, in pages whose numbers are out of order."""

    def __init__(self, model: SpikeWhale, count: int, longest: int):
        self.model = model
        classes = {page_class(g) for g in model.row_groups()}
        each = -(-longest // PAGE)
        order = torch.randperm(count * each, generator=torch.Generator().manual_seed(1)).view(count, each).tolist()
        self.pages = [dict.fromkeys(classes, pages) for pages in order]
        self.store = PagedRows(
            model.row_groups(), dict.fromkeys(classes, count * each), page_tokens=PAGE, dtype=model.dtype
        )

    def batch(self, work: list[tuple[int, int, list[int]]], tape: Tape | None = None) -> tuple[ForwardBatch, RowView]:
        """work: (sequence, start, ids)."""
        batch = ForwardBatch([Chunk(ids, start, pages=self.pages[s]) for s, start, ids in work], tape=tape)
        return batch, self.store.view(batch)

    @torch.no_grad()
    def logits(self, work: list[tuple[int, int, list[int]]], tape: Tape | None = None) -> list[Tensor]:
        batch, view = self.batch(work, tape)
        hidden = self.model(batch, view)
        return list(self.model.logits(hidden).split(batch.lengths))


@pytest.mark.parametrize("name", SETS)
def test_golden(name: str):
    """Would catch any departure from the published model: parts, order, norms, masks, routing, every loss term.

    The derf set is ill-conditioned (logits up to 40): in float32 it moves by up to 1.6e-4 from one processor to
    another, so it is computed in float64, from which the set itself is 9.6e-5 away.
    """
    wanted = load_file(GOLDEN / name / "golden.safetensors")
    dtype = torch.float64 if name.endswith("derf") else torch.float32
    wanted = {k: t.to(dtype) if t.is_floating_point() else t for k, t in wanted.items()}
    model = load_model(GOLDEN / name, dtype=dtype)
    batch = ForwardBatch([Chunk(ids.tolist()) for ids in wanted["ids"]])
    with torch.no_grad():
        hidden, aux = model.forward_with_aux(batch, BatchRows(model.row_groups()).view(batch))
        logits = model.logits(hidden[: wanted["ids"].shape[1]])
        losses = model.loss(batch, hidden, aux, wanted["labels"].flatten())
    torch.testing.assert_close(logits, wanted["logits"][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(losses.total, wanted["loss"][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(aux, wanted["aux_loss"][0], atol=1e-6, rtol=0)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """Sequences of unequal lengths, and forwards of (sequence, new tokens): any cuts, any company, late joiners."""
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    ids = [draw(st.lists(st.integers(0, 39), min_size=n, max_size=n)) for n in lengths]
    left, steps = list(lengths), []
    while any(left):
        open_ = [s for s, n in enumerate(left) if n]
        chosen = draw(st.lists(st.sampled_from(open_), min_size=1, max_size=len(open_), unique=True))
        step = [(s, draw(st.integers(1, left[s]))) for s in chosen]
        for s, n in step:
            left[s] -= n
        steps.append(step)
    return ids, steps


MODELS = {(name, dtype): build(VARIANTS[name], dtype) for name in VARIANTS for dtype in (torch.float64, torch.float32)}


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-9), (torch.float32, 5e-5)])
@pytest.mark.parametrize("name", VARIANTS)
@given(plan=schedules())
def test_any_split_in_any_company(name: str, dtype: torch.dtype, bar: float, plan):
    """Would catch rows of another sequence, forgotten n-grams, acausal chunks, positions that restart: whatever makes a
    cut or a neighbour change a logit. One whole sequence alone on `BatchRows` is the measure."""
    model, (ids, steps) = MODELS[name, dtype], plan
    paged, done = Paged(model, len(ids), max(map(len, ids))), [0] * len(ids)
    parts: list[list[Tensor]] = [[] for _ in ids]
    for step in steps:
        work = [(s, done[s], ids[s][done[s] : done[s] + n]) for s, n in step]
        for (s, n), logits in zip(step, paged.logits(work), strict=True):
            parts[s].append(logits)
            done[s] += n
    for s, tokens in enumerate(ids):
        torch.testing.assert_close(torch.cat(parts[s]), alone(model, tokens), atol=bar, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_neighbours_in_one_training_batch_do_not_matter(name: str, rng: torch.Generator):
    """Would catch attention or n-grams that reach over a border between packed sequences."""
    model = MODELS[name, torch.float64]
    ids = [torch.randint(40, (n,), generator=rng).tolist() for n in (1, 9, 2, 5)]
    batch = ForwardBatch([Chunk(i) for i in ids])
    with torch.no_grad():
        together = model.logits(model(batch, BatchRows(model.row_groups()).view(batch)))
    torch.testing.assert_close(together, torch.cat([alone(model, i) for i in ids]), atol=1e-9, rtol=0)


def test_decoded_tokens_remember_their_ngrams():
    """A cached step that saw its own token only would look up other table rows than the full forward does. The memory
    must be live for that: with the usual small embeddings the released hash is 0 for all, which hides the loss."""
    model, ids = MODELS["derf", torch.float64], [(7 * i * i + i) % 40 for i in range(32)]
    whole = Tape(trace=True)
    batch = ForwardBatch([Chunk(ids)], tape=whole)
    with torch.no_grad():
        wanted = model.logits(model(batch, BatchRows(model.row_groups()).view(batch)))
    paged = Paged(model, 1, 32)
    paged.logits([(0, 0, ids[:16])])
    for i in range(16, 32):
        tape = Tape(trace=True)
        (logits,) = paged.logits([(0, i, ids[i : i + 1])], tape)
        assert torch.equal(tape.seen["engram_hashes"][0], whole.seen["engram_hashes"][i])
        torch.testing.assert_close(logits[0], wanted[i], atol=1e-9, rtol=0)
    assert len(whole.seen["engram_hashes"][16:, 2:].unique()) > 6


def test_derf_chunk_after_a_cached_past_is_causal():
    """Without a mask of its own a cached chunk of several tokens lets each see those after it."""
    model = MODELS["derf", torch.float64]
    first, second = Paged(model, 1, 12), Paged(model, 1, 12)
    for paged in (first, second):
        paged.logits([(0, 0, [3, 1, 4, 1])])
    (a,), (b,) = first.logits([(0, 4, [5, 9, 2, 6])]), second.logits([(0, 4, [5, 9, 2, 7])])
    assert torch.equal(a[:3], b[:3])
    assert not torch.allclose(a[3], b[3])


def test_fresh_weights_keep_their_zeros_and_scales():
    """A second initialisation that treats all matrices alike would undo the zero projections and the small tables."""
    model = build(EVERYTHING, torch.float32, lively=False)
    state = model.state_dict()
    for name in ("mtp_heads.0.proj.weight", "mtp_heads.1.proj.weight", "model.hrm_refine.up.weight"):
        assert not state[name].any(), name
    assert 0.008 < float(state["model.engram.lookup.tables.0.weight"].std()) < 0.012
    assert 0.018 < float(state["model.embed_tokens.weight"].std()) < 0.022
    assert torch.equal(state["model.engram.gate.bias"], torch.full((24,), -1.0))
    assert not state["model.layers.0.ve_gate"].any()


def test_zero_projections_can_leave_zero():
    """A zero matrix behind a closed gate gets no gradient, and the part would never train."""
    model = build(EVERYTHING, lively=False)
    loss_of(model, [[1, 2, 3, 4, 5]]).backward()
    assert model.model.hrm_refine.up.weight.grad.any()
    assert model.mtp_heads[0].proj.weight.grad.any()


def used_share(hash_name: str) -> float:
    """Smallest share of table rows, over heads and n-gram sizes, that 8 n-grams a row reach on fresh weights."""
    rows = 256
    settings = {**SIZES, "vocab_size": 1024, "hidden_size": 128, "use_engram": True, "engram_compress_dim": 32}
    model = build({**settings, "engram_table_size": rows, "engram_hash": hash_name}, torch.float32, lively=False)
    tape = Tape(trace=True)
    ids = torch.randint(1024, (8 * rows,), generator=torch.Generator().manual_seed(3)).tolist()
    batch = ForwardBatch([Chunk(ids)], tape=tape)
    with torch.no_grad():
        model.model.engram(model.model.embed_tokens(batch.ids), BatchRows(model.row_groups()).view(batch))
    hashes = tape.seen["engram_hashes"]
    assert int(hashes.max()) < rows
    return min(len(hashes[3:, n, head].unique()) / rows for n in range(3) for head in range(2))


def test_the_hash_of_new_models_spreads_over_the_table():
    """With the released hash every n-gram of a fresh model meets in row 0; new models use at least 90% of the rows."""
    assert SpikeWhaleConfig(**SIZES).engram_hash == "spread"
    assert used_share("spread") >= 0.9
    assert used_share("released") <= 2 / 256


def test_a_config_without_the_switch_keeps_the_released_hash():
    """Otherwise a published checkpoint would look up other rows than those it was trained with."""
    given_ = SpikeWhaleConfig(**EVERYTHING).to_dict()
    del given_["engram_hash"]
    assert SpikeWhaleConfig.from_dict(given_).engram_hash == "released"


def loss_of(model: SpikeWhale, sequences: list[list[int]], labels: list[list[int]] | None = None) -> Tensor:
    batch = ForwardBatch([Chunk(ids) for ids in sequences])
    hidden, aux = model.forward_with_aux(batch, BatchRows(model.row_groups()).view(batch))
    flat = [label for line in labels or sequences for label in line]
    return model.loss(batch, hidden, aux, torch.tensor(flat)).total


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_and_recomputation(name: str):
    """Would catch a part without a gradient, a NaN in one, and a recomputed layer that sees other rows."""
    model = build(VARIANTS[name]).train()
    sequences = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13]]
    grads = []
    for recompute in (False, True):
        model.model.gradient_checkpointing = recompute
        model.zero_grad()
        loss_of(model, sequences).backward()
        grads.append({k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for key, grad in grads[0].items():
        # All copies are still equal where the first layer mixes them: how it weighs them changes nothing.
        alike = key == "model.layers.0.hc_attn.pre_weight"
        assert grad.isfinite().all() and (alike or grad.any()), key
        torch.testing.assert_close(grads[1][key], grad, atol=1e-12, rtol=0)
    unused = {k for k, _ in model.named_parameters()} - grads[0].keys()
    assert all("router" in k or ".experts." in k for k in unused), unused  # hash layers' routers, experts nobody picked


def test_loss_of_packed_sequences_is_the_mean_over_their_targets():
    """Would catch a label that is taken from the next sequence, and a multi-token head that runs over an end."""
    settings = {
        **EVERYTHING,
        "use_moe": False,
        "zloss_coef": 0.0,
        "mtp_loss_weight": 0.5,
        "num_nextn_predict_layers": 1,
    }
    model = build(settings)
    a, b = [1, 2, 3, 4, 5], [6, 7, 8]
    with torch.no_grad():
        total = loss_of(model, [a, b])
        model.config = SpikeWhaleConfig(**{**settings, "mtp_loss_weight": 0.0})
        next_a, next_b, next_both = loss_of(model, [a]), loss_of(model, [b]), loss_of(model, [a, b])
        batch = ForwardBatch([Chunk(a), Chunk(b)])
        hidden = model(batch, BatchRows(model.row_groups()).view(batch))
        lines = model.logits(model.mtp_heads[0](hidden)).log_softmax(dim=1)
    torch.testing.assert_close(next_both, (4 * next_a + 2 * next_b) / 6)
    far = [(0, 3), (1, 4), (2, 5), (5, 8)]  # (packed index, token two places ahead of it)
    torch.testing.assert_close(total - next_both, -0.5 * sum(lines[i, t] for i, t in far) / 4)


def test_no_target_means_no_loss():
    """The mean over nothing is NaN, and one padded example would end a training run."""
    model = build(SIZES)
    total = loss_of(model, [[1], [2]])
    total.backward()
    assert float(total.detach()) == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_dropout_only_in_training():
    """Would catch a dropout that is read and never applied, or applied in evaluation."""
    model = build({**SIZES, "hidden_dropout": 0.5, "attention_dropout": 0.3})
    ids = [[1, 2, 3, 4, 5, 6]]
    with torch.no_grad():
        assert torch.equal(loss_of(model, ids), loss_of(model, ids))
        model.train()
        assert not torch.equal(loss_of(model, ids), loss_of(model, ids))


def test_drafts_are_the_heads_on_the_last_hidden_state():
    """Would catch drafts made from another position: after a longer chunk, after rejected tokens, beside another
    sequence. Slot i is for position p + 2 + i, whatever the anchor is."""
    model = MODELS["everything", torch.float64]
    drafter, paged = model.drafter(), Paged(model, 2, 12)
    assert drafter.block_size == 2
    ids = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]

    def run(work: list[tuple[int, int, list[int]]]) -> None:
        batch, view = paged.batch(work)
        with torch.no_grad():
            drafter.observe(batch, view, model(batch, view))

    def wanted(tokens: list[int]) -> list[int]:
        batch = ForwardBatch([Chunk(tokens)])
        with torch.no_grad():
            hidden = model(batch, BatchRows(model.row_groups()).view(batch))[-1:]
            return [int(model.logits(head(hidden)).argmax()) for head in model.mtp_heads]

    run([(0, 0, ids[0]), (1, 0, ids[1])])
    run([(0, 7, [11, 12, 13])])  # to be rejected but for 11
    batch, view = paged.batch([(0, 8, drafter.block_chunk(20)), (1, 3, drafter.block_chunk(21))])
    with torch.no_grad():
        proposal = drafter.propose(batch, view)
        forced = drafter.propose(batch, view, lambda logits, slot: torch.full((len(logits),), slot))
    assert proposal.tokens.tolist() == [wanted([*ids[0], 11]), wanted(ids[1])]
    assert forced.tokens.tolist() == [[0, 1], [0, 1]]


def test_a_stale_copy_of_a_tied_head_is_not_used(tmp_path: Path):
    """Files of tied models may hold a separate head; the published class ties it to the embedding after loading."""
    source = GOLDEN / "spikewhale-derf"
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = torch.ones_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    ids = list(range(10, 20))
    pair = [alone(load_model(folder, dtype="float32"), ids) for folder in (source, tmp_path)]
    assert torch.equal(*pair)


def test_bfloat16_stays_near_float32():
    """Would catch sums or hashes in bfloat16: routing, tables and the residual would wander off."""
    ids = load_file(GOLDEN / "spikewhale-dense" / "golden.safetensors")["ids"][0].tolist()
    low, high = (alone(load_model(GOLDEN / "spikewhale-dense", dtype=t), ids) for t in ("bfloat16", "float32"))
    assert low.dtype == torch.float32
    assert float((low - high).norm() / high.norm()) < 2e-2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"use_xza": True}, r"use_xza.*did you mean 'use_xsa'"),
        ({"nope_head_dim": 5}, "nope_head_dim 5 must be head_dim - qk_rope_head_dim = 4"),
        ({"num_key_value_heads": 3}, "must divide 4 attention heads"),
        ({"use_moe": True, "moe_layers": [1], "n_routed_experts": 4, "scoring_func": "sigmoid"}, "use 'softmax' or"),
        ({"use_moe": True, "moe_layers": [3], "n_routed_experts": 4}, r"moe_layers names layers \[3\]; there are 3"),
        ({"use_engram": True, "engram_table_size": 100, "engram_hash": "spread"}, "power of two"),
        ({"engram_hash": "sprad"}, "use 'released' or 'spread'"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_config_errors_say_what_is_allowed(change: dict[str, Any], text: str):
    """A setting that cannot be used must not be dropped or fail later as a shape."""
    with pytest.raises(ConfigError, match=text):
        SpikeWhaleConfig.from_dict({**SIZES, **change})


def test_config_round_trip():
    """Would catch a key that is read and not written: the saved model would load as another one."""
    config = SpikeWhaleConfig(**EVERYTHING)
    assert SpikeWhaleConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert math.isclose(config.rope_theta, 1e4)
