"""Random traffic on a model that any misplaced row betrays.

Would catch: a page that is leaked, given back twice, or written while someone else reads it; a recycled page that a
window still needs; a prefix hit with another sequence's windows; a preempted request that never comes back.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.base.runtime import ConfigError, NonFiniteError, RequestError
from finback.engine.request import SamplingParams, SequenceState

SYSTEM = [[7, 3, 9, 9, 1, 2, 40, 41, 42, 43, 44, 45, 13], [7, 3, 9, 9, 60, 5]]


@st.composite
def traffic(draw):
    """Requests (arrival step, prompt, max_tokens, abort step), and how the engine is set up."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    requests = []
    for _ in range(draw(st.integers(1, 10))):
        prompt = rng.choice([[], *SYSTEM, SYSTEM[0] * 3]) + [rng.randrange(61) for _ in range(rng.randrange(1, 20))]
        abort = rng.randrange(1, 25) if rng.random() < 0.25 else None
        requests.append((rng.randrange(20), prompt, rng.randrange(1, 14), abort))
    options = {
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(6, 40)),
        "block_size": draw(st.sampled_from([2, 4, 8])),
        "prefill": draw(st.sampled_from(["exact_tail", "full"])),
        "prefix_keep_pages": draw(st.integers(0, 2)),
        "enable_prefix_caching": draw(st.booleans()),
    }
    return requests, options, draw(st.integers(0, 4)), draw(st.integers(9, 40)), rng


