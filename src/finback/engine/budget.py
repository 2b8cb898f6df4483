"""How many drafts are worth verifying. Plain Python, no torch.

A draft costs time in the verifying forward whether it is accepted or not. With the chance that each one survives
(accepted together with all before it) and the time of a step by its number of tokens, the best number over a batch is
the one with the most expected tokens per millisecond.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Mapping, Sequence


class Acceptance:
    """Counts by slot (0: the first draft of a block) of what became of drafts.

    steps: verified blocks, empty ones included. drafted[i], accepted[i]: blocks whose slot i was verified, accepted.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.drafted: list[int] = []
        self.accepted: list[int] = []

    def record(self, drafted: int, accepted: int) -> None:
        """One block of `drafted` drafts, the first `accepted` of which were accepted."""
        assert 0 <= accepted <= drafted
        self.steps += 1
        missing = drafted - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for i in range(drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted

    @property
    def rates(self) -> list[float]:
        """By slot: the part of its verified drafts that was accepted (then all before it were, too)."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def mean_length(self) -> float:
        """Tokens a step, the one after the drafts included; 1 before the first step."""
        return 1 + sum(self.accepted) / max(1, self.steps)

    def survival(self, count: int) -> list[float]:
        """Expected survival of slots 0 ... count - 1, never rising: 1 for a slot that was not tried yet, unless an
        earlier one did worse."""
        curve, last = [], 1.0
        for i in range(count):
            if i < len(self.drafted):
                last = min(last, (self.accepted[i] + 1) / (self.drafted[i] + 1))
            curve.append(last)
        return curve


class CostTable:
    """Milliseconds of a step: verify_ms by tokens of the forward, draft_ms by sequences drafted for.

    Between measured counts the time is interpolated, beyond the last one it grows at the last slope. Measured times
    are made to rise with the count first, as noise must not make a larger step look cheaper. ValueError when empty.
    """

    def __init__(self, verify_ms: Mapping[int, float], draft_ms: Mapping[int, float]):
        self._verify, self._draft = _Curve(verify_ms), _Curve(draft_ms)

    def step_ms(self, requests: int, tokens: int) -> float:
        """Drafting for `requests` sequences and a forward of `tokens` tokens."""
        return self._draft(requests) + self._verify(tokens)

    @classmethod
    def measure(
        cls,
        verify: Callable[[int], object],
        draft: Callable[[int], object],
        *,
        most_tokens: int,
        most_requests: int,
        repeats: int = 3,
    ) -> CostTable:
        """Time `verify(tokens)` and `draft(sequences)`, which return when the work is done, at powers of two."""
        return cls(_timed(verify, most_tokens, repeats), _timed(draft, most_requests, repeats))


class _Curve:
    def __init__(self, points: Mapping[int, float]):
        if not points:
            raise ValueError("a cost table needs one measured count at least")
        self._counts = sorted(points)
        self._times: list[float] = []
        for count in self._counts:
            self._times.append(max(points[count], self._times[-1] if self._times else 0.0))

    def __call__(self, count: int) -> float:
        counts, times = self._counts, self._times
        if count <= counts[0] or len(counts) == 1:
            return times[0]
        right = min(bisect.bisect_left(counts, count), len(counts) - 1)
        slope = (times[right] - times[right - 1]) / (counts[right] - counts[right - 1])
        return times[right] + slope * (count - counts[right])


def _timed(work: Callable[[int], object], most: int, repeats: int) -> dict[int, float]:
    counts = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    best = {}
    for count in counts:
        work(count)  # warm up
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            work(count)
            times.append(time.perf_counter() - start)
        best[count] = 1000 * min(times)
    return best


def choose_budget(requests: int, survivals: Sequence[float], other_tokens: int, costs: CostTable) -> int:
    """The number B of drafts, over all requests together, with the most expected tokens per millisecond:
    (requests + sum of the B largest survivals) / step_ms(requests, other_tokens + B); the smallest B of equals.

    survivals: of every slot of every request. other_tokens: the forward's tokens that are no drafts.
    """
    expected, best, budget = float(requests), 0.0, 0
    for count, gain in enumerate([0.0, *sorted(survivals, reverse=True)]):
        expected += gain
        value = expected / max(costs.step_ms(requests, other_tokens + count), 1e-9)
        if value > best:
            best, budget = value, count
    return budget


def admit(survivals: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Drafts to verify of each request, when `budget` in all are: those that survive most likely. survivals: by
    request and slot, never rising along slots, so that what is admitted are first slots."""
    slots = [(-chance, i, request) for request, line in enumerate(survivals) for i, chance in enumerate(line)]
    lengths = [0] * len(survivals)
    for _, _, request in sorted(slots)[:budget]:
        lengths[request] += 1
    return lengths
