"""Drafters and how many of their drafts are verified.

Would catch: drafts made from rows of refused tokens, from a neighbour's rows or for the wrong position; probabilities
that are not those a draft was drawn from; a budget that is not the best one or that looks at what it may not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from finback.base.runtime import ConfigError
from finback.engine import budget, sampler
from finback.engine.budget import Acceptance, CostTable, admit, choose_budget
from finback.engine.drafters import Drafter, DraftRequest, ModelDrafter, NgramDrafter, draft_layers, make_drafter
from finback.engine.request import SamplingParams, SpeculativeConfig
from finback.engine.verify import Picker
from finback.io.load import load_model
from finback.models.spikewhale.config import SpikeWhaleConfig
from finback.models.spikewhale.model import SpikeWhale
from finback.nn.rows import Chunk, ForwardBatch, PagedRows, page_class
from finback.tools import fixtures

PAGES, PAGE_TOKENS, BLOCK = 16, 4, 5
STATIC = SpeculativeConfig(verify_length="static")
FLAT = CostTable({1: 10.0, 100: 10.0}, {1: 1.0})
STEEP = CostTable({1: 1.0, 100: 1000.0}, {1: 1.0})


@pytest.fixture(scope="module")
def v41(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny")
    fixtures.make(folder, preset="tiny-v41-plain", seed=4)
    return load_model(folder, dtype="float64")


@pytest.fixture(scope="module")
def whale() -> SpikeWhale:
    config = SpikeWhaleConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=8, qk_rope_head_dim=4, q_lora_rank=12,
        o_lora_rank=12, moe_intermediate_size=16, vocab_size=40, max_position_embeddings=64, num_nextn_predict_layers=3,
    )  # fmt: skip
    model = SpikeWhale.from_config(config.to_dict(), dtype=torch.float64)
    draws = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = 0.3 * torch.randn(tensor.shape, generator=draws, dtype=torch.float64)
            tensor.copy_(1 + noise if "norm" in name else noise)
    return model.eval()


class Lane:
    """One sequence on its own pages of a shared store, stepped by hand."""

    def __init__(self, model: Any, store: PagedRows, drafter: Drafter, prompt: Sequence[int], number: int, **settings):
        self.model, self.store, self.drafter = model, store, drafter
        self.tokens, self.done = list(prompt), 0
        first = number * PAGES
        self.pages = {page_class(g): list(range(first, first + PAGES)) for g in model.row_groups()}
        params = SamplingParams(max_tokens=60, **settings)
        self.picker = Picker(params, prompt, model.vocab_size)

    @torch.inference_mode()
    def step(self, drafts: Sequence[int] = (), keep: int = 0) -> None:
        """Run the known tokens and `drafts`, keep the first `keep` of these, and take the likeliest next token."""
        known = len(self.tokens) - self.done
        ids = self.tokens[self.done :] + list(drafts)
        context = self.tokens[max(0, self.done - self.model.lookback) : self.done]
        batch = ForwardBatch([Chunk(ids, self.done, context, pages=self.pages)])
        view = self.store.view(batch)
        result = self.model.backbone(batch, view) if hasattr(self.model, "backbone") else self.model(batch, view)
        self.drafter.observe(result, view)
        hidden = result if isinstance(result, Tensor) else result.hidden
        row = known + keep - 1
        self.tokens += list(drafts[:keep])
        self.done = len(self.tokens)
        self.tokens += self.picker.verify(self.model.logits(hidden[row : row + 1])).tokens

    def request(self, limit: int = BLOCK) -> DraftRequest:
        return DraftRequest(self.picker, self.tokens, self.pages, limit)


def make_store(model: Any) -> PagedRows:
    groups = model.row_groups()
    counts = {page_class(g): 4 * PAGES for g in groups}
    return PagedRows(groups, counts, page_tokens=PAGE_TOKENS, dtype=model.dtype)


def make_lanes(model: Any, config: SpeculativeConfig, prompts: Sequence[Sequence[int]], **settings) -> list[Lane]:
    store = make_store(model)
    drafter = make_drafter(model, store, config)
    assert drafter is not None
    return [Lane(model, store, drafter, prompt, i, **settings) for i, prompt in enumerate(prompts)]


def prompts_of(vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    draws = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab, (n,), generator=draws).tolist() for n in lengths]


# -- draft layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v41", "whale"])
def test_refused_drafts_leave_no_trace(name: str, request: pytest.FixtureRequest):
    """Wrong drafts in every verified block, none or two of them "accepted" as plain decoding has them: the next block
    of drafts is the one of plain decoding. Windows (8 tokens) and compression groups wrap several times."""
    model = request.getfixturevalue(name)
    (prompt,) = prompts_of(model.vocab_size, [11])
    plain = make_lanes(model, STATIC, [prompt])[0]
    blocks = {}
    for _ in range(16):
        plain.step()
        blocks[len(plain.tokens)] = plain.drafter.propose([plain.request()])[0]
    lane, compared = make_lanes(model, STATIC, [prompt])[0], 0
    for keep in itertools.cycle([0, 2, 1]):
        right = plain.tokens[len(lane.tokens) : len(lane.tokens) + keep] if lane.done else []
        lane.step([*right, 5, 6, 7][:4] if lane.done else [], len(right))
        if len(lane.tokens) > len(plain.tokens):
            break
        assert lane.tokens == plain.tokens[: len(lane.tokens)]
        got, want = lane.drafter.propose([lane.request()])[0], blocks[len(lane.tokens)]
        assert got.tokens == want.tokens
        assert got.confidence == (want.confidence and pytest.approx(want.confidence, abs=1e-9))
        compared += 1
    assert compared >= 8


def test_a_batch_drafts_what_each_request_alone_would(v41: Any):
    """Three sequences of different lengths, one of them shorter than the window, one without a wish for drafts; greedy
    and sampled together. Would catch rows or random numbers of a neighbour."""
    prompts = prompts_of(v41.vocab_size, [3, 19, 8, 30])

    def lanes() -> list[Lane]:
        made = make_lanes(v41, STATIC, prompts, temperature=0.9, seed=5)
        made[0].picker = Picker(SamplingParams(), prompts[0], v41.vocab_size)
        for lane in made:
            lane.step()
        return made

    together = lanes()
    limits = [BLOCK, 2, BLOCK, 0]
    got = together[0].drafter.propose([lane.request(n) for lane, n in zip(together, limits, strict=True)])
    assert [len(drafted.tokens) for drafted in got] == limits
    for lane, drafted, limit in zip(lanes(), got, limits, strict=True):
        assert lane.drafter.propose([lane.request(limit)])[0].tokens == drafted.tokens


@pytest.mark.parametrize("rule", ["coupled", "standard"])
def test_sampled_drafts_come_from_the_probabilities_they_report(v41: Any, rule: str):
    """probs[i] is the softmax, at the request's temperature, of slot i's logits given the drafts before it; the draft
    is the race that the picker's key decides. "coupled" compares tokens and needs no probabilities."""
    (lane,) = make_lanes(v41, SpeculativeConfig(rule=rule, verify_length="static"), prompts_of(v41.vocab_size, [14]))
    lane.step()
    lane.picker = Picker(SamplingParams(temperature=0.6, seed=9), [], v41.vocab_size, rule=rule)
    drafted = lane.drafter.propose([lane.request()])[0]
    with torch.inference_mode():
        chunk = Chunk(v41.mtp.block_chunk(lane.tokens[-1]), len(lane.tokens) - 1, pages=lane.pages)
        batch = ForwardBatch([chunk])
        block = v41.mtp.run(v41, batch, lane.store.view(batch))
        fixed = iter(drafted.tokens)
        _, logits = v41.mtp.decide(block, batch.ids[:1], lambda line, i: torch.tensor([next(fixed)]))
    probs = torch.softmax(logits[0].double() / 0.6, dim=1)
    keys = sampler.key_tensor(lane.picker.draft_keys(BLOCK))
    assert sampler.race(probs, keys).tolist() == drafted.tokens != probs.argmax(1).tolist()
    if rule == "coupled":
        assert drafted.probs is None
    else:
        torch.testing.assert_close(drafted.probs, probs, rtol=1e-9, atol=0)