def squeeze(box, engine, tokens: int) -> None:
    """Leave pages for about `tokens` tokens in the classes that keep everything, and few for windows."""
    for cls, pool in engine.runner.pages.pools.items():
        size = engine.runner.pages.page_tokens
        keep = -(-80 // size) + tokens // size if engine.runner.pages.windows[cls] is None else 8 + tokens // size
        box.shrink(pool, min(keep, pool.usable))


@given(traffic())
def test_any_traffic_ends_right(box, case):
    """Tokens equal the model's definition whatever else happens; between steps all pages are accounted for; afterwards
    only the cache holds any."""
    requests, options, drafts, memory, rng = case

    def script(tokens, limit):
        right = box.continuation(tokens, limit)
        wrong = rng.randrange(limit + 1)
        return [t if i < wrong else (t + 1) % box.VOCAB for i, t in enumerate(right)]

    engine = box.fake(box.ScriptedDrafter(script, drafts) if drafts else None, **options)
    squeeze(box, engine, memory)
    todo, alive, step = sorted(requests, key=lambda r: r[0]), [], 0
    while todo or engine.unfinished:
        while todo and todo[0][0] <= step:
            _, prompt, count, abort = todo.pop(0)
            alive.append((engine.add(SequenceState(list(prompt)), box.greedy(count)), prompt, count, abort))
        for running, _, _, abort in alive:
            if abort == step:
                engine.abort(running)
        engine.step()
        box.audit(engine)
        step += 1
        assert step < 3000, "requests starve"
    for running, prompt, count, abort in alive:
        out, expected = running.output, box.continuation(prompt, count)
        if out.finish_reason == "abort":
            assert abort is not None and out.token_ids == expected[: len(out.token_ids)]
        else:
            assert out.finish_reason == "length" and out.token_ids == expected
    if engine.cache is not None:
        engine.cache.clear()
    assert all(pool.free == pool.usable for pool in engine.runner.pages.pools.values())


def test_generating_goes_before_prompts(box):
    """A long prompt must not stall a stream: in every step the stream gets its token."""
    engine = box.fake(max_num_batched_tokens=8, max_num_seqs=2)
    stream = engine.add(SequenceState([1, 2, 3]), box.greedy(30))
    engine.step()
    engine.add(SequenceState(list(range(60)) * 2), box.greedy(1))
    for _ in range(10):
        assert stream in [running for running, _ in engine.step()]


def test_preemption_takes_the_last_arrival(box):
    """Else an early request could be thrown out for ever."""
    engine = box.fake(enable_prefix_caching=False)
    squeeze(box, engine, 0)
    first, last = (engine.add(SequenceState([5, i]), box.greedy(60)) for i in (1, 2))
    while engine.unfinished:
        engine.step()
    assert first.slot.preemptions == 0 < last.slot.preemptions
    assert last.output.token_ids == box.continuation([5, 2], 60)


def test_limits_name_themselves(box):
    """A request that can never run must not wait for ever, and a full queue must say so."""
    engine = box.fake(max_queued_requests=2, max_model_len=50)
    with pytest.raises(RequestError, match="50 positions"):
        engine.add(SequenceState([1] * 50), box.greedy(1))
    engine.add(SequenceState([1]), box.greedy(1))
    engine.add(SequenceState([1]), box.greedy(1))
    with pytest.raises(RequestError, match="queue is full"):
        engine.add(SequenceState([1]), box.greedy(1))
    small = box.fake()
    squeeze(box, small, 0)
    with pytest.raises(RequestError, match="kv_cache_memory_bytes"):
        small.add(SequenceState([1] * 90), box.greedy(100))
    with pytest.raises(ConfigError, match="every running request"):
        box.fake(max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(ConfigError, match="ratio of rows 'pairs'"):
        box.fake(block_size=3)


def test_a_shared_beginning_is_reused_by_the_second_prompt(box):
    """Different endings behind twenty shared tokens. A long one hits at once: its own tail begins behind them. A short
    one starts where its tail begins and leaves the whole border to the next one. Without a place to start it says so,
    and all are right."""
    shared = list(range(20))
    for own, expected in ((18, [0, 20, 20, 20]), (6, [0, 8, 20, 20]), (1, [0, 20, 20, 20])):
        engine, reused = box.fake(), []
        for ending in range(4):
            prompt = shared + [50 + ending] * own
            (out,) = box.run(engine, [prompt], box.greedy(4))
            assert out.token_ids == box.continuation(prompt, 4)
            reused.append(out.cached_tokens)
        assert reused == expected
    engine = box.fake()
    for prompt in (shared[:9] + [50] * 20, shared[:9] + [51] * 2):
        box.run(engine, [prompt], box.greedy(1))
    assert engine.stats.prefix_misses == {"no match": 1, "never kept": 1}


def test_windows_on_the_way_make_room_first(box):
    """A long prompt fills idle memory with windows along its way; the ends of others have to outlive it."""
    engine, first = box.fake(max_num_seqs=1, max_num_batched_tokens=16), [5] * 17
    box.run(engine, [first], box.greedy(1))
    box.run(engine, [list(range(60)) * 5], box.greedy(1))
    pool = engine.runner.pages.pools["window:5"]
    assert pool.idle > pool.usable - 5, "idle memory is not used"
    (again,) = box.run(engine, [first], box.greedy(1))
    assert again.cached_tokens == 16


def test_misses_have_reasons(box):
    engine = box.fake()
    box.run(engine, [[1, 2, 3]], box.greedy(1))
    prompt = list(range(30))
    box.run(engine, [prompt], box.greedy(1))
    for _ in range(len(engine.cache.nodes("window:5"))):
        engine.cache._evict("window:5")
    box.run(engine, [prompt], box.greedy(1))
    assert engine.stats.prefix_misses == {"too short": 1, "no match": 1, "window evicted": 1}


def test_a_conversation_goes_on_from_its_last_border(box):
    """The answer is reused too, not only the prompt."""
    engine, prompt = box.fake(), list(range(17))
    (first,) = box.run(engine, [prompt], box.greedy(12))
    (second,) = box.run(engine, [prompt + first.token_ids + [4, 4]], box.greedy(3))
    assert second.cached_tokens == 28
    assert second.token_ids == box.continuation(prompt + first.token_ids + [4, 4], 3)


@pytest.mark.parametrize("drafts", [0, 3])
def test_nan_ends_one_request_with_its_name(box, drafts):
    """NaN must not become text, nor reach the neighbours through shared pages or a batch-wide check. A bad draft that
    would have been refused anyway must not end its request."""
    engine = box.fake(box.ScriptedDrafter(lambda tokens, limit: [60] * limit, drafts) if drafts else None)
    engine.runner.model.bad_token = 60
    prompts = [[1, 2, 3], [4, 60], [5, 6]]
    fine, bad, other = box.run(engine, prompts, box.greedy(3))
    expected = [box.continuation(p, 3) for p in prompts]
    assert 60 not in expected[0][:2] + expected[2][:2]
    assert (fine.token_ids, other.token_ids) == (expected[0], expected[2])
    assert bad.finish_reason == "error" and bad.text == "" and bad.token_ids == []
    assert isinstance(bad.error, NonFiniteError) and "request-1" in str(bad.error)
    box.audit(engine)


def test_stop_inside_an_accepted_block(box):
    """Nothing is emitted past a stop token or max_tokens, and what is kept for reuse ends there too."""
    prompt = [3, 1, 4, 1, 5, 9]
    right = box.continuation(prompt, 12)
    for at in range(6):
        engine = box.fake(box.ScriptedDrafter(lambda tokens, limit: box.continuation(tokens, limit)))
        stop = SamplingParams(max_tokens=12, stop_token_ids=[right[at]])
        cut, short = box.run(engine, [prompt, prompt], [stop, box.greedy(at + 1)])
        first = right.index(right[at]) + 1
        assert cut.token_ids == right[:first] and cut.finish_reason == "stop"
        assert short.token_ids == right[: at + 1] and short.finish_reason == "length"
        (more,) = box.run(engine, [prompt + right[:first] + [8]], box.greedy(3))
        assert more.token_ids == box.continuation(prompt + right[:first] + [8], 3)
