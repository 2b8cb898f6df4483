"""From a checkpoint folder to a model that runs: check headers, build, decode and prepare the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from finback.base.formats import Format
from finback.base.runtime import ConfigError, nearest
from finback.io.checkpoint import Checkpoint, load_weight
from finback.io.completeness import Report, verify
from finback.io.text import Tokenizer, load_token_map
from finback.models.base import Model, TensorSpec, compute_dtype, family
from finback.nn.linear import prepare

ROUNDINGS = ("released", "off")
Progress = Callable[[int, int], None]


def default_dtype(config: dict[str, Any]) -> torch.dtype:
    """bfloat16 for quantised checkpoints, otherwise the type that config.json names (bfloat16 if it names none)."""
    if config.get("quantization_config"):
        return torch.bfloat16
    text = config.get("text_config") or {}
    named = [c.get(key) for c in (config, text) for key in ("dtype", "torch_dtype")]
    return compute_dtype(next((n for n in named if n), "bfloat16"))


def check_rounding(rounding: str | None) -> bool | None:
    """None | "released" | "off" -> None | True | False, else ConfigError."""
    if rounding is not None and rounding not in ROUNDINGS:
        raise ConfigError(f"rounding {rounding!r}{nearest(rounding, ROUNDINGS)}; use 'released', 'off' or None")
    return None if rounding is None else rounding == "released"


def skeleton(config: Mapping[str, Any], *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Model:
    """The model of a parsed config.json on the "meta" device: its weight table and nothing in memory. Raises
    ConfigError."""
    with torch.device("meta"):
        return family(config).from_config(config, dtype=dtype, **options)


def completeness(ckpt: Checkpoint, model: Model) -> Report:
    """What the checkpoint's headers say against the model's weight table."""
    return verify(ckpt, [spec for spec, _ in model.weights()], model.ignored)


def load_model(
    where: str | Path | Checkpoint,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    rounding: str | None = None,
    trainable: bool = False,
    progress: Progress | None = None,
) -> Model:
    """Load a checkpoint of any supported family. See `finback.models.base.Model` for what it can do.

    where: a folder in the released layout (or an opened `Checkpoint`). dtype: "float64", "float32" or "bfloat16"; None
    follows the checkpoint. rounding: "released" | "off"; None = "released" for a quantised checkpoint. trainable: keep
    weights as parameters with gradients instead of packing them for inference, tables included. progress: called with
    (bytes done, bytes in all).

    Every missing, unused, misshapen or truncated tensor is reported (CheckpointError) before weights are allocated.
    Peak memory is the resident weights plus one decoded piece.
    """
    ckpt = where if isinstance(where, Checkpoint) else Checkpoint.open(where)
    dtype = default_dtype(ckpt.config) if dtype is None else compute_dtype(dtype)
    model = skeleton(ckpt.config, dtype=dtype, rounding=check_rounding(rounding), trainable=trainable)
    report = completeness(ckpt, model)
    report.raise_if_bad()
    model.to_empty(device=device)
    _fill(model, ckpt, report.formats, progress)
    if not trainable:
        model.requires_grad_(False)
    if (sizes := model.token_map_sizes()) is not None:
        compressed, vocab = sizes
        has_tokenizer = (ckpt.path / "tokenizer.json").is_file() and not (ckpt.path / "token_map.json").is_file()
        tokenizer = Tokenizer.load(ckpt.path) if has_tokenizer else None
        token_map = load_token_map(ckpt.path, tokenizer, compressed, vocab_size=vocab)
        model.set_token_map(torch.from_numpy(token_map))
    if not trainable:
        prepare(model)
    return model


@torch.no_grad()
def _fill(model: Model, ckpt: Checkpoint, formats: dict[str, Format], progress: Progress | None) -> None:
    entries = list(model.weights())
    total = sum(ckpt.tensors[spec.name].nbytes for spec, _ in entries if spec.name in ckpt.tensors)
    done = 0
    for spec, out in entries:
        if spec.name not in ckpt.tensors:
            out.zero_()  # optional and absent
            continue
        if out.is_meta:
            _attach_table(model, ckpt, spec, formats[spec.name])
        else:
            load_weight(ckpt, spec, formats[spec.name], out)
        done += ckpt.tensors[spec.name].nbytes
        if progress is not None:
            progress(done, total)


def _attach_table(model: Model, ckpt: Checkpoint, spec: TensorSpec, fmt: Format) -> None:
    """Engram tables stay in the file: they are far larger than what a forward reads of them."""
    table = model.file_table(spec.name)
    if fmt.block is not None:
        table.attach(ckpt.mapped(spec.name), ckpt.mapped(spec.scale))
        return
    load_weight(ckpt, spec, fmt, table.allocate(next(model.parameters()).device))
