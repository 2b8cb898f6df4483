"""What a run shows while it works: one line on stderr, and when something that happens every so often is due."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from finback.train.recipe import Recipe


def due(step: int, every: int, steps: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens after `step`."""
    return every > 0 and (step % every == 0 or step == steps)


class Progress:
    """A line on stderr: a moving one on a terminal, else one every `log_every` steps. pace: tokens/s, smoothed; None
    before the first step."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.moving = sys.stderr.isatty()
        self.pace: float | None = None

    def show(self, metrics: Mapping[str, Any]) -> None:
        run, step = self.recipe.run, metrics["step"]
        speed = metrics["tokens"] / metrics["seconds"]
        self.pace = speed if self.pace is None else 0.9 * self.pace + 0.1 * speed
        left = (run.steps - step) * metrics["tokens"] / self.pace
        line = f"step {step}/{run.steps}  loss {metrics['loss']:.3f}"
        for name in ("indexer", "balance", "mtp", "accepted"):
            line += f"  {name} {metrics[name]:.3f}" if name in metrics else ""
        line += f"  norm {metrics['gradient_norm']:.2f}  rate {metrics['rate']:.2f}  {self.pace:,.0f} tok/s"
        line += f"  mfu {metrics['mfu']:.1%}" if "mfu" in metrics else ""
        line += f"  {_duration(left)} left"
        if self.moving:
            print(f"\r\x1b[K{line}", end="\n" if step == run.steps else "", file=sys.stderr, flush=True)
        elif due(step, run.log_every, run.steps):
            print(line, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        if text:
            print(("\r\x1b[K" if self.moving else "") + text, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
