"""Which drafts become output. One `Picker` per request turns logits into tokens, with drafts or without.

Row i of the logits [k + 1, V] follows the i-th draft (row 0: the last known token). The result is the accepted drafts
and one more token, so plain decoding is the case k = 0. Notation: p is the distribution that the request asks for
(after penalties, temperature, top-p, ...), q the one that a draft was drawn from, d the draft.

* Greedy, and rule "coupled": pick each position's token as without drafts; accept a draft where it is that token.
* "standard": accept d with probability min(1, p(d) / q(d)); after the first refusal draw from max(p - q, 0).
  Leviathan et al. 2023.
* "block": r_0 = 1, r_i = min(1, r_{i-1} p_i(d_i) / q_i(d_i)); R_i = sum over x of max(r_i p_{i+1}(x) - q_{i+1}(x), 0);
  h_i = R_i / (R_i + 1 - r_i), h_k = r_k. The largest i with u_i <= h_i drafts are accepted; then draw from
  max(r_i p - q, 0). Sun et al. 2024.

Random numbers. "coupled" keys each draw by (seed, position in the output), so its text does not depend on drafts at
all. The other two key theirs by (seed, output length when the block began, slot), which no later block repeats: after
"block" has judged numbers of positions that it then refused, using them again would bias the text.

For those two, how many drafts are offered must not depend on the drafts themselves: whether slot i is verified may
depend on drafts before i only (drafters.py keeps to that).
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from finback.base.runtime import FinbackError, NonFiniteError, RequestError
from finback.engine import sampler
from finback.engine.constraints import Constraint, Grammars
from finback.engine.logits import Processors, bad_word_ids
from finback.engine.request import SamplingParams, TokenLogprobs
from finback.engine.sampler import ACCEPT, DRAFT, TOKEN, distribution, draw_key, key_tensor
from finback.io.text import Tokenizer


@dataclass(frozen=True)
class Drafted:
    """Drafts for one request. tokens: k ids, may be empty. probs: [k, V] float64, what each was drawn from; None: it
    was certain. confidence: chance that a draft is accepted when all before it are, None where the drafter has none."""

    tokens: list[int]
    probs: Tensor | None = None
    confidence: list[float] | None = None


@dataclass(frozen=True)
class Verified:
    """tokens: the `accepted` first drafts, then one more; they end with the first token that ends the output, if any.
    logprobs: one entry a token where the request wants them."""

    tokens: list[int]
    accepted: int
    logprobs: list[TokenLogprobs] | None = None


class Picker:
    """Picks the tokens of one request, and remembers them.

    eos_ids: ids that end the output unless `ignore_eos`. constraint: from `Grammars.make`. bad_words: as ids, None
    where `params` holds no strings. rule: see above. Raises RequestError for ids outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        *,
        constraint: Constraint | None = None,
        eos_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] | None = None,
        rule: str = "coupled",
    ):
        self.params, self.greedy = params, sampler.is_greedy(params)
        self.coupled = self.greedy or rule == "coupled"
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self._judge = block_rule if rule == "block" else standard_rule
        self._vocab_size = vocab_size
        ends = {*eos_ids, *params.stop_token_ids}
        self._ends = set(params.stop_token_ids) if params.ignore_eos else ends
        self._processors = Processors(
            params, prompt_ids, vocab_size, constraint=constraint, ends=sorted(ends), bad_words=bad_words
        )

    @property
    def output(self) -> Sequence[int]:
        """Tokens picked so far."""
        return self._processors.output

    def verify(self, logits: Tensor, drafted: Drafted | None = None) -> Verified:
        """The next tokens, from logits [k + 1, V] that saw the k drafts. They count as output afterwards.

        Raises NonFiniteError for NaN or infinity in `logits`, RequestError where the settings leave no token.
        """
        if not all(_finite_rows(logits)):
            raise NonFiniteError(_NON_FINITE)
        return self._verify(logits, drafted, None)

    def draft_keys(self, count: int) -> list[int]:
        """Keys of the draws of the next `count` drafts (sampler.race)."""
        if self.coupled:
            return [self.token_key(i) for i in range(count)]
        return [draw_key(self.seed, DRAFT, len(self.output), i) for i in range(count)]

    def token_key(self, ahead: int) -> int:
        """Key of the draw of the token `ahead` positions after the next one, under rule "coupled"."""
        return draw_key(self.seed, TOKEN, len(self.output) + ahead)

    @property
    def plain(self) -> bool:
        """Whether each row's token depends on nothing but that row."""
        return self.coupled and not self._processors and self.params.logprobs_mode == "raw_logprobs"

    def _verify(self, logits: Tensor, drafted: Drafted | None, picks: list[int] | None) -> Verified:
        """picks: every row's token, where it is known already."""
        drafts = drafted.tokens if drafted is not None else []
        assert logits.shape == (len(drafts) + 1, self._vocab_size)
        kept: list[Tensor] | None = None
        if self.params.logprobs is not None and self.params.logprobs_mode == "processed_logprobs":
            kept = []
        if self.coupled:
            tokens = self._match(logits, drafts, kept, picks)
        else:
            tokens = self._reject(logits, drafts, drafted.probs if drafted is not None else None, kept)
        if self.params.logprobs is None:
            return Verified(tokens, len(tokens) - 1)
        lines = torch.log_softmax(logits[: len(tokens)].double(), dim=-1) if kept is None else kept
        reported = [
            sampler.logprobs(line, token, self.params.logprobs) for line, token in zip(lines, tokens, strict=False)
        ]
        return Verified(tokens, len(tokens) - 1, reported)

    # -- acceptance by equality ------------------------------------------------------------------------------------

    def _match(
        self, logits: Tensor, drafts: Sequence[int], kept: list[Tensor] | None, picks: list[int] | None
    ) -> list[int]:
        tokens: list[int] = []
        try:
            for i, token in enumerate(self._picks(logits, kept) if picks is None else picks):
                self._processors.push(token)
                tokens.append(token)
                if i == len(drafts) or token != drafts[i] or token in self._ends:
                    break
        except RequestError:  # no token may follow: plain decoding gives those before it, and fails at the next step
            if not tokens:
                raise
        return tokens

    def _picks(self, logits: Tensor, kept: list[Tensor] | None) -> Iterator[int]:
        """Each row's token as plain decoding picks it; the next one may be asked for once the last one was pushed."""
        keys = [self.token_key(i) for i in range(len(logits))]
        if not self._processors:
            yield from self._pick(logits, keys, kept)
            return
        for line, key in zip(logits, keys, strict=True):
            yield from self._pick(self._processors.line(line).unsqueeze(0), [key], kept)

    def _pick(self, lines: Tensor, keys: Sequence[int], kept: list[Tensor] | None) -> list[int]:
        """The tokens of processed logits [n, V]; their log probabilities [V] are appended to `kept`."""
        tokens, probs = _choose(lines, self, keys)
        if kept is not None:
            kept += torch.log_softmax(lines.double(), dim=-1) if probs is None else probs.log()
        return tokens

    # -- acceptance by rejection sampling --------------------------------------------------------------------------

    def _reject(self, logits: Tensor, drafts: list[int], probs: Tensor | None, kept: list[Tensor] | None) -> list[int]:
        start = len(self.output)
        p, drafts, open_end = self._targets(logits, drafts)
        count = len(drafts)
        ids = torch.tensor(drafts, dtype=torch.int64, device=p.device)
        q = F.one_hot(ids, p.shape[1]).double() if probs is None else probs[:count].to(p.device)
        keys = key_tensor([draw_key(self.seed, ACCEPT, start, i) for i in range(count)]).to(p.device)
        u = sampler.uniform(keys, torch.zeros_like(keys))
        accepted, rest = self._judge(p.unsqueeze(0), q.unsqueeze(0), ids.unsqueeze(0), u.unsqueeze(0))
        tokens = drafts[: int(accepted)]
        if len(tokens) < count or open_end:
            tokens += sampler.race(rest, key_tensor([draw_key(self.seed, TOKEN, start, len(tokens))])).tolist()
        for token in tokens:
            self._processors.push(token)
        if kept is not None:
            kept += p[: len(tokens)].log()
        return tokens

    def _targets(self, logits: Tensor, drafts: list[int]) -> tuple[Tensor, list[int], bool]:
        """p [k' + 1, V], the k' first drafts, and whether a token can follow them. They go up to one that cannot be
        accepted, that ends the output, or after which the settings leave no token; then the last row is not used."""
        start, rows, count = len(self.output), [], len(drafts)
        plain = None if self._processors else distribution(logits, self.params)
        for i in range(len(logits)):
            try:
                rows.append(distribution(self._processors.line(logits[i]), self.params) if plain is None else plain[i])
            except RequestError:
                if not i:
                    raise
                count = i
                break
            if i == len(drafts):
                break
            if drafts[i] in self._ends or float(rows[i][drafts[i]]) == 0:
                count = i + 1
                break
            self._processors.push(drafts[i])
        self._processors.pop(len(self.output) - start)
        open_end = len(rows) > count
        return torch.stack(rows if open_end else [*rows, rows[-1]]), drafts[:count], open_end


