"""Training checkpoints: a folder in the released layout, which serves at once, with one file more that training resumes
from.

    RUN/checkpoints/step-0000200/    config.json, model.safetensors (float32 masters), tokenizer.json, training.pt
    RUN/model/                       the weights at the end of the run
    RUN/model-ema/                   their running average, where the recipe keeps one

`training.pt` holds the optimiser's moments, where the data stand and the random generators. Folders are written beside
their place and renamed, so one that exists is whole; older ones are removed only after that.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from finback.base.runtime import CheckpointError, ConfigError
from finback.io.checkpoint import Checkpoint, load_weight
from finback.io.checkpoint_write import save_checkpoint
from finback.io.completeness import verify
from finback.models.base import Model, TensorSpec
from finback.train.optim import Optimiser

if TYPE_CHECKING:
    from finback.train.recipe import Recipe

STATE_FILE = "training.pt"
SHARDS_FILE = ".metadata"  # of a checkpoint that several processes wrote, see shards.py
_STEP = re.compile(r"step-(\d+)")


def wide_views(model: Model, values: Mapping[int, Tensor]) -> Iterator[tuple[TensorSpec, Tensor]]:
    """The weight table with the float32 values of trained parameters in place of the parameters."""
    for spec, view in model.weights():
        owner = view if view._base is None else view._base
        wide = values.get(id(owner))
        yield spec, view if wide is None else wide.as_strided(view.shape, view.stride(), view.storage_offset())


def weight_tensors(model: Model, values: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Name in the released layout -> its value in `values` (`Optimiser.masters()` or `.averages()`), or in the model
    where those have none. No layout has a place for float64: it is rounded to float32."""
    tensors: dict[str, Tensor] = {}
    for spec, value in wide_views(model, values):
        if not spec.optional:  # else a second name of a tensor
            value = value.detach()
            tensors[spec.name] = value.float() if value.dtype == torch.float64 else value
    return tensors


def save_weights(folder: Path, model: Model, config: Mapping[str, Any], values: Mapping[int, Tensor],
                 extra: Mapping[str, bytes]) -> None:  # fmt: skip
    """Write a checkpoint of `weight_tensors`."""
    save_checkpoint(folder, config, weight_tensors(model, values).items(), extra_files=extra)


@torch.no_grad()
def load_weights(model: Model, folder: Path, optimiser: Optimiser, *, fresh: str | None = None) -> None:
    """Fill masters and parameters from a checkpoint of any accepted format, and let the average begin there. fresh:
    tensors whose names begin so keep their values if the checkpoint has none of them. Raises CheckpointError."""
    checkpoint = Checkpoint.open(folder)
    if fresh is not None and any(name.startswith(fresh) for name in checkpoint.tensors):
        fresh = None
    kept = {spec.name for spec, _ in model.weights() if fresh is not None and spec.name.startswith(fresh)}
    report = verify(checkpoint, [spec for spec, _ in model.weights() if spec.name not in kept], model.ignored)
    report.raise_if_bad()
    for spec, out in wide_views(model, optimiser.masters()):
        if spec.name in checkpoint.tensors:
            load_weight(checkpoint, spec, report.formats[spec.name], out)
        elif spec.name not in kept and not (spec.optional and spec.role == "head"):
            out.zero_()
    for part in optimiser.parts:
        part.publish()
    if optimiser.average is not None:
        torch._foreach_copy_(optimiser.average, [part.master for part in optimiser.parts])


def check_start(recipe: Recipe, folder: Path) -> None:
    """ConfigError if a run has no checkpoint to start from where it names one, or would go on in the folder of a run of
    another model."""
    start = recipe.init_from
    if start is not None and not (Path(start) / "config.json").is_file():
        raise ConfigError(
            f"init_from: there is no checkpoint at {start}; train that run first, or name another with "
            "--set init_from=FOLDER"
        )
    try:
        before = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or one that a crash cut short and that is written anew
        return
    if before.get("model") != json.loads(json.dumps(recipe.model)):
        raise ConfigError(f"{folder} holds a run of another [model]; choose another folder with --out, or remove it")


@dataclass
class Checkpoints:
    """The training checkpoints of one run. keep: how many stay."""

    folder: Path
    keep: int

    def all(self) -> list[tuple[int, Path]]:
        """(step, folder), oldest first."""
        found = self.folder.iterdir() if self.folder.is_dir() else []
        steps = [(int(m[1]), p) for p in found if (m := _STEP.fullmatch(p.name)) and (p / STATE_FILE).is_file()]
        return sorted(steps)

    def latest(self) -> Path | None:
        found = self.all()
        return found[-1][1] if found else None

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step:07}"

    def sweep(self) -> None:
        """Remove what a write that was killed has left. Only while nothing is being written."""
        for left in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)

    def explained(self, error: CheckpointError) -> CheckpointError:
        """The error of a write, with what there is to go on from."""
        last = self.latest()
        kept = f"The last good checkpoint is {last}" if last else "There is no earlier checkpoint"
        return CheckpointError(f"{error} {kept}; the same command resumes from it.")

    def settle(self, work: Path, step: int) -> None:
        """Give a folder that was written beside its place, and is whole, its name, and remove what is beyond `keep`."""
        target = self.place(step)
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
        self._trim()

    def _trim(self) -> None:
        for _, old in self.all()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def write(self, step: int, tensors: Mapping[str, Tensor], config: Mapping[str, Any], state: Mapping[str, Any],
              extra: Mapping[str, bytes]) -> Path:  # fmt: skip
        """Write the checkpoint after `step` steps and remove those beyond `keep`. On failure the older ones stay, and
        the CheckpointError names the last good one. tensors: `weight_tensors`. state: what `read_state` gives back."""
        target = self.place(step)
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        try:
            save_checkpoint(target, config, tensors.items(), extra_files={**extra, STATE_FILE: buffer.getvalue()})
        except CheckpointError as error:
            raise self.explained(error) from error
        self._trim()
        return target


def read_state(folder: Path) -> dict[str, Any]:
    """What `Checkpoints.write` stored beside the weights."""
    try:
        return torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(
            f"{folder / STATE_FILE} cannot be read ({error}); remove {folder} to resume earlier"
        ) from error
