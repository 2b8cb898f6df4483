"""What `finback eval mini` reports of a model: checked with a model that knows every answer, and on tiny-v41."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finback.base.runtime import ConfigError
from finback.cli import main
from finback.engine.llm import LLM
from finback.engine.request import RequestOutput
from finback.io.chat import Chat
from finback.nn.tape import Tape
from finback.tools import evaluate as module
from finback.tools import fixtures, measures
from finback.tools.evaluate import Settings, evaluate
from finback.tools.measures import Rate, Skills, held_out, inside, without_engram
from finback.train.rendering import render
from finback.train.sources import Document
from finback.train.synth import documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    fixtures.make(place)
    return place


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def chat(llm) -> Chat:
    return Chat.of(llm.config, llm.tokenizer)


def ids_of(llm: LLM, count: int) -> list[int]:
    text = " ".join(s.text for s in documents("story", count=3))
    return llm.tokenizer.encode(text)[:count]


def test_right_answers_count_and_no_others(llm, chat, monkeypatch):
    """A parser or a grader that loses calls, reasoning or blanks would fail a model that knows everything."""
    kinds = [k for k in module.KINDS if k not in ("recall", "scene")]
    monkeypatch.setattr(llm.engine, "max_model_len", 10**6)
    for kind in kinds:
        samples = list(documents(kind, 0, "test", 8))
        prompts = [chat.render(s.prompt, s.tools, s.options).token_ids for s in samples]
        answers = [
            render(chat, s.messages, s.tools, s.options).ids[len(p) :] for s, p in zip(samples, prompts, strict=True)
        ]

        def knows(prompts: list[Any], sampling: Any, answers: Any = answers) -> list[RequestOutput]:
            text = [llm.tokenizer.decode(a[:-1]) for a in answers]
            return [RequestOutput([], a, t, "stop") for a, t in zip(answers, text, strict=True)]

        monkeypatch.setattr(llm, "generate", knows)
        run = Skills(llm, chat, 60).exact(samples)
        assert run.rate == Rate(8, 8) and run.tokens == sum(map(len, answers))
        monkeypatch.setattr(llm, "generate", lambda p, s, a=answers: knows(p, s, a[1:] + a[:1]))
        assert Skills(llm, chat, 60).exact(samples).rate.right < 8


def test_too_long_is_left_out_and_said(llm, chat):
    """Samples that a model cannot hold are neither wrong nor silently gone."""
    samples = list(documents(["sum", "recall_1k"], 0, "test", 6))
    long = sum(s.kind == "recall_1k" for s in samples)
    run = Skills(llm, chat, 4).exact(samples)
    assert 0 < long < 6 and (run.rate.count, run.rate.skipped) == (6 - long, long)
    rate = Skills(llm, chat, 4).forced(samples, compressed=True)
    assert (rate.count, rate.skipped) == (6 - long, long)
    assert Rate(0, 0).share is None and Rate(1, 4).share == 0.25


def test_forced_answers_are_greedy_ones(llm, chat, monkeypatch):
    """The short cut of one forward must say what decoding says, and the ablated one must not see past the window."""
    sample = next(documents("list", 0, "test"))
    prompt = chat.render(sample.prompt, sample.tools, sample.options).token_ids
    skills = Skills(llm, chat, 8)
    greedy = llm.generate(prompt, measures.SamplingParams(max_tokens=6))[0].token_ids

    def with_answer(ids: list[int]) -> bool:
        monkeypatch.setattr(measures, "render", lambda *_: measures_rendered([*prompt, *ids]))
        return skills.forced([sample], compressed=True).right == 1

    assert with_answer(greedy) and not with_answer([*greedy[:3], greedy[3] + 1, *greedy[4:]])
    ids = ids_of(llm, 120)
    other = [ids[0], *[i % 50 + 300 for i in ids[1:20]], *ids[20:]]
    rows = measures._no_rows(llm.model, 120)
    window, layers = 8, 5
    reach = 20 + layers * (window - 1) + 4  # and what n-grams look back
    assert torch.equal(llm.score(ids, replay=rows)[reach:], llm.score(other, replay=rows)[reach:])
    assert not torch.equal(llm.score(ids)[reach:], llm.score(other)[reach:])


def measures_rendered(ids: list[int]) -> Any:
    from finback.train.rendering import Rendered

    return Rendered(ids, [True] * len(ids))


def test_nats_are_of_the_learned_tokens(llm):
    """Nats of users' turns, or a mean of means, cannot be compared between models."""
    ids = np.asarray(ids_of(llm, 30))
    learn = np.arange(30) % 3 == 0
    logits = llm.score(ids.tolist()).double().log_softmax(dim=1)
    nats = [-float(logits[i - 1, ids[i]]) for i in range(1, 30)]
    found = held_out(llm, [Document(ids), Document(ids, learn)], tokens=10**6, length=99)
    wanted = nats + [n for n, taught in zip(nats, learn[1:], strict=True) if taught]
    assert found.count == len(wanted) and found.value == pytest.approx(np.mean(wanted), abs=1e-5)
    assert held_out(llm, [Document(ids)] * 5, tokens=60, length=20).count == 3 * 19
    assert held_out(llm, [], tokens=9, length=9) == measures.Mean(None, 0)


