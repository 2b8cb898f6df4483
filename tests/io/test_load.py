"""From a folder to a model: every weight decoded into its place, every defect named before memory is taken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from finback.base.runtime import CheckpointError, ConfigError
from finback.io.checkpoint import Checkpoint
from finback.io.checkpoint_write import Stored, save_checkpoint
from finback.io.load import load_model
from finback.models.base import Model
from finback.nn.rows import BatchRows, Chunk, ForwardBatch
from finback.nn.tape import Tape
from finback.tools.fixtures import make

EXTRA = ("tokenizer.json", "tokenizer_config.json", "token_map.json")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two presets, written once. Never changed."""
    folders = {preset: tmp_path_factory.mktemp("load") / preset for preset in ("tiny-v41", "tiny-v41-plain")}
    for preset, folder in folders.items():
        make(folder, preset=preset)
    return folders


@pytest.fixture(scope="session")
def quantised(folders: dict[str, Path]) -> Path:
    return folders["tiny-v41"]


@pytest.fixture(scope="session")
def plain(folders: dict[str, Path]) -> Path:
    return folders["tiny-v41-plain"]


def rewritten(
    source: Path,
    target: Path,
    change: Callable[[dict[str, Any], dict[str, Any]], None],
    **options: Any,
) -> Path:
    """A copy of a checkpoint after change(config, tensors); tensors are what `save_checkpoint` takes."""
    ckpt = Checkpoint.open(source)
    config: dict[str, Any] = json.loads(json.dumps(ckpt.config))
    tensors: dict[str, Any] = {name: Stored(ckpt.read(name), info.dtype) for name, info in ckpt.tensors.items()}
    change(config, tensors)
    extra = {name: (source / name).read_bytes() for name in EXTRA if (source / name).is_file()}
    save_checkpoint(target, config, tensors.items(), extra_files=extra, **options)
    return target


