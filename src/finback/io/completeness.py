"""What a checkpoint's headers say against what a model expects, before anything large is allocated.

A stored format is recognised by the dtype and shape of the data together with the dtype and shape of its scale, and
only among the formats that the model's table allows for that weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os.path import commonprefix

import torch

from finback.base.formats import Format
from finback.base.runtime import ConfigError
from finback.io.checkpoint import Checkpoint, raise_listing
from finback.io.safetensors_file import TensorInfo
from finback.models.base import TensorSpec

# Words of the file for a Format's dtypes. Writers that do not know e8m0 store its bytes as U8.
_WORDS: dict[torch.dtype, tuple[str, ...]] = {
    torch.float64: ("F64",),
    torch.float32: ("F32",),
    torch.bfloat16: ("BF16",),
    torch.float16: ("F16",),
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.float8_e8m0fnu: ("F8_E8M0", "U8"),
    torch.int8: ("I8", "F4"),
}

# How many missing names get a hint: each is compared with all unused ones, which are thousands for another model.
_HINTED = 10


@dataclass(frozen=True)
class Problem:
    """One finding. `kind` is "missing", "unused", "shape", "dtype", "missing scale" or "scale"."""

    kind: str
    name: str
    text: str


@dataclass(frozen=True)
class Report:
    """The findings of `verify`, and the stored format of every weight that is as expected."""

    problems: list[Problem]
    formats: dict[str, Format]

    @property
    def ok(self) -> bool:
        return not self.problems

    def lines(self) -> list[str]:
        """One line for each problem, each beginning with the tensor's name."""
        return [f"{problem.name}: {problem.text}" for problem in self.problems]

    def raise_if_bad(self) -> None:
        """Raise CheckpointError that counts the problems by kind and lists them by tensor name (the first 200)."""
        counts = Counter(problem.kind for problem in self.problems)
        summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        raise_listing(f"the checkpoint does not fit the model ({summary})", self.lines(), limit=200)


def verify(ckpt: Checkpoint, specs: Iterable[TensorSpec], ignore: Callable[[str], bool] = lambda name: False) -> Report:
    """Compare the headers of `ckpt` with `specs`; reads nothing else.

    Tensors that no spec names and `ignore` does not accept count as unused. Each problem names a tensor; missing ones
    come with the unused tensor that they may have been renamed to.
    """
    problems: list[Problem] = []
    formats: dict[str, Format] = {}
    known: set[str] = set()
    missing: list[TensorSpec] = []
    for spec in specs:
        known.add(spec.name)
        info = ckpt.tensors.get(spec.name)
        if info is None:
            missing += [] if spec.optional else [spec]
            continue
        scale = ckpt.tensors.get(spec.scale)
        fmt = next((fmt for fmt in spec.formats if fits(fmt, spec.shape, info, scale)), None)
        if fmt is None:
            problems.append(_mismatch(spec, info, scale))
        else:
            formats[spec.name] = fmt
        if scale is not None and (fmt is None or fmt.block is not None):
            known.add(spec.scale)
    unused = [name for name in ckpt.tensors if name not in known and not ignore(name)]
    problems = _unpaired(missing, unused, ckpt.tensors) + problems
    return Report(problems, formats)


def fits(fmt: Format, shape: tuple[int, ...], info: TensorInfo, scale: TensorInfo | None) -> bool:
    """Whether `info` and `scale` are how `fmt` stores a weight of logical `shape`."""
    if (
        info.dtype not in _WORDS[fmt.storage]
        or not _can_hold(fmt, shape)
        or info.byte_shape != fmt.storage_shape(shape)
    ):
        return False
    return fmt.scale_dtype is None or (
        scale is not None and scale.dtype in _WORDS[fmt.scale_dtype] and scale.shape == fmt.scale_shape(shape)
    )


def _can_hold(fmt: Format, shape: tuple[int, ...]) -> bool:
    try:
        fmt.storage_shape(shape), fmt.scale_shape(shape)
    except ConfigError:
        return False
    return True


def _mismatch(spec: TensorSpec, info: TensorInfo, scale: TensorInfo | None) -> Problem:
    """Why `info` is stored in none of the spec's formats: the first of dtype, shape, absence of the scale, scale."""
    possible = [fmt for fmt in spec.formats if _can_hold(fmt, spec.shape)]
    by_dtype = [fmt for fmt in possible if info.dtype in _WORDS[fmt.storage]]
    if not by_dtype:
        allowed = " or ".join(f"{_WORDS[fmt.storage][0]} ({fmt.name})" for fmt in possible)
        return Problem("dtype", spec.name, f"stored as {info.dtype}, expected {allowed}")
    by_shape = [fmt for fmt in by_dtype if info.byte_shape == fmt.storage_shape(spec.shape)]
    if not by_shape:
        wanted = by_dtype[0].storage_shape(spec.shape)
        packed = f" ({list(spec.shape)} packed)" if wanted != spec.shape else ""
        return Problem("shape", spec.name, f"stored {list(info.byte_shape)}, expected {list(wanted)}{packed}")
    allowed = " or ".join(
        f"{_WORDS[fmt.scale_dtype][0]} {list(fmt.scale_shape(spec.shape) or ())} ({fmt.name})"
        for fmt in by_shape
        if fmt.scale_dtype is not None
    )
    if scale is None:
        return Problem(
            "missing scale", spec.name, f"stored as {info.dtype} but its scale {spec.scale} is missing: {allowed}"
        )
    return Problem("scale", spec.scale, f"stored {scale.dtype} {list(scale.shape)}, expected {allowed}")


def _unpaired(missing: list[TensorSpec], unused: list[str], tensors: Mapping[str, TensorInfo]) -> list[Problem]:
    """Missing and unused names, with the likely renaming of the first missing ones."""
    problems = []
    for i, spec in enumerate(missing):
        hint = _renamed(spec, unused, tensors) if i < _HINTED else ""
        problems.append(Problem("missing", spec.name, f"missing ({spec.role}, {list(spec.shape)}){hint}"))
    for name in unused:
        info = tensors[name]
        problems.append(
            Problem("unused", name, f"in {info.file.name} but not of this model ({info.dtype} {list(info.shape)})")
        )
    return problems


def _renamed(spec: TensorSpec, unused: list[str], tensors: Mapping[str, TensorInfo]) -> str:
    """A hint at the unused tensor whose name has most in common, first among those whose shape fits."""
    shapes = {fmt.storage_shape(spec.shape) for fmt in spec.formats if _can_hold(fmt, spec.shape)}
    alike = [name for name in unused if tensors[name].byte_shape in shapes]
    for pool in (alike, unused):
        best = max(pool, key=lambda name: _likeness(name, spec.name), default="")
        parts, ends = _likeness(best, spec.name)
        if parts > 0.5 or ends > 0.6 * len(spec.name):
            return f"; the file has an unused {best}, was it renamed?"
    return ""


def _likeness(a: str, b: str) -> tuple[float, int]:
    """How much two names agree: the share of b's dotted parts that a has too, then characters equal at both ends."""
    parts = set(b.split("."))
    ends = commonprefix((a, b)), commonprefix((a[::-1], b[::-1]))  # noqa: RUF071 names, not paths
    return len(parts.intersection(a.split("."))) / len(parts), sum(map(len, ends))
