"""Checkpoints of a run of several processes: each writes what it holds, in torch's distributed format.

    RUN/checkpoints/step-0000200/    .metadata, __0_0.distcp, ... (torch.distributed.checkpoint), config.json,
                                     tokenizer.json, training.pt (where the data and the generators stand)

They are written in the background and load with any number of processes, one included. Names are the model's own:
"NAME/master" (float32), "NAME/first", ..., and "NAME" for what is not trained. A folder is renamed to its place once
all of it is there.
"""

from __future__ import annotations

import io
import json
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finback.base.runtime import CheckpointError
from finback.parallel.world import World
from finback.train.optim import Optimiser, Part
from finback.train.state import STATE_FILE, Checkpoints

MASTER, AVERAGE = "master", "average"


class ShardSaver:
    """Writes the checkpoints of a run of several processes, one at a time; all of them call everything together.

    `save` copies what this process holds and returns. A write that failed is told by the next call of anything here.
    """

    def __init__(self, checkpoints: Checkpoints, model: Any, optimiser: Optimiser, world: World):
        self.checkpoints, self.model, self.optimiser, self.world = checkpoints, model, optimiser, world
        # Its own group: what a thread exchanges and what the training exchanges must not get mixed up.
        self._group: Any = torch.distributed.new_group(backend="gloo")
        self._future: Future[Any] | None = None
        self._step = 0

    def save(self, step: int, config: Mapping[str, Any], state: Mapping[str, Any], extra: Mapping[str, bytes]) -> Path:
        """Begin to write the checkpoint after `step` steps; returns the folder that it will be. state: what
        `read_state` gives back. Raises the error of the write before."""
        from torch.distributed.checkpoint import async_save

        self.wait()
        self._step = step
        buffer = io.BytesIO()
        torch.save({**state, "step": step}, buffer)
        text = json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n"
        self._begin({**extra, "config.json": text.encode(), STATE_FILE: buffer.getvalue()})
        tensors = _state(entries(self.model, self.optimiser))
        future: Any = async_save(tensors, checkpoint_id=self._work, process_group=self._group)  # copies them first
        self._future = future
        return self.checkpoints.place(step)

    def _begin(self, files: Mapping[str, bytes]) -> None:
        """The new folder with its small files, made by rank 0."""
        failed = None
        if self.world.first:
            try:
                shutil.rmtree(self._work, ignore_errors=True)
                self._work.mkdir(parents=True)
                for name, content in files.items():
                    (self._work / name).write_bytes(content)
            except OSError as error:
                failed = error.strerror or str(error)
        self._raise(self.world.from_first(failed))

    def check(self) -> None:
        """Nothing: all processes must see at the same step that a write has ended badly, which is the next `save`."""

    def wait(self) -> None:
        """Until nothing is being written. Raises CheckpointError for what the disk refuses, in all processes."""
        future, self._future = self._future, None
        if future is None:
            return
        error = future.exception()
        bad = self.world.any(error is not None)[0]
        self._raise((str(error).strip() if error else "another process failed") if bad else None)
        if self.world.first:
            self.checkpoints.settle(self._work, self._step)
        self.world.wait()

    @property
    def _work(self) -> Path:
        place = self.checkpoints.place(self._step)
        return place.with_name(f".{place.name}.shards.tmp")

    def _raise(self, failed: str | None) -> None:
        if failed:
            place = self.checkpoints.place(self._step)
            raise self.checkpoints.explained(CheckpointError(f"{place} could not be written: {failed}."))


def entries(model: Any, optimiser: Optimiser) -> dict[str, tuple[Part | None, Tensor]]:
    """Everything that resuming needs, by its name in a sharded checkpoint, with the part that it belongs to."""
    found: dict[str, tuple[Part | None, Tensor]] = {}
    for at, part in enumerate(optimiser.parts):
        values = {MASTER: part.master, **part.state}
        if optimiser.average is not None:
            values[AVERAGE] = optimiser.average[at]
        found |= {f"{part.name}/{kind}": (part, value) for kind, value in values.items()}
    trained = {part.name for part in optimiser.parts}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name not in trained:
            found[name] = None, value.detach()
    return found


def _state(found: Mapping[str, tuple[Part | None, Tensor]]) -> dict[str, Tensor]:
    """`entries` as torch's checkpoints take them: what is divided, as a view of the whole."""
    return {
        name: value if part is None or part.place is None else part.place.global_view(value)
        for name, (part, value) in found.items()
    }


@torch.no_grad()
def load_shards(folder: Path, model: Any, optimiser: Optimiser) -> None:
    """Fill what this process holds of masters, moments, averages and parameters. All processes of the run take part.
    Raises CheckpointError."""
    from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load

    alone = all(part.place is None for part in optimiser.parts)
    try:
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
        _make_room(stored, optimiser)
        wanted = entries(model, optimiser)
        missing = [name for name in wanted if name not in stored and not name.endswith(f"/{AVERAGE}")]
        if missing:
            raise CheckpointError(f"{folder} has no {missing[0]}: it is a checkpoint of another model")
        state = _state({name: entry for name, entry in wanted.items() if name in stored})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # in one process, on purpose
            load(state, checkpoint_id=folder, no_dist=alone)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # torch raises many kinds for what is damaged or does not fit
        raise CheckpointError(f"{folder} cannot be read ({error}); remove it to resume earlier") from error
    for part in optimiser.parts:
        part.publish()


def _make_room(stored: Mapping[str, Any], optimiser: Optimiser) -> None:
    """Moments of the kinds that are stored, to be filled."""
    parts = {part.name: part for part in optimiser.parts}
    for key in stored:
        name, _, kind = key.rpartition("/")
        if name in parts and kind not in (MASTER, AVERAGE):
            parts[name].state[kind] = torch.zeros_like(parts[name].master)
