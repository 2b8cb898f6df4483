"""From raw documents to token ids, once for each source.

A `Document` is token ids, which of them are to be learned, and its images. A source's documents are tokenised once into
a folder (`ids.bin`, `ends.npy`, `learn.npy`, `images.bin`, `images.npy`) that is mapped into memory afterwards; its
name is a digest of everything that decides its content.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finback.base.runtime import ConfigError
from finback.io.chat import ImageSizes
from finback.io.text import Tokenizer
from finback.train import synth
from finback.train.images import Picture, expand, picture
from finback.train.records import Record, Shown, SourceConfig, files, is_chat, pieces, records, turns
from finback.train.synthetic import synthetic
from finback.train.tokenizer import ASSISTANT, NO_THINK, SYSTEM, USER

_FORMAT = 2  # of the cache; raised when its files change
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Document:
    """ids: [n] int64. learn: [n] bool, whether the model is taught to say the token; None = all. pictures: its images
    in order; no token of their spans is learned, and the document does not end in one. whole: what is learned of it
    only follows from what stands before, so it is not cut where its length allows that."""

    ids: Ids
    learn: npt.NDArray[np.bool_] | None = None
    pictures: tuple[Picture, ...] = ()
    whole: bool = False


def illustrated(ids: Sequence[int], learn: Sequence[bool] | None, pictures: Sequence[Picture], sizes: ImageSizes,
                end: int) -> Document:  # fmt: skip
    """A document whose j-th image token stands for `pictures[j]`. end: the token put after an image that comes last.
    Raises ConfigError where tokens and images do not match."""
    taught = iter([True] * len(ids) if learn is None else learn)
    ids = [*ids, end] if ids[-1] == sizes.image_token_id else ids
    expanded, placed = expand(ids, pictures, sizes.image_token_id)
    mask = np.zeros(len(expanded), dtype=bool)
    borders = [0, *(place for one in placed for place in (one.start, one.end)), len(expanded)]
    for i, (a, b) in enumerate(pairwise(borders)):
        if i % 2:
            next(taught)  # of the image token
        else:
            mask[a:b] = [next(taught, False) for _ in range(b - a)]
    return Document(np.asarray(expanded, dtype=np.int64), mask, tuple(placed))


class _Writer:
    """A document under way: tokens, what is learned of them, and images."""

    def __init__(self, tokenizer: Tokenizer, sizes: ImageSizes | None, folder: Path):
        self.tokenizer, self.sizes, self.folder = tokenizer, sizes, folder
        self.ids: list[int] = []
        self.learn: list[bool] = []
        self.pictures: list[Picture] = []

    def add(self, ids: Sequence[int], taught: bool) -> None:
        self.ids.extend(ids)
        self.learn.extend([taught] * len(ids))

    def say(self, content: Any, images: Iterator[Any], taught: bool) -> None:
        for piece in pieces(content, images):
            if isinstance(piece, Shown):
                if self.sizes is None:
                    raise ConfigError("a document has images, but the model has no vision_config with an image token")
                self.pictures.append(picture(piece.image, self.sizes, self.folder))
                self.add([self.sizes.image_token_id], False)
            else:
                self.add(self.tokenizer.encode(piece) if piece else [], taught)

    def document(self, record: Record, rest: Iterator[Any]) -> Document:
        if left := sum(1 for _ in rest):
            raise ConfigError(f"a document has {len(record.images)} images, {left} of which have no place in its text")
        if self.pictures:
            assert self.sizes is not None
            end = self.tokenizer.eos_ids[0] if self.tokenizer.eos_ids else 0
            return illustrated(self.ids, self.learn, self.pictures, self.sizes, end)
        learn = None if all(self.learn) else np.asarray(self.learn)
        return Document(np.asarray(self.ids, dtype=np.int64), learn)


def _chat(record: Record, tokenizer: Tokenizer, sizes: ImageSizes | None) -> Document:
    """V4.1's chat without thinking; only what the assistant says is learned."""
    mark = {name: _control(tokenizer, name) for name in (USER, ASSISTANT, SYSTEM, NO_THINK)}
    out, images = _Writer(tokenizer, sizes, record.folder), iter(record.images)
    out.add([] if tokenizer.bos_id is None else [tokenizer.bos_id], False)
    for role, content in turns(record.content):
        if role == "assistant":
            out.add([mark[ASSISTANT], mark[NO_THINK]], False)
            out.say(content, images, True)
            out.add(tokenizer.eos_ids[:1], True)
        else:
            out.add([mark[SYSTEM if role == "system" else USER]], False)
            out.say(content, images, False)
    return out.document(record, images)


