"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from finback.base.runtime import CheckpointError
from finback.train import state
from finback.train.optim import OptimConfig, Optimiser
from finback.train.saving import Saver
from finback.train.state import Checkpoints, load_weights, read_state, weight_tensors


class Disk:
    """Stands in for `save_checkpoint`: waits for `go`, then writes, or fails with `error`."""

    def __init__(self, write: Any):
        self.write, self.error = write, None
        self.go, self.busy, self.most = threading.Event(), 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.busy += 1
        self.most = max(self.most, self.busy)
        try:
            assert self.go.wait(30)
            if self.error is not None:
                raise self.error
            self.write(*args, **kwargs)
        finally:
            self.busy -= 1


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(state.save_checkpoint)
    monkeypatch.setattr(state, "save_checkpoint", disk)
    return disk


class Run:
    """A model, and what saves it."""

    def __init__(self, model: Any, config: dict[str, Any], folder: Path):
        self.model, self.config = model, config
        self.optimiser = Optimiser(model, OptimConfig())
        self.saver = Saver(Checkpoints(folder, keep=2))

    def save(self, step: int) -> Path:
        tensors = weight_tensors(self.model, self.optimiser.masters())
        moments = {"head.weight/first": self.model.head.weight.detach() * 2}
        extra = {"token_map.json": b"[]"}
        return self.saver.save(step, tensors, moments, self.config, {"stream": {"a": [1]}}, extra)


@pytest.fixture
def run(tiny_model, tiny_config, tmp_path: Path) -> Run:
    return Run(tiny_model("v32"), tiny_config("v32"), tmp_path / "checkpoints")


def test_what_is_saved_is_of_the_moment_of_the_call(run: Run, disk: Disk):
    """Weights move on while the thread writes: references instead of copies would store a mixture of two steps. The
    buffers are used again by the next save, which must wait for the one under way."""
    wanted = run.model.head.weight.detach().clone()
    place = run.save(1)
    with torch.no_grad():
        for p in run.model.parameters():
            p.fill_(7.0)
    assert not place.exists()
    second = threading.Thread(target=run.save, args=(2,))
    second.start()
    second.join(0.2)
    assert second.is_alive() and disk.most == 1
    disk.go.set()
    second.join(30)
    run.saver.wait()
    assert disk.most == 1
    for step, head in ((1, wanted), (2, torch.full_like(wanted, 7.0))):
        folder = run.saver.checkpoints.place(step)
        load_weights(run.model, folder, run.optimiser)
        assert torch.equal(run.model.head.weight, head)
        stored = read_state(folder)
        assert torch.equal(stored["optimiser"]["head.weight/first"], 2 * head)
        assert stored["step"] == step and stored["stream"] == {"a": [1]}


def test_an_error_in_the_background_is_told_once_by_the_next_call(run: Run, disk: Disk):
    """A full disk that nobody hears of lets a run go on for hours without a checkpoint."""
    disk.go.set()
    good = run.save(1)
    run.saver.wait()
    for tell in (run.saver.wait, run.saver.check, lambda: run.save(3)):
        disk.error = CheckpointError("no space left.")
        run.save(2)
        assert run.saver._thread is not None
        run.saver._thread.join(30)
        with pytest.raises(CheckpointError, match=f"no space left. The last good checkpoint is {good}"):
            tell()
        run.saver.check()  # told
        assert run.saver.checkpoints.latest() == good
    disk.error = None
    run.save(4)
    run.saver.wait()
    assert run.saver.checkpoints.latest() == run.saver.checkpoints.place(4)


def test_what_a_killed_write_left_is_swept(tmp_path: Path):
    """Ten killed writes of a large model would fill the disk that the run needs."""
    found = Checkpoints(tmp_path, 2)
    left = tmp_path / ".step-0000003.ab12.tmp"
    left.mkdir()
    (left / "0.payload").write_bytes(b"x" * 100)
    whole = found.place(2)
    whole.mkdir()
    (whole / "training.pt").write_bytes(b"")
    found.sweep()
    assert list(tmp_path.iterdir()) == [whole] and found.latest() == whole
