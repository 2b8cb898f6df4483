"""What the processes of test_distributed.py do; see the fixture `ranks`."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import torch

from finback.base.runtime import CheckpointError, ConfigError
from finback.train.recipe import read_recipe
from finback.train.trainer import Trainer


def train(recipe: str, sets: list[str], folder: str, steps: int = 0) -> dict[str, Any]:
    """A run to its end, or of `steps` steps without one."""
    trainer = Trainer(read_recipe(recipe, sets), folder)
    if not steps:
        return {"done": trainer.run().name}
    return {"metrics": [trainer.advance() for _ in range(steps)]}


def gradients(recipe: str, configs: list[list[str]], folder: str) -> list[dict[str, Any]]:
    """For each of several settings, one step up to its gradients, which are given whole, and what this process holds
    of every parameter."""
    return [_gradients(recipe, sets, Path(folder) / str(i)) for i, sets in enumerate(configs)]


def _gradients(recipe: str, sets: list[str], folder: Path) -> dict[str, Any]:
    trainer = Trainer(read_recipe(recipe, sets), folder)
    optimiser = trainer.optimiser
    found: dict[str, torch.Tensor] = {}

    def step(number: int, steps: int) -> float:
        if optimiser.across is not None:
            optimiser.across.sum_gradients(optimiser.parts)
        for part in optimiser.parts:
            if part.grad is not None:
                found[part.name] = part.grad if part.place is None else part.place.gather(part.grad)
        return 0.0

    optimiser.step = step  # type: ignore[method-assign]
    metrics = trainer.advance()
    held = {part.name: part.master.numel() for part in optimiser.parts}
    return {"gradients": found, "metrics": metrics, "held": held, "held_out": trainer.evaluate()}


def full_disk(recipe: str, sets: list[str], folder: str) -> str:
    """A run whose second checkpoint finds no room in rank 1; its error."""
    from torch.distributed.checkpoint import filesystem

    trainer = Trainer(read_recipe(recipe, sets), folder)
    write = filesystem.FileSystemWriter.write_data

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if trainer.world.rank == 1 and trainer.step > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **kwargs)

    filesystem.FileSystemWriter.write_data = refuse  # type: ignore[method-assign]
    try:
        trainer.run()
    except CheckpointError as error:
        return str(error)
    return "no error"


def refused(recipe: str, sets: list[str], folder: str) -> str:
    """The error of a run that cannot begin."""
    try:
        Trainer(read_recipe(recipe, sets), folder)
    except ConfigError as error:
        return str(error)
    return "no error"