def test_heads_of_spikewhale_read_the_last_hidden_state(whale: SpikeWhale):
    """Slot i is head i on the hidden state before the anchor; off by one position, or the anchor's own state, would
    still look plausible."""
    (lane,) = make_lanes(whale, SpeculativeConfig(method="model"), prompts_of(40, [9]))
    lane.step()
    with torch.inference_mode():
        batch = ForwardBatch([Chunk(lane.tokens[:-1], pages=lane.pages)])
        hidden = whale(batch, make_store(whale).view(batch))[-1:]
        assert whale.mtp_heads is not None
        want = [int(whale.logits(head(hidden)).argmax()) for head in whale.mtp_heads]
    assert lane.drafter.propose([lane.request()])[0].tokens == want


def test_fewer_drafts_than_the_block_are_its_first_and_more_are_refused(v41: Any):
    """A shorter block would change the drafts: the stages attend to the whole block. More than it holds cannot be."""
    prompts = prompts_of(v41.vocab_size, [14])
    whole, short = (
        make_lanes(v41, SpeculativeConfig(num_speculative_tokens=k, verify_length="static"), prompts)[0]
        for k in (None, 3)
    )
    for lane in (whole, short):
        lane.step()
    assert short.drafter.max_tokens == 3 and whole.drafter.max_tokens == BLOCK
    assert short.drafter.propose([short.request()])[0].tokens == whole.drafter.propose([whole.request()])[0].tokens[:3]
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 6.*use 1\.\.5"):
        make_drafter(v41, make_store(v41), SpeculativeConfig(num_speculative_tokens=6))


