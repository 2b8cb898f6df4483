"""Reading documents: text, JSON lines, chats, token ids, data sets of Hugging Face on this machine.

A `Document` is token ids and, where not every token is to be learned, which of them are. A source's documents are
tokenised once into a folder (`ids.bin`, `ends.npy`, `learn.npy`) that is mapped into memory afterwards; its name is a
digest of everything that decides its content.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from finback.base.runtime import ConfigError, nearest
from finback.io.text import Tokenizer
from finback.train.tokenizer import ASSISTANT, NO_THINK, SYSTEM, USER

KINDS = ("text", "jsonl", "chat", "tokens", "huggingface")
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SourceConfig:
    """One [[data.sources]] entry.

    kind: "text" (documents between blank lines, or each file whole with `whole_files`), "jsonl" (one object a line, the
    text under `field`), "chat" (the same, `field` holding a list of turns: {"role", "content"} objects, or plain
    strings that alternate user and assistant), "tokens" (JSON lines of lists of ids) or "huggingface" (a data set that
    `datasets.load_from_disk` reads; `field` as for jsonl). path: a file or a folder; .xz and .gz are unpacked on the
    way. share: of the tokens of every batch, against the shares of the other sources. limit: read only this many
    documents.
    """

    name: str
    path: str
    kind: str = "text"
    share: float = 1.0
    field: str = "text"
    whole_files: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"source {self.name}: kind {self.kind!r}{nearest(self.kind, KINDS)}; use {', '.join(KINDS)}"
            )
        if self.share < 0:
            raise ConfigError(f"source {self.name}: share {self.share} must not be negative")


@dataclass(frozen=True)
class Document:
    """ids: [n] int64. learn: [n] bool, whether the model is taught to say the token; None = all."""

    ids: Ids
    learn: npt.NDArray[np.bool_] | None = None


def _open(path: Path) -> TextIO:
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    return opener(path, "rt", encoding="utf-8")


def _files(config: SourceConfig) -> list[Path]:
    path = Path(config.path).expanduser()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    if not files or not all(f.exists() for f in files):
        raise ConfigError(f"source {config.name}: there is nothing at {path}; give a file or a folder with files")
    return files


def _records(config: SourceConfig) -> Iterator[Any]:
    """The raw documents: strings, lists of turns, or lists of ids."""
    if config.kind == "huggingface":
        try:
            import datasets
        except ImportError:
            raise ConfigError(f"source {config.name}: kind 'huggingface' needs the package datasets") from None
        for row in datasets.load_from_disk(config.path):
            yield _field(row, config, config.path)
        return
    for path in _files(config):
        with _open(path) as file:
            if config.kind == "text":
                text = file.read()
                parts = [text] if config.whole_files else text.split("\n\n")
                yield from (part.strip("\n") for part in parts if part.strip())
                continue
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{path}, line {number}: no JSON ({error.msg})") from None
                yield row if config.kind == "tokens" else _field(row, config, f"{path}, line {number}")


def _field(row: Any, config: SourceConfig, where: str) -> Any:
    if not isinstance(row, dict) or config.field not in row:
        known = list(row) if isinstance(row, dict) else []
        raise ConfigError(f"{where}: no field {config.field!r}{nearest(config.field, known)}; set the source's field")
    return row[config.field]


def _turns(record: Any) -> list[tuple[str, str]]:
    """(role, text) of a chat; a string is JSON inside JSON."""
    turns = json.loads(record) if isinstance(record, str) else record
    out = []
    for i, turn in enumerate(turns):
        if isinstance(turn, str):
            out.append((("user", "assistant")[i % 2], turn))
        else:
            out.append((turn["role"], turn["content"]))
    return out


def _chat(record: Any, tokenizer: Tokenizer) -> Document:
    """V4.1's chat without thinking; only what the assistant says is learned."""
    mark = {name: _control(tokenizer, name) for name in (USER, ASSISTANT, SYSTEM, NO_THINK)}
    ids, learn = [tokenizer.bos_id], [False]

    def add(tokens: list[int], taught: bool) -> None:
        ids.extend(tokens)
        learn.extend([taught] * len(tokens))

    for role, text in _turns(record):
        body = tokenizer.encode(text)
        if role == "assistant":
            add([mark[ASSISTANT], mark[NO_THINK]], False)
            add([*body, *tokenizer.eos_ids[:1]], True)
        else:
            add([mark[SYSTEM if role == "system" else USER], *body], False)
    return Document(np.asarray(ids, dtype=np.int64), np.asarray(learn))


