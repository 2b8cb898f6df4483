"""The safetensors file format: dtypes, the file names of a checkpoint folder, and a header reader that trusts nothing.

A file is an 8-byte little-endian header length, that many bytes of JSON, then the data. The JSON maps the name of each
tensor to `{"dtype", "shape", "data_offsets": [begin, end]}`, with offsets counted from the end of the header.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

# The format's own limit; a longer header means that the first 8 bytes are not a length at all.
MAX_HEADER_BYTES = 100_000_000

# name in the file -> (bits per element, torch dtype of the tensors handed out). Formats that torch cannot compute with
# (block scales, packed FP4, the int8 bytes that hold two FP4 values) are handed out as raw bytes.
DTYPES: dict[str, tuple[int, torch.dtype]] = {
    "F64": (64, torch.float64),
    "F32": (32, torch.float32),
    "F16": (16, torch.float16),
    "BF16": (16, torch.bfloat16),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E5M2": (8, torch.float8_e5m2),
    "F8_E8M0": (8, torch.uint8),
    "F4": (4, torch.uint8),
    "I64": (64, torch.int64),
    "I32": (32, torch.int32),
    "I16": (16, torch.int16),
    "I8": (8, torch.uint8),
    "U64": (64, torch.uint64),
    "U32": (32, torch.uint32),
    "U16": (16, torch.uint16),
    "U8": (8, torch.uint8),
    "BOOL": (8, torch.bool),
}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor. `shape` is the header's: for "F4" it counts values, for packed "I8" bytes."""

    name: str
    file: Path
    dtype: str  # the file's own word, e.g. "BF16", "F8_E4M3", "F8_E8M0", "I8"
    shape: tuple[int, ...]
    offset: int  # of the first byte, from the start of the file
    nbytes: int

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """The shape of the tensor handed out: `shape`, with the last axis halved for "F4"."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "F4" else self.shape


@dataclass(frozen=True)
class Header:
    """A parsed header and everything that is wrong with it. `tensors` holds the sound entries only."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    problems: list[str]


def read_header(file: Path) -> Header:
    """Read and check the header of `file` without touching its data. Every problem names file and tensor."""
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            prefix = handle.read(8)
            length = int.from_bytes(prefix, "little")
            problem = _length_problem(prefix, length, size)
            text = b"" if problem else handle.read(length)
    except OSError as error:
        problem, length, size, text = f"cannot be read ({error.strerror or error})", 0, 0, b""
    if problem:
        return Header({}, {}, [f"{file.name}: {problem}"])
    entries, problems = _parse_json(text)
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        metadata, problems = {}, [*problems, "__metadata__ is not a map of texts"]
    tensors: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        parsed = _parse_entry(file, name, entry, 8 + length)
        if isinstance(parsed, str):
            problems.append(f"{name}: {parsed}")
        else:
            tensors[name] = parsed
    problems += _placement_problems(tensors, size)
    return Header(tensors, metadata, [f"{file.name}: {text}" for text in problems])


def _length_problem(prefix: bytes, length: int, size: int) -> str | None:
    if len(prefix) < 8:
        return f"holds {size} bytes, too few for a safetensors file (an unfinished download?)"
    if length > MAX_HEADER_BYTES:
        return f"not a safetensors file: its first 8 bytes give a header of {length} bytes (at most {MAX_HEADER_BYTES})"
    if 8 + length > size:
        return f"truncated inside its header: {size} bytes, header alone needs {8 + length}; download it again"
    return None


def _parse_json(text: bytes) -> tuple[dict[str, Any], list[str]]:
    """The header's top-level map, and the problems met. A name given twice keeps its last entry and is reported."""
    problems: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            problems.extend(f"{name}: given twice in the header" for name, n in counts.items() if n > 1)
        return entries

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        return {}, [f"not a safetensors file: its header is not JSON ({error})"]
    if not isinstance(entries, dict):
        return {}, [f"not a safetensors file: its header is a {type(entries).__name__}, not a map"]
    return entries, problems


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_entry(file: Path, name: str, entry: object, data_start: int) -> TensorInfo | str:
    """The checked entry, or what is wrong with it."""
    if not isinstance(entry, dict):
        return "header entry is not a map"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype not in DTYPES:
        return f"unknown dtype {dtype!r} (known: {', '.join(DTYPES)})"
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        return f"shape {shape!r} is not a list of sizes"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        return f"data_offsets {offsets!r} are not two byte positions"
    begin, end = offsets
    bits = DTYPES[dtype][0] * math.prod(shape)
    if bits != 8 * (end - begin):
        return f"{dtype} {shape} needs {bits / 8:g} bytes, data_offsets {offsets} hold {end - begin}"
    if dtype == "F4" and (not shape or shape[-1] % 2):
        return f"F4 {shape} cannot be cut into bytes: its last axis must be even"
    return TensorInfo(name, file, dtype, tuple(shape), data_start + begin, end - begin)


def _placement_problems(tensors: dict[str, TensorInfo], size: int) -> list[str]:
    """Tensors that reach past the end of the file, and pairs that share bytes."""
    ordered = sorted((info for info in tensors.values() if info.nbytes), key=lambda info: info.offset)
    problems = []
    cut = [info for info in ordered if info.offset + info.nbytes > size]
    if cut:
        need = max(info.offset + info.nbytes for info in cut)
        names = ", ".join(info.name for info in cut[:5]) + (f" and {len(cut) - 5} more" if len(cut) > 5 else "")
        problems.append(f"truncated: {size} bytes, its header describes {need}; incomplete: {names}; download it again")
    before = None  # the tensor that reaches furthest so far
    for info in ordered:
        if before is not None and info.offset < before.offset + before.nbytes:
            problems.append(f"{info.name}: overlaps {before.name} in the file")
        if before is None or info.offset + info.nbytes > before.offset + before.nbytes:
            before = info
    return problems
