"""Synthetic documents as token ids, made by several processes where there are many."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from finback.base.runtime import ConfigError
from finback.io.chat import Chat, ImageSizes
from finback.io.chat_v41 import DeepseekV41Chat
from finback.io.text import Tokenizer
from finback.train import synth
from finback.train.images import Picture, picture
from finback.train.rendering import render

_PART = 500  # documents that a process makes at a time
_WORTH_PROCESSES = 20_000  # fewer documents than that are made quicker than processes start
_MOST_PROCESSES = 16


@dataclass(frozen=True)
class Made:
    """ids: [n] uint32, one token an image. learn: [n] bool, None = all. pictures: in order."""

    ids: npt.NDArray[np.uint32]
    learn: npt.NDArray[np.bool_] | None
    pictures: tuple[Picture, ...]


def synthetic(
    kinds: Sequence[str], seed: int, count: int, tokenizer: Tokenizer, sizes: ImageSizes | None
) -> Iterator[Made]:
    """Documents 0 to `count` - 1 of the training split. sizes: how the model wants images; None = ConfigError for kinds
    that have some. Whoever calls this from a script of his own needs the usual `if __name__ == "__main__"`."""
    make = partial(_part, tuple(kinds), seed, count, tokenizer, sizes)
    starts = range(0, count, _PART)
    processes = min(os.cpu_count() or 1, _MOST_PROCESSES)
    if count < _WORTH_PROCESSES or processes < 4:
        for start in starts:
            yield from make(start)
        return
    # Forking would copy the locks of threads that are not copied; a fresh interpreter has none.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for part in pool.map(make, starts):
            yield from part


def _part(
    kinds: tuple[str, ...], seed: int, count: int, tokenizer: Tokenizer, sizes: ImageSizes | None, start: int
) -> list[Made]:
    token = None if sizes is None else sizes.image_token_id
    chat = Chat(DeepseekV41Chat(tokenizer, image_token_id=token), tokenizer)
    return [_made(s, chat, sizes) for s in synth.documents(kinds, seed, count=min(_PART, count - start), first=start)]


def _made(sample: synth.Sample, chat: Chat, sizes: ImageSizes | None) -> Made:
    if sample.text:
        tokenizer = chat.tokenizer
        bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        ids = [*bos, *tokenizer.encode(sample.text), *tokenizer.eos_ids[:1]]
        return Made(np.asarray(ids, dtype=np.uint32), None, ())
    found = render(chat, sample.messages, sample.tools, sample.options)
    if found.images and sizes is None:
        raise ConfigError(f"synthetic documents of kind {sample.kind!r} hold images, but the model takes none")
    pictures = tuple(picture(data, sizes, Path()) for data in found.images if sizes is not None)
    return Made(np.asarray(found.ids, dtype=np.uint32), np.asarray(found.learn), pictures)
