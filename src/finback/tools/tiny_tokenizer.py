"""A tiny but real byte-level BPE tokenizer, made in milliseconds without a download: for fixtures and tests.

It encodes any text, its merges come from the paragraphs below, and its ids are laid out as in the released vocabulary:
bos, eos and pad first, then ordinary pieces, then the other control tokens last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from finback.base.runtime import ConfigError

SPECIALS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜deepseek_image｜>",
)
"""Control tokens of DeepSeek-V4.1 by name; the first three are bos, eos and pad and get the ids 0, 1 and 2."""

_TEXT = """
The fin whale is the second largest animal that has ever lived, and it is faster than every larger one. Sailors called
it the greyhound of the sea, because a steam ship could not keep up with it for long. It swims alone or in a small
group, dives for ten or fifteen minutes, and comes up to breathe several times before it dives again. When it feeds, it
turns on its right side, opens its mouth near a cloud of krill, and takes in more water than its own body weighs; then
the water is pressed out through the baleen and the food stays behind.

What does the whale hear? Mostly low notes, near twenty hertz, each about one second long and repeated with great
patience. Other whales hear them from hundreds of miles away. A listener who wants to understand the song should first
write down when each note begins, then look for what returns: the same interval, the same pair of notes, the same pause
after every twelfth one. This is also how a small program learns to read. It counts which two letters stand together
most often, makes one piece out of them, and counts again: "th" and "e" become "the", "in" and "g" become "ing", and a
blank joins the word that comes after it. Some numbers for practice: 0, 1, 2, 3, 10, 42, 100, 365, 1000, 2048.

def count(words):
    total = {}
    for word in words:
        total[word] = total.get(word, 0) + 1
    return total
"""


def byte_level_tokenizer(vocab_size: int = 512, specials: Sequence[str] = SPECIALS) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly `vocab_size` ids, the same one on every call.

    Args:
        vocab_size: at least 256 + len(specials). Ids that the built-in text gives no merge for become unused
            placeholder tokens in front of the last specials.
        specials: control tokens; the first three are bos, eos and pad (ids 0, 1, 2), the rest get the last ids. As in
            the released vocabulary only the first three (and placeholders) are dropped by `skip_special`; the rest is
            markup that a parser reads.

    Raises:
        ConfigError: fewer than three specials, one twice, or too small a `vocab_size`.
    """
    if len(specials) < 3 or len(set(specials)) < len(specials):
        raise ConfigError(f"specials must be three or more different tokens (bos, eos, pad, ...), not {list(specials)}")
    if vocab_size < 256 + len(specials):
        raise ConfigError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(specials)} special tokens need "
            f"{256 + len(specials)} ids"
        )
    markup = [AddedToken(name, special=False, normalized=False) for name in specials[3:]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(markup),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in specials[:3]],
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    unused = vocab_size - len(markup) - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<｜place▁holder▁no▁{i}｜>" for i in range(unused)])
    tokenizer.add_tokens(markup)
    return tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """File name -> content of the two files that describe a `byte_level_tokenizer` beside a checkpoint."""
    roles = {f"{role}_token": tokenizer.id_to_token(i) for i, role in enumerate(("bos", "eos", "pad"))}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, "add_eos_token": False, **roles}
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, ensure_ascii=False, indent=2) + "\n").encode(),
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer_files` into an existing folder."""
    for name, content in tokenizer_files(tokenizer).items():
        (folder / name).write_bytes(content)
