"""What changes logits before a token is chosen: penalties, biases, bans and constraints.

Each `Processor` works on the logits of one position and knows the tokens before it. To verify a block of drafts, a
draft is pushed before the next position is looked at and taken back where it was not accepted, so that every position
sees the history that plain decoding would have shown it.

Order, as in vLLM: constraint and bans, logit_bias, penalties; the temperature comes later (sampler.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from finback.base.runtime import RequestError
from finback.engine.request import SamplingParams
from finback.io.text import Tokenizer

BANNED = float("-inf")


class Processor(Protocol):
    """One change to logits."""

    def apply(self, line: Tensor, output: Sequence[int]) -> None:
        """Change `line` [V] float64 in place, for the token after `output` (generated ids, drafts included)."""
        ...

    def push(self, token: int) -> None:
        """The output grew by `token`."""
        ...

    def pop(self, token: int) -> None:
        """The output's last token, `token`, is taken back."""
        ...


class Stateless:
    """A processor that reads all it needs from the output."""

    def push(self, token: int) -> None:
        pass

    def pop(self, token: int) -> None:
        pass


class Allowed(Stateless):
    """Bans every token but the given ones."""

    def __init__(self, ids: Sequence[int]):
        self._ids = torch.tensor(sorted(set(ids)))

    def apply(self, line: Tensor, output: Sequence[int]) -> None:
        self._ids = self._ids.to(line.device)
        kept = line[self._ids]
        line.fill_(BANNED)
        line[self._ids] = kept


class BadWords(Stateless):
    """Bans the last token of a word where the output ends with the rest of it."""

    def __init__(self, words: Sequence[Sequence[int]]):
        self._words = [(list(word[:-1]), word[-1]) for word in words]

    def apply(self, line: Tensor, output: Sequence[int]) -> None:
        for head, last in self._words:
            if not head or list(output[-len(head) :]) == head:
                line[last] = BANNED


class MinTokens(Stateless):
    """Bans `ids`, which would end the output, before it has `count` tokens."""

    def __init__(self, count: int, ids: Sequence[int]):
        self._count, self._ids = count, sorted(set(ids))

    def apply(self, line: Tensor, output: Sequence[int]) -> None:
        if len(output) < self._count:
            line[self._ids] = BANNED


class Bias(Stateless):
    """Adds a number to the logits of some tokens."""

    def __init__(self, bias: dict[int, float]):
        self._ids = torch.tensor(list(bias), dtype=torch.int64)
        self._values = torch.tensor(list(bias.values()), dtype=torch.float64)

    def apply(self, line: Tensor, output: Sequence[int]) -> None:
        line[self._ids.to(line.device)] += self._values.to(line.device)


class Penalties:
    """Repetition penalty over prompt and output, presence and frequency penalty over the output."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int):
        self._repetition = params.repetition_penalty
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._counts = torch.zeros(vocab_size, dtype=torch.int64)  # in the output
        self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
        self._in_prompt[list(prompt_ids)] = True

    def apply(self, line: Tensor, output: Sequence[int]) -> None:
        self._counts, self._in_prompt = self._counts.to(line.device), self._in_prompt.to(line.device)
        used = self._counts > 0
        if self._repetition != 1:
            scaled = torch.where(line > 0, line / self._repetition, line * self._repetition)
            line.copy_(torch.where(used | self._in_prompt, scaled, line))
        line -= self._frequency * self._counts.to(line.dtype)
        line -= self._presence * used.to(line.dtype)

    def push(self, token: int) -> None:
        self._counts[token] += 1

    def pop(self, token: int) -> None:
        self._counts[token] -= 1


class Processors:
    """All processors of a request, and its output so far. False where none is asked for.

    constraint: one more processor (constraints.py). ends: ids that `min_tokens` holds back. bad_words: id sequences;
    None: those of `params`, which then must not hold strings. Raises RequestError for an id outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        *,
        constraint: Processor | None = None,
        ends: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] | None = None,
    ):
        words = bad_word_ids(params, None) if bad_words is None else bad_words
        check_ids(params, words, vocab_size)
        self.output: list[int] = []
        parts: list[Processor] = [] if constraint is None else [constraint]
        if params.allowed_token_ids is not None:
            parts.append(Allowed(params.allowed_token_ids))
        if words:
            parts.append(BadWords(words))
        if params.min_tokens and ends:
            parts.append(MinTokens(params.min_tokens, ends))
        if params.logit_bias:
            parts.append(Bias(dict(params.logit_bias)))
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            parts.append(Penalties(params, prompt_ids, vocab_size))
        self._parts = parts

    def __bool__(self) -> bool:
        return bool(self._parts)

    def line(self, logits: Tensor) -> Tensor:
        """Logits [V] of the next token -> a processed copy, float64. Raises RequestError where no token is left."""
        line = logits.to(torch.float64, copy=True)
        for part in self._parts:
            part.apply(line, self.output)
        if float(line.max()) == BANNED:
            raise RequestError(
                f"no token is allowed at position {len(self.output)} of the output: its form, allowed_token_ids, "
                "bad_words and min_tokens rule out all of them together. Relax one"
            )
        return line

    def push(self, token: int) -> None:
        """Append a token, or a draft, to the output."""
        self.output.append(token)
        for part in self._parts:
            part.push(token)

    def pop(self, count: int) -> None:
        """Take back the last `count` tokens."""
        for _ in range(count):
            token = self.output.pop()
            for part in self._parts:
                part.pop(token)


def check_ids(params: SamplingParams, bad_words: Sequence[Sequence[int]], vocab_size: int) -> None:
    """RequestError for an id of a setting that is outside the vocabulary."""
    given = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "bad_words": [i for word in bad_words for i in word],
    }
    for name, ids in given.items():
        if (bad := next((i for i in ids if i >= vocab_size), None)) is not None:
            raise RequestError(f"{name} holds the token id {bad}; the vocabulary has ids 0..{vocab_size - 1}")


def bad_word_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """`bad_words` as id sequences: a string as the start of a text and, where that gives other ids, after a blank.
    Raises RequestError for a string without a tokenizer."""
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if not isinstance(word, str):
            found[tuple(word)] = None
        elif tokenizer is None:
            raise RequestError(f"bad_words holds the string {word!r}, but there is no tokenizer; give token ids")
        else:
            for text in (word.lstrip(), " " + word.lstrip()):
                if ids := tokenizer.encode(text):
                    found[tuple(ids)] = None
    return list(found)
