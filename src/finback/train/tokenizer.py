"""Training a byte-level BPE vocabulary with DeepSeek-V4.1's control tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from finback.base.runtime import ConfigError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, SYSTEM = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
THINK, NO_THINK = "<think>", "</think>"
IMAGE = "<｜deepseek_image｜>"
MARKUP = (SYSTEM, USER, ASSISTANT, THINK, NO_THINK, "｜DSML｜", "<｜latest_reminder｜>", IMAGE)
RESERVED = 64  # last ids: `MARKUP`, and unused placeholders in front of it


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A vocabulary of exactly `vocab_size` ids: bos, eos and pad are 0, 1 and 2, the last `RESERVED` ids are kept for
    markup. Digits are single tokens, so that numbers have one spelling. Ids that the texts give no merge for become
    placeholders. Raises ConfigError for too small a size.
    """
    smallest = 256 + 3 + RESERVED
    if vocab_size < smallest:
        raise ConfigError(f"tokenizer.vocab_size {vocab_size} is too small: bytes and control tokens need {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - RESERVED,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in (BOS, EOS, PAD)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    unused = vocab_size - len(MARKUP) - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<｜place▁holder▁no▁{i}｜>" for i in range(unused)])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in MARKUP])
    return tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """File name -> content of what stands beside a checkpoint."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, ensure_ascii=False, indent=2) + "\n").encode(),
    }
