"""Reading checkpoints: a folder (or hub id) of config.json and safetensors files, without a conversion step.

`Checkpoint.open` reads headers only, so a damaged or incomplete checkpoint is refused before anything large is
allocated. `Checkpoint.read` hands out views of the memory-mapped files. `load_weight` decodes one weight of any stored
format in row chunks and gives the pages back, so that loading needs little more memory than the weights that stay.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from finback.base.formats import Format
from finback.base.runtime import CheckpointError, nearest
from finback.io.safetensors_file import CONFIG_FILE, DTYPES, INDEX_FILE, SINGLE_FILE, TensorInfo, read_header
from finback.kernels.torch.quant import dequantize
from finback.models.base import TensorSpec

# Values decoded at a time by `load_weight`: large enough to hide call overhead, small enough for a second-level cache.
CHUNK_VALUES = 1 << 20

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass
class Checkpoint:
    """An opened checkpoint. Tensors stay in their files until they are read.

    `config` is config.json as it stands, `tensors` what the headers say, `metadata` the safetensors metadata of all
    shards together.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str] = field(default_factory=dict)
    _maps: dict[Path, tuple[mmap.mmap, torch.Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, where: str | Path) -> Checkpoint:
        """Open a folder with config.json and model.safetensors (or its index and shards), or a hub id "org/name".

        Reads headers only. Raises CheckpointError that lists what is missing, truncated, garbled or contradictory.
        A hub id is fetched (or found in the local cache) through huggingface_hub, where that package is installed.
        """
        path = _resolve(where)
        config = _read_json(path / CONFIG_FILE, path)
        files, weight_map, problems = _weight_files(path)
        tensors: dict[str, TensorInfo] = {}
        metadata: dict[str, str] = {}
        for file in files:
            header = read_header(file)
            problems += header.problems
            metadata |= header.metadata
            for name, info in header.tensors.items():
                if name in tensors:
                    problems.append(f"{name}: stored twice, in {tensors[name].file.name} and in {file.name}")
                tensors[name] = info
        if not problems:  # a shard that cannot be read would make every tensor in it look absent
            problems = [_absence(name, shard, tensors) for name, shard in weight_map.items()]
        problems = [text for text in problems if text]
        raise_listing(f"{path} cannot be used", problems, limit=20)
        return cls(path, config, tensors, metadata)

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """The tensor `name`, or `rows` of its first axis (step 1), as a view of the mapped file; never write to it.

        Only the bytes asked for are touched. FP8 values come back as torch.float8_e4m3fn; "F8_E8M0" scales, packed "F4"
        and "I8" as uint8 bytes. Data that is not aligned in the file is copied, everything else is mapped.
        """
        info = self._info(name)
        start, count, shape = info.offset, info.nbytes, info.byte_shape
        if rows is not None:
            first, last, step = rows.indices(shape[0])
            assert step == 1, f"rows {rows} of {name}: only whole runs of rows can be read in place"
            row_bytes = info.nbytes // shape[0] if shape[0] else 0
            shape = (max(last - first, 0), *shape[1:])
            start, count = start + first * row_bytes, shape[0] * row_bytes
        dtype = DTYPES[info.dtype][1]
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        data = self._map(info.file)[1][start : start + count]
        if data.numel() < count:
            raise CheckpointError(
                f"{info.file} became shorter since it was opened and no longer holds {name}; open it again"
            )
        if start % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(shape)

    def mapped(self, name: str) -> torch.Tensor:
        """The whole tensor as a view of the mapped file, never a copy: for tables larger than memory. Never write.

        Raises CheckpointError where the data is not aligned to its dtype in the file: it cannot be used in place.
        """
        info = self._info(name)
        itemsize = DTYPES[info.dtype][1].itemsize
        if info.nbytes and info.offset % itemsize:
            raise CheckpointError(
                f"{name} starts at byte {info.offset} of {info.file.name}, not at a multiple of {itemsize} "
                f"({info.dtype}), so it cannot be used in place. "
                "Save the checkpoint again with the larger dtypes first."
            )
        return self.read(name)

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop the pages of `name` (or of its `rows`) from this process's resident memory.

        Views stay valid: their pages are read again when touched. Does nothing where the system has no madvise.
        """
        info = self._info(name)
        if info.file not in self._maps or not info.nbytes or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first, last, row_bytes = 0, 1, info.nbytes
        if rows is not None:
            first, last, _ = rows.indices(info.byte_shape[0])
            row_bytes = info.nbytes // info.byte_shape[0]
        start = info.offset + first * row_bytes
        page = start - start % mmap.PAGESIZE
        if last > first:
            self._maps[info.file][0].madvise(mmap.MADV_DONTNEED, page, info.offset + last * row_bytes - page)

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}{nearest(name, self.tensors)}")
        return self.tensors[name]

    def _map(self, file: Path) -> tuple[mmap.mmap, torch.Tensor]:
        """The mapping of `file` and the same bytes as a uint8 tensor, made at the first use."""
        if file not in self._maps:
            with file.open("rb") as handle:
                # Shared and read-only: a private writable mapping would count against the memory that the system may
                # promise, which a table larger than memory exceeds.
                mapping = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                self._maps[file] = mapping, torch.frombuffer(mapping, dtype=torch.uint8)
        return self._maps[file]


def raise_listing(title: str, lines: list[str], limit: int) -> None:
    """Raise CheckpointError with `title` and up to `limit` of `lines`; nothing when there are none."""
    if lines:
        rest = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
        raise CheckpointError("\n  ".join([f"{title}:", *lines[:limit], *rest]))


def load_weight(ckpt: Checkpoint, spec: TensorSpec, fmt: Format, out: torch.Tensor) -> None:
    """Decode the weight `spec.name`, stored as `fmt`, into `out`: shape `spec.shape`, any float dtype and device.

    Works in row chunks and releases the mapped pages behind it. Raises CheckpointError that names the tensor and the
    first index whose value is NaN or infinite, or a scale that holds no number (byte 255).
    """
    assert tuple(out.shape) == tuple(spec.shape), f"{spec.name}: out is {tuple(out.shape)}, the weight {spec.shape}"
    scale = None if fmt.scale_dtype is None else ckpt.read(spec.scale).view(fmt.scale_dtype)
    # Scales of a matrix in blocks have one row per block[0] rows; else the first axes of data and scale are the same.
    unit = fmt.block[0] if fmt.block is not None and len(spec.shape) == 2 else 1
    for rows in _row_chunks(spec.shape, unit):
        data = ckpt.read(spec.name, rows).view(fmt.storage)
        part = out if rows is None else out[rows]
        part_scale = scale if scale is None or rows is None else scale[rows.start // unit : -(-rows.stop // unit)]
        try:
            dequantize(data, part_scale, fmt, out.dtype, out=part)
        except CheckpointError as error:
            raise CheckpointError(f"{spec.name} ({fmt.name}, scale {spec.scale}): {error}") from error
        _check_finite(spec, part, fmt, rows.start if rows is not None else 0)
        ckpt.release(spec.name, rows)
    if scale is not None:
        ckpt.release(spec.scale)


def _row_chunks(shape: tuple[int, ...], unit: int) -> Iterator[slice | None]:
    """Runs of about CHUNK_VALUES values that start at a multiple of `unit` rows; None (everything) for a scalar."""
    if not shape:
        yield None
        return
    step = max(CHUNK_VALUES // (max(math.prod(shape[1:]), 1) * unit), 1) * unit
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _check_finite(spec: TensorSpec, values: torch.Tensor, fmt: Format, first_row: int) -> None:
    if not values.numel() or all(bool(end.isfinite()) for end in torch.aminmax(values)):
        return
    index = (~values.isfinite()).nonzero()[0].tolist()
    value = values[tuple(index)].item()
    where = [first_row + index[0], *index[1:]] if index else []
    raise CheckpointError(
        f"{spec.name} ({fmt.name}) holds {value} at {where} when decoded to {values.dtype}; weights must be finite. "
        "The file is damaged, or was saved from a model that had already diverged."
    )


def _resolve(where: str | Path) -> Path:
    """The folder that `where` means."""
    path = Path(where).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{where} is a file; give the folder that holds {CONFIG_FILE} and the safetensors files")
    if not isinstance(where, str) or not _HUB_ID.fullmatch(where):
        raise CheckpointError(
            f'there is no folder {where}; give a folder with {CONFIG_FILE} and {SINGLE_FILE}, or a hub id "org/name"'
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"there is no folder {where}. If it is a hub id, install the package that fetches it: "
            'pip install "finback[hub]"'
        ) from None
    try:
        return Path(snapshot_download(where, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt"]))
    except Exception as error:  # the hub's, the network's and the cache's errors have no common base
        raise CheckpointError(
            f"there is no folder {where}, and as a hub id it could not be fetched: {error}"
        ) from error


def _read_json(file: Path, folder: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {file.name}; a checkpoint is a folder with {CONFIG_FILE} and {SINGLE_FILE}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}; a JSON object is needed")
    return value


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str], list[str]]:
    """The safetensors files to read, the index's tensor -> file map ({} without an index), and what is wrong."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if not index.exists():
        if single.exists():
            return [single], {}, []
        others = sorted(file.name for file in folder.glob("*.safetensors"))
        found = f"found instead: {', '.join(others[:5])}" if others else "found no safetensors file at all"
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; {found}")
    weight_map = _read_json(index, folder).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f'{index} has no "weight_map" from tensor names to file names')
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        shards.setdefault(shard, []).append(name)
    problems = []
    if single.exists() and SINGLE_FILE not in shards:
        problems.append(
            f"both {SINGLE_FILE} and {INDEX_FILE} are there, and the index does not name the former; remove one"
        )
    files = []
    for shard, names in sorted(shards.items()):
        if Path(shard).name != shard:
            problems.append(f"{INDEX_FILE} names {shard!r} ({names[0]}); only files of the same folder are read")
        elif not (folder / shard).is_file():
            problems.append(f"{shard}: missing, but {INDEX_FILE} expects {len(names)} tensors in it, first {names[0]}")
        else:
            files.append(folder / shard)
    return files, weight_map, problems


def _absence(name: str, shard: str, tensors: dict[str, TensorInfo]) -> str:
    """What contradicts the index's claim that `name` lies in `shard`, or ""."""
    if name not in tensors:
        return f"{name}: {INDEX_FILE} places it in {shard}, which does not hold it"
    if tensors[name].file.name != shard:
        return f"{name}: {INDEX_FILE} places it in {shard}, but it lies in {tensors[name].file.name}"
    return ""
