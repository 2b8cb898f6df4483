"""Draft training: the drafts of serving, a loss that is the formula, no leaks, and a backbone that stays as it is."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from finback.base.runtime import CheckpointError, ConfigError
from finback.engine.drafters import DraftRequest, make_drafter
from finback.engine.llm import LLM
from finback.engine.request import SamplingParams, SpeculativeConfig
from finback.engine.verify import Picker
from finback.io.checkpoint import Checkpoint
from finback.io.load import load_model
from finback.models.deepseek_v41.dspark import DraftBlock
from finback.nn.rows import Chunk, ForwardBatch, PagedRows, page_class
from finback.train import draft_run
from finback.train.data import Batch
from finback.train.draft import Anchors, DraftConfig, draw_anchors, eligible
from finback.train.draft_run import DraftObjective, Frozen
from finback.train.estimate import draft_operations
from finback.train.loss import IGNORE
from finback.train.optim import OptimConfig, Optimiser
from finback.train.recipe import Stage, read_recipe
from finback.train.state import save_weights
from finback.train.trainer import Trainer

DEMO = Path(__file__).parents[2] / "recipes" / "v41-1m-draft.toml"
BLOCK, NOISE = 4, 5
DRAFTS = {
    "num_nextn_predict_layers": 2, "dspark_block_size": BLOCK, "dspark_noise_token_id": NOISE,
    "dspark_target_layer_ids": [1, 3, 4], "dspark_markov_rank": 8, "dspark_n_routed_experts": 3,
    "dspark_num_experts_per_tok": 2,
}  # fmt: skip
ALL = DraftConfig(anchors=10**6)


def stir(model: Any, size: float = 0.05) -> None:
    """Move every weight off its fresh value, so that no branch is silent, to one that float32 holds."""
    with torch.no_grad():
        for p in model.state_dict().values():
            p.copy_((p + size * torch.randn(p.shape)).float())


@pytest.fixture
def model(tiny_model) -> Any:
    made = tiny_model("v41", torch.float64, **DRAFTS)
    stir(made)
    return made


def every_anchor(batch: Batch) -> Anchors:
    return draw_anchors(batch, 10**6, BLOCK, (0,))


def logits_of(objective: DraftObjective, batch: Batch, anchors: Anchors) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of drafts and backbone [n, k, V] and of the confidence [n, k]."""
    blocks, drafts = objective.blocks(batch, anchors), objective.drafts
    marks = drafts.markov_embed(blocks.known)
    logits = drafts.base_logits(objective.model, blocks.hidden) + drafts.markov_head(marks)
    return logits, objective.model.logits(blocks.wanted), drafts.confidence_logits(blocks.hidden, marks)


# -- the forward -----------------------------------------------------------------------------------------------------


