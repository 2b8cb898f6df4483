"""`deterministic=True`: the same request gives the same bytes, whatever runs beside it.

Would catch: a product whose summing order depends on the number of rows, a window or a selection whose width depends on
the longest sequence in the batch, a vectorised function whose last few values take another path.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest
import torch

from finback import kernels
from finback.engine.args import EngineArgs
from finback.engine.core import Engine
from finback.engine.llm import LLM
from finback.engine.request import SamplingParams, SequenceState
from finback.kernels.torch import fixed
from finback.tools import fixtures

PRESETS = ("tiny-v41-plain", "tiny-v32", "tiny-spikewhale")
PROMPT = [(i * 29 + 7) % 500 for i in range(45)]


@pytest.fixture(
    scope="module",
    params=[(preset, dtype) for preset in PRESETS for dtype in ("float32", "bfloat16")] + [("tiny-v41", None)],
    ids=str,
)
def llm(request, tmp_path_factory):
    preset, dtype = request.param
    folder = tmp_path_factory.mktemp(preset)
    fixtures.make(folder, preset=preset)
    return LLM(folder, dtype=dtype, draft=None)


class Watched:
    """An engine that keeps the logits of the request it watches."""

    def __init__(self, llm, **args):
        self.engine = Engine(llm.model, llm.tokenizer, EngineArgs(deterministic=True, block_size=8, **args))
        self.lines = []
        step = self.engine.runner.step

        def spy(work, tape=None):
            logits = step(work, tape)
            at = 0
            for w in work:
                if w.slot is self.slot and w.wanted:
                    self.lines.append(logits[at : at + w.wanted].clone())
                at += w.wanted
            return logits

        self.engine.runner.step = spy

    def run(self, box, others=(), drafter=None):
        self.engine.runner.drafter = drafter
        self.lines.clear()
        before = [self.engine.add(SequenceState(list(p)), box.greedy(n)) for p, n in others[::2]]
        running = self.engine.add(SequenceState(list(PROMPT)), box.greedy(6))
        self.slot = running.slot
        before += [self.engine.add(SequenceState(list(p)), box.greedy(n)) for p, n in others[1::2]]
        while self.engine.unfinished:
            self.engine.step()
        return torch.cat(self.lines), running


def neighbours(count, longest=60):
    """Prompts from 1 to `longest` tokens, so that the batch's longest sequence changes all the time."""
    return [([(k * 13 + i * 7 + 1) % 500 for i in range(1 + (k * 17) % longest)], 1 + k % 9) for k in range(count)]


def test_bytes_do_not_depend_on_the_company(llm, box):
    """Alone, among 31 neighbours, in chunks of several sizes, after a preemption, with a prefix hit, with drafts."""
    alone, running = Watched(llm, enable_prefix_caching=False).run(box)
    tokens = running.output.token_ids

    crowded = Watched(llm, enable_prefix_caching=False)
    longest = 12 if crowded.engine.runner.one_by_one else 60  # one token a forward takes its time
    crowd, _ = crowded.run(box, neighbours(31, longest))
    assert torch.equal(crowd, alone), "31 neighbours"

    for budget in (1, 7, 16, 44):
        chunked, _ = Watched(llm, max_num_batched_tokens=budget, max_num_seqs=1).run(box)
        assert torch.equal(chunked, alone), f"chunks of {budget}"

    full, _ = Watched(llm, prefill="full").run(box)
    assert torch.equal(full, alone), "full prefill"

    caching = Watched(llm)
    caching.run(box)
    warm, running = caching.run(box, neighbours(3))
    assert running.output.cached_tokens == 40 and torch.equal(warm, alone), "prefix hit"

    small = Watched(llm, enable_prefix_caching=False)
    box.shrink(small.engine.runner.pages.pools["full"], 9)
    again, running = small.run(box, [([3] * 14, 20)])
    assert running.slot.preemptions and torch.equal(again[-len(alone) :], alone), "preemption"

    def half_right(sequence, limit):
        done = len(sequence) - len(PROMPT)
        return [t if i < 2 else (t + 1) % 500 for i, t in enumerate(tokens[done : done + limit])]

    drafted = Watched(llm)
    _, running = drafted.run(box, drafter=box.ScriptedDrafter(half_right))
    assert running.output.token_ids == tokens
    at = 0
    for block in drafted.lines:
        kept = min(3, len(block))
        assert torch.equal(block[:kept], alone[at : at + kept]), "drafts"
        at += kept


def test_scores_do_not_depend_on_splits(llm):
    """Nor on what is scored beside them, nor on being generated instead."""
    fixed = copy(llm)
    fixed.args = replace(llm.args, deterministic=True)
    whole = fixed.score(PROMPT[:20])
    cut, _ = fixed.score([PROMPT[:20], PROMPT[7:40]], splits=[[7, 1, 12], [30, 0, 3]])
    assert torch.equal(cut, whole)
    watched = Watched(llm, enable_prefix_caching=False)
    running = watched.engine.add(SequenceState(PROMPT[:20]), SamplingParams(max_tokens=1))
    watched.slot = running.slot
    watched.engine.step()
    assert torch.equal(watched.lines[0], whole[-1:])


def test_ordinary_products_do_depend_on_it(rng):
    """If they stopped, the option would be a cost for nothing."""
    x, weight = (torch.randn(n, 1024, generator=rng) for n in (64, 129))
    usual = [kernels.linear(x[:n], weight) for n in range(1, 64)]
    whole = kernels.linear(x, weight)
    assert not all(torch.equal(y, whole[: len(y)]) for y in usual)
    with kernels.deterministic():
        fixed_rows = [kernels.linear(x[:n], weight) for n in range(1, 64)]
        assert all(torch.equal(y, fixed_rows[-1][: len(y)]) for y in fixed_rows)
        assert float((fixed_rows[-1] - usual[-1]).abs().max()) < 1e-3
    assert not kernels.is_deterministic()


def test_packed_products_need_enough_rows_only(rng):
    """The large bf16 weights of real models take another product than the small ones of fixtures."""
    weight = torch.randn(640, 512, generator=rng).bfloat16()
    packed = kernels.pack_linear(weight)
    if packed is None or isinstance(packed.data, torch.Tensor):
        pytest.skip("this machine packs no weights")
    x = torch.randn(48, 512, generator=rng).bfloat16()
    with kernels.deterministic():
        whole = kernels.packed_linear(x, packed, torch.float32)
        for n in range(1, 48):
            for at in (0, 48 - n):
                assert torch.equal(kernels.packed_linear(x[at : at + n], packed, torch.float32), whole[at : at + n]), n
    assert float((whole - x.float() @ weight.float().T).abs().max()) < 1e-2


def test_row_blocks_keep_shapes(rng):
    """Padding must be cut off again, for no rows and for more than two dimensions too."""
    x, weight = torch.randn(3, 11, 8, generator=rng), torch.randn(5, 8, generator=rng)
    with kernels.deterministic():
        assert kernels.linear(x[:0], weight).shape == (0, 11, 5)
        assert torch.allclose(kernels.linear(x, weight), x @ weight.T, atol=1e-5)
    assert fixed.pad_rows(x[:0, 0], 4).shape == (4, 8)
