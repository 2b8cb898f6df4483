"""Optimisers: Muon for matrices, AdamW for the rest, in groups by the roles of the family's weight table.

Muon turns the momentum of a matrix into the nearest (semi-)orthogonal one by a Newton-Schulz iteration: 8 fast steps
with (3.4445, -4.775, 2.0315) and 2 that settle with (2, -1.5, 0.5). The update is scaled by 0.2 sqrt(max(rows,
columns)), so that its RMS is 0.2 as Adam's is about, and one learning rate serves all shapes. Every matrix of the
*checkpoint* is orthogonalised on its own, however the model stacks it: experts and fused gate-up pairs in one batch,
query up-projections head by head. Sources: Muon (Jordan et al.), its RMS-matched form (Moonlight), DeepSeek-V4.

`Optimiser` holds float32 masters of narrower parameters: gradients are added up in float32, the step is taken there,
and the parameters are the rounded masters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from finback.base.runtime import ConfigError, nearest
from finback.models.base import Model, TensorSpec

if TYPE_CHECKING:
    from finback.parallel.placed import Placed

_FAST, _SETTLE = (3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)
_STEPS = (*[_FAST] * 8, *[_SETTLE] * 2)
_RMS = 0.2
_MUON_ROLES = {"attention", "expert", "shared_expert", "ffn", "compressor", "engram", "draft", "refinement"}
_NOT_MUON = ("q_weight", "k_weight", "markov_head", "confidence_head")
# Ends of names -> config key that says into how many runs of rows a matrix is cut for Muon.
_CUTS = {"wq_b.weight": "num_attention_heads", "q_b_proj.weight": "num_attention_heads",
         "kv_b_proj.weight": "num_attention_heads", "wo_a.weight": "o_groups"}  # fmt: skip


@dataclass(frozen=True)
class OptimConfig:
    """The recipe's [optim] section. Rates are peaks; `schedule` scales all of them alike.

    matrix_lr: Muon's (RMS-matched form). lr: AdamW's for embeddings, vectors, routers and hyper-connections. head_lr,
    indexer_lr: AdamW's for the vocabulary head and for indexers. table_factor: Engram tables learn at lr times this.
    weight_decay: of Muon's matrices only. momentum_start is raised to `momentum` over the first `momentum_steps` steps.
    clip: largest norm of the whole gradient, 0 = none. ema: decay of the averaged weights, 0 = none.
    schedule "wsd": warm up, hold, then linear over the last `decay` share of the steps to `final` times the peak.
    "cosine": warm up, then half a cosine to `final`.
    """

    matrix_lr: float = 5e-3
    lr: float = 3e-3
    head_lr: float = 2e-3
    indexer_lr: float = 1e-3
    table_factor: float = 5.0
    muon: bool = True
    weight_decay: float = 0.1
    momentum: float = 0.95
    momentum_start: float = 0.85
    momentum_steps: int = 300
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-10
    clip: float = 1.0
    ema: float = 0.0
    schedule: str = "wsd"
    warmup: int = 100
    decay: float = 0.4
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.schedule not in ("wsd", "cosine"):
            hint = nearest(self.schedule, ("wsd", "cosine"))
            raise ConfigError(f"optim.schedule {self.schedule!r}{hint}; use 'wsd' or 'cosine'")
        if not 0 <= self.ema < 1:
            raise ConfigError(f"optim.ema {self.ema} must be at least 0 and below 1")


def schedule(config: OptimConfig, step: int, steps: int) -> float:
    """What the peak rates are multiplied by in `step` (0 .. steps - 1)."""
    done = step + 1
    if done < config.warmup:
        return done / config.warmup
    start = max(config.warmup, steps * (1 - config.decay)) if config.schedule == "wsd" else config.warmup
    if step <= start or steps <= start:
        return 1.0
    part = min(1.0, (step - start) / (steps - start))
    shape = 1 - part if config.schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * part))
    return config.final + (1 - config.final) * shape


def orthogonalise(matrices: Tensor) -> Tensor:
    """[n, r, c] -> the nearest matrices with equal singular values near 1, of the same type. Zeros stay zero."""
    wide = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = wide.shape[1] > wide.shape[2]
    x = wide.transpose(1, 2) if tall else wide
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-20).view(-1, 1, 1)
    for a, b, c in _STEPS:
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.transpose(1, 2) if tall else x).to(matrices.dtype)


def _orthogonalised(shape: tuple[int, int], members: list[tuple[Part, Tensor]]) -> list[Tensor]:
    """The same of stacks of matrices of one shape, in one batch."""
    stacks = [ahead.view(-1, *shape) for _, ahead in members]
    turned = orthogonalise(torch.cat(stacks)).split([len(stack) for stack in stacks])
    return [update.view_as(ahead) for update, (_, ahead) in zip(turned, members, strict=True)]


def _norm(parts: list[Part]) -> float:
    """Of the whole gradient."""
    norms = torch._foreach_norm([p.grad for p in parts if p.grad is not None])
    return float(torch.stack(norms).norm()) if norms else 0.0


@dataclass
class Part:
    """One parameter and how it is stepped. kind: "muon", "adam", "head", "indexer" or "table". shape: of one matrix of
    Muon; the parameter is a stack of them. master: what is stepped (the parameter itself where it is wide enough).
    place: how it is divided among processes, of which master, grad and state are this one's part; None = it is whole.
    """

    name: str
    parameter: nn.Parameter
    kind: str
    shape: tuple[int, int] | None
    master: Tensor
    grad: Tensor | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    place: Placed | None = None

    @property
    def values(self) -> Tensor:
        """The parameter's numbers in this process."""
        return self.parameter.detach() if self.place is None else _local(self.parameter)

    def take_grad(self) -> None:
        """Add the parameter's gradient to `grad`, and clear it."""
        found, self.parameter.grad = self.parameter.grad, None
        if found is not None:
            found = found if self.place is None else _local(found)
            self.grad = found.to(self.master.dtype) if self.grad is None else self.grad.add_(found)

    def publish(self) -> None:
        """Round the master into the parameter, where they are two."""
        if self.master.data_ptr() != (values := self.values).data_ptr():
            values.copy_(self.master)


