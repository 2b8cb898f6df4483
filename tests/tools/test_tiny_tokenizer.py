"""The tokenizer of the tiny fixtures: a real one, with the released layout of ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from finback.base.runtime import ConfigError
from finback.io.text import Tokenizer, compression_map
from finback.tools.tiny_tokenizer import SPECIALS, byte_level_tokenizer, save_tokenizer


@pytest.mark.parametrize("vocab_size", [256 + len(SPECIALS), 320, 512, 4096])
def test_every_id_below_vocab_size_has_its_own_token(vocab_size: int) -> None:
    """A trainer that runs out of merges gives fewer ids than the embedding has rows, and control ids that move."""
    tokenizer = byte_level_tokenizer(vocab_size)
    spellings = [tokenizer.id_to_token(i) for i in range(vocab_size)]
    assert None not in spellings and len(set(spellings)) == vocab_size == tokenizer.get_vocab_size()
    assert tokenizer.id_to_token(vocab_size) is None
    assert tuple(spellings[:3]) == SPECIALS[:3]
    assert tuple(spellings[3 - len(SPECIALS) :]) == SPECIALS[3:]


def test_it_has_merges_and_is_the_same_each_time() -> None:
    """Fixtures made twice must have equal bytes, and a text must be shorter in tokens than in bytes."""
    tokenizer = byte_level_tokenizer()
    assert tokenizer.to_str() == byte_level_tokenizer().to_str()
    text = "The whale listens, and the water is cold."
    assert len(tokenizer.encode(text).ids) < 0.6 * len(text)


def test_its_texts_collapse_under_engram_compression() -> None:
    """With as many compressed ids as ids, a fixture could not tell whether a model uses the map."""
    token_map = compression_map(Tokenizer(byte_level_tokenizer()))
    assert 300 < token_map.max() + 1 < 500


def test_saved_files_name_the_special_ids(tmp_path: Path) -> None:
    """A fixture whose tokenizer_config.json lacks the end token would generate until max_tokens."""
    save_tokenizer(byte_level_tokenizer(), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, (1,), 2)
    assert tokenizer.special_ids == {0, 1, 2}


def test_too_few_ids_are_refused() -> None:
    """Without the check the trainer returns a vocabulary that is larger than asked for."""
    with pytest.raises(ConfigError, match=r"vocab_size 200 is too small: 256 bytes and 11 special tokens need 267"):
        byte_level_tokenizer(200)
    with pytest.raises(ConfigError, match="three or more different tokens"):
        byte_level_tokenizer(512, ("<s>", "</s>", "<s>"))
