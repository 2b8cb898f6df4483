"""`inspect`: what the headers of a checkpoint say, with and without a model's table."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from finback.base import formats
from finback.base.runtime import CheckpointError
from finback.io.checkpoint import Checkpoint
from finback.io.checkpoint_write import Stored, save_checkpoint
from finback.models.base import TensorSpec
from finback.tools import fixtures
from finback.tools.inspect import inspect, render

E4M3, E2M1 = formats.E4M3_B32, formats.E2M1_R32


def byte_tensor(*shape: int) -> torch.Tensor:
    return torch.full(shape, 127, dtype=torch.uint8)


TENSORS = {
    "embed.weight": torch.ones(50, 64).bfloat16(),
    "layers.0.attn.wq_a.weight": torch.ones(96, 64).to(torch.float8_e4m3fn),
    "layers.0.attn.wq_a.scale": Stored(byte_tensor(3, 2), "F8_E8M0"),
    "layers.0.ffn.experts.0.w1.weight": Stored(byte_tensor(16, 32), "I8"),
    "layers.0.ffn.experts.0.w1.scale": Stored(byte_tensor(16, 2), "F8_E8M0"),
    "layers.0.engram.embed.weight": torch.ones(40, 64).to(torch.float8_e4m3fn),
    "layers.0.engram.embed.scale": Stored(byte_tensor(40, 2), "F8_E8M0"),
    "layers.0.hc_attn_scale": torch.ones(3),
    "layers.0.attn_norm.weight": torch.ones(64).bfloat16(),
    "layers.0.ffn.gate.weight": torch.ones(8, 64),
    "mtp.0.attn.wq_a.weight": torch.ones(2, 2),
}
SPECS = [
    TensorSpec("embed.weight", (50, 64), (formats.BF16,), "embedding"),
    TensorSpec("layers.0.attn.wq_a.weight", (96, 64), (E4M3,), "attention"),
    TensorSpec("layers.0.ffn.experts.0.w1.weight", (16, 64), (E2M1,), "expert"),
    TensorSpec("layers.0.engram.embed.weight", (40, 64), (formats.E4M3_R32,), "engram_table"),
    TensorSpec("layers.0.hc_attn_scale", (3,), (formats.F32,), "hyper_connection"),
    TensorSpec("layers.0.attn_norm.weight", (64,), (formats.BF16,), "norm"),
    TensorSpec("layers.0.ffn.gate.weight", (8, 64), (formats.F32,), "router"),
    TensorSpec("mtp.0.attn.wq_a.weight", (2, 2), (formats.F32,), "draft"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "tiny", {"model_type": "tiny"}, TENSORS.items())
    return tmp_path / "tiny"


@pytest.mark.parametrize("specs", [None, SPECS])
def test_counts_are_those_of_the_model(folder: Path, specs: list[TensorSpec] | None) -> None:
    """Counting scales as parameters, FP4 bytes as one value, or hc_attn_scale as a scale gives wrong totals."""
    found = inspect(folder, specs)
    roles = {role: (share.tensors, share.parameters, share.nbytes) for role, share in found.by_role.items()}
    assert roles == {
        "embedding": (1, 3200, 6400),
        "attention": (1, 6144, 6144 + 6),
        "expert": (1, 1024, 512 + 32),
        "engram_table": (1, 2560, 2560 + 80),
        "hyper_connection": (1, 3, 12),
        "norm": (1, 64, 128),
        "router": (1, 512, 2048),
        "draft": (1, 4, 16),
    }
    assert found.total.parameters == sum(share[1] for share in roles.values())
    assert (found.total.tensors, found.tensors, found.files, found.model_type) == (8, 11, 1, "tiny")
    by_format = {name: share.parameters for name, share in found.by_format.items()}
    assert by_format == {"bf16": 3264, "e4m3_b32": 6144, "e4m3_r32": 2560, "e2m1_r32": 1024, "f32": 519}
    assert [weight.name for weight in found.largest[:2]] == ["embed.weight", "layers.0.attn.wq_a.weight"]
    assert found.checked == (specs is not None)
    assert found.problems == [] if specs else "model_type 'tiny'" in found.problems[0]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.layers.3.mlp.experts.7.down_proj.weight", "expert"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "shared_expert"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.layers.3.self_attn.indexer.wq_b.weight", "indexer"),
        ("model.layers.3.self_attn.kv_a_layernorm.weight", "norm"),
        ("layers.2.attn.compressor.wgate.weight", "compressor"),
        ("layers.2.attn.attn_sink", "attention"),
        ("layers.1.engram.wkv.weight", "engram"),
        ("image_newline", "vision"),
        ("something.else", "other"),
    ],
)
def test_roles_from_names(tmp_path: Path, name: str, role: str) -> None:
    """A pattern that swallows its neighbours (gate, gate_proj; experts, shared_experts) moves bytes between roles."""
    save_checkpoint(tmp_path / "one", {}, [(name, torch.ones(1))])
    assert list(inspect(tmp_path / "one").by_role) == [role]


def test_what_does_not_fit_is_listed(folder: Path) -> None:
    """With the model's table, inspect is the check that people run before they start a long load."""
    found = inspect(folder, [*SPECS[1:], TensorSpec("norm.weight", (64,), (formats.BF16,), "norm")])
    assert [line.split(":")[0] for line in found.problems] == ["norm.weight", "embed.weight"]
    with pytest.raises(CheckpointError, match="there is no folder"):
        inspect(folder / "nowhere")


