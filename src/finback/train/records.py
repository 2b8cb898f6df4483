"""Raw documents of local files: text, JSON lines, chats, token ids, data sets of Hugging Face."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from finback.base.runtime import ConfigError, nearest
from finback.train import synth
from finback.train.tokenizer import IMAGE

KINDS = ("text", "jsonl", "chat", "tokens", "huggingface", "synth")
_TABLES = (".parquet", ".arrow")


@dataclass(frozen=True)
class SourceConfig:
    """One [[data.sources]] entry.

    kind: "text" (documents between blank lines, or each file whole with `whole_files`), "jsonl" (one object a line, the
    text under `field`), "chat" (the same, `field` holding a list of turns: {"role", "content"} objects, or plain
    strings that alternate user and assistant), "tokens" (JSON lines of lists of ids), "huggingface" (a folder of
    `Dataset.save_to_disk`, or Parquet and Arrow files; a `field` with text, or with turns as for chat) or "synth"
    (made-up documents with known answers, no path). path: a file or a folder; .xz and .gz are unpacked on the way.
    share: of the tokens of every batch, against the shares of the other sources. limit: read only this many documents.

    images: the field with a document's images, a list of paths (relative to the file) or what a data set has there.
    They stand where the text has the image token, or where a turn's content, a list of parts, has {"type": "image"}.
    split: of a data set that was saved with several.

    kinds, documents, seed: of synthetic documents: names in `synth.KINDS`, each as "name" or "name=weight"; how many
    there are; another seed gives others.
    """

    name: str
    path: str = ""
    kind: str = "text"
    share: float = 1.0
    field: str = "text"
    whole_files: bool = False
    limit: int | None = None
    images: str = "images"
    split: str = "train"
    kinds: tuple[str, ...] = ()
    documents: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"source {self.name}: kind {self.kind!r}{nearest(self.kind, KINDS)}; use {', '.join(KINDS)}"
            )
        if self.share < 0:
            raise ConfigError(f"source {self.name}: share {self.share} must not be negative")
        if self.kind == "synth":
            synth.read_kinds(self.kinds)
        elif not self.path:
            raise ConfigError(f"source {self.name}: missing key path; give a file or a folder")


@dataclass(frozen=True)
class Record:
    """content: a text, a list of turns, or a list of ids. images: of the document, in order. folder: that paths in it
    are relative to."""

    content: Any
    images: tuple[Any, ...] = ()
    folder: Path = Path()


def files(config: SourceConfig) -> list[Path]:
    """The files of a source in order. Raises ConfigError where there is none."""
    path = Path(config.path).expanduser()
    found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    if not found or not all(f.exists() for f in found):
        raise ConfigError(f"source {config.name}: there is nothing at {path}; give a file or a folder with files")
    return found


def records(config: SourceConfig) -> Iterator[Record]:
    """The documents of a source, at most `limit`, in file order."""
    found = _data_set(config) if config.kind == "huggingface" else _lines(config)
    return islice(found, config.limit)


def _lines(config: SourceConfig) -> Iterator[Record]:
    for path in files(config):
        with _open(path) as file:
            if config.kind == "text":
                text = file.read()
                parts = [text] if config.whole_files else text.split("\n\n")
                yield from (Record(part.strip("\n")) for part in parts if part.strip())
                continue
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{path}, line {number}: no JSON ({error.msg})") from None
                yield Record(row) if config.kind == "tokens" else _record(row, config, f"{path}, line {number}", path)


def _open(path: Path) -> TextIO:
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    return opener(path, "rt", encoding="utf-8")


def _data_set(config: SourceConfig) -> Iterator[Record]:
    path = Path(config.path).expanduser()
    saved = path.is_dir() and any((path / name).exists() for name in ("state.json", "dataset_dict.json"))
    try:
        for place, rows in [(path, _saved(config, path))] if saved else _tables(config):
            for row in rows:
                yield _record(row, config, str(place), place)
    except ImportError as error:
        raise ConfigError(
            f"source {config.name}: kind 'huggingface' needs the package {error.name}: pip install 'finback[datasets]'"
        ) from None


def _saved(config: SourceConfig, path: Path) -> Any:
    import datasets

    found = datasets.load_from_disk(str(path))
    if not isinstance(found, dict):
        return found
    if config.split not in found:
        hint = nearest(config.split, found)
        raise ConfigError(f"source {config.name}: no split {config.split!r}{hint}; {path} has {', '.join(found)}")
    return found[config.split]


def _tables(config: SourceConfig) -> Iterator[tuple[Path, Iterator[Any]]]:
    """Every Parquet or Arrow file with its rows, read a few at a time."""
    paths = [p for p in files(config) if p.suffix in _TABLES]
    if not paths:
        raise ConfigError(
            f"source {config.name}: {config.path} is no folder of Dataset.save_to_disk and has no .parquet or .arrow "
            f"files; for JSON lines use kind 'jsonl' or 'chat'"
        )
    for path in paths:
        yield path, (row for batch in _batches(path) for row in batch.to_pylist())


def _batches(path: Path) -> Iterator[Any]:
    """Batches of rows. Arrow files are streams (what `datasets` writes) or have a footer."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256)
        return
    import pyarrow.ipc

    with pyarrow.memory_map(str(path)) as file:
        try:
            yield from pyarrow.ipc.open_stream(file)
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(file)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))