@torch.no_grad()
def logits_of(model: Model, tape: Tape | None = None) -> Tensor:
    ids = torch.randint(8, 500, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = ForwardBatch([Chunk(ids)], tape=tape)
    return model.logits(model(batch, BatchRows(model.row_groups()).view(batch)))


# -- values ------------------------------------------------------------------------------------------------------------


def decoded(raw: Mapping[str, Tensor], name: str) -> Tensor:
    """A weight by the definition of its format, from the plain tensors of the file."""
    data, scale = raw[name], raw.get(name.removesuffix(".weight") + ".scale")
    if scale is None:
        return data.double()
    exponents = 2.0 ** (scale.view(torch.uint8).double() - 127)
    if data.dtype == torch.int8:  # two e2m1 codes a byte, the low nibble first
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        codes = torch.stack([data.view(torch.uint8) & 15, data.view(torch.uint8) >> 4], dim=-1).flatten(1).long()
        values = table[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        return values * exponents.repeat_interleave(32, 1)[:, : values.shape[1]]
    rows = 1 if len(scale) == len(data) else 32
    exponents = exponents.repeat_interleave(rows, 0)[: len(data)].repeat_interleave(32, 1)[:, : data.shape[1]]
    return data.double() * exponents


@pytest.mark.parametrize("preset", ["tiny-v41", "tiny-v41-plain"])
def test_every_parameter_holds_its_tensor(folders: dict[str, Path], preset: str) -> None:
    """Gate and up swapped, experts shifted by one, a scale of another block, a nibble order: all have right shapes."""
    raw = load_file(folders[preset] / "model.safetensors")
    model = load_model(folders[preset], dtype="float64", trainable=True)
    named = {spec.name: out for spec, out in model.weights()}
    for name, out in named.items():
        assert out.detach().double().equal(decoded(raw, name)), name
    scales = {name.removesuffix(".weight") + ".scale" for name in named}
    assert set(raw) <= set(named) | scales
    filled = sum(out.numel() for out in named.values())
    assert filled == sum(p.numel() for p in model.parameters()), "a parameter that no tensor fills"
    gate_up = named["layers.0.ffn.experts.3.w1.weight"], named["layers.0.ffn.experts.3.w3.weight"]
    assert model.layers[0].ffn.experts.w13[3].equal(torch.cat(gate_up))


def test_defaults_follow_the_checkpoint(quantised: Path, plain: Path, tmp_path: Path) -> None:
    """float32 weights computed in bfloat16, or a quantised model without the rounding it was trained with."""
    facts = {}
    for path in (quantised, plain):
        model = load_model(path)
        facts[path.name] = (model.dtype, model.rounding, any(p.requires_grad for p in model.parameters()))
    assert facts == {"tiny-v41": (torch.bfloat16, True, False), "tiny-v41-plain": (torch.float32, False, False)}
    named = load_model(rewritten(plain, tmp_path / "named", lambda c, t: c.update(dtype="float64")))
    assert named.dtype == torch.float64
    unnamed = load_model(rewritten(plain, tmp_path / "unnamed", lambda c, t: c.pop("dtype")))
    assert unnamed.dtype == torch.bfloat16
    off = load_model(quantised, rounding="off", dtype="float32")
    assert (off.dtype, off.rounding) == (torch.float32, False)


def test_inference_form_computes_the_same(quantised: Path) -> None:
    """Packed weights and a table that stays in the file, against plain parameters."""
    for dtype, bar in (("float64", 1e-12), ("float32", 1e-5)):
        served, trained = (load_model(quantised, dtype=dtype, trainable=t) for t in (False, True))
        assert served.file_table("layers.1.engram.embed.weight").weight is None
        assert trained.file_table("layers.1.engram.embed.weight").weight is not None
        assert (logits_of(served) - logits_of(trained)).abs().max() < bar
    # In bf16 packed weights leave activations in float32, so near ties may fall differently: compare with equal picks.
    made = Tape(record=True)
    served = logits_of(load_model(quantised, rounding="off"), made)
    trained = logits_of(load_model(quantised, rounding="off", trainable=True), Tape(made.seen))
    assert torch.nn.functional.cosine_similarity(served, trained, dim=1).min() > 0.99


def test_shards_load_like_one_file(quantised: Path, tmp_path: Path) -> None:
    """An index whose shards are read in another order than the table's."""
    sharded = rewritten(quantised, tmp_path / "s", lambda c, t: None, shard_bytes=40_000)
    assert len(list(sharded.glob("*.safetensors"))) > 5
    one, many = (dict(load_model(f, trainable=True).named_parameters()) for f in (quantised, sharded))
    assert all(p.equal(many[name]) for name, p in one.items())


def test_progress_ends_at_the_whole(quantised: Path) -> None:
    """A bar that never fills, or runs backwards."""
    seen: list[tuple[int, int]] = []
    load_model(quantised, progress=lambda done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(done) and {t for _, t in seen} == {done[-1]}
    raw = load_file(quantised / "model.safetensors")
    assert done[-1] == sum(t.numel() * t.element_size() for name, t in raw.items() if not name.endswith(".scale"))


# -- defects, before anything is allocated -----------------------------------------------------------------------------


@pytest.fixture
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("memory was taken before the headers were checked")

    monkeypatch.setattr(torch.nn.Module, "to_empty", refuse)


def drop(*names: str) -> Callable[[Any, dict[str, Any]], None]:
    def change(_: Any, tensors: dict[str, Any]) -> None:
        for name in names:
            del tensors[name]

    return change


def rename(old: str, new: str) -> Callable[[Any, dict[str, Any]], None]:
    def change(_: Any, tensors: dict[str, Any]) -> None:
        tensors[new] = tensors.pop(old)

    return change


def put(name: str, value: Any) -> Callable[[Any, dict[str, Any]], None]:
    return lambda _, tensors: tensors.update({name: value})


def text(**changes: Any) -> Callable[[dict[str, Any], Any], None]:
    return lambda config, _: config["text_config"].update(changes)


DRAFT_NORM = "mtp.1.markov_head.embed.weight"
DEFECTS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], None], list[str]]] = {
    "missing": (drop("layers.2.attn.wkv.weight"), ["layers.2.attn.wkv.weight", "missing"]),
    "missing draft": (drop(DRAFT_NORM), [DRAFT_NORM, "missing"]),
    "renamed draft": (
        rename(DRAFT_NORM, "mtp.1.markov_head.emb.weight"),
        [DRAFT_NORM, "unused mtp.1.markov_head.emb.weight, was it renamed?"],
    ),
    "missing scale": (
        drop("layers.0.attn.wq_a.scale"), ["layers.0.attn.wq_a.weight", "scale layers.0.attn.wq_a.scale is missing"],
    ),
    "missing expert scale": (drop("layers.4.ffn.experts.7.w2.scale"), ["layers.4.ffn.experts.7.w2.scale is missing"]),
    "extra": (put("layers.5.attn_norm.weight", torch.ones(64)), ["layers.5.attn_norm.weight", "not of this model"]),
    "shape": (put("norm.weight", torch.ones(65)), ["norm.weight", "stored [65], expected [64]"]),
    "scale shape": (
        put("layers.0.attn.wq_a.scale", Stored(torch.ones(1, 3, dtype=torch.uint8), "F8_E8M0")),
        ["layers.0.attn.wq_a.scale", "[1, 3]", "[1, 2]"],
    ),
    "scale as float": (
        put("layers.0.attn.wq_a.scale", torch.ones(1, 2)), ["layers.0.attn.wq_a.scale", "F32", "F8_E8M0"],
    ),
    "dtype": (put("norm.weight", torch.ones(64, dtype=torch.int32)), ["norm.weight", "stored as I32"]),
    "wider config": (text(hidden_size=96), ["embed.weight", "stored [512, 64], expected [512, 96]"]),
    "more layers": (
        text(num_hidden_layers=6, compress_ratios=[0, 2, 2, 1, 1, 1, 0, 0]), ["layers.5.attn.wq_a.weight", "missing"],
    ),
    "fewer experts": (text(n_routed_experts=4), ["layers.0.ffn.experts.4.w1.weight", "not of this model"]),
    "no drafts in the config": (text(dspark_block_size=0), ["mtp.0.main_proj.weight", "not of this model"]),
    "experts of another format": (
        lambda config, _: config["quantization_config"].update(expert_dtype="fp8"),
        ["layers.0.ffn.experts.0.w1.weight", "stored as I8", "F8_E4M3"],
    ),
    "plain config for quantised files": (
        lambda config, _: config.pop("quantization_config"), ["layers.0.attn.wq_a.weight", "stored as F8_E4M3"],
    ),
}  # fmt: skip