def served_draft(model: Any, ids: list[int]) -> tuple[list[int], list[float]]:
    """The engine's drafts and confidences after all of `ids`, the last of which is the anchor."""
    pages = {page_class(g): range(40) for g in model.row_groups()}
    store = PagedRows(model.row_groups(), dict.fromkeys(pages, 40), page_tokens=4, dtype=model.dtype)
    drafter = make_drafter(model, store, SpeculativeConfig(verify_length="static"))
    assert drafter is not None
    start = 0
    for end in (len(ids) // 2, len(ids) - 1):
        if end > start:
            context = ids[max(0, start - model.lookback) : start]
            batch = ForwardBatch([Chunk(ids[start:end], start, context, pages=pages)])
            view = store.view(batch)
            with torch.inference_mode():
                drafter.observe(model.backbone(batch, view), view)
            start = end
    picker = Picker(SamplingParams(max_tokens=60), ids, model.vocab_size)
    (drafted,) = drafter.propose([DraftRequest(picker, ids, pages, BLOCK)])
    assert drafted.confidence is not None
    return list(drafted.tokens), list(drafted.confidence)


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-9), ("float32", 5e-5)])
def test_drafts_are_those_of_serving(dtype, bound, tiny_model, tiny_config, random_batch, tmp_path):
    """Every anchor of a packed batch, in one pass, against the engine's drafter after the same tokens: wrong rows,
    positions, neighbours or targets would train drafts for a model that nobody serves."""
    model = tiny_model("v41", getattr(torch, dtype), **DRAFTS)
    stir(model)
    batch = random_batch(14, 3, 9)
    objective, anchors = DraftObjective(model, ALL), every_anchor(batch)
    blocks = objective.blocks(batch, anchors)
    assert blocks.hidden.requires_grad
    with torch.no_grad():
        block = DraftBlock(blocks.hidden, model.mtp.base_logits(model, blocks.hidden))
        proposal, _ = model.mtp.decide(block, blocks.known[:, 0])
    files = {"token_map.json": json.dumps(list(range(model.vocab_size))).encode()}
    config = {**tiny_config("v41", **DRAFTS), "dtype": dtype}
    save_weights(tmp_path / "m", model, config, Optimiser(model, OptimConfig()).masters(), files)
    served = load_model(tmp_path / "m", dtype=dtype)
    sequences = [(list(c.ids)[: p + 1]) for c in batch.chunks for p in range(1, len(c.ids))]
    assert len(sequences) == len(anchors) == 13 + 2 + 8
    for i, ids in enumerate(sequences):
        tokens, confidence = served_draft(served, ids)
        assert tokens == proposal.tokens[i].tolist()
        assert confidence == pytest.approx(proposal.confidence[i].tolist(), abs=bound)


def test_true_tokens_do_not_leak(model, random_batch):
    """Another true token inside the block: the stages see none of it, and only the slot right after it, whose Markov
    bias follows from it, changes. Drafts trained on leaked tokens look perfect and are of no use."""
    batch = random_batch(30)
    objective, place = DraftObjective(model, ALL), 12
    every = every_anchor(batch)
    anchors = Anchors(*(t[every.places[:, 0] == place] for t in (every.places, every.labels, every.learned)))
    ids = list(batch.chunks[0].ids)
    ids[place + 2] = (ids[place + 2] + 1) % model.vocab_size
    other = Batch([Chunk(ids)], batch.labels, {})
    with torch.no_grad():
        one, two = objective.blocks(batch, anchors), objective.blocks(other, anchors)
        assert float((one.hidden - two.hidden).abs().max()) < 1e-12
        a, b = (logits_of(objective, given, anchors)[0][0] for given in (batch, other))
        ids[place - 1] = (ids[place - 1] + 1) % model.vocab_size
        before = objective.blocks(Batch([Chunk(ids)], batch.labels, {}), anchors)
        assert float((one.hidden - before.hidden).abs().max()) > 1e-3
    changed = [float((x - y).abs().max()) > 1e-3 for x, y in zip(a, b, strict=True)]
    assert float((a - b)[[0, 1, 3]].abs().max()) < 1e-12
    assert changed == [False, False, True, False]


# -- anchors ---------------------------------------------------------------------------------------------------------


def test_the_first_token_of_an_answer_is_drafted(random_batch):
    """Anchors drawn by what is learned of them, and not of the token after them, never draft an answer's first token.
    Blocks end with the answer and with the sequence; nothing stands before a sequence's first token."""
    batch = random_batch(9, 6)
    batch.labels[:4] = IGNORE  # tokens 0 .. 4 are a prompt, 5 .. 7 an answer, then a prompt follows
    batch.labels[7] = IGNORE
    assert eligible(batch).nonzero().flatten().tolist() == [4, 5, 6, 8, 10, 11, 12, 13, 14]
    anchors = every_anchor(batch)
    ids = [*batch.chunks[0].ids, *batch.chunks[1].ids]
    assert anchors.places[0].tolist() == [4, 5, 6, 7] and anchors.labels[0].tolist()[:3] == ids[5:8]
    learned = [3, 2, 1, 1, 4, 4, 3, 2, 1]
    assert anchors.learned.tolist() == [[i < n for i in range(BLOCK)] for n in learned]
    few = draw_anchors(batch, 4, BLOCK, (1, 2))
    assert len(few) == 4 and torch.equal(few.places, draw_anchors(batch, 4, BLOCK, (1, 2)).places)
    assert len({tuple(draw_anchors(batch, 4, BLOCK, (1, s)).places[:, 0].tolist()) for s in range(9)}) > 5


