"""What every test gets: one torch thread, a seed made from its own name, and hypothesis without a clock."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import runpy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from finback.base.runtime import seed_everything

# A deadline would fail a test because the machine is busy. In CI the examples are the same on every run, so a red run
# means that the change is wrong; elsewhere they are drawn anew, so that developers keep finding new ones.
_COMMON = {"deadline": None, "max_examples": 25, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", derandomize=True, **_COMMON)
hypothesis.settings.register_profile("local", **_COMMON)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

# Results do not depend on the number of cores, and xdist's workers do not fight for them.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="shifts the seed of every test (default: 0)")


def seed_of(nodeid: str, shift: int = 0) -> int:
    """The seed of a test: 32 bits of the sha256 of its node id, plus `shift`. Neither order nor neighbours matter."""
    return (int.from_bytes(hashlib.sha256(nodeid.encode()).digest()[:4], "little") + shift) % 2**32


@pytest.fixture(name="seed", autouse=True)
def seed_fixture(request: pytest.FixtureRequest) -> int:
    """Seeds the global generators of Python, numpy and torch; the value is there for tests that make their own."""
    seed = seed_of(request.node.nodeid, request.config.getoption("--seed"))
    seed_everything(seed)
    return seed


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    """A CPU generator of the test's own, unmoved by what the code under test draws from the global one."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def forks() -> Any:
    """A server that has loaded what processes of a run need, and forks them: each then starts at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["finback.train.trainer", "finback.train.dividing", "finback.models.deepseek_v41.model",
         "finback.models.deepseek_v32.model", "finback.models.spikewhale.model", "torch.distributed.checkpoint"]
    )  # fmt: skip
    return context


@pytest.fixture
def ranks(forks: Any, tmp_path: Path) -> Callable[..., list[Any]]:
    """ranks(jobs, size, job, *given) -> what the function `job` of the file `jobs` gave in each of `size` processes, as
    torchrun would start them. One of a size of 1 has no launcher."""

    def run(jobs: Path, size: int, job: str, *given: Any) -> list[Any]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        out = tmp_path / f"ranks{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        task = {"size": size, "port": port, "jobs": str(jobs), "job": job, "given": given, "out": str(out)}
        main = str(Path(__file__).with_name("rank_main.py"))
        started = [
            forks.Process(target=runpy.run_path, args=(main, {"task": {**task, "rank": rank}})) for rank in range(size)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(150)
        waiting = [process for process in started if process.is_alive()]
        for process in waiting:
            process.kill()
        assert not waiting, "a process waits for another for ever"
        assert [process.exitcode for process in started] == [0] * size
        return [torch.load(out / f"{rank}.pt") for rank in range(size)]

    return run
