"""Writing checkpoints: config.json and safetensors files, one tensor in memory at a time, all or nothing.

Everything goes into a temporary folder beside the target, is flushed to the disk and then renamed, so a full disk or an
interruption leaves what was there before.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from finback.base.runtime import CheckpointError
from finback.io.safetensors_file import CONFIG_FILE, DTYPES, INDEX_FILE, SINGLE_FILE

_BY_TORCH_DTYPE = {dtype: word for word, (_, dtype) in DTYPES.items() if dtype != torch.uint8} | {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e8m0fnu: "F8_E8M0",
}


@dataclass(frozen=True)
class Stored:
    """Bytes with the dtype word to write for them: `Stored(scale_bytes, "F8_E8M0")`, `Stored(packed_fp4, "I8")`.

    `data` has the element size of `dtype` ("F4": uint8 with half the last axis); its own dtype does not matter.
    """

    data: torch.Tensor
    dtype: str


@dataclass
class _Shard:
    """One safetensors file under way: its payload on the disk, its header entries in memory."""

    payload: Path
    file: BinaryIO
    whole: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, name: str, stored: Stored) -> None:
        raw = stored.data.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        shape = list(stored.data.shape)
        if stored.dtype == "F4":
            shape[-1] *= 2
        self.file.write(raw.numpy().data)
        end = self.nbytes + raw.numel()
        self.entries[name] = {"dtype": stored.dtype, "shape": shape, "data_offsets": [self.nbytes, end]}
        self.nbytes = end


def save_checkpoint(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor | Stored]],
    *,
    shard_bytes: int = 4 << 30,
    metadata: Mapping[str, str] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint folder: config.json, model.safetensors or shards with an index, and `extra_files`.

    `tensors` is consumed one at a time and keeps its order; a tensor larger than `shard_bytes` gets a shard of its own.
    float8_e8m0fnu and int8 tensors are written as they are, other byte formats are given as `Stored`. `metadata` goes
    into every safetensors header beside {"format": "pt"}. An older checkpoint in `folder` is replaced, with all its
    files, once the new one is on the disk; a folder that holds anything else is refused. Raises CheckpointError for
    that, for a name given twice, and when the disk refuses (full, read-only).
    """
    target = Path(folder).expanduser().resolve()
    extra = dict(extra_files or {})
    _refuse_foreign(target)
    _check_file_names(extra)
    try:
        with _replacing(target) as work:
            shards = _write_shards(work, tensors, shard_bytes, {"format": "pt", **(metadata or {})})
            for name, content in {**extra, **_json_files(config, shards)}.items():
                with (work / name).open("wb") as file:
                    file.write(content)
                    _sync(file)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error.strerror or error}. What was there before is unchanged; "
            "free some space or choose another folder."
        ) from error


@contextmanager
def _replacing(target: Path) -> Generator[Path]:
    """A temporary sibling that takes the place of `target` when the block ends well, and is removed when it does not.

    A folder cannot be renamed over a filled one: the old one is moved aside first, and back if the second rename fails.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    tag = f".{target.name}.{secrets.token_hex(4)}"
    work, aside = target.with_name(f"{tag}.tmp"), target.with_name(f"{tag}.old")
    work.mkdir()
    try:
        yield work
        _sync_folder(work)
        try:
            if target.exists():
                target.rename(aside)
            work.rename(target)
        except BaseException:
            if aside.exists() and not target.exists():
                aside.rename(target)
            raise
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(aside, ignore_errors=True)


def _write_shards(
    work: Path, tensors: Iterable[tuple[str, torch.Tensor | Stored]], shard_bytes: int, metadata: dict[str, str]
) -> dict[str, _Shard]:
    """Write all safetensors files; returns them by their final names."""
    shards: list[_Shard] = []
    names: set[str] = set()
    with ExitStack() as opened:

        def start_shard() -> None:
            payload = work / f"{len(shards)}.payload"
            shards.append(_Shard(payload, opened.enter_context(payload.open("w+b")), payload.with_suffix(".whole")))

        start_shard()
        for name, value in tensors:
            if name in names or name == "__metadata__":
                raise CheckpointError(f"{name}: {'given twice' if name in names else 'a reserved word of safetensors'}")
            names.add(name)
            stored = _as_stored(name, value)
            if shards[-1].entries and shards[-1].nbytes + stored.data.numel() * stored.data.itemsize > shard_bytes:
                _splice(shards[-1], metadata)
                start_shard()
            shards[-1].add(name, stored)
        _splice(shards[-1], metadata)
    count = len(shards)
    files = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for shard, file in zip(shards, files, strict=True):
        shard.whole.rename(work / file)
    return dict(zip(files, shards, strict=True))


def _as_stored(name: str, value: torch.Tensor | Stored) -> Stored:
    """`value` with its dtype word, checked."""
    if isinstance(value, torch.Tensor):
        word = _BY_TORCH_DTYPE.get(value.dtype)
        if word is None:
            raise CheckpointError(
                f"{name}: {value.dtype} has no place in a safetensors file; give bytes as Stored(data, dtype)"
            )
        return Stored(value, word)
    bits = DTYPES[value.dtype][0] if value.dtype in DTYPES else 0
    if max(bits, 8) != 8 * value.data.itemsize:
        raise CheckpointError(
            f"{name}: {value.data.dtype} cannot be stored as {value.dtype!r} (known: {', '.join(DTYPES)})"
        )
    return value


def _splice(shard: _Shard, metadata: dict[str, str]) -> None:
    """Write the header, known only now, and the payload after it into one file, and remove the payload."""
    header = json.dumps({"__metadata__": metadata, **shard.entries}, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    shard.file.seek(0)
    with shard.whole.open("wb") as whole:
        whole.write(len(header).to_bytes(8, "little") + header)
        shutil.copyfileobj(shard.file, whole, 1 << 24)
        _sync(whole)
    shard.file.close()
    shard.payload.unlink()


def _json_files(config: Mapping[str, Any], shards: dict[str, _Shard]) -> dict[str, bytes]:
    """config.json and, with several shards, the index that names them."""
    files: dict[str, Any] = {CONFIG_FILE: dict(config)}
    if len(shards) > 1:
        weight_map = {name: file for file, shard in shards.items() for name in shard.entries}
        total = sum(shard.nbytes for shard in shards.values())
        files[INDEX_FILE] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return {name: (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode() for name, value in files.items()}


def _check_file_names(names: Iterable[str]) -> None:
    for name in names:
        if Path(name).name != name or name in (CONFIG_FILE, INDEX_FILE) or name.endswith(".safetensors"):
            raise CheckpointError(
                f"extra file {name!r}: give a plain file name other than those of the checkpoint itself"
            )


def _refuse_foreign(target: Path) -> None:
    """Replacing deletes what was there, so only a missing or empty folder or an older checkpoint may be replaced."""
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file; give a folder to write the checkpoint into")
    entries = list(target.iterdir())
    if entries and (not (target / CONFIG_FILE).is_file() or any(entry.is_dir() for entry in entries)):
        raise CheckpointError(
            f"{target} holds something other than a checkpoint ({entries[0].name}, ...), which would be deleted; "
            "give another folder"
        )


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable, where the system can sync a folder."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
