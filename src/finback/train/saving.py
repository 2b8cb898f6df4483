"""Checkpoints in the background: a step waits for a copy in the host's memory, not for the disk."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finback.train.state import Checkpoints


class Saver:
    """Writes the training checkpoints of a run, one at a time, in a thread of its own.

    `save` copies everything into host buffers (kept for the next time, page-locked beside a GPU) and returns; whoever
    asks for the next one waits for the one before. A write that failed is told by the next call of anything here. The
    thread outlives an error elsewhere, so that a checkpoint once begun is finished unless the process is killed.
    """

    def __init__(self, checkpoints: Checkpoints):
        self.checkpoints = checkpoints
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], moments: Mapping[str, Tensor], config: Mapping[str, Any],
             state: Mapping[str, Any], extra: Mapping[str, bytes]) -> Path:  # fmt: skip
        """Begin to write the checkpoint after `step` steps; returns the folder that it will be.

        tensors: of the released layout. moments: `Optimiser.state_dict()`. state: the rest of what resuming needs, not
        changed afterwards. extra: further files. Raises the error of the write before.
        """
        self.wait()
        weights = self._copied("weights", tensors)
        kept = {**state, "step": step, "optimiser": self._copied("optimiser", moments)}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies
        self._thread = threading.Thread(
            target=self._write, args=(step, weights, dict(config), kept, dict(extra)), name="checkpoint"
        )
        self._thread.start()
        return self.checkpoints.place(step)

    def check(self) -> None:
        """Raise the error of a write that has ended badly."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written. Raises the error of the last write: CheckpointError for what the disk
        refuses."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, step: int, *args: Any) -> None:
        try:
            self.checkpoints.write(step, *args)
        except BaseException as error:  # raised again in the thread that trains
            self._error = error

    def _copied(self, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors in host buffers. Copies from a GPU are under way when it returns."""
        out = {}
        for name, value in tensors.items():
            key, value = f"{part}/{name}", value.detach()
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=value.is_cuda)
                self._buffers[key] = buffer
            out[name] = buffer.copy_(value, non_blocking=True)
        return out
