"""SpikeWhale in Hugging Face's Trainer on several processes, which is DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra: pip install 'finback[transformers]'")
pytest.importorskip("accelerate", reason="needs the extra: pip install 'finback[transformers]'")

JOBS = Path(__file__).with_name("rank_jobs.py")
CONFIG = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "qk_rope_head_dim": 8,
    "q_lora_rank": 16, "o_lora_rank": 16, "moe_intermediate_size": 32, "vocab_size": 64, "use_moe": True,
    "moe_layers": [1], "n_routed_experts": 4, "moe_aux_loss_coef": 0.0, "use_hyper_connections": True,
    "use_engram": True, "engram_table_size": 64, "engram_hash": "spread", "num_nextn_predict_layers": 1,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_two_processes_learn_what_one_does(ranks: Callable[..., list[Any]], tmp_path: Path):
    """Would catch: experts that got no token in one process and stop DDP, parts that its hooks do not see, gradients
    that stay in one process. (The router's balance is left out: it is a product of two means over a process's rows.)"""
    ids = [[(7 * i + 3 * k * k) % 64 for k in range(10)] for i in range(8)]
    rows = [{"input_ids": line, "labels": line} for line in ids]
    one = ranks(JOBS, 1, "train", CONFIG, rows, 4, str(tmp_path / "one"))[0]
    several = ranks(JOBS, 2, "train", CONFIG, rows, 2, str(tmp_path / "several"))
    for found in several:
        assert found["wrapped"] == "DistributedDataParallel"
        for name, value in one["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, atol=1e-5, rtol=1e-5, msg=name)
    assert sum(found["loss"] for found in several) / 2 == pytest.approx(one["loss"], abs=1e-5)