def _record(row: Any, config: SourceConfig, where: str, path: Path) -> Record:
    if not isinstance(row, dict) or config.field not in row:
        known = list(row) if isinstance(row, dict) else []
        raise ConfigError(f"{where}: no field {config.field!r}{nearest(config.field, known)}; set the source's field")
    images = row.get(config.images) or ()
    return Record(row[config.field], tuple(images) if isinstance(images, list | tuple) else (images,), path.parent)


def turns(content: Any) -> list[tuple[str, Any]]:
    """(role, content) of a chat; a string is JSON inside JSON."""
    found = json.loads(content) if isinstance(content, str) else content
    out = []
    for i, turn in enumerate(found):
        if isinstance(turn, dict):
            out.append((turn["role"], turn["content"]))
        else:
            out.append((("user", "assistant")[i % 2], turn))
    return out


def is_chat(record: Record, config: SourceConfig) -> bool:
    return config.kind == "chat" or (config.kind == "huggingface" and not isinstance(record.content, str))


@dataclass(frozen=True)
class Shown:
    """An image between texts."""

    image: Any


def pieces(content: Any, images: Iterator[Any]) -> Iterator[str | Shown]:
    """A text or the content of a turn as texts and images in order. images: those of the document that are not placed
    yet; with none left, the image token is ordinary text. Raises ConfigError where a part shows one too many."""
    for part in [content] if isinstance(content, str) else content:
        if isinstance(part, dict) and part.get("type", "text") != "text":
            image = part.get("image") or part.get("path")
            image = next(images, None) if image is None else image
            if image is None:
                raise ConfigError(f"a document shows an image that it does not have: {part}; list it under its images")
            yield Shown(image)
            continue
        first, *rest = str(part["text"] if isinstance(part, dict) else part).split(IMAGE)
        for text in rest:
            image = next(images, None)
            if image is None:
                first += IMAGE + text
                continue
            yield first
            yield Shown(image)
            first = text
        yield first


def texts(config: SourceConfig) -> Iterator[str]:
    """The plain texts of a source, to train a tokenizer on."""
    if config.kind == "tokens":
        return
    if config.kind == "synth":
        for sample in islice(synth.documents(config.kinds, config.seed, count=config.documents), config.limit):
            yield from sample.texts()
        return
    for record in records(config):
        said = [content for _, content in turns(record.content)] if is_chat(record, config) else [record.content]
        images = iter(record.images)
        for content in said:
            yield from (piece for piece in pieces(content, images) if isinstance(piece, str))