def _control(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_to_id(name)
    if found is None:
        raise ConfigError(
            f"chats need the control token {name}, which this tokenizer lacks; train one, or use kind jsonl"
        )
    return found


def documents(config: SourceConfig, tokenizer: Tokenizer | None) -> Iterator[Document]:
    """The tokenised documents of a source, in file order. Texts are put between bos and eos."""
    for number, record in enumerate(_records(config)):
        if config.limit is not None and number >= config.limit:
            return
        if config.kind == "tokens":
            yield Document(np.asarray(record, dtype=np.int64))
            continue
        if tokenizer is None:
            raise ConfigError(
                f"source {config.name}: text needs a tokenizer; set tokenizer.path or tokenizer.vocab_size"
            )
        if config.kind == "chat":
            yield _chat(record, tokenizer)
        else:
            bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            yield Document(np.asarray([*bos, *tokenizer.encode(record), *tokenizer.eos_ids[:1]], dtype=np.int64))


def texts(config: SourceConfig) -> Iterator[str]:
    """The plain texts of a source, to train a tokenizer on."""
    for number, record in enumerate(_records(config)):
        if config.limit is not None and number >= config.limit:
            return
        if config.kind == "chat":
            yield from (text for _, text in _turns(record))
        elif config.kind != "tokens":
            yield record


class Corpus:
    """The tokenised documents of one source, mapped from a cache folder."""

    def __init__(self, folder: Path):
        self.ids = np.memmap(folder / "ids.bin", dtype=np.uint32, mode="r")
        self.ends = np.load(folder / "ends.npy")
        learn = folder / "learn.npy"
        self.learn = np.load(learn, mmap_mode="r") if learn.exists() else None

    def __len__(self) -> int:
        return len(self.ends)

    def document(self, i: int) -> Document:
        span = slice(int(self.ends[i - 1]) if i else 0, int(self.ends[i]))
        learn = None if self.learn is None else np.array(self.learn[span])
        return Document(self.ids[span].astype(np.int64), learn)

    def is_held_out(self, i: int, share: float) -> bool:
        """Whether document i is kept from training: decided by a hash of its tokens, so that copies fall on one
        side."""
        digest = hashlib.sha256(self.document(i).ids.tobytes()).digest()
        return int.from_bytes(digest[:8], "little") < share * 2**64


def cached(config: SourceConfig, tokenizer: Tokenizer | None, vocabulary: bytes, cache: Path) -> Corpus:
    """The corpus of a source, tokenised into `cache` if it is not there yet. vocabulary: the tokenizer file's bytes."""
    files = (
        []
        if config.kind == "huggingface"
        else [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in _files(config)]
    )
    facts = [config.kind, config.path, config.field, config.whole_files, config.limit, files]
    key = hashlib.sha256(json.dumps(facts).encode() + vocabulary).hexdigest()[:20]
    folder = cache / key
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        work = cache / f".{key}.{secrets.token_hex(4)}"
        work.mkdir()
        try:
            _write(documents(config, tokenizer), config.name, work)
            try:
                os.rename(work, folder)
            except OSError:
                if not folder.is_dir():  # else another process was quicker
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return Corpus(folder)


def _write(found: Iterator[Document], name: str, folder: Path) -> None:
    ends, masks, total, masked = [], [], 0, False
    with (folder / "ids.bin").open("wb") as file:
        for document in found:
            if len(document.ids) < 2:  # nothing to predict
                continue
            file.write(document.ids.astype(np.uint32).tobytes())
            total += len(document.ids)
            ends.append(total)
            masked = masked or document.learn is not None
            masks.append(np.ones(len(document.ids), bool) if document.learn is None else document.learn)
    if not ends:
        raise ConfigError(f"source {name}: no document of at least two tokens")
    np.save(folder / "ends.npy", np.asarray(ends, dtype=np.int64))
    if masked:
        np.save(folder / "learn.npy", np.concatenate(masks))
