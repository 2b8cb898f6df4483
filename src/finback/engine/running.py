"""One request while it runs: takes its tokens in, turns them into text, knows when to stop."""

from __future__ import annotations

from collections import deque

from finback.base.runtime import FinbackError
from finback.engine.request import Delta, RequestOutput, SamplingParams
from finback.engine.scheduler import Slot
from finback.engine.stops import StopStrings
from finback.engine.verify import Picker, Verified
from finback.io.text import Detokenizer, Tokenizer


class Running:
    """slot: its sequence. picker: picks its tokens. longest: the most tokens that the sequence can have. deltas: what
    steps added, for whoever takes them out. arrived, last_time: clock at its arrival and its last token."""

    def __init__(
        self,
        request_id: str,
        slot: Slot,
        params: SamplingParams,
        picker: Picker,
        tokenizer: Tokenizer | None,
        longest: int,
    ):
        self.request_id, self.slot, self.params, self.picker = request_id, slot, params, picker
        self.output = RequestOutput(
            list(slot.state.tokens), logprobs=None if params.logprobs is None else [], request_id=request_id
        )
        self.longest = min(len(slot.state.tokens) + params.max_tokens, longest)
        self.deltas: deque[Delta] = deque()
        self.arrived = self.last_time = 0.0
        self._text = Detokenizer(tokenizer, skip_special=True) if tokenizer is not None else None
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._stop_ids = set(params.stop_token_ids)
        if tokenizer is not None and not params.ignore_eos:
            self._stop_ids |= set(tokenizer.eos_ids)

    @property
    def most_drafts(self) -> int:
        """Drafts that can be of use: one token is picked after them."""
        return self.longest - len(self.slot.state.tokens) - 1

    def advance(self, verified: Verified) -> Delta:
        """Take in verified tokens up to the one that ends the request; what follows it never existed."""
        out, text, taken = self.output, "", []
        for token in verified.tokens:
            self.slot.state.tokens.append(token)
            taken.append(token)
            text += self._stops.push(self._text.push(token)) if self._text is not None else ""
            if token in self._stop_ids or self._stops.matched is not None:
                out.finish_reason = "stop"
            elif len(self.slot.state.tokens) >= self.longest:
                out.finish_reason = "length"
            if out.finish_reason is not None:
                break
        if out.finish_reason is not None and self._text is not None:
            text += self._stops.push(self._text.finish()) + self._stops.finish()
            if self._stops.matched is not None:  # what `finish` gave out may have completed it
                out.finish_reason = "stop"
        out.token_ids += taken
        out.text += text
        logprobs = None
        if out.logprobs is not None and verified.logprobs is not None:
            logprobs = tuple(verified.logprobs[: len(taken)])
            out.logprobs += logprobs
        cached = self.slot.cached_tokens or 0
        return Delta(text, tuple(taken), out.finish_reason, logprobs, stop=self._stops.matched, cached_tokens=cached)

    def fail(self, error: FinbackError) -> Delta:
        """End the request with an error."""
        self.output.finish_reason, self.output.error = "error", error
        return Delta("", (), "error", error=error)
