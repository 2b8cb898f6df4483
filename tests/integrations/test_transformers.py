"""SpikeWhale as a Hugging Face model: published checkpoints, masks, generation, saving, training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra: pip install 'finback[transformers]'")

from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import finback.integrations.transformers as hf
from finback.base.runtime import ConfigError, RequestError
from finback.io.load import load_model
from finback.nn.rows import BatchRows, Chunk, ForwardBatch

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
SETS = ("spikewhale-dense", "spikewhale-derf", "spikewhale-full")
LENGTHS = (5, 9)


def published(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32)


MODELS = {name: published(name) for name in SETS}


def ids_of(length: int, shift: int = 0) -> Tensor:
    return (torch.arange(length) * 37 + 11 * shift + 5) % 320


def padded(left: bool) -> tuple[Tensor, Tensor]:
    """Two sequences of unequal length, padded with a token that would change everything if it were read."""
    ids = torch.full((2, max(LENGTHS)), 7)
    mask = torch.zeros_like(ids)
    for b, n in enumerate(LENGTHS):
        columns = slice(max(LENGTHS) - n, None) if left else slice(n)
        ids[b, columns], mask[b, columns] = ids_of(n, b), 1
    return ids, mask


@pytest.mark.parametrize("name", SETS)
def test_published_checkpoints_load_and_agree(name: str):
    """Checkpoints made by the published class: same names, same logits, same loss, nothing missing or left over."""
    wanted, model = load_file(GOLDEN / name / "golden.safetensors"), MODELS[name]
    assert model.config.engram_hash == "released"
    with torch.no_grad():
        output = model(input_ids=wanted["ids"], labels=wanted["labels"])
    torch.testing.assert_close(output.logits[:1], wanted["logits"], atol=1e-4, rtol=0)
    torch.testing.assert_close(output.loss, wanted["loss"][0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_a_mask_of_ones_changes_nothing(name: str, batch: int):
    """A 0/1 mask that is taken for an additive one lifts causality at batch 1 and cannot be broadcast at batch 2."""
    model, ids = MODELS[name], torch.stack([ids_of(12, b) for b in range(batch)])
    masked = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(masked, model(input_ids=ids).logits, atol=0, rtol=0)
    changed = ids.clone()
    changed[:, -1] = 1
    earlier = model(input_ids=changed, attention_mask=torch.ones_like(ids)).logits[:, :-1]
    torch.testing.assert_close(earlier, masked[:, :-1], atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 2)], ids=["batch1", "batch2"])
@torch.no_grad()
def test_padding_is_ignored(name: str, left: bool, rows: slice):
    """Would catch pads that are attended to, that enter n-grams, or that shift positions and hash-routed experts."""
    model, (ids, mask) = MODELS[name], padded(left)
    logits = model(input_ids=ids[rows], attention_mask=mask[rows]).logits
    for b in range(rows.stop):
        single = model(input_ids=ids_of(LENGTHS[b], b)[None]).logits[0]
        torch.testing.assert_close(logits[b, mask[b] == 1], single, atol=5e-5, rtol=0)


@torch.no_grad()
def test_padding_does_not_enter_the_loss():
    """Labels of pads are usually -100, but nothing forces them to be."""
    model, (ids, mask) = MODELS["spikewhale-full"], padded(left=True)
    losses = [
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, fill)).loss for fill in (-100, 3)
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_generation_with_cache_and_padding(name: str, left: bool):
    """Would catch a cache without n-grams, one that mixes sequences, and a first token that is read off a pad."""
    model, (ids, mask) = MODELS[name], padded(left)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 7}
    together = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    for b, n in enumerate(LENGTHS):
        prompt = ids_of(n, b)[None]
        for use_cache in (True, False):
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=use_cache, **options)
            assert torch.equal(out[0, n:], together[b])


def test_beams_follow_their_parents():
    """Would catch beams that share pages and overwrite each other's rows."""
    model, prompt = MODELS["spikewhale-full"], ids_of(6)[None]
    options = {"max_new_tokens": 18, "num_beams": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 7}
    outs = [model.generate(prompt, use_cache=use_cache, **options) for use_cache in (True, False)]
    assert torch.equal(*outs)