def _control(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_to_id(name)
    if found is None:
        raise ConfigError(
            f"chats need the control token {name}, which this tokenizer lacks; train one, or use kind jsonl"
        )
    return found


def _text(record: Record, tokenizer: Tokenizer, sizes: ImageSizes | None) -> Document:
    """A text between bos and eos."""
    out, images = _Writer(tokenizer, sizes, record.folder), iter(record.images)
    out.add([] if tokenizer.bos_id is None else [tokenizer.bos_id], True)
    out.say(record.content, images, True)
    out.add(tokenizer.eos_ids[:1], True)
    return out.document(record, images)


def _needed(tokenizer: Tokenizer | None, config: SourceConfig) -> Tokenizer:
    if tokenizer is None:
        raise ConfigError(f"source {config.name}: text needs a tokenizer; set tokenizer.path or tokenizer.vocab_size")
    return tokenizer


def _synthetic(config: SourceConfig, tokenizer: Tokenizer, sizes: ImageSizes | None) -> Iterator[Document]:
    count = config.documents if config.limit is None else min(config.documents, config.limit)
    for made in synthetic(config.kinds, config.seed, count, tokenizer, sizes):
        document = Document(made.ids.astype(np.int64), made.learn, whole=made.learn is not None)
        if made.pictures:
            assert sizes is not None
            learn = None if made.learn is None else made.learn.tolist()
            shown = illustrated(made.ids.tolist(), learn, made.pictures, sizes, tokenizer.eos_ids[0])
            document = replace(shown, whole=True)
        yield document


def documents(config: SourceConfig, tokenizer: Tokenizer | None, sizes: ImageSizes | None = None) -> Iterator[Document]:
    """The tokenised documents of a source, in file order. sizes: how the model wants images, None = it takes none."""
    if config.kind == "synth":
        yield from _synthetic(config, _needed(tokenizer, config), sizes)
        return
    for number, record in enumerate(records(config), start=1):
        if config.kind == "tokens":
            yield Document(np.asarray(record.content, dtype=np.int64))
            continue
        known = _needed(tokenizer, config)
        try:
            yield (_chat if is_chat(record, config) else _text)(record, known, sizes)
        except ConfigError as error:
            raise ConfigError(f"source {config.name}, document {number}: {error}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"source {config.name}, document {number} is not of kind {config.kind!r} ({type(error).__name__}: "
                f"{error}); a chat is a list of turns with role and content"
            ) from None


_IMAGE_COLUMNS = ("document", "start", "grid_h", "grid_w", "tokens", "end in images.bin")


class Corpus:
    """The tokenised documents of one source, mapped from a cache folder."""

    def __init__(self, folder: Path):
        self._hashes: npt.NDArray[np.float64] | None = None
        self.ids = np.memmap(folder / "ids.bin", dtype=np.uint32, mode="r")
        self.ends = np.load(folder / "ends.npy")
        learn, images = folder / "learn.npy", folder / "images.npy"
        self.learn = np.load(learn, mmap_mode="r") if learn.exists() else None
        self.images = np.load(images) if images.exists() else np.empty((0, len(_IMAGE_COLUMNS)), np.int64)
        self.packed = np.memmap(folder / "images.bin", dtype=np.uint8, mode="r") if len(self.images) else None
        self.whole = (folder / "whole").exists()

    def __len__(self) -> int:
        return len(self.ends)

    def document(self, i: int) -> Document:
        span = slice(int(self.ends[i - 1]) if i else 0, int(self.ends[i]))
        learn = None if self.learn is None else np.array(self.learn[span])
        whole = self.whole and learn is not None and not learn.all()
        return Document(self.ids[span].astype(np.int64), learn, tuple(self._pictures(i)), whole)

    def _pictures(self, i: int) -> Iterator[Picture]:
        if self.packed is None:
            return
        first, last = np.searchsorted(self.images[:, 0], [i, i + 1])
        for line in range(first, last):
            _, start, grid_h, grid_w, tokens, end = self.images[line].tolist()
            begin = int(self.images[line - 1, -1]) if line else 0
            yield Picture(start, grid_h, grid_w, tokens, self.packed[begin:end].tobytes())

    def held_out(self, share: float) -> npt.NDArray[np.bool_]:
        """[len(self)]: which documents are kept from training, decided by a hash of their tokens and images, so that
        copies fall on one side."""
        if self._hashes is None:
            self._hashes = np.asarray([self._hash(i) for i in range(len(self))], dtype=np.float64)
        return self._hashes < share

    def _hash(self, i: int) -> float:
        """A number in [0, 1) that follows from the content of document i."""
        document = self.document(i)
        digest = hashlib.sha256(document.ids.tobytes())
        for one in document.pictures:
            digest.update(one.packed)
        return int.from_bytes(digest.digest()[:6], "little") / 2**48


def cached(
    config: SourceConfig,
    tokenizer: Tokenizer | None,
    vocabulary: bytes,
    cache: Path,
    sizes: ImageSizes | None = None,
) -> Corpus:
    """The corpus of a source, tokenised into `cache` if it is not there yet. vocabulary: the tokenizer file's bytes.
    sizes: how the model wants images."""
    facts = [_FORMAT, _facts(config), None if sizes is None else vars(sizes)]
    key = hashlib.sha256(json.dumps(facts).encode() + vocabulary).hexdigest()[:20]
    folder = cache / key
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        work = cache / f".{key}.{secrets.token_hex(4)}"
        work.mkdir()
        try:
            write_documents(documents(config, tokenizer, sizes), config.name, work)
            try:
                os.rename(work, folder)
            except OSError:
                if not folder.is_dir():  # else another process was quicker
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return Corpus(folder)


def _facts(config: SourceConfig) -> list[Any]:
    """What decides the documents of a source."""
    if config.kind == "synth":
        first = [
            repr(sample) for sample in synth.documents(config.kinds, config.seed, count=64)
        ]  # tells generators apart
        return [config.kind, config.kinds, config.documents, config.limit, config.seed, first]
    known = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files(config)]
    return [
        config.kind,
        config.path,
        config.field,
        config.whole_files,
        config.limit,
        config.images,
        config.split,
        known,
    ]


def write_documents(found: Iterator[Document], name: str, folder: Path) -> None:
    """Write what `Corpus` reads. Documents of fewer than two tokens are left out. name: of the source, for errors."""
    ends, masks, images = [], [], []
    total, packed, masked, whole = 0, 0, False, False
    with (folder / "ids.bin").open("wb") as file, (folder / "images.bin").open("wb") as pixels:
        for document in found:
            if len(document.ids) < 2:  # nothing to predict
                continue
            file.write(document.ids.astype(np.uint32).tobytes())
            for one in document.pictures:
                packed += pixels.write(one.packed)
                images.append((len(ends), one.start, one.grid_h, one.grid_w, one.tokens, packed))
            total += len(document.ids)
            ends.append(total)
            masked, whole = masked or document.learn is not None, whole or document.whole
            masks.append(np.ones(len(document.ids), bool) if document.learn is None else document.learn)
    if not ends:
        raise ConfigError(f"source {name}: no document of at least two tokens")
    np.save(folder / "ends.npy", np.asarray(ends, dtype=np.int64))
    if masked:
        np.save(folder / "learn.npy", np.concatenate(masks))
    if images:
        np.save(folder / "images.npy", np.asarray(images, dtype=np.int64))
    if whole:
        (folder / "whole").touch()