def test_models_without_draft_layers():
    """ "auto" goes without, "model" is an error, "ngram" always works."""
    model = torch.nn.Linear(1, 1)
    store: Any = None
    assert make_drafter(model, store, SpeculativeConfig()) is None
    with pytest.raises(ConfigError, match="no draft layers; use method 'ngram'"):
        make_drafter(model, store, SpeculativeConfig(method="model"))
    assert isinstance(make_drafter(model, store, SpeculativeConfig(method="ngram")), NgramDrafter)


# -- how many ------------------------------------------------------------------------------------------------------


def adaptive(model: Any, rule: str, costs: CostTable) -> list[Lane]:
    lanes = make_lanes(model, SpeculativeConfig(rule=rule), prompts_of(model.vocab_size, [9, 14, 20]))
    layers = draft_layers(model)
    assert layers is not None
    drafter = ModelDrafter(model, layers, lanes[0].store, SpeculativeConfig(rule=rule), costs=costs)
    for lane in lanes:
        lane.drafter = drafter
        lane.step()
    return lanes


def test_verify_length_follows_costs_and_confidence(v41: Any):
    """Free tokens: all are verified. Dear ones: none. Between: the best number, of the likeliest slots."""
    for costs, want in ((FLAT, [5, 5, 5]), (STEEP, [0, 0, 0])):
        lanes = adaptive(v41, "coupled", costs)
        got = lanes[0].drafter.propose([lane.request() for lane in lanes])
        assert [len(d.tokens) for d in got] == want
    lanes = adaptive(v41, "coupled", FLAT)
    survivals = []
    for drafted in lanes[0].drafter.propose([lane.request() for lane in lanes]):
        assert drafted.confidence is not None
        survivals.append(list(itertools.accumulate(drafted.confidence, lambda a, b: a * b)))
    costs = CostTable({1: 2.0, 10: 3.5, 20: 9.0}, {1: 1.0})
    lanes = adaptive(v41, "coupled", costs)
    got = [len(d.tokens) for d in lanes[0].drafter.propose([lane.request() for lane in lanes])]
    best = choose_budget(3, [s for line in survivals for s in line], 3, costs)
    assert 0 < sum(got) == best < 15 and got == admit(survivals, best)


def test_rejection_rules_choose_the_number_without_looking_at_the_drafts(v41: Any):
    """Under "standard" the number comes from measured acceptance: nothing accepted so far, so nothing is verified,
    however sure the confidence head is; much accepted, so all are."""
    costs = CostTable({1: 1.0, 101: 21.0}, {1: 1.0})
    for accepted, want in ((0, 0), (BLOCK, 3 * BLOCK)):
        lanes = adaptive(v41, "standard", costs)
        for _ in range(1000):
            lanes[0].drafter.acceptance.record(BLOCK, accepted)
        got = lanes[0].drafter.propose([lane.request() for lane in lanes])
        assert sum(len(d.tokens) for d in got) == want


def test_measured_costs(v41: Any, monkeypatch: pytest.MonkeyPatch):
    """Runs the real model, with a clock that adds 1 ms a look, so every step costs the same and all drafts pay."""
    clock = itertools.count()
    monkeypatch.setattr(budget.time, "perf_counter", lambda: next(clock) / 1000)
    (lane,) = make_lanes(v41, SpeculativeConfig(), prompts_of(v41.vocab_size, [14]))
    assert isinstance(lane.drafter, ModelDrafter)
    costs = lane.drafter.measure(3)
    assert costs.step_ms(1, 1) == pytest.approx(2.0) == costs.step_ms(3, 18)
    lane.step()
    assert len(lane.drafter.propose([lane.request()])[0].tokens) == BLOCK