def verify_batch(work: Sequence[tuple[Picker, Drafted | None]], logits: Tensor) -> list[Verified | FinbackError]:
    """`Picker.verify` for many requests at once. logits: [sum of (k + 1), V], the requests' rows one after another.

    What fails for one request is its entry of the result, and leaves the others alone. Requests without settings that
    look back, and with the same temperature and filters, are picked for together.
    """
    finite = _finite_rows(logits)
    ends = list(itertools.accumulate(1 + (len(d.tokens) if d is not None else 0) for _, d in work))
    spans = list(zip([0, *ends], ends, strict=False))
    picks = _shared_picks([picker for picker, _ in work], spans, logits)
    results: list[Verified | FinbackError] = []
    for i, ((picker, drafted), (begin, end)) in enumerate(zip(work, spans, strict=True)):
        if not all(finite[begin:end]):
            results.append(NonFiniteError(_NON_FINITE))
            continue
        try:
            results.append(picker._verify(logits[begin:end], drafted, picks.get(i)))
        except FinbackError as error:
            results.append(error)
    return results


def _finite_rows(logits: Tensor) -> list[bool]:
    """Whether each row of [n, V] is free of NaN and infinity."""
    finite = logits.sum(dim=1).isfinite()  # one pass without a copy; only an overflow of the sum itself is in doubt
    return finite.tolist() if bool(finite.all()) else logits.isfinite().all(dim=1).tolist()


