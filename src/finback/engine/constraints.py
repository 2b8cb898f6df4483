"""Outputs of a given form: a JSON schema, a regular expression or a Lark grammar, kept by a mask over the logits.

The library `llguidance` (extra `structured`) does the parsing. A constraint is a processor like any other (logits.py):
it moves forward over drafts and back again where they are not accepted. An end-of-sequence token is allowed exactly
where the output is complete; control tokens never are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finback.base.runtime import RequestError
from finback.engine.logits import BANNED
from finback.engine.request import SamplingParams
from finback.io.text import Tokenizer


class Grammars:
    """Makes constraints for one vocabulary. Preparing it (about a second for 130,000 ids) happens at the first one.

    vocab_size: length of a line of logits, which may exceed the tokenizer's; ids without a token are banned.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def make(self, params: SamplingParams) -> Constraint | None:
        """The constraint that `params` ask for, None for none.

        Raises RequestError for a schema, expression or grammar that cannot be used, with the library's reason; without
        the library; for a checkpoint without a byte-level tokenizer that names an end-of-sequence token.
        """
        name, source = next(
            ((n, v) for n in ("json_schema", "regex", "grammar") if (v := getattr(params, n)) is not None), ("", None)
        )
        if source is None:
            return None
        library = _library(name)
        matcher = library.LLMatcher
        try:
            if name == "json_schema":
                grammar = matcher.grammar_from_json_schema(source if isinstance(source, str) else dict(source))
            else:
                grammar = (matcher.grammar_from_regex if name == "regex" else matcher.grammar_from_lark)(source)
        except (ValueError, TypeError) as error:
            raise RequestError(f"{name} cannot be used: {error}. A schema is a JSON object") from None
        if reason := matcher.validate_grammar(grammar, self._vocabulary(name)):
            if not reason.startswith("WARNING"):
                raise RequestError(f"{name} cannot be used: {' '.join(reason.split())}")
        return Constraint(matcher(self._vocabulary(name), grammar, log_level=0), name, self._vocab_size)

    def _vocabulary(self, name: str) -> Any:
        tokenizer = self._tokenizer
        if tokenizer is None or not tokenizer.is_byte_level or not tokenizer.eos_ids:
            raise RequestError(
                f"{name} needs a byte-level tokenizer with an end-of-sequence token; this model has none"
            )
        return self._prepared

    @cached_property
    def _prepared(self) -> Any:
        assert self._tokenizer is not None
        return _library("json_schema").LLTokenizer(
            _Vocabulary(self._tokenizer), eos_token=list(self._tokenizer.eos_ids)
        )


class _Vocabulary:
    """A `Tokenizer` in the words of the library."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.added_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


class Constraint:
    """Where one output stands in its grammar. See `finback.engine.logits.Processor`."""

    def __init__(self, matcher: Any, name: str, vocab_size: int):
        self._matcher, self._name, self._vocab_size = matcher, name, vocab_size

    def apply(self, line: Tensor, output: Sequence[int]) -> None:
        line.masked_fill_(~self.allowed().to(line.device), BANNED)

    def allowed(self) -> Tensor:
        """[V] bool: tokens that may come next, an end-of-sequence token where the output is complete."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        self._check()
        mask = np.zeros(self._vocab_size, dtype=bool)
        count = min(self._vocab_size, len(bits))
        mask[:count] = bits[:count]
        return torch.from_numpy(mask)

    @property
    def complete(self) -> bool:
        """Whether the output so far has the whole form."""
        return self._matcher.is_accepting()

    def push(self, token: int) -> None:
        """Raises RequestError for a token that `allowed` rules out."""
        self._matcher.consume_token(token)
        self._check()

    def pop(self, token: int) -> None:
        self._matcher.rollback(1)
        self._check()

    def _check(self) -> None:
        """The library never raises: it enters an error state (too complex a grammar, a token that does not fit)."""
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())
            raise RequestError(f"{self._name} stopped working in the middle of the output: {reason}")


def _library(name: str) -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(f"{name} needs the llguidance package: pip install 'finback[structured]'") from None
    return llguidance
