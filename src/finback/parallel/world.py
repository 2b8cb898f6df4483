"""The processes of one run, as torchrun starts them: how many, which one this is, and how they are laid out.

Every process has data of its own. With `ep` > 1 they stand in a grid: the `ep` neighbours of a line hold different
experts and exchange tokens, the processes of a column hold the same experts.

    ep = 2, four processes:      experts 0-1   experts 2-3
                                    rank 0        rank 1
                                    rank 2        rank 3

A run of one process (`World()`) does without torch.distributed altogether.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from finback.base.runtime import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
_PATIENCE = timedelta(hours=6)  # while rank 0 reads the data, or a disk is slow


@dataclass(frozen=True)
class ParallelConfig:
    """The recipe's [parallel] section: how a run started by torchrun uses its processes.

    processes: how many the recipe is meant for, None = any number. shard: divide parameters, gradients and the
    optimiser's state among all of them (FSDP2), each block gathered when it runs; off = every process holds all. ep:
    into how many parts routed experts are divided; tokens travel to them. tables: divide Engram tables by rows.
    """

    processes: int | None = None
    shard: bool = True
    ep: int = 1
    tables: bool = True

    def __post_init__(self) -> None:
        if self.ep < 1:
            raise ConfigError(f"parallel.ep {self.ep} must be at least 1")

    def check(self, size: int, forwards: int) -> None:
        """ConfigError unless `size` processes fit, which share a step's `forwards` evenly."""
        start = f"torchrun --nproc-per-node {self.processes or self.ep} -m finback train RECIPE"
        if self.processes is not None and self.processes != size:
            raise ConfigError(f"parallel.processes is {self.processes}, but the run has {size}; start it with: {start}")
        if size % self.ep:
            raise ConfigError(
                f"parallel.ep {self.ep} does not divide the number of processes, {size}; start a multiple of "
                f"{self.ep}, for example with: {start}"
            )
        if forwards % size:
            raise ConfigError(
                f"data.accumulate {forwards} forwards a step cannot be shared evenly among {size} processes; use a "
                f"multiple of {size} (a step then learns from data.accumulate times data.batch_tokens tokens)"
            )


@dataclass(frozen=True)
class World:
    """rank, size: of this process, and how many there are. mesh: all of them in a line. grid: [ep, size / ep], see the
    module docstring; its dimensions are called "experts" and "copies". background: a gloo group of all, for what
    happens beside the training or takes long. The last three are None in a run of one process."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    grid: DeviceMesh | None = None
    background: ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """The sum of all processes' `values`, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(values)
        return values

    def totals(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sums of all processes' values by name; all of them have the same names."""
        if self.size == 1:
            return dict(values)
        sums = self.total(torch.tensor([values[name] for name in sorted(values)], dtype=torch.float64))
        return dict(zip(sorted(values), sums.tolist(), strict=True))

    def any(self, *flags: bool) -> list[bool]:
        """For every flag whether it is set in some process."""
        return list(flags) if self.size == 1 else (self.total(torch.tensor(flags, dtype=torch.int64)) > 0).tolist()

    def from_first(self, value: T) -> T:
        """Rank 0's `value`."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        torch.distributed.broadcast_object_list(box, src=0, group=self.background)
        return box[0]

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            torch.distributed.barrier(group=self.background)

    @contextmanager
    def first_goes_first(self) -> Generator[None]:
        """Rank 0 runs the block before the others do, for what is made once and then found on the disk."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()

    def share(self, items: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """This process's part of `items`, and whether each counts: a process for which none is left gets one that
        another has too, because all of them must run equally often."""
        line: list[T] = []
        for item in items:
            line.append(item)
            if len(line) == self.size:
                yield line[self.rank], True
                line = []
        if line:
            counts = self.rank < len(line)
            yield line[self.rank if counts else 0], counts


def launched() -> int:
    """How many processes a launcher such as torchrun has started for this run; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(device: str, ep: int = 1) -> World:
    """Meet the other processes of the run, and lay them out. device: "cpu" (gloo) or "cuda" (nccl), of which each
    process takes the GPU of its local rank. ep: divides the number of processes. Raises ConfigError."""
    size = launched()
    if size == 1:
        return World()
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    kind = torch.device(device).type
    if kind == "cuda":
        _take_gpu()
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    ranks = torch.arange(size).view(size // ep, ep)
    mesh = DeviceMesh(kind, torch.arange(size), mesh_dim_names=("all",))
    grid = DeviceMesh(kind, ranks.t().contiguous(), mesh_dim_names=("experts", "copies"))
    background: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
    return World(dist.get_rank(), size, mesh, grid, background)


def _take_gpu() -> None:
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"this machine has {torch.cuda.device_count()} GPUs, too few for its process number {number + 1}; lower "
            f"torchrun's --nproc-per-node"
        )
    torch.cuda.set_device(number)


def leave(world: World) -> None:
    """Part from the other processes. Nothing of `world` works afterwards."""
    if world.size > 1 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def chunk_of(length: int, parts: int, part: int) -> tuple[int, int]:
    """(first, count) of the part'th of `parts` runs of `length` things: all equally long but the last ones."""
    size = -(-length // parts)
    first = min(part * size, length)
    return first, min(size, length - first)


def chunks_of(length: int, parts: int) -> Sequence[int]:
    """How long each run of `chunk_of` is."""
    return [chunk_of(length, parts, i)[1] for i in range(parts)]
