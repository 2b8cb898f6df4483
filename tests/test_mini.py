"""The trained model that comes with finback: does it load, do what its card says, and keep finback's promises?

Would catch: weights that were damaged or written in another format, a chat format that is not the one of the training,
a skill lost to a change of arithmetic, drafts that change text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from finback import LLM, SamplingParams
from finback.io.chat import Chat
from finback.io.checkpoint import Checkpoint
from finback.io.default import default_model
from finback.tools.measures import Skills
from finback.train import synth


@pytest.fixture(scope="module")
def load() -> Callable[..., LLM]:
    """LLM() with options, each combination once."""
    made: dict[str, LLM] = {}

    def get(**options: object) -> LLM:
        return made.setdefault(repr(options), LLM(**options))  # pyrefly: ignore[bad-argument-type]

    return get


def test_it_is_small_and_quantised_as_released():
    """bf16 weights shipped by mistake, or a shard that is missing."""
    folder = default_model()
    assert sum(p.stat().st_size for p in Path(folder).iterdir()) < 60e6
    tensors = Checkpoint.open(folder).tensors
    stored = {name.rsplit(".", 1)[0]: info.dtype for name, info in tensors.items() if name.endswith(".weight")}
    assert stored["layers.3.ffn.experts.7.w1"] == "I8"  # two FP4 values a byte
    assert stored["layers.3.attn.wq_b"] == "F8_E4M3"
    assert any(name.startswith("mtp.") for name in stored) and any(name.startswith("vision.") for name in stored)


@pytest.mark.parametrize(("kind", "least"), [("sum", 9), ("word_problem", 8), ("tool", 8)])
def test_it_has_learned_what_its_card_says(load: Callable[..., LLM], kind: str, least: int):
    """12 questions of the test split; of 40, its card says, 38, 40 and 35 are right. Random weights get none."""
    llm = load()
    skills = Skills(llm, Chat.of(llm.config, llm.tokenizer), most=160)
    assert skills.exact(synth.documents(kind, seed=1, split="test", count=12)).rate.right >= least


def test_drafts_change_no_text(load: Callable[..., LLM]):
    """Speculation that accepts a token which plain decoding would not have taken."""
    prompts = ["Once upon a time there was a", "The captain looked at the"]
    params = SamplingParams(max_tokens=40, temperature=0.0)
    options = {"dtype": "float32", "rounding": "off"}
    plain, drafted = load(**options, draft=None), load(**options)
    expected = [o.token_ids for o in plain.generate(prompts, params)]
    assert [o.token_ids for o in drafted.generate(prompts, params)] == expected
    assert sum(drafted.stats.accepted) > 10


def test_real_weights_do_not_mind_cuts(load: Callable[..., LLM]):
    """Random weights make flat attention; trained ones have sharp peaks, near ties and large activations."""
    llm = load(dtype="float32", rounding="off", draft=None)
    ids = llm.tokenizer.encode("A letter came to the lighthouse. " * 40)
    whole = llm.score(ids)
    cut = llm.score(ids, splits=[1, 130, 7, len(ids) - 138])
    assert (whole - cut).abs().max() <= 2e-4
