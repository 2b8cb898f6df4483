"""Quantisation-aware training: from some step on, the forward runs on exactly what the quantised checkpoint will hold.

The parameters become the rounded masters, written anew after every optimiser step; the masters stay float32. So a
gradient is that at the rounded point, and the step is taken by the masters (straight-through: identity, never masked;
block scales follow the largest value, so nothing is clamped). A forward costs nothing more, however often it uses a
weight, in recomputed blocks too.

Activations, window and compressed rows, index queries and keys are rounded as in serving, with identity gradients
(`kernels.round_e4m3`, `round_e2m1`), and so is what multiplies rows in attention, where asked for.

Formats of weights and the policy of activations are read off a twin of the model, built from the quantised config.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finback.base.formats import F32, Format
from finback.base.runtime import ConfigError
from finback.io.load import skeleton
from finback.io.quantise import QuantLayout, save_quantised
from finback.kernels.torch.quant import round_weight
from finback.models.base import Model
from finback.train.optim import Optimiser
from finback.train.state import wide_views

# What modules keep their rounding policy in.
_POLICY = ("rounding", "rounds", "rounds_weights")


@dataclass(frozen=True)
class QuantConfig:
    """The recipe's [quant] section: train for a quantised checkpoint, and write it at the end of the run.

    start: share of the steps after which weights and activations are rounded; 1 = only at the end, when the checkpoint
    is written. expert: "fp4" or "fp8" of routed experts (as the family was released where left out). table: "fp8" or
    "bf16" of Engram tables. activations: round what serving rounds beside weights. attention_weights: the weights of
    attention too, which takes the form of attention that gathers rows: slower than the masked one, and more memory.
    shard_mib: largest file of the quantised checkpoint, in MiB.
    """

    start: float = 0.6
    expert: str | None = None
    table: str = "fp8"
    activations: bool = True
    attention_weights: bool = True
    shard_mib: int = 4096

    def __post_init__(self) -> None:
        if not 0 <= self.start <= 1:
            raise ConfigError(f"quant.start {self.start} is a share of the run's steps, from 0 to 1")
        if self.shard_mib < 1:
            raise ConfigError(f"quant.shard_mib {self.shard_mib} must be at least 1")
        if self.attention_weights and not self.activations:
            raise ConfigError("quant.attention_weights needs quant.activations; switch both off, or both on")
        _ = self.layout

    @property
    def layout(self) -> QuantLayout:
        return QuantLayout(self.expert, self.table)

    def served(self, config: Mapping[str, Any]) -> Model:
        """The quantised model, on "meta": its weight table and its rounding policy. Raises ConfigError for a family or
        sizes without a quantised layout."""
        return skeleton(self.layout.config(config), rounding=True, trainable=True)


@dataclass
class _Group:
    """Tensors of the checkpoint of one shape and format: what training steps, and what the forward reads."""

    fmt: Format
    masters: list[Tensor]
    parameters: list[Tensor]

    def write(self, rounded: bool) -> None:
        values = self.masters
        if rounded:
            values = list(round_weight(torch.stack(self.masters), self.fmt).unbind())
        torch._foreach_copy_(self.parameters, values)


class Quantiser:
    """Keeps the parameters of a model at the rounded values of an optimiser's masters, from `start()` on.

    config: config.json of the run. A parameter that is not trained has no master: it is rounded once, and stays so.
    """

    def __init__(self, model: Model, config: Mapping[str, Any], quant: QuantConfig, optimiser: Optimiser):
        self.model, self.config, self.quant, self.optimiser = model, config, quant, optimiser
        self.served = quant.served(config)
        self.on = False
        self._groups: list[_Group] = []

    def start_at(self, step: int, steps: int) -> None:
        """`start` if its share of the run is over and it has not happened yet."""
        if not self.on and step >= self.quant.start * steps:
            self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Round from now on. The masters must have their values: a resumed run loads them first."""
        for part in self.optimiser.parts:
            if part.master.data_ptr() == part.parameter.data_ptr():  # wide enough to be its own master, until now
                part.master = part.parameter.detach().clone()
        self._groups = self._grouped()
        self._switch(True)

    def _grouped(self) -> list[_Group]:
        """The tensors of the weight table that rounding changes, by shape and format."""
        groups: dict[Any, _Group] = {}
        every = zip(
            self.served.weights(),
            self.model.weights(),
            wide_views(self.model, self.optimiser.masters()),
            strict=True,
        )
        for (spec, _), (_, parameter), (_, master) in every:
            fmt = self.quant.layout.format_of(spec)
            if spec.optional or (fmt is F32 and parameter.dtype == torch.float32):
                continue
            if master.data_ptr() == parameter.data_ptr():  # not trained
                parameter.copy_(round_weight(parameter, fmt))
                continue
            group = groups.setdefault((spec.shape, fmt, parameter.dtype), _Group(fmt, [], []))
            group.masters.append(master)
            group.parameters.append(parameter.detach())
        return list(groups.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the rounded masters into the parameters, after an optimiser step; nothing before `start`."""
        if self.on:
            for group in self._groups:
                group.write(rounded=True)

    @contextmanager
    def lifted(self) -> Generator[None]:
        """Run the block on the masters themselves and round nothing, to see what rounding costs."""
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    def save(self, folder: Path, values: Mapping[int, Tensor], extra: Mapping[str, bytes]) -> None:
        """Write the quantised checkpoint of `values` (`Optimiser.masters()` or `.averages()`), with `extra` files."""
        tensors = {spec.name: value for spec, value in wide_views(self.model, values)}
        save_quantised(
            folder,
            self.config,
            lambda name: tensors[name].detach(),
            self.quant.layout,
            shard_bytes=self.quant.shard_mib << 20,
            extra_files=extra,
        )

    @torch.no_grad()
    def _switch(self, on: bool) -> None:
        self.on = on
        for group in self._groups:
            group.write(rounded=on)
        for module, served in zip(self.model.modules(), self.served.modules(), strict=True):
            for name in _POLICY:
                if hasattr(served, name):
                    wanted = self.quant.attention_weights if name == "rounds_weights" else self.quant.activations
                    off = None if name == "rounds" else False
                    setattr(module, name, getattr(served, name) if on and wanted else off)
