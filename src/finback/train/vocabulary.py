"""The tokenizer of a run, and the model's config.json that follows from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finback.io.text import Tokenizer
from finback.train.families import family_of
from finback.train.recipe import Recipe
from finback.train.records import texts
from finback.train.tokenizer import BOS, EOS, PAD, tokenizer_files, train_tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a run and its files; both empty for a run on token ids."""

    tokenizer: Tokenizer | None
    files: dict[str, bytes]


def prepare_vocabulary(recipe: Recipe, folder: Path) -> Vocabulary:
    """The recipe's tokenizer: read, or trained on the sources once and kept in the run's folder."""
    c = recipe.tokenizer
    path = folder / "tokenizer.json" if c.vocab_size else c.path and Path(c.path)
    if not path:
        return Vocabulary(None, {})
    if c.vocab_size and not path.is_file():
        files = tokenizer_files(train_tokenizer(_some_texts(recipe), c.vocab_size))
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in reversed(files.items()):
            (folder / name).write_bytes(content)
    tokenizer = Tokenizer.load(path)
    place = path if path.is_dir() else path.parent
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "token_map.json")
    return Vocabulary(tokenizer, {name: (place / name).read_bytes() for name in names if (place / name).is_file()})


def _some_texts(recipe: Recipe) -> Iterator[str]:
    """Texts of all sources up to the recipe's number of characters, each source by its share."""
    total = sum(s.share for s in recipe.data.sources)
    for source in recipe.data.sources:
        room = recipe.tokenizer.characters * source.share / total
        for text in texts(source):
            if room <= 0:
                break
            yield text
            room -= len(text)


def build_config(recipe: Recipe, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """config.json of the run: the recipe's [model] with what follows from the tokenizer."""
    config = json.loads(json.dumps(recipe.model))
    family_of(config["model_type"]).complete(config, tokenizer)
    config["dtype"] = recipe.run.dtype
    for name, token in (("bos_token_id", BOS), ("eos_token_id", EOS), ("pad_token_id", PAD)):
        if tokenizer is not None and (found := tokenizer.token_to_id(token)) is not None:
            config.setdefault(name, found)
    return config