@pytest.mark.usefixtures("no_allocation")
@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_named_before_memory_is_taken(quantised: Path, tmp_path: Path, name: str) -> None:
    """A draft head that stays random, FP8 read without scales, a config of another model: no error, wrong text. Or an
    error after half an hour of loading."""
    change, words = DEFECTS[name]
    with pytest.raises(CheckpointError) as error:
        load_model(rewritten(quantised, tmp_path / "x", change))
    for word in words:
        assert word in str(error.value)


@pytest.mark.usefixtures("no_allocation")
def test_a_config_of_another_model(quantised: Path, tmp_path: Path) -> None:
    """The weights of one family under the config of another, and of a family that nobody here knows."""
    v32 = {
        "model_type": "deepseek_v32", "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
        "num_hidden_layers": 5, "first_k_dense_replace": 1, "num_attention_heads": 4, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "index_n_heads": 16, "index_head_dim": 32,
        "index_topk": 4, "vocab_size": 512, "max_position_embeddings": 64,
    }  # fmt: skip

    def other(config: dict[str, Any], _: Any) -> None:
        config.clear()
        config.update(v32)

    with pytest.raises(CheckpointError, match="does not fit the model") as error:
        load_model(rewritten(quantised, tmp_path / "a", other))
    assert "missing" in str(error.value) and "unused" in str(error.value) and len(str(error.value)) < 40_000
    with pytest.raises(ConfigError, match=r"'llama'.*this build runs .*deepseek_v41"):
        load_model(rewritten(quantised, tmp_path / "b", lambda config, _: config.update(model_type="llama")))


