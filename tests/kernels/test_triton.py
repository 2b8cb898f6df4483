"""The fused GPU kernels against their torch twins, by triton's interpreter: every line of them runs, on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("collapse", "expand", "mixes", "swiglu 0.0", "swiglu 1.5", "swiglu alone")
CASES = ["sinkhorn 1", "sinkhorn 20", *(f"{op} {dtype}" for op in NAMES for dtype in ("float32", "bfloat16"))]


@pytest.fixture(scope="module")
def errors() -> dict[str, list[float]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (torch for CPUs comes without it): pip install triton")
    script = Path(__file__).with_name("triton_twins.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(errors: dict[str, list[float]], case: str):
    """Catches a transposed comb, columns and rows swapped in the Sinkhorn or its way back, lanes past the width or
    tokens past the last that are read or written, and sums kept in bf16: float32 agrees to 2e-6 of the largest value,
    bf16 to what rounding results once costs (gradients come in rounded too)."""
    bound = 2**-7 if case.endswith("bfloat16") else 2e-6
    assert max(errors[case]) <= bound, errors[case]
