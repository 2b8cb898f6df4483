"""DeepSeek-V4.1 through the engine: whatever runs beside a request, its tokens and its rows are those of the plain run.

Would catch: a compressed row that a rejected draft finished, a window of another request behind a prefix hit, a prompt
chunk that forgets its image, upper layers that start one position too late, a batch whose longest member changes the
others.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from finback.engine.args import EngineArgs
from finback.engine.core import Engine
from finback.engine.llm import LLM
from finback.engine.request import SamplingParams, SequenceState, SpeculativeConfig
from finback.models.deepseek_v41.model import DeepseekV41
from finback.nn.tape import Trace
from finback.tools import fixtures

BLOCK = 8  # tokens of a page: the fixture's window is 8 too, its ratios 2 and 1
PROMPT = [(i * 37 + 11) % 500 for i in range(64)]


def engine_of(llm: LLM, drafter=None, **args) -> Engine:
    return Engine(llm.model, llm.tokenizer, EngineArgs(**{"block_size": BLOCK, **args}), drafter=drafter)


@pytest.fixture(scope="module")
def plain(tiny, box):
    """(prompt, steps) -> tokens, and the readable rows after each length, of a request that runs alone, undisturbed."""

    @cache
    def run(prompt, count):
        silent = box.ScriptedDrafter(lambda tokens, limit: [], model=tiny.model)
        engine = engine_of(tiny, silent, enable_prefix_caching=False)
        running = engine.add(SequenceState(list(prompt)), box.greedy(count, logprobs=5))
        states = {}
        while engine.unfinished:
            before = running.slot.table
            engine.step()
            if before.pages:
                states[running.slot.state.computed] = box.readable_rows(engine, running.slot)
        return running.output, states

    return run


def assert_close_logprobs(one, other, bound=1e-9):
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        assert abs(a.logprob - b.logprob) < bound
        assert max(abs(x[1] - y[1]) for x, y in zip(a.top, b.top, strict=True)) < bound


def test_a_mix_of_requests_equals_each_alone(tiny, box, plain):
    """Five lengths, chunked prompts, late arrivals, another's abort, few seats: tokens and logits of each one alone."""
    engine = engine_of(tiny, max_num_seqs=4, max_num_batched_tokens=11)
    cuts, running = [(0, 1), (3, 10), (5, 13), (2, 11), (0, 48)], []
    doomed = engine.add(SequenceState(PROMPT[9:40]), box.greedy(50))
    for a, b in cuts:
        running.append(engine.add(SequenceState(PROMPT[a:b]), box.greedy(6, logprobs=5)))
        engine.step()
        engine.step()
    engine.abort(doomed)
    while engine.unfinished:
        engine.step()
        box.audit(engine)
    for (a, b), r in zip(cuts, running, strict=True):
        alone, _ = plain(tuple(PROMPT[a:b]), 6)
        assert r.output.token_ids == alone.token_ids
        assert_close_logprobs(r.output, alone)


@pytest.mark.parametrize("phase", range(8))
def test_forced_drafts_leave_tokens_and_rows_of_plain_decoding(tiny, box, plain, phase):
    """Right for j drafts, then wrong (j = 0..5, all right and all wrong among them), six requests interleaved, at each
    phase of the window and of the compression group. After every step all readable rows are the plain ones."""
    prompt, count = tuple(PROMPT[: 17 + phase]), 8
    out, states = plain(prompt, count + 6)

    def script(tokens, limit):
        done = len(tokens) - len(prompt)
        right = out.token_ids[done : done + limit]
        return [t if i < right_for["now"] else (t + 1) % 500 for i, t in enumerate(right)]

    engine = engine_of(tiny, enable_prefix_caching=False)
    right_for = {}

    class ByRequest(box.ScriptedDrafter):
        def propose(self, requests, *, other_tokens=0):
            drafted = []
            for r in requests:
                right_for["now"] = right_for[r.picker]
                drafted += super().propose([r])
            return drafted

    engine.runner.drafter = ByRequest(script, model=tiny.model)
    running = [engine.add(SequenceState(list(prompt)), box.greedy(count)) for _ in range(6)]
    right_for |= {r.picker: j for j, r in enumerate(running)}
    while engine.unfinished:
        engine.step()
        for r in running:
            if r.output.finish_reason is None:
                box.close(box.readable_rows(engine, r.slot), states[r.slot.state.computed])
    assert all(r.output.token_ids == out.token_ids[:count] for r in running)
    rates = engine.runner.drafter.acceptance.rates
    assert len(rates) == 5 and 0 < rates[4] < rates[0] < 1, "drafts were not both accepted and refused"