@torch.no_grad()
def test_cached_calls_and_crop():
    """A cache goes on over calls of several tokens, and forgets what is cropped."""
    model, ids = MODELS["spikewhale-full"], ids_of(20)[None]
    wanted = model(input_ids=ids).logits
    cache = model(input_ids=ids[:, :9], use_cache=True).cache
    model(input_ids=ids_of(4, 3)[None], cache=cache)
    cache.crop(9)
    assert cache.get_seq_length() == 9
    rest = model(input_ids=ids[:, 9:], cache=cache, logits_to_keep=3).logits
    torch.testing.assert_close(rest, wanted[:, -3:], atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", SETS)
def test_saved_models_load_everywhere(name: str, tmp_path: Path):
    """The folder that save_pretrained writes has the published names, and loads in transformers and in finback."""
    MODELS[name].save_pretrained(tmp_path)
    saved, source = load_file(tmp_path / "model.safetensors"), load_file(GOLDEN / name / "model.safetensors")
    assert saved.keys() == source.keys()
    assert all(torch.equal(saved[key], source[key].float()) for key in saved)
    again, plain = AutoModelForCausalLM.from_pretrained(tmp_path), load_model(tmp_path, dtype="float32")
    ids = ids_of(10)
    batch = ForwardBatch([Chunk(ids.tolist())])
    with torch.no_grad():
        wanted = MODELS[name](input_ids=ids[None]).logits[0]
        assert torch.equal(again(input_ids=ids[None]).logits[0], wanted)
        assert torch.equal(plain.logits(plain(batch, BatchRows(plain.row_groups()).view(batch))), wanted)


def fresh(**changes: Any) -> Any:
    own = MODELS["spikewhale-full"].config.own().to_dict()
    return AutoModelForCausalLM.from_config(hf.SpikeWhaleHFConfig(**{**own, "engram_hash": "spread", **changes}))


def test_fresh_models_keep_their_zeros():
    """transformers initialises every module once more at the end of construction, zero projections too."""
    state = fresh().state_dict()
    for key in ("mtp_heads.0.proj.weight", "mtp_heads.1.proj.weight", "model.hrm_refine.up.weight"):
        assert not state[key].any(), key
    assert 0.008 < float(state["model.engram.lookup.tables.0.weight"].std()) < 0.012
    tables = [v for k, v in state.items() if "hash_proj" in k]
    assert all(0.1 < float(t.std()) < 0.5 for t in tables)


def test_missing_tensors_are_initialised_and_others_left_alone(tmp_path: Path):
    """Multi-token heads are often added to an older checkpoint: they begin as zero, and what was loaded stays."""
    model = copy.deepcopy(MODELS["spikewhale-dense"])
    del model.mtp_heads
    model.mtp_heads = None
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not again.mtp_heads[0].proj.weight.any()
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_takes_a_step(checkpointing: bool, tmp_path: Path):
    """Would catch a loss without a graph, hash directions that move, and weights that the optimiser never sees."""
    model = fresh()
    before = copy.deepcopy(model.state_dict())
    rows = [{"input_ids": ids_of(12, b), "labels": ids_of(12, b)} for b in range(4)]
    arguments = TrainingArguments(
        tmp_path, max_steps=1, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, report_to=[],
        gradient_checkpointing=checkpointing, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    with torch.no_grad():
        first = float(model(**{k: torch.stack([r[k] for r in rows]) for k in rows[0]}).loss)
    result = Trainer(model, arguments, train_dataset=rows).train()
    assert abs(result.training_loss - first) < 1e-4
    after = model.state_dict()
    moved = {key for key, value in before.items() if not torch.equal(value, after[key])}
    assert {"model.embed_tokens.weight", "mtp_heads.0.proj.weight", "model.hrm_refine.up.weight"} <= moved
    assert not [key for key in moved if "hash_proj" in key or "compressor" in key]


def test_bfloat16_keeps_norms_and_hashes_exact():
    """Rounded hash directions would look up other rows than the model was trained with."""
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "spikewhale-full", dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    kept = {k: v.dtype for k, v in model.state_dict().items() if "norm" in k or "hash_proj" in k or "compressor" in k}
    assert set(kept.values()) == {torch.float32}


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (torch.zeros(1, 1, 4, 4), r"shape \[1, 1, 4, 4\]; give \[1, 4\]"),
        (torch.tensor([[0.0, -1e4, 0.0, 0.0]]), "other than 0 and 1"),
        (torch.ones(1, 3), r"give \[1, 4\]"),
    ],
)
def test_other_masks_are_refused(mask: Tensor, text: str):
    """A mask in another convention would silently mask the wrong tokens."""
    with pytest.raises(RequestError, match=text):
        MODELS["spikewhale-dense"](input_ids=ids_of(4)[None], attention_mask=mask)


def test_settings_are_checked():
    """Errors of the configuration come from finback's own check, with its hints."""
    with pytest.raises(ConfigError, match="power of two"):
        fresh(engram_table_size=100)
    assert isinstance(AutoConfig.from_pretrained(GOLDEN / "spikewhale-full"), hf.SpikeWhaleHFConfig)
