"""Where the numbers of a run go beside metrics.jsonl: TensorBoard and Weights & Biases, named in [run] log.

Names are those of metrics.jsonl, with a slash for every level ("held_out/stories"); the x axis is the step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from finback.base.runtime import ConfigError
from finback.train.recipe import LOGS, Recipe


class Writer(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, text: str) -> None:
        """A sample text."""
        ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard. What an interrupted run wrote after `step` is hidden."""

    def __init__(self, recipe: Recipe, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def text(self, step: int, text: str) -> None:
        self.writer.add_text("samples", text, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run of Weights & Biases. Its id follows from the folder, so that a resumed run goes on in the same place; the
    project is the recipe's name unless the environment says otherwise (WANDB_PROJECT, WANDB_MODE=offline, ...)."""

    def __init__(self, recipe: Recipe, folder: Path, step: int):
        import wandb

        name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", recipe.name), name=folder.name, id=name, resume="allow",
            dir=str(folder), config=dataclasses.asdict(recipe),
        )  # fmt: skip

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def text(self, step: int, text: str) -> None:
        self.run.log({"samples": text}, step=step)

    def close(self) -> None:
        self.run.finish()


_KINDS: Mapping[str, type[Any]] = {"tensorboard": TensorBoard, "wandb": Wandb}
assert set(_KINDS) == set(LOGS)


def check_writers(recipe: Recipe) -> None:
    """Raise ConfigError where [run] log names a writer whose package is not installed."""
    for name in recipe.run.log:
        if find_spec(name) is None:
            raise ConfigError(
                f"run.log has {name!r}, but the package {name} is not installed: pip install 'finback[{name}]', or "
                f"leave it out; RUN/metrics.jsonl is always written"
            )


def open_writers(recipe: Recipe, folder: Path, step: int) -> list[Writer]:
    """The writers of [run] log for a run that has done `step` steps."""
    return [_KINDS[name](recipe, folder, step) for name in recipe.run.log]


def flat(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line of metrics.jsonl, by names with a slash for every level."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield f"{prefix}{name}", float(value)