@pytest.mark.parametrize("rule", ["coupled", "block"])
def test_the_models_own_drafts_change_nothing(tiny, plain_folder, box, plain, rule):
    """DSpark end to end: greedy tokens with drafts are those without, in a batch, in chunks, after a prefix hit."""
    llm = LLM(
        plain_folder, dtype="float64", draft=SpeculativeConfig(rule=rule, verify_length="static"), block_size=BLOCK,
        max_num_batched_tokens=40,
    )  # fmt: skip
    prompts = [PROMPT[:n] for n in (5, 18, 33)]
    for _ in range(2):
        outs = llm.generate(prompts, box.greedy(10))
        assert [o.token_ids for o in outs] == [plain(tuple(p), 10)[0].token_ids for p in prompts]
    assert [o.cached_tokens for o in outs] == [0, 16, 32]
    assert llm.stats.drafted[0] > 10 and llm.stats.summary()["acceptance"]


def test_a_prefix_hit_restores_the_plain_rows(tiny, box, plain):
    """Cold, warm, and warm after another request has used the recycled pages, at lengths around a page border and
    with an odd one in the middle of a group: tokens and all readable rows are the cold ones."""
    for length in (31, 32, 33, 40):
        engine = engine_of(tiny, box.ScriptedDrafter(lambda tokens, limit: [], model=tiny.model))
        prompt = tuple(PROMPT[:length])
        out, states = plain(prompt, 6)
        for attempt in range(3):
            if attempt == 2:
                box.run(engine, [PROMPT[20:60]], box.greedy(5))
            running = engine.add(SequenceState(list(prompt)), box.greedy(6))
            while engine.unfinished:
                engine.step()
                if running.output.finish_reason is None:
                    box.close(box.readable_rows(engine, running.slot), states[running.slot.state.computed])
            assert running.output.token_ids == out.token_ids
            assert running.output.cached_tokens == (0 if attempt == 0 else (length - 1) // BLOCK * BLOCK)


def test_preemption_changes_nothing(tiny, box, plain):
    """With memory for little more than one request, three take turns; each computes its rows again or finds them."""
    for caching in (False, True):
        engine = engine_of(tiny, enable_prefix_caching=caching, max_num_seqs=3)
        box.shrink(engine.runner.pages.pools["full"], 9)
        prompts = [PROMPT[i : i + 22] for i in (0, 7, 19)]
        outs = box.run(engine, prompts, box.greedy(14))
        assert engine.stats.preemptions > 0
        assert [o.token_ids for o in outs] == [plain(tuple(p), 14)[0].token_ids for p in prompts]


# -- exact tail --------------------------------------------------------------------------------------------------------


def tail_config(preset: dict, seed: int) -> dict:
    """A random plain config: layers, window, ratios, sources and candidates vary."""
    rng = random.Random(seed)
    text = dict(preset["text_config"])
    upper = rng.randrange(0, 4)
    ratios = [0, 2, 2, 1] + [1] * upper
    sources = [1, 3]
    text |= {
        "num_hidden_layers": len(ratios), "compress_ratios": [*ratios, 0, 0], "kv_source_layer_ids": sources,
        "index_source_layer_ids": sorted({1, 3, rng.randrange(3, len(ratios))}), "candidate_source_layer_id": 3,
        "sliding_window": rng.choice([2, 3, 5, 8]), "dspark_target_layer_ids": [1, 2, len(ratios) - 1],
        "index_topk": rng.choice([4, 6]), "candidate_topk_blocks": 3,
    }  # fmt: skip
    return {**preset, "text_config": text}


@pytest.mark.parametrize("seed", range(3))
def test_exact_tail_equals_full(box, tmp_path, seed):
    """Logits 1e-9 over chunks, with the tail's continuation; and one position less is caught, or the rule computes more
    than it has to."""
    config = tail_config(fixtures.preset_config("tiny-v41-plain"), seed)
    fixtures.write(tmp_path, config, seed=seed, extra_files=fixtures.tokenizer_files(fixtures.byte_level_tokenizer()))
    llm = LLM(tmp_path, dtype="float64", draft=None)
    outs = {
        prefill: box.run(
            engine_of(llm, prefill=prefill, max_num_batched_tokens=50, enable_prefix_caching=False),
            [PROMPT, PROMPT[:30]],
            box.greedy(6, logprobs=5),
        )
        for prefill in ("full", "exact_tail")
    }
    for full, tail in zip(*outs.values(), strict=True):
        assert full.token_ids == tail.token_ids
        assert_close_logprobs(full, tail)


def test_one_position_less_than_the_exact_tail_is_caught(tiny, box, monkeypatch):
    """The comparison with the full prefill has teeth: any upper layer that starts one position late shows."""
    full = box.run(engine_of(tiny, prefill="full"), [PROMPT], box.greedy(1, logprobs=5))[0]
    rule, caught = DeepseekV41.needed_from, []
    # The last layer's own outputs are wanted from the last position on, so it has none to lose.
    for late in range(tiny.model.last_source, len(tiny.model.layers) - 1):

        def shorter(self, layer, batch, late=late):
            firsts = rule(self, layer, batch)
            return [f + 1 for f in firsts] if layer == late else firsts

        monkeypatch.setattr(DeepseekV41, "needed_from", shorter)
        engine = engine_of(tiny, enable_prefix_caching=False)
        out = box.run(engine, [PROMPT], box.greedy(1, logprobs=5))[0]
        caught.append(abs(out.logprobs[0].logprob - full.logprobs[0].logprob) > 1e-9)
    assert caught and all(caught)


def test_window_tail_is_only_nearly_right(plain_folder, box):
    """It must do less than the exact tail (else it is no option), leave the prefix cache alone, and not be exact by
    definition."""
    near = LLM(plain_folder, dtype="float64", draft=None, prefill="window_tail")
    assert near.engine.cache is None and near.model.window_tail
    exact = LLM(plain_folder, dtype="float64", draft=None)
    one, other = (llm.generate([PROMPT], box.greedy(1, logprobs=0))[0].logprobs[0].logprob for llm in (near, exact))
    if len(exact.model.layers) - 1 - exact.model.last_source > 1:
        assert one != other
    assert abs(one - other) < 1


# -- images ------------------------------------------------------------------------------------------------------------


def image_prompt(llm: LLM, seed: int, before: int):
    """Text, one image of 2 x 2 cells, text; `before` tokens come first."""
    facts = llm.model.image_facts()
    side = 2 * facts["downsample"]
    patches = torch.randn(side * side, 3, facts["patch"], facts["patch"], generator=torch.Generator().manual_seed(seed))
    span = 2 + 2 * 3  # start, two lines of two and a newline, end
    ids = PROMPT[:before] + [facts["image_token_id"]] * span + PROMPT[before : before + 6]
    return {"prompt_token_ids": ids, "images": [(before, patches, side, side)]}


def test_images_across_chunks_and_in_the_prefix_cache(tiny, plain_folder, box):
    """Chunk borders at every place of the span: same logits. Equal pixels are found again, others are not."""
    whole = LLM(plain_folder, dtype="float64", draft=None, enable_prefix_caching=False)
    prompt = image_prompt(whole, 0, 5)
    wanted = whole.generate(prompt, box.greedy(4, logprobs=5))[0]
    for budget in range(1, 12):
        engine = engine_of(tiny, max_num_batched_tokens=budget, max_num_seqs=1)
        running = engine.add(tiny.prompt(prompt), box.greedy(4, logprobs=5))
        while engine.unfinished:
            engine.step()
        assert running.output.token_ids == wanted.token_ids
        assert_close_logprobs(running.output, wanted)
    engine, outs = engine_of(tiny), []
    for seed in (0, 0, 1):
        running = engine.add(tiny.prompt(image_prompt(tiny, seed, 5)), box.greedy(4, logprobs=5))
        while engine.unfinished:
            engine.step()
        outs.append(running.output)
    assert [o.cached_tokens for o in outs] == [0, 16, 0]
    assert engine.stats.prefix_misses == {"no match": 1, "images differ": 1}
    assert_close_logprobs(outs[1], wanted)
    other = whole.generate(image_prompt(whole, 1, 5), box.greedy(4, logprobs=5))[0]
    assert_close_logprobs(outs[2], other)


# -- sampling and surface ----------------------------------------------------------------------------------------------


def test_a_seed_does_not_depend_on_the_neighbours(tiny, box):
    """Sampled text of a seed is the same alone and in company."""
    params = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
    (alone,) = box.run(engine_of(tiny), [PROMPT[:9]], params)
    others = [SamplingParams(max_tokens=5, temperature=1.0, seed=s) for s in range(3)]
    company = box.run(engine_of(tiny), [PROMPT[:9]] + [PROMPT[s : s + 12] for s in range(3)], [params, *others])
    assert company[0].token_ids == alone.token_ids


def test_streams_can_be_read_in_turns_and_closed(tiny, box, plain):
    """Two streams of one LLM share its steps; closing one frees its pages and leaves the other right."""
    one, two = tiny.stream(PROMPT[:9], box.greedy(8)), tiny.stream(PROMPT[:12], box.greedy(8))
    tokens = list(next(one).token_ids)
    next(two)
    tokens += next(one).token_ids
    two.close()
    tokens += [t for delta in one for t in delta.token_ids]
    assert tokens == plain(tuple(PROMPT[:9]), 8)[0].token_ids
    assert not tiny.engine.unfinished
    assert tiny.stats.finished["abort"] == 1


def test_trace_is_still_one_line_per_token(tiny):
    """`score` shares the runner: it keeps reporting every position although generation skips most."""
    logits, trace = tiny.score(PROMPT[:20], trace=True)
    assert len(logits) == 20 and isinstance(trace, Trace) and len(trace["layer4.stream"]) == 20
