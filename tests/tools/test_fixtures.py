"""Random tiny checkpoints: the released layout, the same on every machine, and everything in them exercised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finback import LLM, SamplingParams
from finback.base.runtime import ConfigError
from finback.io.checkpoint import Checkpoint
from finback.io.load import load_model
from finback.models.base import TensorSpec
from finback.nn.rows import BatchRows, Chunk, ForwardBatch
from finback.nn.tape import Tape
from finback.tools.fixtures import PRESETS, make, preset_config, random_tensor, write


def test_presets_are_the_same_bytes_every_time(tmp_path: Path) -> None:
    """Values that depend on the order of tensors, on global random state or on the platform's hash."""
    for name in ("a", "b"):
        torch.manual_seed(hash(name) % 1000)
        make(tmp_path / name, seed=3)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    make(tmp_path / "b", seed=4)  # an older checkpoint is replaced
    assert (tmp_path / "a/model.safetensors").read_bytes() != (tmp_path / "b/model.safetensors").read_bytes()


def test_the_quantised_preset_has_the_released_formats(tmp_path: Path) -> None:
    """A fixture in formats that no released checkpoint has tests nothing of loading."""
    make(tmp_path / "x", preset="tiny-v41")
    raw = load_file(tmp_path / "x/model.safetensors")
    kinds = {
        "layers.0.attn.wq_a.weight": torch.float8_e4m3fn, "layers.0.attn.wq_a.scale": torch.float8_e8m0fnu,
        "layers.0.ffn.experts.0.w1.weight": torch.int8, "layers.0.ffn.experts.0.w1.scale": torch.float8_e8m0fnu,
        "layers.1.engram.embed.weight": torch.float8_e4m3fn, "embed.weight": torch.float32,
        "layers.0.hc_attn_fn": torch.float32, "mtp.1.markov_head.embed.weight": torch.float32,
    }  # fmt: skip
    assert {name: raw[name].dtype for name in kinds} == kinds
    assert raw["layers.0.ffn.experts.0.w1.weight"].shape == (64, 32)  # packed
    assert raw["layers.0.attn.wq_a.scale"].shape == (1, 2)
    config = json.loads((tmp_path / "x/config.json").read_text())
    assert config["quantization_config"]["expert_dtype"] == "fp4" and config == preset_config("tiny-v41")


def test_plain_and_quantised_presets_share_their_values(tmp_path: Path) -> None:
    """Values depend on name, shape and seed alone: what differs between two configs is only what they say differs."""
    for preset in PRESETS:
        make(tmp_path / preset, preset=preset)
    quantised, plain = (Checkpoint.open(tmp_path / preset) for preset in ("tiny-v41", "tiny-v41-plain"))
    names = [{n for n in c.tensors if not n.endswith(".scale")} for c in (quantised, plain)]
    assert names[0] == names[1]
    assert all("engram.embed" in n for n in plain.tensors if n.endswith(".scale")), "tables are FP8 in both"
    assert plain.read("embed.weight").equal(quantised.read("embed.weight"))
    fine, coarse = (dict(load_model(c, dtype="float32", trainable=True).named_parameters()) for c in (plain, quantised))
    for name, p in fine.items():
        bar = 0.4 if ".experts." in name else 0.07  # of the largest value; FP4 has 3 significant bits, FP8 4
        assert (p - coarse[name]).abs().max() <= bar * p.abs().max(), name


