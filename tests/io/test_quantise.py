"""Quantised checkpoints from plain ones: every tensor in its released format, to the bit what rounding gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from finback.base.formats import BF16, E2M1_R32, E4M3_B32, E4M3_R32, F32
from finback.base.runtime import CheckpointError, ConfigError
from finback.cli import main
from finback.engine.llm import LLM
from finback.io.checkpoint import Checkpoint
from finback.io.load import completeness, load_model, skeleton
from finback.io.quantise import QuantLayout, quantise_checkpoint, save_quantised
from finback.kernels.torch.quant import round_weight
from finback.tools.fixtures import make, write


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 V4.1 checkpoint with every feature. Never changed."""
    folder = tmp_path_factory.mktemp("quantise") / "plain"
    make(folder, preset="tiny-v41-plain")
    (folder / "training.pt").write_bytes(b"moments")
    return folder


@pytest.fixture(scope="module")
def quantised(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantise") / "quantised"
    quantise_checkpoint(plain, folder)
    return folder


def expected_format(name: str, role: str):
    """Section 7.1 of the layout, by name."""
    if ".experts." in name:
        return E2M1_R32
    if name.endswith("engram.embed.weight"):
        return E4M3_R32
    dense = ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "w1", "w2", "w3", "engram.wkv", "main_proj")
    if role not in ("vision",) and name.removesuffix(".weight").endswith(dense):
        return E4M3_B32
    return (
        F32 if name.endswith(("_fn", "_base", "_scale", "attn_sink", "bias", "bias_vl")) and role != "vision" else BF16
    )


def test_every_tensor_is_in_its_released_format(quantised: Path):
    """A router in FP8, experts left in FP8, norms in float32: it would load all the same, at another size or quality.
    A compressor's `wkv` is no dense matrix in this sense."""
    ckpt = Checkpoint.open(quantised)
    model = skeleton(ckpt.config)
    report = completeness(ckpt, model)
    report.raise_if_bad()
    for spec, _ in model.weights():
        assert report.formats[spec.name] is expected_format(spec.name, spec.role), spec.name


def test_values_are_the_rounded_ones_of_the_source(plain: Path, quantised: Path):
    """To the bit: what `round_weight` gives of the float32 values, in the place of the same name. Experts that swap
    gate and up, or a scale taken over another block, show here."""
    before = load_model(plain, dtype="float32", trainable=True)
    after = load_model(quantised, dtype="float32", trainable=True)
    for (_, source), (spec, found) in zip(before.weights(), after.weights(), strict=True):
        fmt = expected_format(spec.name, spec.role)
        assert torch.equal(found, round_weight(source, fmt)), spec.name
        assert fmt is F32 or spec.role == "engram_table" or not torch.equal(found, source) or not source.any()


def test_what_lies_beside_the_weights_comes_along(quantised: Path):
    """A copy without its tokenizer cannot chat; one with the moments of a training run is many times too large."""
    names = {file.name for file in quantised.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json"} <= names and "training.pt" not in names
    llm = LLM(quantised)
    assert llm.score(llm.encode("the sea")).isfinite().all()


def test_quantising_twice_changes_no_value(quantised: Path, tmp_path: Path):
    """Cutting a quantised checkpoint into smaller files must not round it again."""
    quantise_checkpoint(quantised, tmp_path / "again", shard_bytes=400_000)
    files = sorted((tmp_path / "again").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size <= 400_000 for file in files)
    first, second = (load_model(f, dtype="float32", trainable=True) for f in (quantised, tmp_path / "again"))
    for (spec, one), (_, two) in zip(first.weights(), second.weights(), strict=True):
        assert torch.equal(one, two), spec.name


def test_other_types_of_experts_and_tables(plain: Path, tmp_path: Path, capsys):
    """The options of the command reach the file and the config, which is what readers go by."""
    args = ["--expert", "fp8", "--table", "bf16", "--shard-mib", "1"]
    assert main(["quantise", str(plain), str(tmp_path / "q"), *args]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "q")
    ckpt = Checkpoint.open(tmp_path / "q")
    assert "expert_dtype" not in ckpt.config["quantization_config"] and ckpt.config["dtype"] == "bfloat16"
    assert ckpt.tensors["layers.0.ffn.experts.0.w1.weight"].dtype == "F8_E4M3"
    assert ckpt.tensors["layers.1.engram.embed.weight"].dtype == "BF16"
    assert all(file.stat().st_size <= 1 << 20 for file in (tmp_path / "q").glob("*.safetensors"))
    assert load_model(tmp_path / "q").rounding


def test_mistakes_are_told_before_anything_is_written(plain: Path, tmp_path: Path):
    """Each text names the value and what is possible; the target stays as it was."""
    target = tmp_path / "q"
    with pytest.raises(ConfigError, match=r"expert 'fp5'.*did you mean 'fp[48]'.*fp4 or fp8"):
        QuantLayout("fp5")
    with pytest.raises(ConfigError, match="'spikewhale' has no quantised layout"):
        QuantLayout().config({"model_type": "spikewhale"})
    with pytest.raises(ConfigError, match="deepseek_v32 has no fp4 experts; use fp8"):
        QuantLayout("fp4").config({"model_type": "deepseek_v32"})
    with pytest.raises(CheckpointError, match="is the source itself"):
        quantise_checkpoint(plain, plain)
    config = json.loads((plain / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = 48
    with pytest.raises(ConfigError, match="multiples of 32"):
        save_quantised(target, config, lambda name: None, QuantLayout())
    assert not target.exists() and Checkpoint.open(plain).config["dtype"] == "float32"


def test_a_weight_that_is_not_finite_is_named(plain: Path, tmp_path: Path):
    """Its block's scale would be lost, and the file would load."""
    ckpt = Checkpoint.open(plain)
    bad = "layers.2.attn.wq_b.weight"

    def read(name: str) -> torch.Tensor:
        value = ckpt.read(name).float()
        return value.index_fill(0, torch.tensor([3]), float("nan")) if name == bad else value

    with pytest.raises(CheckpointError, match=rf"{bad}: a tensor with NaN"):
        save_quantised(tmp_path / "q", ckpt.config, read, QuantLayout())
    assert not (tmp_path / "q").exists()


def test_v32_takes_its_own_layout(tmp_path: Path):
    """128x128 blocks with float32 scales, under V3.2's own names of scales. Widths that its rounding cannot divide are
    refused: the checkpoint would not run as it says."""
    make(tmp_path / "narrow", preset="tiny-v32")
    with pytest.raises(ConfigError, match="must be multiples of 128"):
        quantise_checkpoint(tmp_path / "narrow", tmp_path / "q")
    config = Checkpoint.open(tmp_path / "narrow").config | dict.fromkeys(
        ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "index_head_dim"),
        128,
    )
    write(tmp_path / "plain", config)
    quantise_checkpoint(tmp_path / "plain", tmp_path / "q")
    ckpt = Checkpoint.open(tmp_path / "q")
    name = "model.layers.1.mlp.experts.0.gate_proj"
    assert ckpt.tensors[f"{name}.weight"].dtype == "F8_E4M3" and ckpt.tensors[f"{name}.weight_scale_inv"].dtype == "F32"
    assert LLM(tmp_path / "q").score([5, 6, 7]).isfinite().all()
