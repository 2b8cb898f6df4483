"""Hyper-connections and SwiGLU: catches a transposed comb, columns and rows swapped in the Sinkhorn or its way back."""

from __future__ import annotations

from functools import partial

import torch
from compare import DEVICE, errors, report

from finback.kernels.torch import moe, stream
from finback.kernels.triton import gated, hyper

COPIES = 4


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_device(DEVICE)
    found = {}
    for iterations in (1, 20):
        run, twin = (partial(f, iterations=iterations, eps=1e-6) for f in (hyper.sinkhorn, stream.sinkhorn))
        found[f"sinkhorn {iterations}"] = errors(run, twin, [2 * torch.randn(35, COPIES, COPIES)])
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        streams, y = torch.randn(5, COPIES, 200).to(dtype), torch.randn(5, 200).to(dtype)
        post, comb = torch.randn(5, COPIES), torch.randn(5, COPIES, COPIES)
        found[f"collapse {name}"] = errors(hyper.hc_collapse, stream.hc_collapse, [streams, post])
        found[f"expand {name}"] = errors(hyper.hc_expand, stream.hc_expand, [y, streams, post, comb])
        counts = (2 + COPIES) * COPIES
        fn, scale, base = torch.randn(counts, COPIES * 20) / 9, torch.randn(3), torch.randn(counts)
        run, twin = (partial(f, iterations=3, norm_eps=1e-6, eps=1e-6) for f in (hyper.hc_mixes, stream.hc_mixes))
        found[f"mixes {name}"] = errors(run, twin, [torch.randn(35, COPIES, 20).to(dtype), fn, scale, base])
        gate_up, weights = (torch.randn(5, 2 * 300) * 2).to(dtype), torch.rand(5, 1)
        for limit in (0.0, 1.5):
            run, twin = (partial(f, limit=limit) for f in (gated.weighed_swiglu, moe.weighed_swiglu))
            found[f"swiglu {limit} {name}"] = errors(run, twin, [gate_up, weights])
        run, twin = (partial(f, weights=None, limit=1.5) for f in (gated.weighed_swiglu, moe.weighed_swiglu))
        found[f"swiglu alone {name}"] = errors(run, twin, [gate_up])
    report(found)


if __name__ == "__main__":
    main()
