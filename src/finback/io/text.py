"""Text in and out: the tokenizer, the incremental detokenizer and Engram's token compression map.

Two rules hold everywhere:

* Text that comes from a user is encoded without the added vocabulary, so that typing "</think>" or "<｜User｜>" gives
  plain BPE pieces and never a control token. Only a chat template may ask for `allow_special=True`.
* Streamed text is the decoded text: the pieces a `Detokenizer` hands out, joined, equal `Tokenizer.decode` of all ids.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, normalizers

from finback.base.runtime import CheckpointError, RequestError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how byte-fallback vocabularies spell one raw byte
_ROLES = ("bos", "eos", "pad")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONE_BLANK = "\ue000"  # private-use character that stands for a text which is one blank while blanks are stripped


class Tokenizer:
    """Text <-> token ids, over a `tokenizers.Tokenizer` (which this object takes over: truncation and padding go off).

    Args:
        backend: the vocabulary, merges and added tokens, as read from tokenizer.json.
        bos_id, pad_id: None where the checkpoint names none.
        eos_ids: every id that ends a generation, the tokenizer's own first; may be empty.

    Attributes:
        vocab_size: number of ids, added tokens included; every id is in [0, vocab_size).
        added_ids: control tokens and markup. Plain text never gives one of them.
        special_ids: the added ids that `skip_special=True` leaves out. Markup that a parser needs, such as "</think>",
            is not among them in the released vocabulary.
        is_byte_level: tokens are pieces of UTF-8, so that `token_bytes` is defined.
        chat_template: the checkpoint's own Jinja template of a chat, None without one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        pad_id: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.pad_id = pad_id
        self.chat_template = chat_template

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json (given itself, or the folder that holds it) and the special ids named beside it.

        bos, eos and pad come from tokenizer_config.json, then generation_config.json, then config.json; the end ids of
        the first two are joined, because a generation config may list more than one.

        Raises:
            CheckpointError: a file is missing or damaged, or names a token that the vocabulary lacks.
        """
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise CheckpointError(
                f"no tokenizer at {file}. The model still works on token ids (prompt_token_ids); "
                "for text, put the checkpoint's tokenizer.json there"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the binding raises bare Exception for every kind of damage
            raise CheckpointError(f"{file} is not a readable tokenizer.json: {error}. Download it again") from error
        return cls(backend, **_named_ids(backend, file.parent), chat_template=_chat_template(file.parent))

    def __len__(self) -> int:
        return self.vocab_size

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same normaliser, pre-tokeniser and model (shared, not copied) without any added vocabulary."""
        plain = tokenizers.Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self._backend.pre_tokenizer
        return plain

    def encode(self, text: str, *, allow_special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of `text`; nothing is added to it except bos_id in front where `add_bos` asks for it.

        Args:
            text: any text that UTF-8 can hold; "" gives no ids.
            allow_special: spellings of added tokens become those tokens. Only for text that a template wrote.

        Raises:
            RequestError: a lone surrogate; a control token that this vocabulary cannot spell as text; no bos id.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}), which "
                "UTF-8 cannot hold. Replace it, for example by text.encode('utf-16', 'surrogatepass').decode('utf-16', "
                "'replace')"
            ) from None
        backend = self._backend if allow_special else self._plain
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        if not allow_special:
            self._refuse_control_tokens(text, ids)
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise RequestError("add_bos needs a bos token, but the tokenizer names none. Set bos_token in its config")
        return [self.bos_id, *ids]

    def _refuse_control_tokens(self, text: str, ids: list[int]) -> None:
        """Some models (whole words, unigram pieces) hold control tokens as ordinary pieces; byte-level BPE does not."""
        spelled = {token for i in self.added_ids.intersection(ids) if (token := self.id_to_token(i)) and token in text}
        if spelled:
            raise RequestError(
                f"the text spells {', '.join(map(repr, sorted(spelled)))}, which this vocabulary can only read as a "
                "control token. Remove it from the text"
            )

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`. Invalid UTF-8 becomes U+FFFD; an id without an entry (a padded embedding row) gives no text.

        Raises:
            RequestError: an id that is negative or does not fit into 32 bits.
        """
        wrong = next((i for i in ids if not 0 <= i < 2**32), None)
        if wrong is not None:
            raise RequestError(f"{wrong} is not a token id; ids are in [0, {self.vocab_size})")
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling (byte-level characters, not text), or None for an id without an entry."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary spelling or added token, or None."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token of a byte-level vocabulary; b"" for an id without an entry."""
        assert self.is_byte_level
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = _spelled_bytes(self.id_to_token(token_id) or "")
        return data

    def decode_each(self) -> list[str]:
        """The text of every id on its own, special tokens included. [vocab_size]"""
        return self._backend.decode_batch([[i] for i in range(self.vocab_size)], skip_special_tokens=False)


class Detokenizer:
    """Turns one stream of token ids into text as soon as that text can no longer change.

    The pieces of `push` and the last one of `finish`, joined, equal `tokenizer.decode(all ids)`, for valid text and for
    broken bytes alike. A byte-level vocabulary is decoded exactly, byte by byte. Any other one is decoded over a short
    window of ids; there, raw bytes of a byte-fallback vocabulary wait for the first token that is not a byte, because
    its decoder judges each run of bytes as a whole.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that are already handed out

    def push(self, token_id: int) -> str:
        """The text that became certain with this token: never half of a multi-byte character, often ""."""
        if token_id in self._skipped:
            return ""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        return "" if _BYTE_TOKEN.fullmatch(token) else self._take()

    def finish(self) -> str:
        """The rest of the text; bytes that never became a character are U+FFFD. Afterwards a new stream can begin."""
        rest = self._tokenizer.decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return rest + self._utf8.decode(b"", final=True)

    def _take(self) -> str:
        text = self._tokenizer.decode(self._window)
        certain = text.removesuffix(_REPLACEMENT)  # a trailing one may be the head of a character still to come
        delta = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        # The last token stays as context, since decoders treat the start of a text differently (leading blanks).
        if certain == text:
            self._window = self._window[-1:]
            self._shown = len(self._tokenizer.decode(self._window))
        return delta


def compression_map(tokenizer: Tokenizer) -> np.ndarray:
    """Engram's map from token id to compressed id: tokens whose texts differ only in case, accents, width or kind of
    white space share one. [vocab_size] int32

    A token's key is its normalised text, or the text itself where nothing is left of it, or its vocabulary spelling
    where it is a broken piece of UTF-8. Compressed ids count the keys in order of first appearance, so the number of
    keys is `map.max() + 1`: 99,092 for the released vocabulary. Source: the released reference's Engram hash.
    """
    normalise = _compression_normaliser().normalize_str
    seen: dict[str | None, int] = {}
    compressed = np.empty(tokenizer.vocab_size, dtype=np.int32)
    for token_id, text in enumerate(tokenizer.decode_each()):
        key = tokenizer.id_to_token(token_id) if _REPLACEMENT in text else normalise(text) or text
        compressed[token_id] = seen.setdefault(key, len(seen))
    return compressed


def _compression_normaliser() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(tokenizers.Regex(r"^ $"), _LONE_BLANK),
            normalizers.Strip(),
            normalizers.Replace(_LONE_BLANK, " "),
        ]
    )


def load_token_map(
    folder: str | Path, tokenizer: Tokenizer | None, expected_size: int, *, vocab_size: int | None = None
) -> np.ndarray:
    """The map from token id to compressed id that a checkpoint's Engram tables were trained with. [vocab_size] int32

    A `token_map.json` in `folder` (a JSON list: entry i is the compressed id of token i) is used where there is one;
    otherwise the map is computed from the tokenizer. The hash multipliers depend on the number of compressed ids, so a
    map of another size would look up unrelated rows without any visible failure; it is refused.

    Args:
        tokenizer: None where the checkpoint has none; then token_map.json is required.
        expected_size: the config's `engram_compressed_vocab_size`.
        vocab_size: rows of the model's embedding, each of which needs an entry; None takes the tokenizer's size.

    Raises:
        CheckpointError: no source for the map, or one of the wrong length, range or number of keys.
    """
    file = Path(folder) / "token_map.json"
    if file.is_file():
        if vocab_size is None and tokenizer is not None:
            vocab_size = tokenizer.vocab_size
        return _read_token_map(file, expected_size, vocab_size)
    if tokenizer is None:
        raise CheckpointError(
            f"Engram needs to know which token ids share a text, but {folder} holds neither token_map.json nor "
            "tokenizer.json. Put one of them there"
        )
    if vocab_size is not None and tokenizer.vocab_size != vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, but the model's vocab_size is {vocab_size:,}. Use the "
            "checkpoint's own tokenizer.json, or put a map of all ids into token_map.json beside it"
        )
    token_map = compression_map(tokenizer)
    keys = int(token_map.max(initial=-1)) + 1
    if keys != expected_size:
        raise CheckpointError(
            f"the tokenizer gives {keys:,} compressed ids, but the config's engram_compressed_vocab_size is "
            f"{expected_size:,}: this is not the tokenizer that the Engram tables were trained with. Use the "
            "checkpoint's own tokenizer.json, or put the map into token_map.json beside it"
        )
    return token_map


def _read_token_map(file: Path, expected_size: int, vocab_size: int | None) -> np.ndarray:
    entries = _read_json(file)
    if not isinstance(entries, list):
        raise CheckpointError(f"{file} must be a JSON list of integers, but it holds a {type(entries).__name__}")
    if vocab_size is not None and len(entries) != vocab_size:
        raise CheckpointError(
            f"{file} has {len(entries):,} entries, but the vocabulary has {vocab_size:,} ids. Write one entry per id"
        )
    for i, entry in enumerate(entries):
        if type(entry) is not int or not 0 <= entry < expected_size:
            raise CheckpointError(
                f"{file}: entry {i} is {entry!r}, but compressed ids are integers in [0, {expected_size:,}) "
                "(engram_compressed_vocab_size). Use the map that belongs to this checkpoint"
            )
    return np.array(entries, dtype=np.int32)


def _spelled_bytes(token: str) -> bytes:
    """Bytes behind a byte-level spelling. A token with any character outside that alphabet stands for its own UTF-8."""
    try:
        return bytes(_BYTE_OF_CHARACTER[c] for c in token)
    except KeyError:
        return token.encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells each byte as one visible character: itself where it is one in Latin-1, otherwise the next
    free code point from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _named_ids(backend: tokenizers.Tokenizer, folder: Path) -> dict[str, Any]:
    """The arguments bos_id, eos_ids and pad_id of `Tokenizer`, from the configs beside tokenizer.json."""
    by_name = _ids_by_name(backend, folder / "tokenizer_config.json")
    generation = _ids_by_number(backend, folder / "generation_config.json")
    model = _ids_by_number(backend, folder / "config.json")

    def first(role: str) -> int | None:
        return next((ids[0] for ids in (by_name[role], generation[role], model[role]) if ids), None)

    eos = [*by_name["eos"], *generation["eos"]] or model["eos"]
    return {"bos_id": first("bos"), "eos_ids": tuple(dict.fromkeys(eos)), "pad_id": first("pad")}


def _chat_template(folder: Path) -> str | None:
    """The template in chat_template.jinja or tokenizer_config.json: the only one, or that named "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = _read_json_object(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _ids_by_name(backend: tokenizers.Tokenizer, file: Path) -> dict[str, list[int]]:
    """Role -> the id of the token that a tokenizer_config.json names for it; [] where it names none."""
    config = _read_json_object(file)
    found: dict[str, list[int]] = {}
    for role in _ROLES:
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        token_id = None if token is None else backend.token_to_id(token)
        if token is not None and token_id is None:
            raise CheckpointError(
                f"{file} names {token!r} as {role}_token, but the vocabulary has no such token. "
                "Use the tokenizer files of one checkpoint"
            )
        found[role] = [] if token_id is None else [token_id]
    return found


def _ids_by_number(backend: tokenizers.Tokenizer, file: Path) -> dict[str, list[int]]:
    """Role -> the ids that a generation_config.json or config.json (or its text_config) gives it; [] for none."""
    config = _read_json_object(file)
    config = (config.get("text_config") or {}) | config
    found: dict[str, list[int]] = {}
    for role in _ROLES:
        value = config.get(f"{role}_token_id")
        found[role] = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in found[role]:
            if type(token_id) is not int or token_id < 0 or backend.id_to_token(token_id) is None:
                raise CheckpointError(
                    f"{file}: {role}_token_id is {value!r}, but {token_id!r} is not an id of the vocabulary. "
                    "Use the tokenizer files of one checkpoint"
                )
    return found


def _read_json_object(file: Path) -> dict[str, Any]:
    """The object in `file`, {} where there is no such file."""
    content = _read_json(file) if file.is_file() else {}
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, but it holds a {type(content).__name__}")
    return content


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}. Download it again") from error