def test_without_engram_takes_the_memories_away_and_gives_them_back(llm):
    """An ablation that stays on spoils everything measured after it."""
    ids = ids_of(llm, 40)
    before = llm.score(ids)
    with without_engram(llm.model):
        ablated = llm.score(ids)
    assert not torch.equal(before, ablated) and torch.equal(before, llm.score(ids))


def test_recall_of_an_indexer_is_the_mass_of_its_picks(llm, monkeypatch):
    """Picks of everything get all of the attention, picks of nothing none; the load of one expert is their number."""
    ids = ids_of(llm, 60)
    found = inside(llm, [ids])
    assert found.tokens == 60 and set(found.recall) == {"layer1", "layer3", "layer4"}
    assert all(0 < m.value < 1 and m.count > 10 for m in found.recall.values())
    assert all(1 <= load <= 4 for load in found.load.values()) and len(found.load) == 5

    def replaying(name: str, rows: torch.Tensor) -> measures.Inside:
        def tape(**options: Any) -> Tape:
            return Tape({name: rows}, **options)

        monkeypatch.setattr(measures, "Tape", tape)
        return inside(llm, [ids])

    everything = torch.arange(60).expand(60, -1)
    everything = torch.where(everything <= torch.arange(60)[:, None], everything, -1)
    assert replaying("layer3.selected", everything).recall["layer3"].value == pytest.approx(1, abs=1e-4)
    assert replaying("layer3.selected", torch.full((60, 1), -1)).recall["layer3"].value == 0
    one = torch.tensor([[0, 1]]).expand(60, -1)
    assert replaying("layer2.experts", one).load["layer2"] == 8 / 2


def test_the_whole_report(folder, tmp_path, capsys, monkeypatch):
    """Every section is there, printed with counts and ready for JSON; wrong flags are told before a model is loaded."""
    monkeypatch.setattr(module, "KINDS", ("sum", "json", "scene"))
    texts, turns = tmp_path / "t.jsonl", tmp_path / "c.jsonl"
    texts.write_text("".join(json.dumps({"text": f"The {i} cats sat on the mat. " * 3}) + "\n" for i in range(30)))
    chat = [{"role": "user", "content": "cat?"}, {"role": "assistant", "content": "mat"}]
    turns.write_text(json.dumps({"text": chat}) + "\n")

    def load(**options: Any) -> LLM:
        return LLM(folder, **options)

    lines: list[str] = []
    settings = Settings(
        count=1, answer_tokens=4, speed_tokens=6, tokens=150, length=100, files=(("t", str(texts)), ("c", str(turns)))
    )
    report = evaluate(load, settings, lines.append)
    assert json.loads(json.dumps(report)) and "\n".join(lines).count("(") > 20
    assert set(report) == {"settings", "exact", "recall", "held_out", "inside", "drafts", "speed"}
    assert {"scene", "scene (withheld)", "sum (withheld)"} <= set(report["exact"])
    assert report["held_out"]["c"]["nats"]["count"] == len(load().tokenizer.encode("mat")) + 1
    assert set(report["held_out"]["t"]) == {"nats", "without engram"}
    assert report["recall"]["recall_1k"]["sparse"]["skipped"] == 1
    assert report["speed"]["with drafts"]["value"] > 0 and report["drafts"]["story_chat"]["count"] > 0
    part = evaluate_sources(load(), Settings(tokens=10**6, files=(("t", str(texts)),), share=0.3))
    assert 0 < part < 30
    for wrong in ({"count": 0}, {"share": 0.0}, {"length": 1}):
        with pytest.raises(ConfigError):
            Settings(**wrong)
    for flags in (["mini", "lambada"], [], ["mini", "--held-out", "t"], ["mini", "--out", str(tmp_path / "no" / "x")]):
        assert main(["eval", *flags, "--model", str(folder)]) == 2
    assert "NAME=PATH" in capsys.readouterr().err


def evaluate_sources(llm: LLM, settings: Settings) -> int:
    return len(module._sources(llm, settings)["t"])