@pytest.mark.usefixtures("no_allocation")
def test_truncated_and_missing_files(quantised: Path, tmp_path: Path) -> None:
    """An interrupted download: the shard and what is missing from it, not a crash while reading."""
    whole = tmp_path / "whole"
    shutil.copytree(quantised, whole)
    with (whole / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 10)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_model(whole)
    sharded = rewritten(quantised, tmp_path / "s", lambda c, t: None, shard_bytes=40_000)
    shard = sorted(sharded.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}: missing, but .* expects"):
        load_model(sharded)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("nowhere/at/all", ["there is no folder nowhere/at/all"]),
        (Path("nowhere"), ["there is no folder nowhere", "config.json"]),
        (__file__, ["is a file", "give the folder"]),
        (Path(__file__).parent, ["has no config.json"]),
    ],
    ids=str,
)
def test_wrong_paths(where: Any, words: list[str]) -> None:
    """The path that was given must stand in the error, with what should lie there."""
    with pytest.raises(CheckpointError) as error:
        load_model(where)
    for word in words:
        assert word in str(error.value)


def test_options_are_checked_with_a_hint(plain: Path) -> None:
    """An option that is misspelt must not mean its default."""
    with pytest.raises(ConfigError, match=r"rounding 'relased' \(did you mean 'released'"):
        load_model(plain, rounding="relased")
    with pytest.raises(ConfigError, match="dtype 'fp32' is not supported; use one of"):
        load_model(plain, dtype="fp32")


# -- defects in the bytes ----------------------------------------------------------------------------------------------


def spoiled(name: str, byte: int, at: int = 7) -> Callable[[Any, dict[str, Any]], None]:
    """Overwrite one byte of a tensor."""

    def change(_: Any, tensors: dict[str, Any]) -> None:
        stored = tensors[name]
        data = stored.data.clone()
        data.view(torch.uint8).view(-1)[at] = byte
        tensors[name] = Stored(data, stored.dtype)

    return change


@pytest.mark.parametrize(
    ("name", "byte", "words"),
    [
        ("layers.0.attn.wq_b.weight", 0x7F, ["layers.0.attn.wq_b.weight", "nan", "[0, 7]"]),
        ("layers.3.attn.wkv.scale", 255, ["layers.3.attn.wkv.weight", "layers.3.attn.wkv.scale", "255"]),
        ("layers.3.ffn.experts.2.w3.scale", 255, ["layers.3.ffn.experts.2.w3.weight", "255"]),
    ],
)
def test_values_that_are_no_numbers_are_named(
    quantised: Path, tmp_path: Path, name: str, byte: int, words: list[str]
) -> None:
    """One NaN weight makes every logit NaN; read as a number, byte 255 of a scale makes garbage."""
    at = 1 if name.endswith(".scale") else 7
    with pytest.raises(CheckpointError) as error:
        load_model(rewritten(quantised, tmp_path / "x", spoiled(name, byte, at)))
    for word in words:
        assert word in str(error.value)


def test_nan_and_infinity_of_plain_weights(plain: Path, tmp_path: Path) -> None:
    """A float32 value beyond bfloat16 is finite in the file and infinite in the model."""
    for value, dtype, word in ((float("nan"), "float32", "nan"), (3.4e38, "bfloat16", "inf")):
        sink = torch.zeros(512, 64)
        sink[37, 5] = value
        spoilt = rewritten(plain, tmp_path / word, put("head.weight", sink))
        with pytest.raises(CheckpointError, match=rf"head\.weight .* holds {word} at \[37, 5\]"):
            load_model(spoilt, dtype=dtype)
    assert load_model(tmp_path / "inf", dtype="float32") is not None


# -- the token map -----------------------------------------------------------------------------------------------------


def without(source: Path, target: Path, *names: str) -> Path:
    shutil.copytree(source, target)
    for name in names:
        (target / name).unlink()
    return target