def test_image_tokens_are_no_anchors(random_batch):
    """The token before an answer may be the end of an image, which has no embedding that serving would draft from."""

    class Shown:
        start, end = 3, 6

    batch = random_batch(9)
    shown = Batch(batch.chunks, batch.labels, {}, (Shown(),))  # type: ignore[arg-type]
    assert eligible(shown).nonzero().flatten().tolist() == [1, 2, 6, 7, 8]


# -- the loss --------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_formula(model, random_batch):
    """Slot by slot in plain Python: weights, the three terms, the label of the confidence, blocks that are cut off, and
    the two estimates of accepted drafts."""
    batch, config = random_batch(9, 6), DraftConfig(anchors=10**6, ce=0.2, l1=0.7, confidence=0.5)
    batch.labels[7] = IGNORE
    objective, anchors = DraftObjective(model, config), every_anchor(batch)
    with torch.no_grad():
        drafted, wanted, sure = (t.tolist() for t in logits_of(objective, batch, anchors))
        result = objective(batch, Stage(), targets=40)
    assert objective.targets(batch) == result.targets == len(anchors)

    def softmax(logits: list[float]) -> list[float]:
        total = math.fsum(math.exp(x) for x in logits)
        return [math.exp(x) / total for x in logits]

    sums, accepted, greedy = [0.0] * 3, [], []
    norm = sum(math.exp(-i / BLOCK) for i in range(BLOCK))
    for n in range(len(anchors)):
        chance, same, expected, agreed = 1.0, True, 0.0, 0
        for i in range(BLOCK):
            p, q, c = softmax(drafted[n][i]), softmax(wanted[n][i]), 1 / (1 + math.exp(-sure[n][i]))
            l1 = math.fsum(abs(x - y) for x, y in zip(p, q, strict=True))
            label = 1 - l1 / 2
            assert label == pytest.approx(math.fsum(map(min, p, q)))
            chance, same = chance * label, same and p.index(max(p)) == q.index(max(q))
            expected, agreed = expected + chance, agreed + same
            if anchors.learned[n, i]:
                bce = -label * math.log(c) - (1 - label) * math.log(1 - c)
                for k, term in enumerate((-math.log(p[int(anchors.labels[n, i])]), l1, bce)):
                    sums[k] += math.exp(-i / BLOCK) / norm * term
        if anchors.learned[n].all():
            accepted.append(expected)
            greedy.append(agreed)
    total = 0.2 * sums[0] + 0.7 * sums[1] + 0.5 * sums[2]
    assert float(result.nats) == pytest.approx(total, rel=1e-9)
    assert float(result.total) == pytest.approx(total / 40, rel=1e-9)
    terms = {name: float(value) for name, value in result.terms.items()}
    assert [terms[n] * len(anchors) for n in ("ce", "l1", "bce")] == pytest.approx(sums, rel=1e-9)
    assert len(accepted) == 5 and terms["accepted"] == pytest.approx(sum(accepted) / 5, rel=1e-9)
    assert terms["greedy"] == pytest.approx(sum(greedy) / 5)


def test_only_draft_tensors_learn(model, random_batch):
    """Every draft tensor gets a gradient, head and embedding that are shared with the backbone get none."""
    Frozen(model, Optimiser(model, OptimConfig()))
    batch = random_batch(40, 25)
    DraftObjective(model, ALL)(batch, Stage(), 1).total.backward()
    learning = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    drafts = {n for n, _ in model.named_parameters() if n.startswith("mtp.") and ".gate.bias" not in n}
    assert learning == drafts and len(drafts) > 30
    assert all(p.grad is None for n, p in model.named_parameters() if not n.startswith("mtp."))


