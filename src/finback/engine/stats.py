"""What an engine has done and is doing. Plain Python, no torch."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_RECENT = 1024


@dataclass
class Recent:
    """Count, mean and quantiles of a measurement; quantiles are of the last thousand values."""

    count: int = 0
    total: float = 0.0
    values: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, value: float, times: int = 1) -> None:
        self.count += times
        self.total += value * times
        self.values.append(value)

    def summary(self) -> dict[str, float]:
        """{"count", "mean", "p50", "p95", "max"}; zeros before the first value."""
        if not self.count:
            return {"count": 0, "mean": 0.0, "p50": 0.0, "p95": 0.0, "max": 0.0}
        ordered = sorted(self.values)
        at = {"p50": len(ordered) // 2, "p95": min(len(ordered) - 1, int(0.95 * len(ordered))), "max": -1}
        quantiles = {name: ordered[i] for name, i in at.items()}
        return {"count": self.count, "mean": self.total / self.count, **quantiles}


@dataclass
class Stats:
    """Counters since the engine was made, and the sizes at the last step.

    Times are seconds. time_to_first_token counts from the request's arrival; inter_token_latency is the time between
    two steps that gave a request tokens, shared among the tokens of the later one. accepted[i], drafted[i]: drafts that
    were accepted, and verified, at place i of a block. prefix_misses: reason -> requests (engine/prefix.py).
    """

    waiting: int = 0
    running: int = 0
    batch_sequences: int = 0
    batch_tokens: int = 0
    pages_used: dict[str, int] = field(default_factory=dict)
    pages_cached: dict[str, int] = field(default_factory=dict)
    pages_total: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    preemptions: int = 0
    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_tokens_asked: int = 0
    prefix_tokens_hit: int = 0
    prefix_misses: Counter[str] = field(default_factory=Counter)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    time_to_first_token: Recent = field(default_factory=Recent)
    inter_token_latency: Recent = field(default_factory=Recent)
    step_seconds: Recent = field(default_factory=Recent)
    model_seconds: float = 0.0
    clock: Callable[[], float] = time.perf_counter

    def count_prefix(self, tokens: int, hit: int, reason: str | None) -> None:
        """One look into the prefix cache for a prompt of `tokens`."""
        self.prefix_queries += 1
        self.prefix_tokens_asked += tokens
        self.prefix_tokens_hit += hit
        if hit:
            self.prefix_hits += 1
        elif reason is not None:
            self.prefix_misses[reason] += 1

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """One verified block."""
        for i in range(drafted):
            if i == len(self.drafted):
                self.drafted.append(0)
                self.accepted.append(0)
            self.drafted[i] += 1
            self.accepted[i] += i < accepted

    def acceptance(self) -> list[float]:
        """Share of verified drafts that were accepted, by place in the block."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON."""
        out = {k: v for k, v in vars(self).items() if k not in ("clock", "accepted", "drafted")}
        out |= {name: value.summary() for name, value in out.items() if isinstance(value, Recent)}
        out |= {name: dict(value) for name, value in out.items() if isinstance(value, Counter)}
        return {**out, "acceptance": self.acceptance(), "drafted": list(self.drafted)}
