"""What is inside a checkpoint, by its headers alone: parameters, bytes by role, formats, largest tensors, problems."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finback.base.formats import FORMATS, Format
from finback.base.runtime import ConfigError
from finback.io.checkpoint import Checkpoint
from finback.io.completeness import fits, verify
from finback.io.load import completeness, skeleton
from finback.io.safetensors_file import TensorInfo
from finback.models.base import TensorSpec

# The first pattern found in a name gives its role, where the model's own table is not at hand. Names of all families.
_ROLES = tuple(
    (role, re.compile(pattern))
    for role, pattern in (
        ("draft", r"^(model\.)?mtp\b|mtp_heads"),
        ("vision", r"^(model\.)?(vision|visual|aligner|image_)"),
        ("engram_table", r"engram\.(embed|tables?)\b"),
        ("engram", r"engram"),
        ("hyper_connection", r"\bhc_|hyper_connection|\.hc\."),
        ("indexer", r"\.indexer\."),
        ("compressor", r"\.compressor\."),
        ("shared_expert", r"shared_expert"),
        ("expert", r"\.experts\."),
        ("router", r"\.(ffn|mlp)\.gate\b|router"),
        ("norm", r"norm[\w]*(\.weight|\.bias)?$"),
        ("embedding", r"^(model\.)?(embed|embed_tokens|wte)\b"),
        ("head", r"^(lm_)?head\b"),
        ("attention", r"attn|attention"),
        ("mlp", r"\.(ffn|mlp)\."),
    )
)


@dataclass
class Share:
    """Totals of some weights. `parameters` counts values, two per FP4 byte and no scales; `nbytes` data and scales."""

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0

    def add(self, parameters: int, nbytes: int) -> None:
        self.tensors += 1
        self.parameters += parameters
        self.nbytes += nbytes


@dataclass(frozen=True)
class Weight:
    """One weight with its scale. `shape` is logical, `format` a Format's name or, where none fits, the stored dtype."""

    name: str
    role: str
    format: str
    shape: tuple[int, ...]
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`. `tensors` counts entries of the files including scales; `checked` says whether a model's
    table was at hand, so that an empty `problems` means a complete checkpoint."""

    path: str
    model_type: str | None
    files: int
    tensors: int
    total: Share
    by_role: dict[str, Share]
    by_format: dict[str, Share]
    largest: list[Weight]
    checked: bool
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """All fields as a JSON object."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def inspect(where: str | Path, specs: Iterable[TensorSpec] | None = None, largest: int = 10) -> Inspection:
    """Look at the headers of a checkpoint folder or hub id; no weight is read.

    specs: the weight table to compare with; None takes the one of the family that config.json names. With a table,
    roles and formats are the table's and `problems` lists what does not fit. Without one (`checked` is False, and
    `problems` says why) roles come from name patterns and formats from the dtypes and shapes of data and scale ("a or
    b" where several fit). Raises CheckpointError as `Checkpoint.open`.
    """
    ckpt = Checkpoint.open(where)
    report, table, trouble = None, list(specs or ()), []
    try:
        if specs is not None:
            report = verify(ckpt, table)
        else:
            model = skeleton(ckpt.config)
            report, table = completeness(ckpt, model), [spec for spec, _ in model.weights()]
    except ConfigError as error:
        trouble = [f"not compared with a model: {error}"]
    recognised = {} if report is None else report.formats
    by_name = {spec.name: spec for spec in table}
    scales = _scales(ckpt.tensors, by_name)
    scale_names = set(scales.values())
    weights = [
        _weight(info, ckpt.tensors.get(scales.get(name, "")), by_name.get(name), recognised.get(name))
        for name, info in ckpt.tensors.items()
        if name not in scale_names
    ]
    total, by_role, by_format = Share(), {}, {}
    for weight in weights:
        for share in (total, by_role.setdefault(weight.role, Share()), by_format.setdefault(weight.format, Share())):
            share.add(weight.parameters, weight.nbytes)
    return Inspection(
        path=str(ckpt.path),
        model_type=ckpt.config.get("model_type"),
        files=len({info.file for info in ckpt.tensors.values()}),
        tensors=len(ckpt.tensors),
        total=total,
        by_role=_by_size(by_role),
        by_format=_by_size(by_format),
        largest=sorted(weights, key=lambda weight: -weight.nbytes)[:largest],
        checked=report is not None,
        problems=report.lines() if report is not None else trouble,
    )


def _scales(tensors: Mapping[str, TensorInfo], specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Weight name -> name of its scale, for the quantised weights whose scale is in the checkpoint."""
    found = {}
    for name, info in tensors.items():
        if info.dtype in ("F8_E4M3", "F4", "I8"):
            derived = (name.removesuffix(".weight") + ".scale", name + "_scale_inv")
            candidates = (specs[name].scale,) if name in specs else derived
            found.update((name, scale) for scale in candidates if scale in tensors and scale != name)
    return found


def _weight(info: TensorInfo, scale: TensorInfo | None, spec: TensorSpec | None, fmt: Format | None) -> Weight:
    shape = info.shape
    if info.dtype == "I8" and scale is not None:
        shape = (*shape[:-1], shape[-1] * 2)
    if fmt is not None:
        label = fmt.name
    else:
        label = " or ".join(f.name for f in FORMATS.values() if fits(f, shape, info, scale)) or info.dtype
    nbytes = info.nbytes + (scale.nbytes if scale else 0)
    return Weight(info.name, spec.role if spec else _role(info.name), label, shape, math.prod(shape), nbytes)


def _role(name: str) -> str:
    return next((role for role, pattern in _ROLES if pattern.search(name)), "other")


def _by_size(shares: dict[str, Share]) -> dict[str, Share]:
    return dict(sorted(shares.items(), key=lambda item: -item[1].nbytes))


def render(inspection: Inspection) -> RenderableType:
    """The inspection as tables for a terminal."""
    total = inspection.total
    head = Text.assemble(
        (inspection.path, "bold"),
        f"\n{inspection.model_type or 'no model_type'}: {inspection.tensors:,} tensors in {inspection.files} file(s), "
        f"{_count(total.parameters)} parameters, {_bytes(total.nbytes)}",
    )
    largest = Table("largest", "role", "format", "shape", "bytes", box=None, pad_edge=False)
    for weight in inspection.largest:
        size = _bytes(weight.nbytes)
        largest.add_row(
            Text(weight.name), weight.role, weight.format, " x ".join(map(str, weight.shape)) or "scalar", size
        )
    tables = [_shares("role", inspection.by_role, total), _shares("format", inspection.by_format, total), largest]
    parts: list[RenderableType] = [head]
    for table in tables:
        parts += ["", table]
    if inspection.problems:
        parts += ["", Text("\n".join(["problems:", *inspection.problems]), style="red")]
    elif inspection.checked:
        parts += ["", Text("complete: every tensor of the model is there, and nothing else", style="green")]
    return Group(*parts)


def _shares(title: str, shares: dict[str, Share], total: Share) -> Table:
    table = Table(title, box=None, pad_edge=False)
    for column in ("tensors", "parameters", "bytes", "share"):
        table.add_column(column, justify="right")
    for name, share in shares.items():
        percent = f"{share.nbytes / max(total.nbytes, 1):.1%}"
        table.add_row(Text(name), f"{share.tensors:,}", _count(share.parameters), _bytes(share.nbytes), percent)
    return table


def _count(n: int) -> str:
    """1234567 -> "1.23 M"."""
    return _scaled(n, 1000, ("", " K", " M", " B", " T"))


def _bytes(n: int) -> str:
    """1234567 -> "1.18 MiB"."""
    return _scaled(n, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(n: int, base: int, units: tuple[str, ...]) -> str:
    value, i = float(n), 0
    while value >= base and i < len(units) - 1:
        value, i = value / base, i + 1
    return f"{value:.2f}{units[i]}" if i else f"{n}{units[0]}"