def gradients(model: Any) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_pieces_give_the_gradient_of_the_whole(model, random_batch, monkeypatch: pytest.MonkeyPatch):
    """Logits of a few anchors at a time, made again in the backward pass, and a step of two forwards of unlike numbers
    of anchors."""
    Frozen(model, Optimiser(model, OptimConfig()))
    long, short = random_batch(30), random_batch(7, 5)
    whole = Batch([*long.chunks, *short.chunks], torch.cat([long.labels, short.labels]), {})
    objective = DraftObjective(model, ALL)
    targets = objective.targets(whole)
    objective(whole, Stage(), targets).total.backward()
    wanted = gradients(model)
    monkeypatch.setattr(draft_run, "_CHUNK_ELEMENTS", 3 * BLOCK * model.vocab_size)
    for batch in (long, short):
        objective(batch, Stage(), targets, 2).total.backward()
    found = gradients(model)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert torch.allclose(value, found[name], atol=1e-12), name


def test_nothing_to_draft_is_no_error(home: Path, tmp_path: Path, random_batch):
    """A step of prompts alone has no anchors; the run must not end there, nor the weights be lost to NaN."""
    batch = random_batch(6)
    batch.labels[:] = IGNORE
    trainer = Trainer(read_recipe(home / "draft.toml", ["optim.weight_decay=0"]), tmp_path)
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.stream.next = lambda length: batch  # type: ignore[method-assign]
    found = trainer.advance()
    assert found["loss"] == 0 and found["step"] == 1 and found["load"] is None
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_dry_run_counts_the_work_of_anchors(model, random_batch):
    """Against torch's own counter, the difference that more anchors make: an estimate that takes a draft run for a
    training of its backbone promises several times its duration."""
    Frozen(model, Optimiser(model, OptimConfig()))
    batch = random_batch(64)
    counted, estimated = [], []
    for count in (8, 56):
        config = DraftConfig(anchors=count)
        with FlopCounterMode(display=False) as counter:
            DraftObjective(model, config)(batch, Stage(), count).total.backward()
        counted.append(counter.get_total_flops())
        estimated.append(draft_operations(model, 64, config, 64).per_token * 64)
    assert 0.85 < (estimated[1] - estimated[0]) / (counted[1] - counted[0]) < 1.15
    assert 0.7 < estimated[1] / counted[1] < 1.3


@torch.no_grad()
def own_text(model: Any, starts: list[int], length: int) -> Batch:
    """What a model says by itself, greedily, and the tokens after each."""
    rows = DraftObjective(model, ALL).rows
    lines = [[start] for start in starts]
    for _ in range(length):
        batch = ForwardBatch([Chunk(line) for line in lines])
        hidden = model(batch, rows.view(batch))[batch.last_tokens()]
        for line, token in zip(lines, model.logits(hidden).argmax(dim=1).tolist(), strict=True):
            line.append(token)
    chunks = [Chunk(line[:-1]) for line in lines]
    return Batch(chunks, torch.cat([torch.tensor(line[1:]) for line in lines]), {})


def test_drafts_of_one_batch_are_learned_by_heart(tiny_model):
    """Greedy drafts, made as in serving, become the backbone's own tokens: whatever of the path carries no gradient, or
    draws towards something else, keeps some of them wrong."""
    model = tiny_model("v41", **DRAFTS)
    stir(model, 0.1)
    with torch.no_grad():
        model.head.weight *= 8  # one token stands out, as after training
    batch = own_text(model, [7, 20, 33], 10)
    optimiser = Optimiser(model, OptimConfig(matrix_lr=2e-2, lr=1e-2, warmup=5, decay=0, weight_decay=0))
    Frozen(model, optimiser)
    objective, anchors = DraftObjective(model, ALL), every_anchor(batch)
    whole = anchors.learned.all(dim=1)
    assert len(torch.unique(anchors.labels[whole], dim=0)) > 10
    for step in range(120):
        result = objective(batch, Stage(), len(anchors))
        if float(result.terms["greedy"]) == BLOCK:
            break
        result.total.backward()
        optimiser.collect()
        optimiser.step(step, 120)
    with torch.no_grad():
        blocks = objective.blocks(batch, anchors)
        block = DraftBlock(blocks.hidden, model.mtp.base_logits(model, blocks.hidden))
        proposal, _ = model.mtp.decide(block, blocks.known[:, 0])
    assert torch.equal(proposal.tokens[whole], anchors.labels[whole])