def test_engram_needs_to_know_the_compressed_ids(plain: Path, tmp_path: Path) -> None:
    """n-grams of raw ids read rows that were trained for others: no error, worse text."""
    bare = without(plain, tmp_path / "bare", "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"neither token_map\.json nor tokenizer\.json"):
        load_model(bare)
    keys = Checkpoint.open(plain).config["text_config"]["engram_compressed_vocab_size"]
    for entries, word in (([0] * 511, "511 entries"), ([keys] * 512, f"entry 0 is {keys}")):
        (bare / "token_map.json").write_text(json.dumps(entries))
        with pytest.raises(CheckpointError, match=word):
            load_model(bare)


def test_a_token_map_beside_the_checkpoint_wins(plain: Path, tmp_path: Path) -> None:
    """The tokenizer's own map is replaced, not merged; and other compressed ids give other memory, so other logits."""
    model = load_model(plain, dtype="float64")
    given = model.token_map.flip(0)
    other = without(plain, tmp_path / "other")
    (other / "token_map.json").write_text(json.dumps(given.tolist()))
    changed = load_model(other, dtype="float64")
    assert changed.token_map.equal(given)
    assert (logits_of(changed) - logits_of(model)).abs().max() > 1e-3


def test_models_without_engram_need_no_tokenizer(plain: Path, tmp_path: Path) -> None:
    """A checkpoint on token ids only must load."""

    def change(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        config["text_config"].update(engram_layer_ids=[], engram_num_embeddings=[])
        for name in [n for n in tensors if ".engram." in n]:
            del tensors[name]

    rewritten(plain, tmp_path / "a", change)
    model = load_model(without(tmp_path / "a", tmp_path / "b", *EXTRA[:2]))
    assert model.token_map is None and bool(logits_of(model).isfinite().all())


# -- memory ------------------------------------------------------------------------------------------------------------

WRITE_AND_LOAD = """
import math, re, sys, torch
from finback.base.runtime import release_freed_memory
from finback.io.checkpoint_write import Stored, save_checkpoint
from finback.io.load import load_model
from finback.models.base import family
from finback.tools.fixtures import preset_config, storage_format
torch.set_num_threads(1)

def memory(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

config = preset_config("tiny-v41")
config["text_config"].update(
    hidden_size=512, moe_intermediate_size=512, n_routed_experts=6, num_hidden_layers=14,
    compress_ratios=[0, 2, 2] + [1] * 11, engram_layer_ids=[], engram_num_embeddings=[],
)

def tensors():
    with torch.device("meta"):
        model = family(config).from_config(config, dtype=torch.float32)
    block = torch.randint(0, 100, (1 << 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for spec, _ in model.weights():
        fmt = storage_format(spec)
        shape = fmt.storage_shape(spec.shape)
        if fmt.block is None:
            yield spec.name, torch.full(shape, 0.02, dtype=torch.bfloat16)
            continue
        count = math.prod(shape)
        data = block.repeat(-(-count // len(block)))[:count].view(shape)
        yield spec.name, Stored(data, {1: "F8_E4M3", 2: "I8"}[fmt.pack])
        yield spec.scale, Stored(torch.full(fmt.scale_shape(spec.shape), 118, dtype=torch.uint8), "F8_E8M0")

if sys.argv[1] == "write":
    save_checkpoint(sys.argv[2], config, tensors())
else:
    load_model(sys.argv[3])  # a tiny one first: torch's own buffers are not the model's
    before = memory("VmRSS")
    model = load_model(sys.argv[2])
    peak = memory("VmHWM") - before
    release_freed_memory()  # what was freed and kept must not pass for the model's
    print(peak, memory("VmRSS") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_little_more_than_what_stays(plain: Path, tmp_path: Path) -> None:
    """A second copy of all weights while they are decoded or packed, or holes that the C library keeps between packed
    ones: machines that could run a model cannot load it."""
    for verb in ("write", "load"):
        run = subprocess.run(
            [sys.executable, "-c", WRITE_AND_LOAD, verb, str(tmp_path / "x"), str(plain)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
    peak, resident = map(float, run.stdout.split())
    assert resident > 100, "MiB: too small to tell"
    assert peak < 1.15 * resident, "MiB"