def test_unknown_quantisation_is_shown_as_stored(tmp_path: Path) -> None:
    """A scale layout that no Format describes must not be labelled as one; ambiguous ones show each reading."""
    e4m3 = torch.ones(64, 64).to(torch.float8_e4m3fn)
    tensors = {"a.weight": e4m3, "a.scale": torch.ones(5), "b.weight": e4m3, "c.weight": e4m3[:32, :32]}
    tensors |= {"c.weight_scale_inv": Stored(byte_tensor(1, 1), "F8_E8M0")}
    save_checkpoint(tmp_path / "odd", {}, tensors.items())
    found = inspect(tmp_path / "odd")
    labels = {weight.name: weight.format for weight in found.largest}
    assert labels == {"a.weight": "F8_E4M3", "b.weight": "F8_E4M3", "c.weight": "e4m3_b32 or e4m3_b128_e8m0"}


def test_rendering_and_json(folder: Path) -> None:
    """Names in brackets are markup to a careless table, and a JSON of dataclasses easily drops the nested totals."""
    save_checkpoint(folder, {}, [("layers[red].weight", torch.ones(512, 1024))])
    found = inspect(folder, SPECS[:1])
    stream = io.StringIO()
    Console(file=stream, width=160).print(render(found))
    text = stream.getvalue()
    assert "layers[red].weight" in text and "524.29 K parameters, 2.00 MiB" in text and "100.0%" in text
    assert "embed.weight: missing (embedding, [50, 64])" in text
    data = json.loads(found.to_json())
    assert data["by_role"]["other"] == {"tensors": 1, "parameters": 524288, "nbytes": 2097152}
    assert data["largest"][0]["shape"] == [512, 1024] and len(data["problems"]) == 2


def test_a_known_family_is_checked_against_its_own_table(tmp_path: Path) -> None:
    """Without the family's table an incomplete checkpoint looks as good as a whole one."""
    fixtures.make(tmp_path / "whole")
    found = inspect(tmp_path / "whole")
    assert found.checked and found.problems == []
    whole = Checkpoint.open(tmp_path / "whole")
    kept = (
        (name, Stored(whole.read(name), info.dtype)) for name, info in whole.tensors.items() if name != "norm.weight"
    )
    save_checkpoint(tmp_path / "part", whole.config, kept)
    assert any("norm.weight" in line for line in inspect(tmp_path / "part").problems)
