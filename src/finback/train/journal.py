"""What a run writes down while it works: metrics.jsonl, samples.txt, the writers of [run] log, and the progress line.

RUN/metrics.jsonl has one object a step and one a held-out evaluation. Lines after the checkpoint that a run resumes
from are removed: those steps come again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finback.base.runtime import CheckpointError, ConfigError
from finback.train.progress import Progress
from finback.train.recipe import Recipe
from finback.train.writers import flat, open_writers

_WARM = 20  # steps of a process that its speed is not judged by


class Journal:
    """Of one run from `step` on. Closed at the end, so that writers send what they hold back."""

    def __init__(self, recipe: Recipe, folder: Path, step: int):
        self.recipe, self.folder, self.first = recipe, folder, step
        self.progress = Progress(recipe)
        self.writers = open_writers(recipe, folder, step)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: Any) -> None:
        for writer in self.writers:
            writer.close()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """One optimiser step's metrics."""
        self.progress.show(metrics)
        self._write(metrics)

    def held_out(self, metrics: Mapping[str, Any]) -> None:
        self.progress.note(self._write(metrics))

    def sample(self, step: int, text: str) -> None:
        """Sample texts; "" = none."""
        if text:
            self.progress.note(text)
            _append(self.folder / "samples.txt", text)
            for writer in self.writers:
                writer.text(step, text)

    def note(self, text: str) -> None:
        self.progress.note(text)

    def too_slow(self, step: int) -> ConfigError | None:
        """The error of [run] min_tokens_per_second, once the run is under way and slower."""
        wanted, pace = self.recipe.run.min_tokens_per_second, self.progress.pace
        if not wanted or pace is None or pace >= wanted or step < self.first + _WARM:
            return None
        return ConfigError(
            f"step {step}: {pace:,.0f} tokens/s are fewer than run.min_tokens_per_second {wanted:,.0f}; the run is "
            f"saved and ends. Use a faster device, or lower the bound: the same command goes on"
        )

    def _write(self, metrics: Mapping[str, Any]) -> str:
        line = json.dumps(metrics)
        _append(self.folder / "metrics.jsonl", line)
        for writer in self.writers:
            writer.write(metrics["step"], dict(flat(metrics)))
        return line


def _append(file: Path, line: str) -> None:
    try:
        with file.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be written ({error.strerror}); free some space, and the same command resumes from the last "
            f"checkpoint"
        ) from error


def trim_metrics(folder: Path, step: int) -> None:
    """Forget what an interrupted run wrote after `step`."""
    file = folder / "metrics.jsonl"
    if file.is_file():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        file.write_text("".join(kept), encoding="utf-8")