@pytest.mark.parametrize("preset", ["tiny-v41", "tiny-v41-plain"])
@torch.no_grad()
def test_presets_reach_the_real_regimes(tmp_path: Path, preset: str) -> None:
    """Windows, selections and candidates that never bind, or experts that are never picked, leave all that untested."""
    make(tmp_path / "x", preset=preset)
    model = load_model(tmp_path / "x", dtype="float32")
    ids = torch.randint(8, 500, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    tape = Tape(trace=True)
    batch = ForwardBatch([Chunk(ids)], tape=tape)
    logits = model.logits(model(batch, BatchRows(model.row_groups()).view(batch)))
    assert 0.5 < logits.std() < 5, "neither flat nor saturated"
    recent = [range(60 // r - 4, 60 // r) for r in (0, 2, 2, 1, 1) if r]
    for i, newest in enumerate(recent, start=1):
        picks = tape.seen[f"layer{i}.selected"]
        assert picks.shape == (60, 4) and sorted(picks[-1].tolist()) != list(newest)
    for i in range(5):
        assert len(tape.seen[f"layer{i}.experts"].unique()) > 4
    assert len(tape.seen["engram_hashes"].unique()) > 300
    assert not tape.seen["layer3.selected"].equal(tape.seen["layer4.selected"])


@pytest.mark.parametrize("preset", ["tiny-v32", "tiny-spikewhale"])
def test_presets_of_the_other_families_run(tmp_path: Path, preset: str) -> None:
    """A preset whose parts do not fit together, or whose saturated logits hide a cut that changes them."""
    make(tmp_path / "x", preset=preset)
    llm = LLM(tmp_path / "x")
    ids = llm.generate("Once upon a time", SamplingParams(max_tokens=8))[0]
    ids = ids.prompt_token_ids + ids.token_ids
    whole, steps = llm.score(ids), llm.score(ids, splits=[1] * len(ids))
    assert 0.5 < whole.std() < 5 and (whole - steps).abs().max() < 5e-5


@torch.no_grad()
def test_the_v32_preset_reaches_the_real_regimes(tmp_path: Path) -> None:
    """An indexer that picks the newest rows or everything, or groups that never exclude an expert, test nothing."""
    make(tmp_path / "x", preset="tiny-v32")
    model = load_model(tmp_path / "x")
    ids = torch.randint(8, 500, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    tape = Tape(trace=True)
    batch = ForwardBatch([Chunk(ids)], tape=tape)
    logits = model.logits(model(batch, BatchRows(model.row_groups()).view(batch)))
    assert 0.5 < logits.std() < 5
    for i in range(4):
        picks = tape.seen[f"layer{i}.selected"]
        assert picks.shape == (60, 8) and sorted(picks[-1].tolist()) != list(range(52, 60))
    assert all(len(tape.seen[f"layer{i}.experts"].unique()) > 4 for i in (1, 2, 3))


def test_values_by_kind_of_tensor() -> None:
    """Norms near 1 keep the stream alive, matrices keep its variance; a bias of the size of a score would route all."""

    def spread(name: str, shape: tuple[int, ...], role: str) -> tuple[float, float]:
        values = random_tensor(TensorSpec(name, shape, (), role), 0)
        return round(float(values.mean()), 1), float(values.std())

    assert spread("layers.0.attn_norm.weight", (4096,), "norm")[0] == 1.0
    assert spread("layers.0.attn_norm.weight", (4096,), "norm")[1] < 0.2
    mean, std = spread("layers.0.attn.wq_a.weight", (64, 1024), "attention")
    assert mean == 0 and abs(std * 32 - 1) < 0.1
    assert 0.2 < spread("layers.0.ffn.gate.bias", (4096,), "router")[1] < 0.4
    assert abs(spread("embed.weight", (64, 64), "embedding")[1] - 1) < 0.1
    spec = TensorSpec("embed.weight", (4, 4), (), "embedding")
    assert random_tensor(spec, 0).equal(random_tensor(spec, 0)) and not random_tensor(spec, 0).equal(
        random_tensor(spec, 1)
    )


def test_any_config_of_a_known_family(tmp_path: Path) -> None:
    """Changed sizes must change the files with them, and what loads must be complete."""
    config: dict[str, Any] = preset_config("tiny-v41-plain")
    del config["vision_config"]
    config["text_config"].update(
        hidden_size=96, n_routed_experts=3, dspark_block_size=0, engram_layer_ids=[], engram_num_embeddings=[]
    )
    write(tmp_path / "x", config)
    model = load_model(tmp_path / "x")
    assert model.embed.weight.shape == (512, 96) and model.mtp is None and model.image_facts() is None
    names = set(Checkpoint.open(tmp_path / "x").tensors)
    assert not any(n.startswith(("mtp", "vision", "aligner", "image_")) or "engram" in n for n in names)


def test_unknown_presets_and_foreign_folders(tmp_path: Path) -> None:
    """A misspelt preset with the nearest name; a folder with other files is not emptied."""
    with pytest.raises(ConfigError, match=r"'tiny-v14'.*did you mean 'tiny-v41'.*use one of"):
        make(tmp_path / "x", preset="tiny-v14")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("all of it")
    with pytest.raises(ConfigError, match="mine"):
        make(tmp_path / "mine")
    assert (tmp_path / "mine/thesis.txt").read_text() == "all of it"
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match="model"):
        make(tmp_path / "model")
    assert (tmp_path / "model/config.json").read_text() == '{"mine": 1}', "a checkpoint of somebody else's"
    make(tmp_path / "again")
    make(tmp_path / "again", preset="tiny-v41-plain")
