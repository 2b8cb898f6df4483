"""The golden sets on any device: is what the CPU tests show also true there, and how fast is the torch backend?

    python benchmarks/device_check.py --device cuda [--json PATH]

For every set under tests/data/golden that rounds nothing: one prefill, a decode token by token, and both again in
float64, against the reference's logits and against each other. Then decode and prefill of one mid-size random model
(dim 1024, 5 layers, bf16) with the torch backend. Prints a table and one JSON line. Nothing here asserts: the tests do.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from finback import LLM
from finback.models.base import family
from finback.nn.linear import prepare
from finback.nn.rows import Chunk, ForwardBatch, PagedRows, page_class
from finback.tools.fixtures import random_tensor

GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "golden"
SETS = ("v41-full-math", "v41-plain-math", "v32-math", "v32-softmax-math", "spikewhale-dense", "spikewhale-full")


def golden_errors(name: str, device: str, dtype: str) -> dict[str, float]:
    """Largest absolute logit differences of one set: prefill against the reference, decode against the prefill."""
    golden = load_file(GOLDEN / name / "golden.safetensors")
    ids_key, logits_key = ("text.ids", "text.prefill_logits") if "text.ids" in golden else ("ids", "logits")
    if ids_key not in golden:
        ids_key = next(k for k in golden if k.endswith("ids"))
    ids = golden[ids_key].long()[:1].tolist()[0]
    reference = golden[logits_key].float().view(-1, len(ids), golden[logits_key].shape[-1])[0]
    llm = LLM(GOLDEN / name, device=device, dtype=dtype, draft=None)
    whole = llm.score(ids).cpu()
    steps = llm.score(ids, splits=[5] + [1] * (len(ids) - 5)).cpu()
    return {
        "prefill": (whole - reference).abs().max().item(),
        "decode": (steps - whole).abs().max().item(),
    }


def mid_config() -> dict[str, Any]:
    """The mid-size V4.1 of benchmarks/cpu_model.py: 5 layers, dim 1024, 8 experts, vocabulary 129,280."""
    text = {
        "hidden_size": 1024, "moe_intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 16,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 256, "head_dim": 128, "qk_rope_head_dim": 32,
        "o_groups": 8, "o_lora_rank": 256, "sliding_window": 128, "compress_ratios": [0, 2, 2, 1, 1],
        "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3], "index_n_heads": 16, "index_head_dim": 64,
        "index_topk": 64, "vocab_size": 129280, "max_position_embeddings": 4096, "compress_rope_theta": 40000.0,
    }  # fmt: skip
    return {"model_type": "deepseek_v41", "text_config": text}


@torch.inference_mode()
def speed(device: str, prompt: int = 512, steps: int = 20) -> dict[str, float]:
    """Median milliseconds of a decode step after `prompt` tokens at batch 1 and 8, and prefill tokens per second."""
    config = mid_config()
    with torch.device(device):
        model = family(config).from_config(config, dtype=torch.bfloat16)
    for spec, out in model.weights():
        out.copy_(random_tensor(spec, 0))
    prepare(model)
    groups = model.row_groups()
    found = {}
    for batch in (1, 8):
        pages = -(-(prompt + steps + 1) // 64)
        store = PagedRows(groups, {page_class(g): pages * batch for g in groups}, dtype=model.dtype, device=device)
        own = [{page_class(g): list(range(b * pages, (b + 1) * pages)) for g in groups} for b in range(batch)]
        ids = torch.randint(0, 1000, (prompt + steps + 1,), generator=torch.Generator().manual_seed(0)).tolist()
        times = []
        for start, stop in [(0, prompt), *((prompt + i, prompt + i + 1) for i in range(steps))]:
            _wait(device)
            begun = time.perf_counter()
            chunks = [Chunk(ids[start:stop], start, (), None, p) for p in own]
            step = ForwardBatch(chunks, device=device)
            hidden = model(step, store.view(step))
            model.logits(hidden[step.last_tokens()])
            _wait(device)
            times.append(time.perf_counter() - begun)
        found[f"decode_ms_b{batch}"] = sorted(times[1:])[steps // 2] * 1e3
        found[f"prefill_tok_s_b{batch}"] = batch * prompt / times[0]
    return found


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-speed", action="store_true")
    args = parser.parse_args()
    name = (
        torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine()
    )
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "golden": {}}
    table = Table("set", "dtype", "prefill - reference", "decode - prefill", title=name)
    for golden in SETS:
        for dtype in ("float32", "float64"):
            errors = golden_errors(golden, args.device, dtype)
            result["golden"][f"{golden}/{dtype}"] = errors
            table.add_row(golden, dtype, f"{errors['prefill']:.1e}", f"{errors['decode']:.1e}")
    Console(width=120).print(table)
    if not args.no_speed:
        result["speed"] = speed(args.device)
        print({k: round(v, 2) for k, v in result["speed"].items()})
    line = json.dumps(result)
    if args.json:
        args.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
