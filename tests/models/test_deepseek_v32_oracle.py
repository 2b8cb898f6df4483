"""DeepSeek-V3.2 against transformers' DeepseekV32ForCausalLM, written by somebody else from the same description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finback.io.load import load_model
from finback.nn.rows import BatchRows, Chunk, ForwardBatch
from finback.nn.tape import Tape

transformers = pytest.importorskip("transformers", reason='needs the "oracle" extra: transformers with DeepSeek-V3.2')
if not hasattr(transformers, "DeepseekV32ForCausalLM"):
    pytest.skip("this transformers has no DeepSeek-V3.2 yet", allow_module_level=True)

SIZES: dict[str, Any] = {
    "vocab_size": 80, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_shared_experts": 2, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 20, "v_head_dim": 12, "max_position_embeddings": 64, "index_topk": 6, "index_head_dim": 32,
    "index_n_heads": 16, "attn_implementation": "eager",
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"n_group": 4, "topk_group": 2, "rope_scaling": YARN},
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 1, "first_k_dense_replace": 0, "n_shared_experts": 1},
    ],
    ids=["groups-yarn", "no-groups", "one-expert"],
)
@torch.no_grad()
def test_equal_to_transformers(changes: dict[str, Any], tmp_path: Path):
    """A convention of rotation, indexer, routing or folding that our own tests share with our own code; also that a
    checkpoint which transformers saved loads as it is."""
    theirs = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**{**SIZES, **changes})).eval()
    for name, value in theirs.named_parameters():
        value.normal_(std=value.shape[-1] ** -0.5) if value.ndim > 1 else value.add_(torch.randn_like(value) * 0.1)
        if "embed" in name:
            value.mul_(8)
    for name, value in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            value.normal_(std=0.1)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    ids = torch.randint(SIZES["vocab_size"], (2, 30))
    tape = Tape(record=True)
    batch = ForwardBatch([Chunk(line) for line in ids.tolist()], tape=tape)
    logits = ours.logits(ours(batch, BatchRows(ours.row_groups()).view(batch)))
    wanted = theirs(input_ids=ids).logits.float().flatten(0, 1)
    assert tape.seen["layer0.selected"].shape[1] == SIZES["index_topk"]  # sparse: not everything is attended to
    assert wanted.std() > 0.3
    assert (logits - wanted).abs().max() < 1e-4
