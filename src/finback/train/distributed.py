"""A run of several processes: meeting, who writes, and what one cannot do.

torchrun starts the processes, and every one of them runs the same `Trainer`. Only rank 0 prints and writes, but for
checkpoints, of which each writes its part. What divides the model is in dividing.py; a run of one process never loads
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finback.base.runtime import ConfigError
from finback.parallel.world import World, join, launched
from finback.train.journal import Journal
from finback.train.optim import Optimiser
from finback.train.progress import Progress
from finback.train.recipe import Recipe
from finback.train.saving import Saver
from finback.train.shards import ShardSaver
from finback.train.state import Checkpoints


def meet(recipe: Recipe) -> World:
    """The processes that were started for a run of `recipe`. Raises ConfigError where it does not fit them."""
    size = launched()
    recipe.parallel.check(size, recipe.data.accumulate)
    if size > 1 and recipe.draft is not None:
        raise ConfigError(f"[draft] is trained by one process, but {size} were started; start it without torchrun")
    if size > 1 and recipe.quant is not None and recipe.quant.start < 1:
        raise ConfigError(
            f"quant.start {recipe.quant.start} rounds whole matrices while training, which none of {size} processes "
            f"has; use quant.start = 1, which quantises at the end, or start one process"
        )
    return join(recipe.run.device, recipe.parallel.ep)


def make_saver(checkpoints: Checkpoints, model: Any, optimiser: Optimiser, world: World) -> Saver | ShardSaver:
    """What writes the checkpoints of this run."""
    return Saver(checkpoints) if world.size == 1 else ShardSaver(checkpoints, model, optimiser, world)


class Mute(Journal):
    """The journal of a process other than rank 0: it notes nothing."""

    def __init__(self, recipe: Recipe, folder: Path, step: int):
        self.recipe, self.folder, self.first = recipe, folder, step
        self.progress, self.writers = Progress(recipe), []

    def step(self, metrics: Mapping[str, Any]) -> None: ...

    def held_out(self, metrics: Mapping[str, Any]) -> None: ...

    def sample(self, step: int, text: str) -> None: ...

    def note(self, text: str) -> None: ...
