"""Run by test_triton.py in a process of its own, with TRITON_INTERPRET=1 (triton reads that when it is imported).

Prints one JSON object: name of a case -> the largest error of each result and of each gradient, relative to the largest
value of the torch twin in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from finback.kernels.torch import moe, stream
from finback.kernels.triton import gated, hyper

COPIES = 4


def errors(run: Callable[..., Any], twin: Callable[..., Any], arguments: list[Tensor]) -> list[float]:
    narrow = [x.clone().requires_grad_() for x in arguments]
    wide = [x.double().clone().requires_grad_() for x in arguments]
    found, expected = run(*narrow), twin(*wide)
    if isinstance(found, Tensor):
        found, expected = (found,), (expected,)
    weights = [torch.randn_like(x) for x in expected]
    for results in (found, expected):
        torch.stack([(x.double() * w).sum() for x, w in zip(results, weights, strict=True)]).sum().backward()
    pairs = [*zip(found, expected, strict=True), *((a.grad, b.grad) for a, b in zip(narrow, wide, strict=True))]
    return [float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs]


def main() -> None:
    torch.manual_seed(0)
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
    print(json.dumps(found))


if __name__ == "__main__":
    main()
