"""Where the numbers of a run go beside its own files. The packages are stood in for; nothing leaves the machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from finback.base.runtime import ConfigError
from finback.train import journal, writers
from finback.train.journal import Journal
from finback.train.recipe import Recipe, read_recipe

DEMO = Path(__file__).parents[2] / "recipes" / "v41-1m.toml"


class Recorder:
    """Takes the calls of both packages."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.opened: dict[str, Any] = {}

    def init(self, **options: Any) -> Recorder:
        self.opened = options
        return self

    def SummaryWriter(self, folder: str, purge_step: int) -> Recorder:
        self.opened = {"folder": folder, "purge_step": purge_step}
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.calls += [(name, value, step) for name, value in values.items()]

    def add_scalar(self, *call: Any) -> None:
        self.calls.append(call)

    add_text = add_scalar

    def finish(self) -> None:
        self.calls.append(("closed",))

    close = finish


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    for name, attribute in (("wandb", "init"), ("torch.utils.tensorboard", "SummaryWriter")):
        module = ModuleType(name)
        setattr(module, attribute, getattr(found, attribute))
        monkeypatch.setitem(sys.modules, name, module)
    return found


def recipe(*sets: str) -> Recipe:
    return read_recipe(DEMO, sets)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_numbers_arrive_under_their_names(name: str, recorder: Recorder, tmp_path: Path):
    """One point a step and number, nested ones by path, sample texts too; the end flushes, also after an error."""
    with (
        pytest.raises(KeyboardInterrupt),
        Journal(recipe(f'run.log=["{name}"]'), tmp_path, 3) as found,
    ):
        found.step({"step": 4, "loss": 2.5, "load": None, "gradient_norm": 1.0, "rate": 1.0, "tokens": 8, "seconds": 2})
        found.held_out({"step": 4, "held_out": {"a": 1.25}})
        found.sample(4, "a text")
        raise KeyboardInterrupt
    assert ("loss", 2.5, 4) in recorder.calls and ("held_out/a", 1.25, 4) in recorder.calls
    assert ("samples", "a text", 4) in recorder.calls and recorder.calls[-1] == ("closed",)
    assert not {"step", "load"} & {call[0] for call in recorder.calls}
    assert (tmp_path / "samples.txt").read_text() == "a text\n"


def test_a_resumed_run_goes_on_in_the_same_place(recorder: Recorder, tmp_path: Path, monkeypatch):
    """Else every restart opens a new curve, and TensorBoard draws what an interrupted run wrote twice."""
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    opened = []
    for step in (0, 70):
        for name in ("wandb", "tensorboard"):
            with Journal(recipe(f'run.log=["{name}"]'), tmp_path / "run", step):
                opened.append(recorder.opened)
    first, board, second, later = opened
    assert first["id"] == second["id"] and second["resume"] == "allow" and second["project"] == "v41-1m"
    assert (board["purge_step"], later["purge_step"]) == (1, 71)
    with Journal(recipe('run.log=["wandb"]'), tmp_path / "other", 0):
        assert recorder.opened["id"] != first["id"]


def test_a_missing_package_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch):
    """After an hour of tokenising is too late."""
    monkeypatch.setattr(writers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'finback\[wandb\]'"):
        writers.check_writers(recipe('run.log=["wandb"]'))
    with pytest.raises(ConfigError, match=r"run.log 'tensorbord' .did you mean 'tensorboard'"):
        recipe('run.log=["tensorbord"]')


def test_a_slow_run_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Judged by the smoothed speed and not by the first steps, which compile and warm up."""
    monkeypatch.setattr(journal, "_WARM", 3)
    metrics = {"loss": 2.5, "gradient_norm": 1.0, "rate": 1.0, "tokens": 100, "seconds": 1.0}
    with Journal(recipe("run.min_tokens_per_second=150"), tmp_path, 10) as found:
        verdicts = []
        for step in range(11, 15):
            found.step({"step": step, **metrics})
            verdicts.append(found.too_slow(step))
        assert verdicts[:2] == [None, None] and "100 tokens/s are fewer" in str(verdicts[2])
    with Journal(recipe("run.min_tokens_per_second=90"), tmp_path, 0) as found:
        found.step({"step": 50, **metrics})
        assert found.too_slow(50) is None
