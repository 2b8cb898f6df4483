"""A model whose next token is a sum that any misplaced row changes, a drafter that does as it is told, and audits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finback.engine.args import EngineArgs
from finback.engine.blocks import PagePool
from finback.engine.budget import Acceptance
from finback.engine.core import Engine
from finback.engine.drafters import draft_layers
from finback.engine.llm import LLM
from finback.engine.request import SamplingParams, SequenceState
from finback.engine.scheduler import Slot
from finback.engine.verify import Drafted
from finback.nn.rows import ForwardBatch, RowGroup, RowView, page_class
from finback.tools import fixtures

VOCAB, WINDOW = 61, 5
COEFFICIENTS = torch.tensor([3.0, 1, 4, 1, 5], dtype=torch.float64)


class FakeModel(nn.Module):
    """Two layers of windowed sums over ids, and sums of pairs of ids that every later token reads. The upper layer can
    run on a tail, as V4.1's can. Everything is a small integer, so that equal means equal."""

    vocab_size, max_positions, lookback, dtype = VOCAB, 400, 0, torch.float64

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
        self.bad_token: int | None = None

    def row_groups(self) -> list[RowGroup]:
        return [
            RowGroup("window", (0, 1), 1, window=WINDOW),
            RowGroup("pairs", (0,), 1, stride=2),
            RowGroup("raw", (0,), 1, window=2),
        ]

    def forward(self, batch: ForwardBatch, view: RowView) -> Tensor:
        ids = batch.ids.double().unsqueeze(1)
        raw = view.append("raw", 0, ids)
        done = batch.finished(2)
        members = view.locate("raw", done.seq.unsqueeze(1), done.row.unsqueeze(1) * 2 + torch.arange(2))
        pairs = view.append("pairs", 0, raw[members, 0].prod(1, keepdim=True) % 89)
        lower = self.windows(view, 0, ids)
        firsts = [c.exact_from - WINDOW + 1 for c in batch.chunks]
        batch, kept = batch.narrow(firsts)
        view = view.rebind(batch)
        upper = self.windows(view, 1, lower[kept])
        for b, (start, end) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
            totals = torch.cat([pairs.new_zeros(1), view.sequence("pairs", pairs, b)[:, 0].cumsum(0)])
            upper[start:end, 0] += totals[(batch.positions[start:end] + 1) // 2]
        upper = upper[batch.narrow([c.exact_from for c in batch.chunks])[1]]
        if self.bad_token is not None:
            ends = batch.narrow([c.exact_from for c in batch.chunks])[0]
            upper[ends.ids == self.bad_token] = float("nan")
        return upper

    def windows(self, view: RowView, layer: int, rows: Tensor) -> Tensor:
        table, index = view.append("window", layer, rows), view.window("window")
        picked = torch.where(index >= 0, table[index.clamp(min=0), 0], 0)
        return (picked * COEFFICIENTS[WINDOW - index.shape[1] :]).sum(1, keepdim=True) % 97

    def logits(self, hidden: Tensor) -> Tensor:
        return -(hidden % VOCAB - torch.arange(VOCAB)).abs()


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What `FakeModel` goes on with, from its definition."""
    tokens = list(prompt)

    def summed(values: Sequence[float], at: int) -> float:
        window = values[max(0, at - WINDOW + 1) : at + 1]
        return sum(v * c for v, c in zip(window, COEFFICIENTS.tolist()[WINDOW - len(window) :], strict=True)) % 97

    for _ in range(count):
        lower = [summed(tokens, i) for i in range(len(tokens))]
        pairs = sum(tokens[i] * tokens[i + 1] % 89 for i in range(0, len(tokens) - 1, 2))
        tokens.append(int((summed(lower, len(tokens) - 1) + pairs) % VOCAB))
    return tokens[len(prompt) :]


class ScriptedDrafter:
    """Drafts what `script(tokens, limit)` says. model: its draft layers keep their rows, as when they draft."""

    def __init__(
        self, script: Callable[[Sequence[int], int], list[int]], max_tokens: int = 5, model: Any = None
    ) -> None:
        self.script, self.max_tokens, self.acceptance = script, max_tokens, Acceptance()
        self.layers = draft_layers(model) if model is not None else None

    def observe(self, result: Any, view: RowView) -> None:
        if self.layers is not None:
            self.layers.observe(view.batch, view, result)

    def propose(self, requests: Sequence[Any], *, other_tokens: int = 0) -> list[Drafted]:
        return [Drafted(self.script(list(r.tokens), r.limit)[: r.limit]) for r in requests]


def audit(engine: Engine) -> None:
    """Every page has exactly the holders that hold it, and nobody else writes to it."""
    cache = engine.cache
    for cls, pool in engine.runner.pages.pools.items():
        holders: Counter[int] = Counter()
        for slot in engine.scheduler.running:
            holders.update(slot.table.held(cls))
        for slot in engine.scheduler.waiting:
            assert not slot.table.pages.get(cls)
        cached = [node.pages[cls][0] for node in cache.nodes(cls)] if cache is not None else []
        assert len(cached) == len(set(cached))
        holders.update(cached)
        assert dict(holders) == pool._holders
        assert sorted(pool._free) == sorted(set(range(1, pool.count)) - set(holders))
        assert pool.idle == sum(holders[page] == 1 for page in cached)
        for slot in engine.scheduler.running:
            ahead = slot.table.pages.get(cls, [])[slot.state.computed // engine.runner.pages.page_tokens :]
            assert all(pool.holders(page) == 1 for page in ahead)


def readable_rows(engine: Engine, slot: Slot) -> dict[tuple[str, int], Tensor]:
    """Every stored row of a sequence that a later token can read."""
    store, size, length = engine.runner.store, engine.runner.pages.page_tokens, slot.state.computed
    rows = {}
    for (name, layer), table in store.tables.items():
        group = store.groups[name]
        first = 0 if group.window is None else max(0, length - group.window + 1)
        numbers = torch.arange(first // group.stride, length // group.stride)
        pages = torch.tensor(slot.table.pages[page_class(group)])
        per_page = size // group.stride
        rows[name, layer] = table[pages[numbers // per_page] * per_page + numbers % per_page].clone()
    return rows


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


class Toolbox:
    """What tests of this folder share."""

    FakeModel, ScriptedDrafter, VOCAB = FakeModel, ScriptedDrafter, VOCAB
    audit, readable_rows, greedy = staticmethod(audit), staticmethod(readable_rows), staticmethod(greedy)
    continuation = staticmethod(continuation)

    @staticmethod
    def shrink(pool: PagePool, usable: int) -> None:
        """Leave that many pages in a pool that nobody has used yet."""
        assert pool.free == pool.usable >= usable
        pool.count, pool._free = usable + 1, list(range(usable, 0, -1))

    @staticmethod
    def fake(drafter: Any = None, **args: Any) -> Engine:
        return Engine(FakeModel(), None, EngineArgs(**{"block_size": 4, **args}), drafter=drafter)

    @staticmethod
    def run(engine: Engine, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        """Every prompt to its end; returns the outputs."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        running = [engine.add(SequenceState(list(p)), s) for p, s in zip(prompts, each, strict=True)]
        while engine.unfinished:
            engine.step()
        return [r.output for r in running]

    @staticmethod
    def close(one: Mapping[Any, Tensor], other: Mapping[Any, Tensor], bound: float = 1e-9) -> None:
        """Equal rows of every group."""
        assert one.keys() == other.keys()
        for key, rows in one.items():
            assert rows.shape == other[key].shape, key
            assert not rows.numel() or float((rows - other[key]).abs().max()) < bound, key


@pytest.fixture(scope="session")
def box() -> type[Toolbox]:
    return Toolbox


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-v41-plain")
    fixtures.make(folder, preset="tiny-v41-plain")
    return str(folder)


@pytest.fixture(scope="session")
def tiny(plain_folder: str) -> LLM:
    """V4.1 with every feature in float64, without drafts; tests make engines of its model."""
    return LLM(plain_folder, dtype="float64", draft=None)
