"""One request while it runs: picks its tokens, turns them into text, knows when to stop."""

from __future__ import annotations

import torch
from torch import Tensor

from finback.engine import sampler
from finback.engine.request import Delta, RequestOutput, SamplingParams, SequenceState
from finback.engine.stops import StopStrings
from finback.io.text import Detokenizer, Tokenizer


class Running:
    """state: its tokens, the prompt first. longest: the most tokens it can ever have."""

    def __init__(self, state: SequenceState, params: SamplingParams, tokenizer: Tokenizer | None, max_positions: int):
        self.state, self.params = state, params
        self.output = RequestOutput(list(state.tokens), logprobs=None if params.logprobs is None else [])
        self.longest = min(len(state.tokens) + params.max_tokens, max_positions)
        self._text = Detokenizer(tokenizer, skip_special=True) if tokenizer is not None else None
        self._stops = StopStrings(params.stop)
        self._stop_ids = set(params.stop_token_ids)
        if tokenizer is not None and not params.ignore_eos:
            self._stop_ids |= set(tokenizer.eos_ids)
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def advance(self, logits: Tensor) -> Delta:
        """Pick the next token from logits [V] and take it in."""
        token = sampler.pick(logits, self.params, self._generator)
        out = self.output
        if out.logprobs is not None:
            out.logprobs.append(sampler.logprobs(logits, token, self.params.logprobs or 0))
        self.state.tokens.append(token)
        out.token_ids.append(token)
        text = self._stops.push(self._text.push(token)) if self._text is not None else ""
        if token in self._stop_ids or self._stops.matched is not None:
            out.finish_reason = "stop"
        elif len(self.state.tokens) >= self.longest:
            out.finish_reason = "length"
        if out.finish_reason is not None and self._text is not None:
            text += self._stops.push(self._text.finish()) + self._stops.finish()
        out.text += text
        return Delta(text, (token,), out.finish_reason)
