"""Prompts that share a beginning: the second one already starts behind it, in every family, and never on wrong rows.

Memory is filled with NaN before anything runs, so that a row that nobody computed shows as soon as it is read.

Would catch: a start whose own tail reaches back into windows that the first prompt left out, a window of another
request, a row behind a window that draft layers still read, a shared border that nobody keeps.
"""

from __future__ import annotations

import pytest

from finback.base.runtime import NonFiniteError
from finback.engine.args import EngineArgs
from finback.engine.core import Engine
from finback.engine.llm import LLM
from finback.engine.request import SequenceState, SpeculativeConfig
from finback.engine.runner import tail_reach
from finback.tools import fixtures

BLOCK, COUNT = 8, 4
SHARED = [(i * 37 + 11) % 500 for i in range(83)]


@pytest.fixture(scope="module", params=["tiny-v41-plain", "tiny-v32", "tiny-spikewhale"])
def llm(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    fixtures.make(folder, preset=request.param)
    return LLM(folder, dtype="float64", draft=None)


def poisoned(llm: LLM, drafter=None, **args) -> Engine:
    """An engine whose rows are NaN, but for the page that stands for none."""
    engine = Engine(llm.model, llm.tokenizer, EngineArgs(**{"block_size": BLOCK, **args}), drafter=drafter)
    for (name, _), table in engine.runner.store.tables.items():
        table[BLOCK // engine.runner.store.groups[name].stride :] = float("nan")
    return engine


def ending(number: int, length: int) -> list[int]:
    return [(i * 13 + 101 * number + 3) % 500 for i in range(length)]


def check(box, llm, output, prompt):
    """The request's tokens and logits are those of the plain run."""
    plain = Engine(llm.model, None, EngineArgs(prefill="full", enable_prefix_caching=False, max_num_seqs=1))
    (alone,) = box.run(plain, [prompt], box.greedy(COUNT, logprobs=3))
    assert output.error is None and output.token_ids == alone.token_ids
    for a, b in zip(output.logprobs, alone.logprobs, strict=True):
        assert max(abs(x[1] - y[1]) for x, y in zip(a.top, b.top, strict=True)) < 1e-9


@pytest.mark.parametrize(("own", "budget"), [(1, 400), (12, 13), (60, 13), (60, 400)])
def test_the_second_prompt_starts_behind_what_it_shares(llm, box, own, budget):
    """With a long ending behind all of it, with a short one where its own tail begins; the third one behind all."""
    shares = len(SHARED) // BLOCK * BLOCK
    engine, hits = poisoned(llm, max_num_batched_tokens=budget, max_num_seqs=2), []
    for number, length in ((0, 60), (1, own), (2, own)):
        prompt = SHARED + ending(number, length)
        (output,) = box.run(engine, [prompt], box.greedy(COUNT, logprobs=3))
        check(box, llm, output, prompt)
        hits.append(output.cached_tokens)
    begins = (len(SHARED) + own - 1) // BLOCK * BLOCK - tail_reach(llm.model)
    assert hits == [0, min(shares, begins // BLOCK * BLOCK), shares]
    box.audit(engine)


def test_a_start_one_page_later_is_caught(llm, box):
    """The comparison has teeth: where layers run on tails, their reach is as short as it can be."""
    reach = tail_reach(llm.model)
    if not hasattr(llm.model, "needed_from"):
        pytest.skip("every layer of this family runs everywhere")
    engine = poisoned(llm)
    engine.cache.reach = reach - BLOCK
    for number, own in ((0, 60), (1, 1)):
        (output,) = box.run(engine, [SHARED + ending(number, own)], box.greedy(COUNT))
    assert isinstance(output.error, NonFiniteError)


def test_prompts_that_part_under_pressure(llm, box):
    """Many endings at once, in chunks, with drafts, preemption and little room for windows."""
    drafter = box.ScriptedDrafter(lambda tokens, limit: tokens[-limit:], 3, model=llm.model)
    engine = poisoned(llm, drafter, max_num_seqs=4, max_num_batched_tokens=30)
    for cls, pool in engine.runner.pages.pools.items():
        box.shrink(pool, 26 if engine.runner.pages.windows[cls] is None else 14)
    prompts = [SHARED[: 40 + 9 * (n % 4)] + ending(n, 1 + 11 * (n % 3)) for n in range(12)]
    running = [engine.add(SequenceState(list(p)), box.greedy(COUNT, logprobs=3)) for p in prompts]
    while engine.unfinished:
        engine.step()
        box.audit(engine)
    for prompt, r in zip(prompts, running, strict=True):
        check(box, llm, r.output, prompt)
    assert engine.stats.prefix_hits > 4


def test_draft_layers_find_the_whole_window(tmp_path, box):
    """They read a window that ends before the anchor, so one row further back than the model's next token does. With a
    window of 9 and pages of 8 that row is alone on its page at every page border."""
    config = fixtures.preset_config("tiny-v41-plain")
    config["text_config"] = {**config["text_config"], "sliding_window": 9}
    fixtures.write(tmp_path, config, extra_files=fixtures.tokenizer_files(fixtures.byte_level_tokenizer()))
    llm = LLM(tmp_path, dtype="float64", draft=None)

    def confidences(block: int) -> list[list[float]]:
        """What the draft layers say of their drafts in each step."""
        args = EngineArgs(block_size=block, speculative=SpeculativeConfig(verify_length="static"))
        engine, found = Engine(llm.model, llm.tokenizer, args), []
        propose = engine.runner.drafter.propose

        def spy(requests, **more):
            drafted = propose(requests, **more)
            found.append(drafted[0].confidence)
            return drafted

        engine.runner.drafter.propose = spy
        box.run(engine, [SHARED[:20]], box.greedy(20))
        return found

    one, other = confidences(8), confidences(64)
    assert len(one) == len(other) > 8
    assert max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)) < 1e-9
