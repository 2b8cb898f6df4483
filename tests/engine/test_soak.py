"""Two thousand random requests through one engine (pytest -m slow).

Would catch: what a short test does not reach: a page lost once in a thousand requests, a cache that grows without end,
a rare order of abort, preemption, prefix hit and rejected drafts that leaves a wrong row behind.
"""

from __future__ import annotations

import random
import resource
from typing import Any

import pytest
import torch

from finback.engine.args import EngineArgs
from finback.engine.core import Engine
from finback.engine.llm import LLM
from finback.engine.request import SamplingParams, SpeculativeConfig

REQUESTS = 2000
KINDS = 40  # different prompts, so that prefixes are shared and the plain run can be kept


def prompts(llm: LLM, rng: random.Random, images: list[Any]) -> list[Any]:
    """Short and long ones, many with a common beginning, some with an image."""
    system = [rng.randrange(8, 500) for _ in range(21)]
    found: list[Any] = []
    for i in range(KINDS):
        ids = (system if i % 2 else []) + [rng.randrange(8, 500) for _ in range(rng.randrange(1, 24))]
        if i % 5 == 0:
            start = rng.randrange(len(ids) + 1)
            span = [llm.model.image_facts()["image_token_id"]] * 8
            ids = ids[:start] + span + ids[start:]
            found.append({"prompt_token_ids": ids, "images": [(start, images[i % 3], 6, 6)]})
        else:
            found.append(ids)
    return found


def settings(kind: int) -> SamplingParams:
    count = 3 + kind % 7
    if kind % 4 == 3:
        return SamplingParams(max_tokens=count, temperature=0.9, top_p=0.95, seed=kind, ignore_eos=True)
    return SamplingParams(max_tokens=count, ignore_eos=True, stop_token_ids=[7] if kind % 6 == 0 else [])


@pytest.mark.slow
def test_soak(plain_folder, box, rng):
    """Zero lost pages, zero wrong tokens against the plain run, flat memory."""
    llm = LLM(plain_folder, dtype="float64", draft=None)
    dice = random.Random(0)
    images = [torch.randn(36, 3, 4, 4, generator=rng) for _ in range(3)]
    kinds = prompts(llm, dice, images)
    plain = LLM(plain_folder, dtype="float64", draft=None, enable_prefix_caching=False, prefill="full", max_num_seqs=1)
    expected = [plain.generate(p, settings(i))[0].token_ids for i, p in enumerate(kinds)]

    speculative = SpeculativeConfig(method="model", verify_length="static", num_speculative_tokens=3)
    args = EngineArgs(block_size=8, max_num_seqs=8, max_num_batched_tokens=48, speculative=speculative)
    engine = Engine(llm.model, llm.tokenizer, args)
    for cls, pool in engine.runner.pages.pools.items():  # a request takes up to eight full pages
        keep = 14 if engine.runner.pages.windows[cls] is None else 40
        box.shrink(pool, keep)
    sent, alive, wrong, peak = 0, [], 0, 0
    while sent < REQUESTS or engine.unfinished:
        while sent < REQUESTS and engine.unfinished < 12 and dice.random() < 0.7:
            kind = dice.randrange(KINDS)
            alive.append((kind, engine.add(llm.prompt(kinds[kind]), settings(kind))))
            sent += 1
        if alive and dice.random() < 0.06:
            engine.abort(dice.choice(alive)[1])
        engine.step()
        if engine.stats.steps % 20 == 0:
            box.audit(engine)
        for kind, running in [pair for pair in alive if pair[1].output.finish_reason is not None]:
            alive.remove((kind, running))
            out = running.output
            right = expected[kind][: len(out.token_ids)] if out.finish_reason == "abort" else expected[kind]
            wrong += out.token_ids != right
        if sent >= REQUESTS // 2 and not peak:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stats = engine.stats
    assert wrong == 0
    assert stats.preemptions and stats.prefix_hits and sum(stats.accepted) and stats.finished["abort"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1.05 * peak
    engine.cache.clear()
    assert all(pool.free == pool.usable for pool in engine.runner.pages.pools.values())
    assert not engine.cache.root.children and not engine._requests
