"""A model and its optimiser divided among the processes of a run.

| what                                              | where its values lie                      | gradients are summed |
|---------------------------------------------------|-------------------------------------------|----------------------|
| blocks, embedding, head                           | by rows over all, gathered when used      | by FSDP2             |
| routed experts                                    | by expert, over `ep` and then over copies | by FSDP2             |
| Engram tables                                     | by rows over all, looked up by exchange   | where they arrive    |
| vision, SpikeWhale's experts, what is not trained | everywhere                                | here                 |
| what is float32 beside bfloat16                   | everywhere                                | here                 |

Gradients are sums over all processes, as each divides its loss by the whole step's targets. So the losses and steps of
a run do not depend on the number of processes, but for the order of sums.

Everything starts as one process would have it, fresh or loaded, and is then cut: a process once holds the whole model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard

from finback.base.runtime import ConfigError
from finback.models.base import Model
from finback.nn.linear import Embedding
from finback.nn.moe import Experts
from finback.parallel.experts import run_elsewhere
from finback.parallel.matrices import on_whole_matrices
from finback.parallel.placed import Placed, divided, everywhere, local
from finback.parallel.tables import look_up
from finback.parallel.world import ParallelConfig, World, chunk_of
from finback.train.families import blocks
from finback.train.optim import Optimiser, Part, orthogonalise


def distribute(model: Any, optimiser: Optimiser, world: World, config: ParallelConfig) -> None:
    """Leave of a whole model and its whole optimiser what this process holds. Raises ConfigError for sizes that cannot
    be divided."""
    # The warning is about changing a block's outputs in place, which nothing here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    placed = _Divider(model, world, config).run()
    for at, part in enumerate(optimiser.parts):
        place = placed[part.name]
        _cut(part, model.get_parameter(part.name), place)
        if optimiser.average is not None:
            optimiser.average[at] = place.part_of(optimiser.average[at])
    optimiser.across = Processes(world)


def _cut(part: Part, parameter: nn.Parameter, place: Placed) -> None:
    """Make `part`, of a whole parameter, one of what lies here of it."""
    values = local(parameter)
    part.master = values if values.dtype == part.master.dtype else place.part_of(part.master)
    part.state = {key: place.part_of(value) for key, value in part.state.items()}
    part.parameter, part.place = parameter, place


@torch.no_grad()
def gathered(
    whole: Model, model: Any, optimiser: Optimiser, values: Mapping[int, Tensor] | None
) -> dict[int, Tensor] | None:
    """`Optimiser.masters()` or `.averages()` of a divided model, as those of `whole`, the same model in one piece and
    without values: rank 0 gets all tensors, in host memory, the others none of them. All processes take part."""
    if values is None:
        return None
    parts = {part.name: part for part in optimiser.parts}
    here = {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    found = {}
    for name, blank in [*whole.named_parameters(), *whole.named_buffers()]:
        part = parts.get(name)
        value = here[name] if part is None else _place(part).gather(values[id(part.parameter)])
        if dist.get_rank() == 0:
            found[id(blank)] = value.cpu()
    return found


def _place(part: Part) -> Placed:
    assert part.place is not None, f"{part.name} was not divided"
    return part.place


class Processes:
    """What an optimiser's step needs of the other processes (`optim.Across`)."""

    def __init__(self, world: World):
        self.world = world

    def sum_gradients(self, parts: list[Part]) -> None:
        """Sum the gradients of what several processes hold. A part without one in any process stays without."""
        copied = [part for part in parts if _place(part).copies > 1]
        if not copied:
            return
        flags = torch.tensor([part.grad is not None for part in copied], dtype=torch.int64)
        for part, count in zip(copied, self.world.total(flags).tolist(), strict=True):
            if count:
                part.grad = torch.zeros_like(part.master) if part.grad is None else part.grad
                _place(part).sum_copies(part.grad)

    def norm(self, parts: list[Part]) -> float:
        """Of the whole gradient."""
        grads = [part.grad for part in parts if part.grad is not None]
        if not grads:
            return math.sqrt(float(self.world.total(torch.zeros(1, dtype=torch.float64))))
        shares = torch.tensor([1 / _place(part).copies for part in parts if part.grad is not None], dtype=torch.float64)
        squares = torch.stack(torch._foreach_norm(grads)).cpu().double().square()
        return math.sqrt(float(self.world.total((squares * shares).sum())))

    def orthogonalise(self, shape: tuple[int, int], members: list[tuple[Part, Tensor]]) -> list[Tensor]:
        """What Muon makes of stacks of matrices of one shape, of which each process has a part."""
        out: dict[int, Tensor] = {}
        cut = [i for i, (part, _) in enumerate(members) if _cuts_matrices(_place(part), shape)]
        whole = [i for i in range(len(members)) if i not in cut]
        if whole:
            stacks = [members[i][1].reshape(-1, *shape) for i in whole]
            turned = orthogonalise(torch.cat(stacks)).split([len(stack) for stack in stacks])
            out |= dict(zip(whole, turned, strict=True))
        if cut:
            assert self.world.mesh is not None
            rows = [_place(members[i][0]).shape.numel() // shape[1] for i in cut]
            parts = [members[i][1].reshape(-1, shape[1]) for i in cut]
            found = on_whole_matrices(orthogonalise, parts, rows, shape, self.world.mesh.get_group())
            out |= dict(zip(cut, found, strict=True))
        return [out[i].view_as(ahead) for i, (_, ahead) in enumerate(members)]


def _cuts_matrices(place: Placed, shape: tuple[int, int]) -> bool:
    """Whether processes hold pieces of matrices [n, c] of a tensor [R, c], not whole ones. Stacks of experts are only
    cut between experts."""
    if len(place.shape) == 3 or all(placement.is_replicate() for placement in place.placements):
        return False
    second, _ = chunk_of(place.shape[0], place.mesh.size(), 1)  # where the second process begins
    return second % shape[0] != 0


class _Divider:
    """Cuts a model's parameters and changes the modules that then have to ask other processes."""

    def __init__(self, model: Any, world: World, config: ParallelConfig):
        assert world.mesh is not None and world.grid is not None
        self.model, self.config = model, config
        self.mesh, self.grid = world.mesh, world.grid
        self.experts = [(name, m) for name, m in model.named_modules() if isinstance(m, Experts)]
        self.placed: dict[str, Placed] = {}

    def run(self) -> dict[str, Placed]:
        """Name of every parameter -> where it now lies."""
        kept = self._kept()
        if self.config.ep > 1:
            self._divide_experts()
        if self.config.tables:
            kept |= self._divide_tables()
        for name, parameter in self.model.named_parameters():
            place = divided if self.config.shard and name not in kept else everywhere
            self.placed.setdefault(name, place(parameter.shape, self.mesh))
        if self.config.shard:
            self._shard({p for name, p in self.model.named_parameters() if name in kept})
        return self.placed

    def _kept(self) -> set[str]:
        """Names of parameters that every process keeps whole: those that FSDP2 cannot mix with the others, and those
        that may take part in one process's forward and not in another's."""
        stacked = {id(p) for _, module in self.experts for p in module.parameters()}
        owners = ((spec.role, id(_owner(view))) for spec, view in self.model.weights())
        sometimes = {p for role, p in owners if role == "vision" or (role == "expert" and p not in stacked)}
        return {
            name
            for name, p in self.model.named_parameters()
            if not p.requires_grad or p.dtype != self.model.dtype or id(p) in sometimes
        }

    def _divide_experts(self) -> None:
        """Keep this process's run of every stack of experts."""
        parts, group = self.config.ep, self.grid.get_group("experts")
        if not self.experts:
            raise ConfigError(f"parallel.ep is {parts}, but the model has no stack of routed experts; leave it out")
        for name, module in self.experts:
            assert module.w13 is not None and module.w2 is not None
            count = len(module.w13)
            if count % parts:
                raise ConfigError(
                    f"parallel.ep {parts} does not divide the {count} routed experts of {name}; use a divisor of them"
                )
            first, own = chunk_of(count, parts, dist.get_rank(group))
            for end, whole in (("w13", module.w13), ("w2", module.w2)):
                kinds = Shard(0), Shard(0) if self.config.shard else Replicate()
                self.placed[f"{name}.{end}"] = Placed(whole.shape, self.grid, kinds)
                setattr(module, end, _parameter(whole[first : first + own]))
            module.forward = partial(run_elsewhere, module.forward, own, group)

    def _divide_tables(self) -> set[str]:
        """Keep this process's rows of every Engram table; returns the tables' names."""
        group = self.mesh.get_group()
        owners = {id(_owner(view)) for spec, view in self.model.weights() if spec.role == "engram_table"}
        names = {name for name, parameter in self.model.named_parameters() if id(parameter) in owners}
        for name in names:
            module: Any = self.model.get_submodule(name.removesuffix(".weight"))
            place = self.placed[name] = divided(module.weight.shape, self.mesh)
            module.weight = _parameter(place.part_of(module.weight))
            find = partial(_rows_of, module, place.shape[0], group)
            module.forward = find if isinstance(module, Embedding) else partial(_columns_of, find)
        return names

    def _shard(self, ignored: set[nn.Parameter]) -> None:
        """FSDP2: every block for itself, the rest as one; stacks of divided experts among those with the same ones."""
        if self.config.ep > 1:
            for _, module in self.experts:
                self._fully(module, self.grid["copies"], ignored)
        drafts = getattr(getattr(self.model, "mtp", None), "stages", [])
        for module in [*blocks(self.model), *drafts, self.model]:
            self._fully(module, self.mesh, ignored)
        if hasattr(self.model, "forward_with_aux"):
            register_fsdp_forward_method(self.model, "forward_with_aux")

    def _fully(self, module: nn.Module, mesh: Any, ignored: set[nn.Parameter]) -> None:
        wide = torch.float32 if self.model.dtype == torch.bfloat16 else None
        policy = MixedPrecisionPolicy(reduce_dtype=wide, cast_forward_inputs=False)
        sharded: FSDPModule = fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def _owner(view: Tensor) -> Tensor:
    return view if view._base is None else view._base


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone())


def _rows_of(module: Any, rows: int, group: Any, index: Tensor) -> Tensor:
    """As `Embedding`, of a module whose `weight` is this process's rows: index [...] -> [..., d]."""
    return look_up(module.weight, rows, index.flatten(), group).view(*index.shape, -1)


def _columns_of(find: Callable[[Tensor], Tensor], index: Tensor, dtype: torch.dtype) -> Tensor:
    """As `EngramTable`: index [T, C] -> [T, C * d] in `dtype`."""
    return find(index).to(dtype).flatten(1)
