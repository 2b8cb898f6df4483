"""The engine: many requests, one forward a step.

A step: the scheduler says which tokens run; drafts are proposed for the sequences that generate; one forward runs
prompts, generated tokens and drafts together; wanted rows become tokens; what was accepted is committed, the rest is
overwritten later. Requests can be added and given up between steps. Nothing here knows a model family.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from finback.base.runtime import FinbackError, NonFiniteError, RequestError
from finback.engine.args import EngineArgs, page_counts, page_tokens_for
from finback.engine.drafters import Drafter, DraftRequest, make_drafter
from finback.engine.prefix import PageKeys, PrefixCache
from finback.engine.request import Delta, SamplingParams, SequenceState
from finback.engine.runner import Runner, Work, tail_reach
from finback.engine.running import Running
from finback.engine.scheduler import Limits, Scheduler, Slot
from finback.engine.stats import Stats
from finback.engine.verify import Pickers, verify_batch
from finback.io.text import Tokenizer

_MEASURED_REQUESTS = 8  # batch up to which the cost table of drafts is measured


class Engine:
    """model: any `finback.models.base.Model`. tokenizer: None = ids only. drafter: overrides `args.speculative`.

    Not thread-safe: add, abort and step from one thread (`AsyncEngine` does). Raises ConfigError.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer | None, args: EngineArgs, *, drafter: Drafter | None = None):
        self.args, self.tokenizer, self.stats = args, tokenizer, Stats()
        self.max_model_len = min(model.max_positions, args.max_model_len or model.max_positions)
        page_tokens = page_tokens_for(model, args.block_size)
        counts = page_counts(model, args, page_tokens, self.max_model_len)
        self.runner = Runner(
            model, [], 0, backend=args.backend, page_tokens=page_tokens, counts=counts, deterministic=args.deterministic
        )
        pages = self.runner.pages
        self.cache = PrefixCache(pages, tail_reach(model)) if args.caches_prefixes else None
        limits = Limits(args.max_num_seqs, args.max_num_batched_tokens, args.prefix_keep_pages)
        self.scheduler = Scheduler(pages, self.cache, limits, args.prefill, self.stats)
        self.stats.pages_total = {cls: pool.usable for cls, pool in pages.pools.items()}
        rule = "coupled" if args.speculative is None else args.speculative.rule
        self._pickers = Pickers(tokenizer, model.vocab_size, rule)
        self._requests: dict[Slot, Running] = {}
        self._arrivals = itertools.count()
        self.runner.drafter = drafter or self._make_drafter(model)

    def _make_drafter(self, model: Any) -> Drafter | None:
        config = self.args.speculative
        if config is None:
            return None
        drafter = make_drafter(model, self.runner.store, config, backend=self.args.backend)
        if config.verify_length == "adaptive" and hasattr(drafter, "measure"):
            drafter.measure(min(self.args.max_num_seqs, _MEASURED_REQUESTS))
            self.runner.store.clear()  # measuring writes anywhere; page 0 has to be zeros
        return drafter

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    def add(self, state: SequenceState, params: SamplingParams, request_id: str | None = None) -> Running:
        """Take a request in; `step` runs it. Its deltas come out of `step` and wait in `.deltas` too. Raises
        RequestError: too long for the model or the memory, settings that cannot be served, a full queue."""
        number = next(self._arrivals)
        self._check(state)
        picker = self._pickers.make(params, state.tokens)
        slot = Slot(state, arrival=number)
        running = Running(request_id or f"request-{number}", slot, params, picker, self.tokenizer, self.max_model_len)
        if not self.scheduler.can_ever_hold(running.longest):
            raise RequestError(
                f"a request of up to {running.longest} tokens does not fit the memory for rows; ask for fewer "
                "max_tokens, or raise kv_cache_memory_bytes"
            )
        if self.cache is not None:
            slot.keys = PageKeys(state.tokens, self.runner.pages.page_tokens, _digests(state))
        running.arrived = running.last_time = self.stats.clock()
        self._requests[slot] = running
        self.scheduler.add(slot)
        self.stats.requests += 1
        self.stats.prompt_tokens += len(state.tokens)
        self._count()
        return running

    def _check(self, state: SequenceState) -> None:
        length, queued = len(state.tokens), self.args.max_queued_requests
        if length + 1 > self.max_model_len:
            raise RequestError(
                f"the prompt and one new token: {length + 1} tokens, but the model has {self.max_model_len} positions"
            )
        if queued is not None and len(self.scheduler.waiting) >= queued:
            raise RequestError(
                f"the queue is full: {queued} requests are waiting already (max_queued_requests); try again later"
            )

    def abort(self, running: Running) -> None:
        """Give a request up: its pages are free at once. Nothing happens if it has ended."""
        if running.slot in self._requests:
            running.output.finish_reason = "abort"
            self._end(running)
            self._count()

    def _end(self, running: Running, *, keep: bool = True) -> None:
        del self._requests[running.slot]
        self.scheduler.finish(running.slot, keep=keep)
        running.output.cached_tokens = running.slot.cached_tokens or 0
        self.stats.finished[running.output.finish_reason or ""] += 1

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Running, Delta]]:
        """Run one forward, and return what it added to which requests."""
        clock = self.stats.clock
        started = clock()
        if self.runner.drafter is not None:
            most = self.runner.drafter.max_tokens
            for slot in self.scheduler.running:
                slot.most_drafts = max(0, min(most, self._requests[slot].most_drafts))
        plan = self.scheduler.plan()
        if not plan:
            return []
        work = self._draft(plan)
        deltas = self._run(work)
        now = clock()
        self._measure(work, deltas, started, now)
        return deltas

    def _draft(self, plan: Sequence[tuple[Slot, int]]) -> list[Work]:
        """The planned tokens, with drafts for the sequences that have room for some."""
        drafter = self.runner.drafter
        if drafter is None:
            return [Work(slot, count) for slot, count in plan]
        work, asking, limits = [], [], []
        for slot, count in plan:
            generating = slot.pending == 1
            work.append(Work(slot, 1 if generating else count))
            if generating:
                asking.append(work[-1])
                limits.append(count - 1)
        if any(limits):
            requests = [
                DraftRequest(self._requests[w.slot].picker, w.slot.state.tokens, w.slot.table.pages, limit)
                for w, limit in zip(asking, limits, strict=True)
            ]
            others = sum(w.count for w in work) - len(asking)
            for w, drafted in zip(asking, drafter.propose(requests, other_tokens=others), strict=True):
                w.drafted = drafted if drafted.tokens else None
        return work

    def _run(self, work: list[Work]) -> list[tuple[Running, Delta]]:
        """One forward and what comes of it. What fails for one sequence leaves the others alone."""
        clock = self.stats.clock
        started = clock()
        try:
            logits = self.runner.step(work)
        except NonFiniteError as error:
            if len(work) == 1:
                return self._fail(work[0], error)
            return [found for w in work for found in self._run([w])]  # nothing counts as computed yet
        self.stats.model_seconds += clock() - started
        return self._commit(work, logits)

    def _commit(self, work: Sequence[Work], logits: Tensor) -> list[tuple[Running, Delta]]:
        """Pick tokens, take them in, and make what they came from final."""
        wanted = [w for w in work if w.wanted]
        results = verify_batch([(self._requests[w.slot].picker, w.drafted) for w in wanted], logits) if wanted else []
        for w in work:
            if not w.wanted:
                self.scheduler.commit(w.slot, w.slot.state.computed + w.count)
        deltas = []
        for w, result in zip(wanted, results, strict=True):
            if isinstance(result, FinbackError):
                deltas += self._fail(w, result)
                continue
            running, drafts = self._requests[w.slot], len(w.drafts)
            if w.drafted is not None and self.runner.drafter is not None:
                accepted = min(result.accepted, drafts)
                self.runner.drafter.acceptance.record(drafts, accepted)
                self.stats.count_drafts(drafts, accepted)
            delta = running.advance(result)
            # All but the newest token have their rows: the known ones, and the accepted drafts.
            self.scheduler.commit(w.slot, len(w.slot.state.tokens) - 1)
            if delta.finish_reason is not None:
                self._end(running)
            running.deltas.append(delta)
            deltas.append((running, delta))
        return deltas

    def _fail(self, work: Work, error: FinbackError) -> list[tuple[Running, Delta]]:
        """End one request with an error that names it."""
        if work.drafts:  # a draft may be to blame, which nobody asked for
            return self._run([Work(work.slot, work.count)])
        running = self._requests[work.slot]
        name = running.request_id
        if isinstance(error, NonFiniteError):
            error = NonFiniteError(self.runner.diagnose([work], name))
        else:
            error = type(error)(f"{name}: {error}")
        delta = running.fail(error)
        self._end(running, keep=False)
        running.deltas.append(delta)
        return [(running, delta)]

    # -- statistics ------------------------------------------------------------------------------------------------

    def _measure(
        self, work: Sequence[Work], deltas: Sequence[tuple[Running, Delta]], started: float, now: float
    ) -> None:
        stats = self.stats
        stats.steps += 1
        stats.batch_sequences, stats.batch_tokens = len(work), sum(w.size for w in work)
        stats.computed_tokens += stats.batch_tokens
        stats.step_seconds.add(now - started)
        for running, delta in deltas:
            count = len(delta.token_ids)
            if not count:
                continue
            stats.generated_tokens += count
            if len(running.output.token_ids) == count:
                stats.time_to_first_token.add(now - running.arrived)
            else:
                stats.inter_token_latency.add((now - running.last_time) / count, count)
            running.last_time = now
        self._count()

    def _count(self) -> None:
        stats, scheduler = self.stats, self.scheduler
        stats.waiting, stats.running = len(scheduler.waiting), len(scheduler.running)
        for cls, pool in self.runner.pages.pools.items():
            stats.pages_cached[cls] = pool.idle
            stats.pages_used[cls] = pool.usable - pool.free - pool.idle


def _digests(state: SequenceState) -> list[tuple[int, int, str]]:
    """(start, end, digest of grid and pixels) of every image."""
    spans = []
    for image in state.images:
        assert state.types is not None
        end = image.start + 1
        while end < len(state.types) and state.types[end] > 0:  # 0 starts the next span
            end += 1
        pixels = image.patches.detach().contiguous().cpu()
        digest = hashlib.sha256(f"{image.grid_h} {image.grid_w} {pixels.dtype} {tuple(pixels.shape)}".encode())
        digest.update(pixels.view(-1).numpy().tobytes())
        spans.append((image.start, end, digest.hexdigest()))
    return spans
