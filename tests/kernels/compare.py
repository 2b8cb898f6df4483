"""What the scripts `twins_*.py` share: a fused kernel beside its torch twin in float64.

A script is run by test_triton.py in a process of its own, with TRITON_INTERPRET=1 (triton reads that when it is
imported), or by hand on a GPU: `PYTHONPATH=src python tests/kernels/twins_hyper.py cuda`. It prints one JSON object:
name of a case -> the largest error of each result and of each gradient, relative to the largest value of the twin's.
Names tell what is allowed: `bound`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
FULL = DEVICE != "cpu"  # real sizes, too slow for the interpreter


def bound(case: str) -> float:
    """The largest error allowed: 0 for "... exact", what rounding a result once costs for "... bfloat16", else float32
    sums."""
    if case.endswith("exact"):
        return 0.0
    return 2**-7 if case.endswith("bfloat16") else 2e-6


def errors(run: Callable[..., Any], twin: Callable[..., Any], arguments: Sequence[Tensor]) -> list[float]:
    """Errors of run(*arguments) and of its gradients against twin(*arguments in float64). Every argument is
    differentiated; bind the others with functools.partial."""
    narrow = [x.detach().clone().requires_grad_() for x in arguments]
    wide = [x.detach().double().clone().requires_grad_() for x in arguments]
    found, expected = run(*narrow), twin(*wide)
    if isinstance(found, Tensor):
        found, expected = (found,), (expected,)
    weights = [torch.randn_like(x) for x in expected]
    for results in (found, expected):
        torch.stack([(x.double() * w).sum() for x, w in zip(results, weights, strict=True)]).sum().backward()
    pairs = [*zip(found, expected, strict=True), *((a.grad, b.grad) for a, b in zip(narrow, wide, strict=True))]
    return [error(a, b) for a, b in pairs]


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value; infinity where NaN or infinity differ."""
    a, b = found.detach().double(), expected.detach().double()
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a[a.isfinite()], b[b.isfinite()]
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if len(a) else 0.0


def report(found: Mapping[str, Sequence[float]]) -> None:
    """Print the object; end with status 1, and the cases that are too far off, where there are any."""
    print(json.dumps(found))
    if far := {case: values for case, values in found.items() if not max(values) <= bound(case)}:
        sys.exit(f"too far off: {far}")
