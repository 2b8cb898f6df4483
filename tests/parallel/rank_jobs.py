"""What the processes of test_parallel.py do; see the fixture `ranks`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from finback.parallel.experts import run_elsewhere
from finback.parallel.matrices import on_whole_matrices
from finback.parallel.placed import Placed, divided, everywhere
from finback.parallel.tables import look_up
from finback.parallel.world import World, chunk_of, join


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scaled(matrices: Tensor) -> Tensor:
    """Something that only a whole matrix gives."""
    return matrices / matrices.flatten(1).norm(dim=1).view(-1, 1, 1)


def matrices() -> list[Any]:
    """Of stacks whose rows are cut anywhere: what became of them, and what one process makes of them."""
    world = join("cpu")
    assert world.mesh is not None
    wholes = [values(rows, 3, seed=rows) for rows in (4, 8, 12, 4)]
    parts = []
    for whole in wholes:
        first, count = chunk_of(len(whole), world.size, world.rank)
        parts.append(whole[first : first + count])
    found = on_whole_matrices(scaled, parts, [len(w) for w in wholes], (4, 3), world.mesh.get_group())
    placed = [divided(whole.shape, world.mesh) for whole in wholes]
    wanted = [scaled(whole.view(-1, 4, 3)).view(-1, 3) for whole in wholes]
    return [(place.gather(part), want) for place, part, want in zip(placed, found, wanted, strict=True)]


def table() -> dict[str, Tensor]:
    """The rows that this process asked for, and what the whole table's gradient is."""
    world = join("cpu")
    assert world.mesh is not None
    whole = values(10, 4)
    place = divided(whole.shape, world.mesh)
    part = place.part_of(whole).requires_grad_()
    index = torch.tensor([[9, 0, 0, 3], [9, 2, 2, 2], [2, 1, 0, 2]])[world.rank]
    rows = look_up(part, 10, index, world.mesh.get_group())
    (rows * (1 + world.rank)).sum().backward()
    assert part.grad is not None
    return {"rows": rows.detach(), "wanted": whole[index], "gradient": place.gather(part.grad)}


def experts() -> dict[str, Tensor]:
    """Tokens of this process through experts of which each process has two, with the gradients of all inputs, and the
    same with all experts here. No token is for the last process."""
    world = join("cpu", ep=3)
    assert world.grid is not None
    stack = values(6, 4, 4)
    first = 2 * world.rank
    own = stack[first : first + 2].clone().requires_grad_()
    experts = torch.tensor([[[0, 3], [3, 1]], [[1, 0], [2, 3]], [[3, 0], [0, 2]]])[world.rank]
    found = {}
    for name, weight in (("elsewhere", own), ("here", stack.clone().requires_grad_())):
        x = values(2, 4, seed=5 + world.rank).requires_grad_()
        shares = values(2, 2, seed=9 + world.rank).requires_grad_()
        start = torch.ones(2, 4, dtype=torch.float64)
        run = _apply(weight)
        if name == "elsewhere":
            y = run_elsewhere(run, 2, world.grid.get_group("experts"), x, shares, experts, start)
        else:
            y = run(x, shares, experts, start)
        y.square().sum().backward()
        assert x.grad is not None and shares.grad is not None and weight.grad is not None
        grad = weight.grad if name == "elsewhere" else world.total(weight.grad)[first : first + 2]
        found |= {f"{name}.y": y.detach(), f"{name}.x": x.grad, f"{name}.shares": shares.grad, f"{name}.w": grad}
    return found


def _apply(weight: Tensor) -> Any:
    def run(x: Tensor, shares: Tensor, experts: Tensor, out: Tensor) -> Tensor:
        for k in range(experts.shape[1]):
            y = torch.einsum("tij,tj->ti", weight[experts[:, k]], x)
            out = out + shares[:, k, None] * y
        return out

    return run


def places() -> list[Any]:
    """Whole tensors that were cut, and joined again."""
    world = join("cpu", ep=2)
    assert world.mesh is not None and world.grid is not None
    out = []
    for rows in (2, 6, 7):
        whole = values(rows, 3)
        kinds = [divided(whole.shape, world.mesh), everywhere(whole.shape, world.mesh)]
        kinds += [divided(whole.shape, world.grid)] * (rows % 2 == 0)
        both = kinds[0].placements + kinds[1].placements
        kinds.append(Placed(whole.shape, world.grid, both))
        out += [(place.gather(place.part_of(whole)), whole) for place in kinds]
    return out


def worlds() -> dict[str, Any]:
    world = join("cpu")
    shared = [(item, counts) for item, counts in world.share("abcde")]
    return {
        "shared": shared,
        "any": world.any(world.rank == 1, False),
        "first": world.from_first(f"rank {world.rank}"),
        "totals": world.totals({"b": 1.0 + world.rank, "a": 2.0}),
    }


def alone() -> bool:
    """Whether a world of one process does without a process group."""
    world = join("cpu")
    with world.first_goes_first():
        world.wait()
    return world == World() and not torch.distributed.is_initialized()
