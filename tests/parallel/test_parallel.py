"""What moves between processes arrives, and its gradients come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finback.base.runtime import ConfigError
from finback.parallel.world import ParallelConfig, chunk_of, chunks_of

JOBS = Path(__file__).with_name("rank_jobs.py")
Ranks = Callable[..., list[Any]]


def test_matrices_are_worked_on_whole(ranks: Ranks):
    """Would catch: pieces joined in the wrong order, owners of nothing, processes with no rows of a matrix."""
    for results in ranks(JOBS, 3, "matrices"):
        for found, wanted in results:
            torch.testing.assert_close(found, wanted)


def test_a_divided_table_is_looked_up_and_learns(ranks: Ranks):
    """Would catch: rows of a neighbour, and gradients that miss a process or count a row asked for twice once."""
    counts = torch.zeros(10, dtype=torch.float64)
    for rank, asked in enumerate(([9, 0, 0, 3], [9, 2, 2, 2], [2, 1, 0, 2])):
        for row in asked:
            counts[row] += 1 + rank
    for result in ranks(JOBS, 3, "table"):
        assert torch.equal(result["rows"], result["wanted"])
        torch.testing.assert_close(result["gradient"], counts.unsqueeze(1).expand(-1, 4))


def test_experts_elsewhere_are_experts(ranks: Ranks):
    """Would catch: results that come back to another token, weights without a gradient, and a process without tokens
    that keeps the others waiting or has no gradient to reduce."""
    for result in ranks(JOBS, 3, "experts"):
        for part in ("y", "x", "shares", "w"):
            torch.testing.assert_close(result[f"elsewhere.{part}"], result[f"here.{part}"], msg=part)


def test_what_is_cut_is_joined_again(ranks: Ranks):
    """Would catch: parts of two divisions in the wrong order, and sizes that do not divide."""
    for results in ranks(JOBS, 4, "places"):
        for found, whole in results:
            assert torch.equal(found, whole)


def test_processes_agree(ranks: Ranks):
    """Would catch: a process with nothing left that others wait for, and one that decides for itself."""
    two = ranks(JOBS, 2, "worlds")
    assert two[0]["shared"] == [("a", True), ("c", True), ("e", True)]
    assert two[1]["shared"] == [("b", True), ("d", True), ("e", False)]
    for found in two:
        assert found["any"] == [True, False] and found["first"] == "rank 0"
        assert found["totals"] == {"a": 4.0, "b": 3.0}


def test_one_process_needs_no_group(ranks: Ranks):
    """Would catch: a run without torchrun that waits for others, or opens a port."""
    assert ranks(JOBS, 1, "alone") == [True]


@pytest.mark.parametrize(("length", "parts"), [(7, 3), (2, 4), (8, 4), (0, 2)])
def test_runs_cover_everything_as_torch_cuts(length: int, parts: int):
    """Would catch: a cut other than that of FSDP2, whose parts the optimiser and checkpoints take for theirs."""
    found = torch.arange(length).split(chunks_of(length, parts)) if length else ()
    pieces = torch.arange(length).chunk(parts) if length else ()
    assert [p.tolist() for p in found if len(p)] == [p.tolist() for p in pieces]
    firsts = [chunk_of(length, parts, i)[0] for i in range(parts)]
    assert firsts == sorted(firsts) and max(firsts) <= length


@pytest.mark.parametrize(
    ("config", "size", "forwards", "text"),
    [
        (ParallelConfig(processes=8), 2, 8, "--nproc-per-node 8"),
        (ParallelConfig(ep=2), 1, 8, "parallel.ep 2"),
        (ParallelConfig(ep=2), 3, 9, "multiple of 2"),
        (ParallelConfig(), 4, 6, "data.accumulate 6"),
    ],
)
def test_sizes_that_do_not_fit_are_told(config: ParallelConfig, size: int, forwards: int, text: str):
    """Would catch: processes that learn from unequal shares, or wait for others that were never started."""
    with pytest.raises(ConfigError, match=text):
        config.check(size, forwards)