def _local(tensor: Tensor) -> Tensor:
    from finback.parallel.placed import local

    return local(tensor)


class Across(Protocol):
    """What a step needs of the other processes of a run."""

    def sum_gradients(self, parts: list[Part]) -> None:
        """Finish the gradients of what several processes hold."""
        ...

    def norm(self, parts: list[Part]) -> float:
        """Of the whole gradient."""
        ...

    def orthogonalise(self, shape: tuple[int, int], members: list[tuple[Part, Tensor]]) -> list[Tensor]:
        """`orthogonalise` of matrices of one shape that may be divided; of each member, what lies here."""
        ...


def kind_of(spec: TensorSpec, muon: bool = True) -> str:
    """Which optimiser group a checkpoint tensor belongs to."""
    fixed = {"head": "head", "indexer": "indexer", "engram_table": "table"}
    if "indexer" in spec.name:
        return "indexer"
    if spec.role in fixed:
        return fixed[spec.role]
    matrix = muon and spec.role in _MUON_ROLES and len(spec.shape) == 2 and not any(w in spec.name for w in _NOT_MUON)
    return "muon" if matrix else "adam"


def parts_of(model: Model, muon: bool = True) -> list[Part]:
    """Every trainable parameter with its group, in the order of the weight table."""
    owners = {id(p): (name, p) for name, p in model.named_parameters() if p.requires_grad}
    config = getattr(model.config, "text_config", model.config)
    found: dict[int, Part] = {}
    for spec, view in model.weights():
        owner = id(view if view._base is None else view._base)
        if owner not in owners:
            continue
        name, parameter = owners[owner]
        kind, shape = kind_of(spec, muon), None
        if kind == "muon":
            cuts = next((getattr(config, key) for end, key in _CUTS.items() if spec.name.endswith(end)), 1)
            shape = (spec.shape[0] // cuts, spec.shape[1])
        if owner not in found or spec.role == "embedding":  # a tied head is an embedding
            wide = parameter.dtype in (torch.float32, torch.float64)
            master = parameter.detach() if wide else parameter.detach().float()
            found[owner] = Part(name, parameter, kind, shape, master)
    return list(found.values())


class Optimiser:
    """All parameters of a model under one schedule.

    A step is: `collect()` after each backward pass, then `step(number, steps, scale)`.
    """

    def __init__(self, model: Model, config: OptimConfig):
        self.config = config
        self.parts = parts_of(model, config.muon)
        self.average = [p.master.clone() for p in self.parts] if config.ema else None
        self.across: Across | None = None

    def collect(self) -> None:
        """Add the parameters' gradients to the float32 ones, and clear them."""
        for part in self.parts:
            part.take_grad()

    @torch.no_grad()
    def step(self, number: int, steps: int, scale: float = 1.0) -> float:
        """One step from the collected gradients times `scale`. number: 0 .. steps - 1. Returns the gradient's norm
        before clipping; with a norm that is not finite, nothing is changed."""
        c = self.config
        if self.across is not None:
            self.across.sum_gradients(self.parts)
        active = [p for p in self.parts if p.grad is not None]
        norm = scale * (_norm(active) if self.across is None else self.across.norm(active))
        if math.isfinite(norm):
            factor = scale * min(1.0, c.clip / norm) if c.clip and norm else scale
            for part in active:
                assert part.grad is not None
                part.grad.mul_(factor)
            rate = schedule(c, number, steps)
            ramp = min(1.0, number / max(1, c.momentum_steps))
            self._muon(active, rate, c.momentum_start + (c.momentum - c.momentum_start) * ramp)
            self._adam(active, rate, number + 1)
            for part in active:
                part.publish()
            if self.average is not None:
                torch._foreach_lerp_(self.average, [p.master for p in self.parts], 1 - c.ema)
        for part in active:
            part.grad = None
        return norm

    def _muon(self, active: list[Part], rate: float, momentum: float) -> None:
        c = self.config
        stacks: dict[tuple[int, int], list[tuple[Part, Tensor]]] = {}
        for part in active:
            if part.kind == "muon":
                assert part.shape is not None and part.grad is not None
                buffer = part.state.setdefault("momentum", torch.zeros_like(part.grad))
                buffer.mul_(momentum).add_(part.grad)
                ahead = part.grad.add(buffer, alpha=momentum)  # Nesterov
                stacks.setdefault(part.shape, []).append((part, ahead))
        for shape, members in stacks.items():
            turn = _orthogonalised if self.across is None else self.across.orthogonalise
            size = _RMS * math.sqrt(max(shape))
            for (part, _), update in zip(members, turn(shape, members), strict=True):
                part.master.mul_(1 - rate * c.matrix_lr * c.weight_decay)
                part.master.add_(update, alpha=-rate * c.matrix_lr * size)

    def _adam(self, active: list[Part], rate: float, count: int) -> None:
        c = self.config
        rates = {"adam": c.lr, "head": c.head_lr, "indexer": c.indexer_lr, "table": c.lr * c.table_factor}
        for kind, lr in rates.items():
            parts = [p for p in active if p.kind == kind]
            if not parts:
                continue
            grads = [p.grad for p in parts if p.grad is not None]
            first = [p.state.setdefault("first", torch.zeros_like(p.master)) for p in parts]
            second = [p.state.setdefault("second", torch.zeros_like(p.master)) for p in parts]
            torch._foreach_lerp_(first, grads, 1 - c.beta1)
            torch._foreach_mul_(second, c.beta2)
            torch._foreach_addcmul_(second, grads, grads, 1 - c.beta2)
            root = torch._foreach_sqrt(second)
            torch._foreach_div_(root, math.sqrt(1 - c.beta2**count))
            torch._foreach_add_(root, c.eps)
            size = -rate * lr / (1 - c.beta1**count)
            torch._foreach_addcdiv_([p.master for p in parts], first, root, size)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a resumed run needs beside the masters: "NAME/momentum", "NAME/first", "NAME/average", ..."""
        out = {f"{p.name}/{key}": value for p in self.parts for key, value in p.state.items()}
        if self.average is not None:
            out |= {f"{p.name}/average": value for p, value in zip(self.parts, self.average, strict=True)}
        return out

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` gave. ConfigError for state of another model or other settings."""
        by_name = {p.name: p for p in self.parts}
        for key, value in state.items():
            name, kind = key.rsplit("/", 1)
            if name not in by_name or value.shape != by_name[name].master.shape:
                raise ConfigError(f"the optimiser state has {key} {tuple(value.shape)}, which this model does not have")
            if kind == "average":
                if self.average is not None:
                    self.average[self.parts.index(by_name[name])].copy_(value)
            else:
                by_name[name].state[kind] = value.to(by_name[name].master).clone()

    def masters(self) -> dict[int, Tensor]:
        """id of a parameter -> its float32 (float64) value."""
        return {id(p.parameter): p.master for p in self.parts}

    def averages(self) -> dict[int, Tensor] | None:
        """The same of the averaged weights, None without them."""
        if self.average is None:
            return None
        return {id(p.parameter): value for p, value in zip(self.parts, self.average, strict=True)}
