"""The adapter for lm-evaluation-harness against `LLM.score`; a stand-in takes the place of an absent harness."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from finback.engine.llm import LLM
from finback.tools import fixtures


def stand_in() -> dict[str, ModuleType]:
    """The three names that the adapter takes from the harness."""
    modules = {
        name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    }
    modules["lm_eval.api.model"].LM = type("LM", (), {})  # type: ignore[attr-defined]
    modules["lm_eval.api.registry"].register_model = lambda name: lambda cls: cls  # type: ignore[attr-defined]
    modules["lm_eval"].simple_evaluate = lambda **given: {  # type: ignore[attr-defined]
        "results": {task: {"limit": given["limit"]} for task in given["tasks"]}
    }
    return modules


@pytest.fixture
def adapter(monkeypatch) -> Any:
    name = "finback.integrations.lm_eval"
    try:
        import_module("lm_eval.api.model")
    except ImportError:
        for module, content in stand_in().items():
            monkeypatch.setitem(sys.modules, module, content)
        monkeypatch.delitem(sys.modules, name, raising=False)
        yield import_module(name)
        del sys.modules[name]
    else:
        yield import_module(name)


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("tiny")
    fixtures.make(folder, preset="tiny-v41-plain")
    return LLM(folder)


def asked(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def nats(llm: LLM, ids: list[int], n: int) -> float:
    logits = llm.score(ids).double().log_softmax(dim=1)
    return sum(float(logits[i - 1, ids[i]]) for i in range(len(ids) - n, len(ids)))


def test_continuations_are_scored_as_score_does(llm, adapter):
    """A shift by one, a lost blank or a batch that mixes lines up gives plausible, wrong accuracies."""
    model = adapter.FinbackLM(llm)
    pairs = [("The cat sat", " on the mat"), ("One two ", "three"), ("", "Alone"), ("A" * 40, " b"), ("Say", "")]
    found = model.loglikelihood([asked(*pair) for pair in pairs])
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        text = llm.tokenizer.encode(context.rstrip())
        whole = [llm.tokenizer.bos_id, *llm.tokenizer.encode(context + continuation)]
        n = len(whole) - 1 - len(text)
        assert value == pytest.approx(nats(llm, whole, n), abs=1e-4)
        assert greedy == (n == 0 or llm.score(whole)[-n - 1 : -1].argmax(dim=1).tolist() == whole[-n:])
    start = [llm.tokenizer.bos_id, *llm.tokenizer.encode("The cat sat")]
    likeliest = int(llm.score(start)[-1].argmax())
    assert model._score([([*start, likeliest], 1)])[0][1]


def test_long_texts_lose_nothing(llm, adapter, monkeypatch):
    """Every token counts once, however the text is cut; the beginning of a context is what gives way."""
    model = adapter.FinbackLM(llm)
    text = "The old mill stood by the river. " * 6
    ids = llm.tokenizer.encode(text)
    whole = model.loglikelihood_rolling([asked(text), asked("short")])
    assert whole[0] == pytest.approx(nats(llm, [llm.tokenizer.bos_id, *ids], len(ids)), abs=1e-3)
    monkeypatch.setattr(llm.model, "max_positions", 24)
    parts = list(model._parts(ids))
    assert sum(n for _, n in parts) == len(ids) and max(len(part) for part, _ in parts) <= 24
    assert [t for part, n in parts for t in part[-n:]] == ids
    long, short = model.loglikelihood([asked(text, " end"), asked(text[-12:], " end")])
    assert long[0] < 0 and short[0] < 0


def test_generation_follows_the_settings_of_a_task(llm, adapter):
    """Stops that are ignored, or sampling where greedy was meant, change every exact-match score."""
    model = adapter.FinbackLM(llm)
    free = model.generate_until([asked("The cat", {"until": [], "max_gen_toks": 12})])[0]
    stop = free[2:4]
    cut, same, drawn = model.generate_until(
        [
            asked("The cat", {"until": [stop, ""], "max_gen_toks": 12}),
            asked("The cat", {"until": stop, "max_gen_toks": 12, "do_sample": False, "temperature": 0.7}),
            asked("The cat", {"max_gen_toks": 12, "until": stop, "temperature": 0.0}),
        ]
    )
    assert cut == same == drawn == free[: free.index(stop)] and stop not in cut
    assert model.generate_until([]) == []
    assert model._sampling({"max_gen_toks": 10**6}).max_tokens == 512
    assert model._sampling({"do_sample": True, "temperature": 0.5, "top_p": 0.9}).temperature == 0.5


def test_batch_settings_of_the_harness_are_not_the_models(llm, adapter, monkeypatch):
    """The harness passes its batch size to every model; LLM refuses what it does not know."""
    made: dict[str, Any] = {}

    class Fake(LLM):
        def __init__(self, model: str, **options: Any):
            made.update(options, model=model)
            self.tokenizer = llm.tokenizer

    monkeypatch.setattr(adapter, "LLM", Fake)
    adapter.FinbackLM("folder", batch_size=4, max_batch_size=8, device="cpu")
    assert made == {"model": "folder", "device": "cpu"}