# -- runs ------------------------------------------------------------------------------------------------------------

WORDS = "the fin whale swims fast and far while the sea sings one low note after another in the dark".split()


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_config) -> Path:
    """A folder with a text, a backbone without drafts that learned it for some steps, and a draft recipe for it."""
    home = tmp_path_factory.mktemp("home")
    lines = [" ".join(WORDS[(i * 7 + k) % len(WORDS)] for k in range(12 + i)) for i in range(30)]
    (home / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    config = tiny_config("v41")
    for key in ("vocab_size", "engram_num_embeddings", "engram_compressed_vocab_size"):
        del config["text_config"][key]
    common = """
[data]
batch_tokens = 96
length = 32
held_out = 0.2
sources = [{name = "text", path = "text.jsonl", kind = "jsonl"}]
[run]
steps = 6
threads = 1
save_every = 3
eval_every = 3
eval_tokens = 200
"""
    optim = "optim = { warmup = 2, ema = 0.5 }\n"
    (home / "base.toml").write_text(
        f'name = "base"\nmodel = {toml(config)}\ntokenizer = {{ vocab_size = 352 }}\n{optim}{common}'
    )
    Trainer(read_recipe(home / "base.toml", ["run.steps=8", "run.eval_every=0"]), home / "base").run()
    text = {k: v for k, v in {**config["text_config"], **DRAFTS}.items() if k != "dspark_noise_token_id"}
    (home / "draft.toml").write_text(
        f'name = "draft"\ninit_from = "base/model"\nmodel = {toml({**config, "text_config": text})}\n'
        f"draft = {{ anchors = 64 }}\n{optim}{common}"
    )
    return home


def stored(folder: Path) -> dict[str, bytes]:
    found = Checkpoint.open(folder)
    return {name: found.mapped(name).contiguous().view(torch.uint8).numpy().tobytes() for name in found.tensors}


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def backbone_of(folder: Path) -> dict[str, bytes]:
    return {n: b for n, b in stored(folder).items() if not n.startswith("mtp.")}


def test_a_draft_run_leaves_a_model_that_drafts(home: Path, tmp_path: Path):
    """The backbone to the byte as it was, with draft tensors beside it; it drafts at once and says what it says without
    drafts. The estimates of accepted drafts rise."""
    run = tmp_path / "run"
    folder = Trainer(read_recipe(home / "draft.toml", ["run.steps=12"]), run).run()
    assert backbone_of(folder) == stored(home / "base" / "model") == backbone_of(run / "model-ema")
    assert sum(n.startswith("mtp.") for n in stored(folder)) > 40
    held = [m for m in metrics(run) if "held_out" in m]
    assert set(held[0]) == {"step", "held_out", "accepted", "greedy"} and set(held[0]["accepted"]) == {"text"}
    assert held[-1]["held_out"]["text"] < held[0]["held_out"]["text"]
    assert 0 < held[0]["accepted"]["text"] < held[-1]["accepted"]["text"] < BLOCK
    step = metrics(run)[0]
    assert 0 < step["ce"] and 0 < step["l1"] < 2 and 0 <= step["greedy"] <= BLOCK and step["tokens"] == 96
    assert step["loss"] == pytest.approx(0.1 * step["ce"] + 0.9 * step["l1"] + step["bce"], rel=1e-5)
    drafting, plain = LLM(folder), LLM(folder, draft=None)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    assert drafting.generate("the fin", params)[0].token_ids == plain.generate("the fin", params)[0].token_ids
    config = json.loads((folder / "config.json").read_text())["text_config"]
    assert config["dspark_noise_token_id"] == drafting.tokenizer.token_to_id("<｜System｜>")


def test_a_narrow_draft_run_keeps_the_backbone_wide(home: Path, tmp_path: Path):
    """Computing in bfloat16, the frozen weights are rounded copies: written as they are, the delivered model would have
    lost digits that its own training had kept."""
    sets = ["run.dtype=bfloat16", "run.steps=1", "run.eval_every=0"]
    folder = Trainer(read_recipe(home / "draft.toml", sets), tmp_path / "run").run()
    assert backbone_of(folder) == stored(home / "base" / "model")


def test_an_interrupted_draft_run_equals_the_straight_one(home: Path, tmp_path: Path):
    """Weights, averages and metrics to the byte: moments, router biases, or the draw of anchors."""
    recipe = read_recipe(home / "draft.toml")
    Trainer(recipe, tmp_path / "a").run()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for left in ("checkpoints/step-0000006", "model", "model-ema"):
        shutil.rmtree(tmp_path / "b" / left)
    again = Trainer(recipe, tmp_path / "b")
    assert again.step == 3
    again.run()
    for part in ("model", "model-ema"):
        assert stored(tmp_path / "a" / part) == stored(tmp_path / "b" / part)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def test_a_backbone_that_changed_is_never_written(home: Path, tmp_path: Path):
    """Drafts would fit a model that is not the one they are delivered with."""
    trainer = Trainer(read_recipe(home / "draft.toml"), tmp_path / "run")
    trainer.advance()
    trainer.save()
    with torch.no_grad():
        trainer.model.layers[2].ffn.gate.bias[0] += 1e-6
    with pytest.raises(CheckpointError, match="backbone changed"):
        trainer.save()
    with pytest.raises(CheckpointError, match="backbone changed"):
        trainer._finish()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-0000001"]


def test_drafts_go_on_from_drafts(home: Path, tmp_path: Path):
    """Draft tensors that init_from has are taken, not drawn anew; other sizes of them are refused."""
    first = Trainer(read_recipe(home / "draft.toml", ["run.steps=2"]), tmp_path / "one").run()
    again = Trainer(read_recipe(home / "draft.toml", [f"init_from={first}", "run.seed=9"]), tmp_path / "two")
    tensors = stored(first)
    spec = next(name for name in tensors if name.startswith("mtp.1.attn.wq_a"))
    assert tensors[spec] == again.model.mtp.stages[1].attn.wq_a.weight.detach().numpy().tobytes()
    with pytest.raises(CheckpointError, match=r"mtp\.1\.markov_head"):
        sets = [f"init_from={first}", "model.text_config.dspark_markov_rank=16"]
        Trainer(read_recipe(home / "draft.toml", sets), tmp_path / "three")


def test_the_quantised_form_is_drafted_for(home: Path, tmp_path: Path):
    """With [quant] the backbone runs rounded as it will serve, and its masters still leave the run as they came."""
    sets = ["quant.start=0", "run.steps=2", "run.save_every=0", "run.eval_every=0"]
    folder = Trainer(read_recipe(home / "draft.toml", sets), tmp_path / "run").run()
    assert backbone_of(folder) == stored(home / "base" / "model")
    assert LLM(tmp_path / "run" / "model-quantised").generate("the fin", SamplingParams(max_tokens=3))[0].token_ids


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ("draft.anchors=0", "at least 1"),
        ("draft.anchor=3", "did you mean 'anchors'"),
        ("tokenizer.vocab_size=1024", "that of init_from is used"),
        ("stages=[{select=false}]", "as it serves"),
        ("model.text_config.dspark_block_size=0", "has none"),
        ("quant.start=0.5", "from the start"),
    ],
)
def test_mistakes_are_named(change: str, answer: str):
    """A setting that has no effect, or the wrong one, costs a whole run."""
    with pytest.raises(ConfigError, match=answer):
        read_recipe(DEMO, [change])


def test_another_backbone_than_the_recipes_is_refused(home: Path, tmp_path: Path):
    """Sizes that shapes do not show (a window, a theta) would give drafts for a model that does not exist."""
    for change in ("sliding_window=16", "rope_theta=1e5"):
        with pytest.raises(ConfigError, match=rf"text_config\.{change.split('=')[0]} is .* but"):
            Trainer(read_recipe(home / "draft.toml", [f"model.text_config.{change}"]), tmp_path / change)
    text = (home / "draft.toml").read_text().replace('init_from = "base/model"\n', "")
    (tmp_path / "none.toml").write_text(text)
    with pytest.raises(ConfigError, match="needs init_from"):
        read_recipe(tmp_path / "none.toml")
