"""What every model family gives the rest of finback: the weight table's entry type, the two protocols, the registry."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from finback.base.formats import Format
from finback.base.runtime import ConfigError, nearest
from finback.nn.rows import ForwardBatch, RowGroup, RowView


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint.

    name: its name in the file. shape: logical (unpacked) shape. formats: stored formats that are accepted. role: what
    it is for ("attention", "expert", "engram_table", ...), used for byte counts and optimiser groups. optional: may
    be absent from the file and is zero then. scale_name: name of the scale tensor where the format has one (None: the
    name with ".weight" replaced by ".scale").
    """

    name: str
    shape: tuple[int, ...]
    formats: tuple[Format, ...]
    role: str
    optional: bool = False
    scale_name: str | None = None

    @property
    def scale(self) -> str:
        return self.scale_name or self.name.removesuffix(".weight") + ".scale"


class Model(nn.Module):
    """A language model on packed tokens. Families derive from it and share leaves, not skeletons.

    dtype: what it computes in. lookback: token ids before a chunk that `Chunk.context` must hold (n-gram memory).
    window_tail: run layers that only a prompt's tail needs on its last window alone, which is approximate; models
    without such layers ignore it.
    """

    vocab_size: int
    max_positions: int
    dtype: torch.dtype
    lookback: int = 0
    window_tail: bool = False

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, dtype: torch.dtype, rounding: bool | None = None, trainable: bool = False
    ) -> Model:
        """An uninitialised model for a parsed config.json, on torch's current default device.

        rounding: round activations and stored rows as the released kernels do; None: where the checkpoint is quantised.
        trainable: keep everything a parameter, also tables that inference reads from the file. Raises ConfigError.
        """
        raise AssertionError("every family builds itself")

    def row_groups(self) -> Sequence[RowGroup]:
        """Kinds of rows the model remembers."""
        raise AssertionError("every family names its rows")

    def forward(self, batch: ForwardBatch, view: RowView) -> Tensor:
        """Hidden states [T, D], ready for `logits`."""
        raise AssertionError("every family has its forward")

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, D] -> [n, V] float32 (float64 for a float64 model)."""
        raise AssertionError("every family has its head")

    def weights(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Every checkpoint tensor with the view of a parameter that it fills. A "meta" destination of a model that is
        itself not on "meta" is a table that stays in the file (`file_table`)."""
        raise AssertionError("every family has its weight table")

    def ignored(self, name: str) -> bool:
        """Whether the checkpoint tensor `name` is known and left out on purpose."""
        return False

    def choice_names(self) -> list[str]:
        """Names of the discrete choices of a forward, as a `Tape` records and replays them."""
        return []

    def image_facts(self) -> dict[str, int] | None:
        """patch, downsample and image_token_id of a model that takes images, else None."""
        return None

    def set_token_map(self, token_map: Sequence[int] | Tensor) -> None:
        """Compressed id of each token id, for a model whose `token_map_sizes` asks for them."""
        raise AssertionError("this family has no token map")

    def file_table(self, name: str) -> Any:
        """The module whose stored rows the checkpoint tensor `name` holds, with `attach` and `allocate`."""
        raise AssertionError("this family has no table that stays in the file")

    def token_map_sizes(self) -> tuple[int, int] | None:
        """(compressed ids, vocabulary) of the token map that `set_token_map` needs, None for a model without one."""
        return None


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for some sequences. tokens: [n, k] int64. probabilities: [n, k, V] of each draft, or None for a
    point mass on the drafted token. confidence: [n, k] in (0, 1), P(accepted | all before accepted), or None."""

    tokens: Tensor
    probabilities: Tensor | None = None
    confidence: Tensor | None = None


class Drafter(Protocol):
    """Proposes tokens that the model then verifies in one forward.

    Let p be the last position that the model has run for a sequence, and the anchor its known next token, at p + 1.
    Slot i of a proposal is for position p + 2 + i. All memory is rows of the store, so a drafter serves any sequences
    in any order, and rejecting drafts is lowering a length.

    block_size: tokens a proposal holds. lookback: token ids before the anchor that `Chunk.context` must hold.
    """

    block_size: int
    lookback: int

    def block_chunk(self, anchor: int) -> list[int]:
        """Token ids of the chunk that `propose` wants for one sequence: the anchor first, then any filler."""
        ...

    def observe(self, batch: ForwardBatch, view: RowView, targets: Tensor) -> None:
        """Remember what drafting needs of a forward of the model, verified drafts included. batch, view: that
        forward's. targets: [T, *], what the model hands its drafter (its hidden states, or a combination of layers)."""
        ...

    def propose(
        self, batch: ForwardBatch, view: RowView, choose: Callable[[Tensor, int], Tensor] | None = None
    ) -> Proposal:
        """Draft for every sequence of `batch`: one `block_chunk(anchor)` each, starting at p + 1, not to be stored.
        choose(logits [n, V], i) -> [n] int64, the token of slot i; None: the likeliest."""
        ...


_FAMILIES = {
    "deepseek_v32": ("finback.models.deepseek_v32.model", "DeepseekV32"),
    "deepseek_v41": ("finback.models.deepseek_v41.model", "DeepseekV41"),
    "spikewhale": ("finback.models.spikewhale.model", "SpikeWhale"),
}


def family(config: Mapping[str, Any]) -> type:
    """The model class for a checkpoint's config.json. Raises ConfigError for an unknown `model_type`."""
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        hint = nearest(str(kind), _FAMILIES)
        raise ConfigError(f"config.json has model_type {kind!r}{hint}; this build runs {known}")
    module, name = _FAMILIES[kind]
    return getattr(importlib.import_module(module), name)


_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(name: str | torch.dtype) -> torch.dtype:
    """ "float64", "float32" or "bfloat16" (or the torch dtype itself) -> torch dtype, else ConfigError."""
    if isinstance(name, torch.dtype):
        name = str(name).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def read_fields(cls: type, given: Mapping[str, Any], where: str, ignored: Sequence[str] = ()) -> Any:
    """An instance of the config dataclass `cls` from JSON keys: unknown and missing keys and wrong types raise
    ConfigError naming the key and its nearest known one. Lists become tuples. Keys in `ignored` and Hugging Face's
    bookkeeping (keys that start with an underscore, "transformers_version") are dropped."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in ignored or key.startswith("_") or key == "transformers_version":
            continue
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, fields)}; finback never ignores a setting")
        values[key] = _checked(value, hints[key], f"{where}: {key}")
    missing = [
        n for n, f in fields.items()
        if n not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise ConfigError(f"{where}: missing key{'s' * (len(missing) > 1)} {', '.join(missing)}")
    return cls(**values)


def _checked(value: Any, hint: Any, where: str) -> Any:
    """`value` if it fits the annotation (int, float, bool, str, tuple, X | None, a dataclass), else ConfigError."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, _UNION) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, Mapping):
            return read_fields(typing.cast(type, option), value, where)
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(_checked(v, typing.get_args(option)[0], where) for v in value)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if option in (int, str) and isinstance(value, option) and not isinstance(value, bool):
            return value
        if option is bool and isinstance(value, bool):
            return value
    names = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise ConfigError(f"{where}: {value!r} is not of type {names}")


_UNION = type(int | None)