def _shared_picks(pickers: Sequence[Picker], spans: Sequence[tuple[int, int]], logits: Tensor) -> dict[int, list[int]]:
    """By request: each row's token, where it depends on nothing but that row."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for i, picker in enumerate(pickers):
        if picker.plain:
            p = picker.params
            how = () if picker.greedy else (p.temperature, p.min_p, p.top_k, p.top_p)
            groups.setdefault(how, []).append(i)
    picks = {}
    for members in groups.values():
        rows = [row for i in members for row in range(*spans[i])]
        lines = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
        keys = [pickers[i].token_key(row - spans[i][0]) for i in members for row in range(*spans[i])]
        tokens = iter(_choose(lines, pickers[members[0]], keys)[0])
        for i in members:
            picks[i] = [next(tokens) for _ in range(*spans[i])]
    return picks


def _choose(lines: Tensor, picker: Picker, keys: Sequence[int]) -> tuple[list[int], Tensor | None]:
    """A token of each line of processed logits [n, V], and the probabilities they were drawn from (None: greedy)."""
    if picker.greedy:
        return lines.argmax(dim=1).tolist(), None
    probs = distribution(lines, picker.params)
    return sampler.race(probs, key_tensor(keys)).tolist(), probs


class Pickers:
    """Makes the pickers of one engine. Preparing a vocabulary for constraints happens at the first one."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, rule: str = "coupled"):
        self._tokenizer, self._vocab_size, self._rule = tokenizer, vocab_size, rule
        self._grammars = Grammars(tokenizer, vocab_size)

    def make(self, params: SamplingParams, prompt_ids: Sequence[int]) -> Picker:
        """A picker for a request. Raises RequestError for settings that this model cannot serve."""
        return Picker(
            params,
            prompt_ids,
            self._vocab_size,
            constraint=self._grammars.make(params),
            eos_ids=self._tokenizer.eos_ids if self._tokenizer is not None else (),
            bad_words=bad_word_ids(params, self._tokenizer),
            rule=self._rule,
        )


# -- rules, over n independent blocks ------------------------------------------------------------------------------
# p: [n, k + 1, V], q: [n, k, V] probabilities. drafts: [n, k] int64. u: [n, k] uniform in (0, 1).
# -> accepted [n] int64, and [n, V]: what the token after them is drawn from (not normalised).


def standard_rule(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Leviathan et al. 2023, algorithm 1."""
    chosen_p, chosen_q = _of_drafts(p, drafts), _of_drafts(q, drafts)
    accepted = (chosen_p > u * chosen_q).long().cumprod(dim=1).sum(dim=1)
    return accepted, _rest(p, q, accepted, torch.ones_like(p[:, 0, 0]))


def block_rule(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2."""
    count = drafts.shape[1]
    ratio = torch.ones_like(p[:, 0, 0])
    accepted, at = torch.zeros_like(ratio, dtype=torch.int64), ratio
    odds = _of_drafts(p, drafts) / _of_drafts(q, drafts)
    for i in range(1, count + 1):
        ratio = (ratio * odds[:, i - 1]).clamp(max=1)
        bar = ratio
        if i < count:
            excess = (ratio[:, None] * p[:, i] - q[:, i]).clamp(min=0).sum(dim=1)
            total = excess + 1 - ratio
            bar = torch.where(total > 0, excess / total, 1.0)  # p = q and all accepted: go on
        taken = u[:, i - 1] <= bar
        accepted, at = torch.where(taken, i, accepted), torch.where(taken, ratio, at)
    return accepted, _rest(p, q, accepted, at)


def _of_drafts(probs: Tensor, drafts: Tensor) -> Tensor:
    """[n, k] probabilities of the drafted tokens."""
    return probs[:, : drafts.shape[1]].gather(2, drafts.unsqueeze(2)).squeeze(2)


def _rest(p: Tensor, q: Tensor, accepted: Tensor, ratio: Tensor) -> Tensor:
    """max(ratio * p - q, 0) at each block's first refused slot, p itself after its last slot; [n, V]."""
    index = torch.arange(len(p), device=p.device)
    row = p[index, accepted]
    refused = F.pad(q, (0, 0, 0, 1))[index, accepted]  # zeros after the last slot
    rest = (ratio.unsqueeze(1) * row - refused).clamp(min=0)
    return torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, row)  # nothing left by rounding only


_NON_FINITE = (
    "the model computed NaN or infinity in the logits of this request; no text is made from them. "
    "Check the weights, or run with dtype='float32'"
)
