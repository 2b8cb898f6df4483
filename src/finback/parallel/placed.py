"""How one tensor is divided among processes: always by runs of its first axis, or not at all.

A `Placed` says it in DTensor's terms, so that gathering and sharded checkpoints are torch's own. What a process holds
is called the tensor's *part*, a plain tensor that optimisers step like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from finback.parallel.world import chunk_of


@dataclass(frozen=True)
class Placed:
    """shape: of the whole tensor. placements: one for each dimension of `mesh`, Shard(0) or Replicate()."""

    shape: torch.Size
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @property
    def run(self) -> tuple[int, int]:
        """(first, count) of the entries of the first axis that lie here. Later dimensions divide what the earlier ones
        leave."""
        first, count = 0, self.shape[0]
        for dim, placement in enumerate(self.placements):
            if placement.is_shard():
                step, count = chunk_of(count, self.mesh.size(dim), self.mesh.get_local_rank(dim))
                first += step
        return first, count

    @property
    def copies(self) -> int:
        """How many processes hold the same part."""
        return math.prod(self.mesh.size(i) for i, p in enumerate(self.placements) if p.is_replicate())

    def part_of(self, whole: Tensor) -> Tensor:
        """A copy of what this process holds of the whole tensor."""
        first, count = self.run
        return whole.detach()[first : first + count].clone()

    def global_view(self, part: Tensor) -> DTensor:
        """This process's part as a view of the whole; nothing is copied."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride)

    def gather(self, part: Tensor) -> Tensor:
        """The whole tensor. All processes of the mesh must take part."""
        found: Any = self.global_view(part)
        placements = list(self.placements)
        for dim in reversed(range(self.mesh.ndim)):  # what was divided last is joined first
            placements[dim] = Replicate()
            found = found.redistribute(placements=placements)
        return local(found)

    def sum_copies(self, part: Tensor) -> None:
        """Sum, in place, over the processes that hold the same part."""
        for dim, placement in enumerate(self.placements):
            if placement.is_replicate() and self.mesh.size(dim) > 1:
                dist.all_reduce(part, group=self.mesh.get_group(dim))


def everywhere(shape: torch.Size, mesh: DeviceMesh) -> Placed:
    """The same tensor in all processes of `mesh`."""
    return Placed(shape, mesh, (Replicate(),) * mesh.ndim)


def divided(shape: torch.Size, mesh: DeviceMesh) -> Placed:
    """Divided along all dimensions of `mesh`, one after the other."""
    return Placed(shape, mesh, (Shard(0),) * mesh.ndim)


def local(tensor: Tensor) -> Tensor:
    """What lies in this process of a tensor that may be a DTensor; shares its memory, without its gradient."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
