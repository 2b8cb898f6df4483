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
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finback.base.runtime import CheckpointError
from finback.io.checkpoint import Checkpoint, load_weight
from finback.io.checkpoint_write import save_checkpoint
from finback.io.completeness import verify
from finback.models.base import Model, TensorSpec
from finback.train.optim import Optimiser

STATE_FILE = "training.pt"
_STEP = re.compile(r"step-(\d+)")


def _wide_views(model: Model, values: Mapping[int, Tensor]) -> Iterator[tuple[TensorSpec, Tensor]]:
    """The weight table with the float32 values of trained parameters in place of the parameters."""
    for spec, view in model.weights():
        owner = view if view._base is None else view._base
        wide = values.get(id(owner))
        yield spec, view if wide is None else wide.as_strided(view.shape, view.stride(), view.storage_offset())


def save_weights(folder: Path, model: Model, config: Mapping[str, Any], values: Mapping[int, Tensor],
                 extra: Mapping[str, bytes]) -> None:  # fmt: skip
    """Write a checkpoint of `values` (`Optimiser.masters()` or `.averages()`), and of the model where those have none.
    No layout has a place for float64: it is rounded to float32."""
    tensors: dict[str, Tensor] = {}
    for spec, value in _wide_views(model, values):
        if not spec.optional:  # else a second name of a tensor
            value = value.detach()
            tensors[spec.name] = value.float() if value.dtype == torch.float64 else value
    save_checkpoint(folder, config, tensors.items(), extra_files=extra)


@torch.no_grad()
def load_weights(model: Model, folder: Path, optimiser: Optimiser) -> None:
    """Fill masters and parameters from a checkpoint of any accepted format. Raises CheckpointError."""
    checkpoint = Checkpoint.open(folder)
    report = verify(checkpoint, [spec for spec, _ in model.weights()], model.ignored)
    report.raise_if_bad()
    for spec, out in _wide_views(model, optimiser.masters()):
        if spec.name in checkpoint.tensors:
            load_weight(checkpoint, spec, report.formats[spec.name], out)
        elif not (spec.optional and spec.role == "head"):
            out.zero_()
    for part in optimiser.parts:
        if part.master.data_ptr() != part.parameter.data_ptr():
            part.parameter.copy_(part.master)


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

    def save(self, step: int, model: Model, config: Mapping[str, Any], optimiser: Optimiser, state: Mapping[str, Any],
             extra: Mapping[str, bytes]) -> Path:  # fmt: skip
        """Write the checkpoint after `step` steps and remove those beyond `keep`. On failure the older ones stay, and
        the CheckpointError names the last good one."""
        target = self.folder / f"step-{step:07}"
        buffer = io.BytesIO()
        torch.save({**state, "step": step, "optimiser": optimiser.state_dict()}, buffer)
        try:
            save_weights(target, model, config, optimiser.masters(), {**extra, STATE_FILE: buffer.getvalue()})
        except CheckpointError as error:
            last = self.latest()
            kept = f"The last good checkpoint is {last}" if last else "There is no earlier checkpoint"
            raise CheckpointError(f"{error} {kept}; the same command resumes from it.") from error
        for _, old in self.all()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target


def read_state(folder: Path) -> dict[str, Any]:
    """What `Checkpoints.save` stored beside the weights."""
    try:
        return torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(
            f"{folder / STATE_FILE} cannot be read ({error}); remove {folder} to resume earlier"
        ) from error