def test_cost_table():
    """Interpolation, a measurement that falls where it cannot, and growth past the last count."""
    table = CostTable({4: 8.0, 1: 2.0, 2: 5.0, 8: 7.0, 16: 16.0}, {1: 0.5, 3: 1.5})
    assert [table.step_ms(1, n) - 0.5 for n in (1, 2, 3, 4, 6, 8, 12, 16, 24)] == [2, 5, 6.5, 8, 8, 8, 12, 16, 24]
    assert [table.step_ms(n, 1) - 2.0 for n in (1, 2, 3, 5)] == [0.5, 1.0, 1.5, 2.5]
    assert CostTable({3: 2.0}, {1: 1.0}).step_ms(9, 9) == 3.0
    with pytest.raises(ValueError, match="one measured count"):
        CostTable({}, {1: 1.0})


chances = st.lists(st.floats(0.01, 1), min_size=0, max_size=4)


@given(
    lines=st.lists(chances, min_size=1, max_size=3),
    steps=st.lists(st.floats(0, 3), min_size=20, max_size=20),
    other=st.integers(0, 4),
)
def test_budget_is_the_best_of_all_choices(lines: list[list[float]], steps: list[float], other: int):
    """Against every combination of prefixes, under costs with plateaus and jumps, where climbing uphill would stop too
    early."""
    survivals = [list(itertools.accumulate(line, lambda a, b: a * b)) for line in lines]
    costs = CostTable(dict(enumerate(itertools.accumulate(steps, initial=1.0))), {1: 0.5})
    n = len(lines)

    def value(lengths: Sequence[int]) -> float:
        gained = sum(sum(line[:k]) for line, k in zip(survivals, lengths, strict=True))
        return (n + gained) / costs.step_ms(n, n + other + sum(lengths))

    best = max(value(lengths) for lengths in itertools.product(*(range(len(line) + 1) for line in survivals)))
    count = choose_budget(n, [s for line in survivals for s in line], n + other, costs)
    lengths = admit(survivals, count)
    assert sum(lengths) == count
    assert value(lengths) == pytest.approx(best, rel=1e-12)


def test_acceptance_by_slot():
    acceptance = Acceptance()
    assert acceptance.mean_length == 1 and acceptance.survival(2) == [1.0, 1.0]
    for drafted, accepted in ((3, 3), (3, 1), (0, 0), (2, 0)):
        acceptance.record(drafted, accepted)
    assert acceptance.drafted == [3, 3, 2] and acceptance.accepted == [2, 1, 1]
    assert acceptance.rates == [2 / 3, 1 / 3, 1 / 2]
    assert acceptance.mean_length == 2.0
    assert acceptance.survival(4) == [3 / 4, 2 / 4, 2 / 4, 2 / 4]  # never rising


# -- n-grams -------------------------------------------------------------------------------------------------------


def looked_up(tokens: list[int], low: int, high: int, count: int) -> list[int]:
    """Search from the end, longest first; then go on as if the found distance were a period."""
    for n in range(high, low - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                line = list(tokens)
                for _ in range(count):
                    line.append(line[len(line) - (len(tokens) - end)])
                return line[len(tokens) :]
    return []


@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40), first=st.integers(1, 40), count=st.integers(0, 7))
def test_ngrams_against_a_search(tokens: list[int], first: int, count: int):
    """The index grows with the text, in steps of any size; a match with itself, or an old one, would propose noise."""
    drafter = NgramDrafter(SpeculativeConfig(method="ngram", num_speculative_tokens=6))
    picker = Picker(SamplingParams(), [0], 3)
    for end in sorted({min(first, len(tokens)), len(tokens)}):
        known = tokens[:end]
        got = drafter.propose([DraftRequest(picker, known, {}, count)])[0]
        assert got.tokens == looked_up(known, 2, 4, min(count, 6)) and got.probs is None


def test_ngrams_of_one_request_are_not_another_ones():
    """An index that is shared would quote a neighbour's text; one that is kept would grow for ever."""
    drafter = NgramDrafter(SpeculativeConfig(method="ngram"))
    pickers = [Picker(SamplingParams(), [0], 9) for _ in range(2)]
    first = DraftRequest(pickers[0], [1, 2, 3, 4, 1, 2], {}, 2)
    second = DraftRequest(pickers[1], [1, 2, 8, 8, 1, 2], {}, 2)
    assert [d.tokens for d in drafter.propose([first, second])] == [[3, 4], [8, 8]]
    del first, second, pickers
    assert len(drafter._indices) == 0
