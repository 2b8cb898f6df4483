"""Checkpoints in the quantised released layouts, made from plain weights.

The first format that a family's weight table accepts for a tensor is the one it was released in, so the table of the
quantised config says how every tensor is stored: for DeepSeek-V4.1 dense matrices as FP8 in 32x32 blocks, routed
experts as FP4 in rows of 32, Engram tables as FP8 in rows of 32, hyper-connections, sinks and router biases in float32,
all else in bfloat16. Scales are computed from the float32 values (`quantize_weight`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finback.base.formats import BF16, Format
from finback.base.runtime import CheckpointError, ConfigError, nearest
from finback.io.checkpoint import Checkpoint, load_weight
from finback.io.checkpoint_write import save_checkpoint
from finback.io.load import Progress, completeness, skeleton
from finback.io.safetensors_file import CONFIG_FILE, INDEX_FILE
from finback.kernels.torch.quant import quantize_weight
from finback.models.base import TensorSpec

_KEPT_SUFFIXES = (".json", ".jinja", ".txt", ".md")  # of the files beside the weights
_HEADER_ENTRY = 160  # bytes of a safetensors header for one tensor, without its name, at most


@dataclass(frozen=True)
class _Family:
    """quantization: the `quantization_config` of a quantised checkpoint; experts: types of routed experts, the released
    one first."""

    quantization: Mapping[str, Any]
    experts: tuple[str, ...]


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
_FAMILIES = {
    "deepseek_v41": _Family({**_FP8, "weight_block_size": [32, 32]}, ("fp4", "fp8")),
    "deepseek_v32": _Family({**_FP8, "weight_block_size": [128, 128], "fmt": "e4m3"}, ("fp8",)),
}


@dataclass(frozen=True)
class QuantLayout:
    """Which quantised layout. expert: "fp4" or "fp8" of routed experts, None = as the family was released. table: "fp8"
    or "bf16" of Engram tables. Everything else is as released."""

    expert: str | None = None
    table: str = "fp8"

    def __post_init__(self) -> None:
        for key, value, known in (("expert", self.expert, ("fp4", "fp8")), ("table", self.table, ("fp8", "bf16"))):
            if value is not None and value not in known:
                raise ConfigError(f"{key} {value!r}{nearest(value, known)}; use {' or '.join(known)}")

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of the quantised checkpoint for that of plain weights. Raises ConfigError where the family has no
        such layout."""
        kind = config.get("model_type")
        family = _FAMILIES.get(str(kind))
        if family is None:
            raise ConfigError(f"model_type {kind!r} has no quantised layout; {', '.join(_FAMILIES)} have one")
        expert = self.expert or family.experts[0]
        if expert not in family.experts:
            raise ConfigError(f"the layout of {kind} has no {expert} experts; use {' or '.join(family.experts)}")
        quantization = dict(family.quantization)
        if expert == "fp4":
            quantization["expert_dtype"] = expert
        kept = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
        return json.loads(json.dumps({**kept, "dtype": "bfloat16", "quantization_config": quantization}))

    def format_of(self, spec: TensorSpec) -> Format:
        """How a tensor of the quantised config's weight table is stored."""
        if spec.role == "engram_table" and self.table == "bf16":
            return BF16
        return spec.formats[0]


def save_quantised(
    folder: str | Path,
    config: Mapping[str, Any],
    read: Callable[[str], Tensor | None],
    layout: QuantLayout,
    *,
    shard_bytes: int = 4 << 30,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint in a quantised layout, one tensor in memory at a time, all or nothing (`save_checkpoint`).

    config: of the plain weights. read(name): the plain tensor of that name, any float dtype, or None for an optional
    one that is absent. shard_bytes: largest file, header included, unless a single tensor is larger. Raises ConfigError
    for a family or sizes without such a layout, CheckpointError for NaN and infinity, by name.
    """
    quantised = layout.config(config)
    specs = [spec for spec, _ in skeleton(quantised, trainable=True).weights()]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for spec in specs:
            value = read(spec.name)
            if value is None:
                continue
            try:
                data, scale = quantize_weight(value.to(torch.float32), layout.format_of(spec))
            except CheckpointError as error:
                raise CheckpointError(f"{spec.name}: {error}") from error
            yield spec.name, data
            if scale is not None:
                yield spec.scale, scale

    header = sum(2 * (len(spec.name) + _HEADER_ENTRY) for spec in specs)  # of one file; more files share it
    payload = max(shard_bytes - header, shard_bytes // 2)
    save_checkpoint(folder, quantised, tensors(), shard_bytes=payload, extra_files=extra_files)


def quantise_checkpoint(
    source: str | Path,
    target: str | Path,
    layout: QuantLayout | None = None,
    *,
    shard_bytes: int = 4 << 30,
    progress: Progress | None = None,
) -> None:
    """Write the checkpoint `source` (folder or hub id, of any accepted formats) in a quantised layout into the folder
    `target`, with the tokenizer and other text files beside it.

    layout None: as the family was released. shard_bytes: as in `save_quantised`. progress: called with (bytes read,
    bytes in all). Raises CheckpointError and ConfigError.
    """
    ckpt = Checkpoint.open(source)
    if Path(target).expanduser().resolve() == ckpt.path.resolve():
        raise CheckpointError(f"{target} is the source itself, which would be replaced; give another folder")
    model = skeleton(ckpt.config, trainable=True)
    report = completeness(ckpt, model)
    report.raise_if_bad()
    specs = {spec.name: spec for spec, _ in model.weights() if spec.name in ckpt.tensors}
    total, done = sum(ckpt.tensors[name].nbytes for name in specs), 0

    def read(name: str) -> Tensor | None:
        nonlocal done
        if name not in specs:
            return None
        out = torch.empty(specs[name].shape, dtype=torch.float32)
        load_weight(ckpt, specs[name], report.formats[name], out)
        done += ckpt.tensors[name].nbytes
        if progress is not None:
            progress(done, total)
        return out

    plain = {key: value for key, value in ckpt.config.items() if key != "quantization_config"}
    save_quantised(
        target, plain, read, layout or QuantLayout(), shard_bytes=shard_bytes, extra_files=_files_beside(ckpt.path)
    )


def _files_beside(folder: Path) -> dict[str, bytes]:
    """The tokenizer, chat template, model card and the like of a checkpoint folder."""
    return {
        file.name: file.read_bytes()
        for file in sorted(folder.iterdir())
        if file.is_file() and file.suffix in _KEPT_SUFFIXES and file.name not in (CONFIG_FILE, INDEX_FILE)
    }
