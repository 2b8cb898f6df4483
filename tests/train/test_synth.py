"""Synthetic documents: their answers are right, their splits are apart, and they are trained on as they are served."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from finback.base.runtime import ConfigError
from finback.io.chat import Chat, ImageSizes
from finback.io.conversation import Answer, Image
from finback.io.images import decode_image
from finback.io.text import Tokenizer
from finback.train.data import Stream
from finback.train.loss import IGNORE
from finback.train.rendering import render
from finback.train.sources import SourceConfig, cached
from finback.train.synth import KINDS, SPLITS, documents
from finback.train.synth.recall import CHARACTERS
from finback.train.synth.sample import Draw, Sample, question
from finback.train.synth.scenes import COLORS, Item, Scene, draw_scene
from finback.train.synth.stories import plots, write
from finback.train.synth.sums import working
from finback.train.synth.words import NAMES, withheld
from finback.train.tokenizer import IMAGE, tokenizer_files, train_tokenizer

QUICK = [k for k in KINDS if k != "recall_4k"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("vocabulary")
    texts = [text for sample in documents([*QUICK], count=60) for text in sample.texts()]
    for name, content in tokenizer_files(train_tokenizer(texts, 700)).items():
        (folder / name).write_bytes(content)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def config(tokenizer) -> dict:
    vision = {"patch_size": 14, "downsample_ratio": 3, "min_pixels": 28224, "max_image_tokens": 64}
    return {
        "model_type": "deepseek_v41",
        "vision_config": vision,
        "image_token_id": tokenizer.token_to_id(IMAGE),
    }


def content(sample: Sample, turn: int = 0) -> str:
    return "".join(part for part in sample.messages[turn].parts if isinstance(part, str))


def right(sample: Sample) -> Answer:
    last = sample.messages[-1]
    text = "" if last.calls else sample.answer
    return Answer(last.reasoning, text, tuple((c.name, c.arguments) for c in last.calls))


def test_a_document_depends_on_its_number_alone():
    """A run that resumes, or that several processes feed, must see the very documents of a straight run."""
    for kind in QUICK:
        straight = list(documents(kind, 3, "test", 6))
        assert straight == [next(documents(kind, 3, "test", 1, first=i)) for i in range(6)]
        assert straight[0] != next(documents(kind, 4, "test", 1))
    mixed = list(documents(["sum=3", "list", "json=0"], 1, count=200))
    kinds = [s.kind for s in mixed]
    assert 120 < kinds.count("sum") < 180 and kinds.count("json") == 0
    assert mixed[50:60] == list(documents(["sum=3", "list", "json=0"], 1, count=10, first=50))


def test_splits_share_no_document_and_withheld_combinations_are_never_trained():
    """A score on what was trained on says nothing."""
    for kind in ("story_questions", "sum", "list", "recall_short"):
        texts = {split: {repr(s) for s in documents(kind, 0, split, 150)} for split in SPLITS}
        assert not texts["train"] & texts["withheld"]
        assert len(texts["train"] & texts["test"]) <= 3  # 2 + 3 may be asked twice
    for split in SPLITS:
        for sample in documents("sum", 5, split, 400):
            x, op, y = re.match(r"(\d+) ([+-]) (\d+) =", sample.answer[sample.answer.rindex(". ") + 2 :]
                                if ". " in sample.answer else sample.answer).groups()  # fmt: skip
            if int(x) > 9 or split == "withheld":
                assert withheld(int(x), op, int(y)) == (split == "withheld")
        for i in range(100):
            story = write(Draw(random.Random(f"{split}{i}"), split))
            for plot, facts in story.episodes:
                assert withheld(facts["h"], plot.name) == (split == "withheld")


def test_answers_follow_from_their_story():
    """An answer that names what the telling left out could only be guessed; every wording of a plot must keep it."""
    assert len(plots()) >= 25
    asked = set()
    for i in range(1000):
        story = write(Draw(random.Random(i), "train"))
        plain = story.text.lower()
        for plot, facts in story.episodes:
            for text, answer in plot.questions:
                asked.add(text)
                for name in set(re.findall(r"{(\w+)}", answer)) - set(re.findall(r"{(\w+)}", text)):
                    assert facts[name].lower() in plain, (plot.name, answer, name, story.text)
        for text, _ in story.questions:
            named = re.search(r"^What is (\w+)\?|first in the story, (\w+) or (\w+)\?", text)
            assert named is None or all(name in story.text for name in named.groups() if name)
    assert len(asked) >= 90


def test_stories_are_told_in_many_ways():
    """Few wordings make samples that feel the same after minutes, and a model that knows them by heart."""
    assert all(len(plot.beats) >= 4 and len(plot.questions) >= 3 for plot in plots())
    tellings = [int(np.prod([len(beat) for beat in plot.beats])) for plot in plots()]
    assert min(tellings) >= 16 and np.median(tellings) > 100
    told = [sample.text for sample in documents("story", count=400)]
    assert len({text.split(". ")[1] for text in told}) > 300
    assert {len(write(Draw(random.Random(i), "test")).episodes) for i in range(60)} == {1, 2, 3}
    assert not any("{" in text or "[" in text or "|" in text for text in told)


def test_sums_are_worked_out_right():
    """A wrong step in the working teaches wrong sums; every pair of carries and borrows is looked at."""
    for x in [*range(0, 130, 7), 199, 500, 905, 999]:
        for y in [*range(0, 120, 11), 99, 101, 507, 999]:
            for op in "+-":
                if op == "-" and y > x:
                    continue
                text = working(x, y, op)
                assert text.endswith(f"So {x + y if op == '+' else x - y}.")
                for left, value in re.findall(r"([\d +-]+) = (\d+)", text):
                    assert eval(left) == int(value), text
                digits = re.search(r"From the end: ([\d ]+)\.", text)[1].split()
                assert int("".join(digits[::-1])) == (x + y if op == "+" else x - y)
    for sample in documents("word_problem", count=200):
        x, op, y = re.search(r"(\d+) ([+-]) (\d+)\.", sample.messages[-1].reasoning or sample.answer).groups()
        assert int(re.findall(r"\d+", sample.answer)[-1]) == eval(x + op + y)
        assert x in content(sample) and y in content(sample)


def test_recall_asks_for_a_fact_that_is_there_once_at_the_distance_it_says():
    """Two values for one name have no right answer; a fact too near is read off the window and proves nothing."""
    for kind in ("recall", "recall_short", "recall_256", "recall_1k", "recall_4k"):
        for split in ("train", "test"):
            for sample in documents(kind, 0, split, 25 if kind != "recall_4k" else 4):
                text = content(sample)
                for turn in range(1, len(sample.messages), 2):
                    assert text.count(content(sample, turn)) == 1
                    name = content(sample, turn).split(" of ")[1].split(" is ")[0]
                    assert name in NAMES and f"of {name}?" in content(sample, turn - 1)
                    assert len(re.findall(rf"\bThe \w+ of {name} is ", text)) == 1
                wanted = {"recall_256": 256, "recall_1k": 1024, "recall_4k": 4096}.get(kind)
                if wanted:
                    back = (len(text) - text.index(sample.answer) - len(sample.answer)) / CHARACTERS
                    assert len(sample.messages) == 2 and wanted <= back < wanted + 64
    longest = max(len(content(s)) for s in documents("recall", 0, "train", 80))
    assert 4000 < longest / CHARACTERS < 7600


def test_list_answers_are_right():
    """The answers come from the same code as the lists; here they are worked out from the words of the question."""
    for sample in documents("list", count=500):
        asked = content(sample)
        entries = re.split(r"[:?] ?", asked, maxsplit=1)[1].split(", ")
        given = sample.answer.split(", ")
        if asked.startswith(("Sort", "Put")):
            assert given == sorted(entries, key=int if entries[0].isdigit() else str)
        elif "Reverse" in asked or "backwards" in asked:
            assert given == entries[::-1]
        elif asked.startswith(("How many", "Count")):
            assert given == [str(len(entries))]
        elif "larger than" in asked:
            limit = int(re.search(r"larger than (\d+)", asked)[1])
            assert given == ([e for e in entries if int(e) > limit] or ["none"])


def test_calls_match_their_tools_and_json_its_schema():
    """A call with an argument that the tool does not have, or of another type, cannot be learned from the prompt."""
    python = {"string": str, "integer": int, "boolean": bool, "array": list}
    seen = set()
    for sample in documents("tool", count=300):
        seen.add((sample.kind, len(sample.tools)))
        tools = {tool.name: tool.parameters for tool in sample.tools}
        for call in (call for message in sample.messages for call in message.calls):
            arguments, schema = json.loads(call.arguments), tools[call.name]
            assert set(arguments) == set(schema["required"])
            for key, value in arguments.items():
                assert type(value) is python[schema["properties"][key]["type"]]
                assert type(value) is bool or str(value) in content(sample)
    assert seen == {(kind, n) for kind in ("tool_call", "tool_result", "tool_none") for n in (1, 2)}
    for sample in documents("json", count=200):
        found, schema = json.loads(sample.answer), sample.options.response_schema
        assert list(found) == schema["required"]
        for key, value in found.items():
            assert type(value) is python[schema["properties"][key]["type"]]
            assert type(value) in (bool, list) or str(value) in content(sample)


def test_answers_are_judged_by_what_counts():
    """A grader that takes any text with the right word in it, or refuses the same JSON in other blanks, misleads."""
    for sample in documents([k for k in QUICK if not k.startswith("story")], 7, "test", 150):
        if not sample.text:
            assert sample.accepts(right(sample))
            assert not sample.accepts(Answer("", "nonsense"))
            if not sample.messages[-1].calls:
                assert not sample.accepts(replace(right(sample), content=right(sample).content + " And more."))
    plain = question("x", "?", "two  words")
    assert plain.accepts(Answer("anything", " two words\n")) and not plain.accepts(Answer("", "two words more"))
    call = next(s for s in documents("tool", 1, "test") if s.kind == "tool_call")
    name, arguments = right(call).calls[0]
    changed = dict.fromkeys(json.loads(arguments), 1)
    assert not call.accepts(Answer("", "", ((name, json.dumps(changed)),)))
    assert not call.accepts(Answer("", "", ((name + "x", arguments),)))
    spaced = json.dumps(json.loads(arguments), indent=1)
    assert call.accepts(Answer("", "", ((name, spaced),)))


def test_pictures_show_what_is_said_about_them():
    """A picture that is drawn in another colour or place than its caption says teaches the opposite."""
    scene = Scene("white", (Item("circle", "red", (0, 2), 22), Item("bar", "blue", (2, 1), 11, 3, -2)))
    pixels = draw_scene(scene)
    assert tuple(pixels[28, 140]) == COLORS["red"] and tuple(pixels[138, 87]) == COLORS["blue"]
    assert tuple(pixels[84, 84]) == COLORS["white"]
    assert (
        scene.caption
        == "On white there is a large red circle at the top right and a small blue bar at the bottom center."
    )
    for sample in documents("scene", count=40):
        data = next(part for part in sample.messages[0].parts if isinstance(part, Image)).data
        image = np.asarray(decode_image(data))
        assert image.shape == (168, 168, 3)
        for turn in range(0, len(sample.messages), 2):
            said = content(sample, turn + 1)
            if "background" in content(sample, turn):
                counts = {name: int((image == color).all(-1).sum()) for name, color in COLORS.items()}
                assert said == f"The background is {max(counts, key=counts.get)}."
    pairs = {split: set() for split in SPLITS}
    for split in SPLITS:
        for sample in documents("scene", 2, split, 150):
            for message in sample.messages:
                for color, shape in re.findall(r"(?:small|large) (\w+) (\w+)", str(message.parts)):
                    pairs[split].add((shape, color))
    assert pairs["withheld"] and not pairs["withheld"] & (pairs["train"] | pairs["test"])


def test_training_sees_what_serving_sees(tokenizer, config):
    """One token's difference between the two, at the first word of an answer above all, costs every skill a little."""
    chat = Chat.of(config, tokenizer)
    for kind in QUICK:
        for sample in documents(kind, 1, "train", 6):
            if sample.text:
                continue
            made = render(chat, sample.messages, sample.tools, sample.options)
            images = ImageSizes.of(config).image_token_id
            served = chat.render(sample.prompt, sample.tools, sample.options).token_ids
            once = [t for i, t in enumerate(served) if t != images or served[i - 1] != images]
            assert made.ids[: len(once)] == once and not any(made.learn[:1])
            tail, learn = made.ids[len(once) :], made.learn[len(once) :]
            assert all(learn) and tail[-1] == tokenizer.eos_ids[0]
            parser = chat.parser(sample.prompt, sample.tools, sample.options)
            answer = Answer().plus(parser.feed(tail[:-1], tokenizer.decode(tail[:-1]))).plus(parser.finish())
            assert sample.accepts(answer) and answer.reasoning == sample.messages[-1].reasoning
            taught = [t for t, ok in zip(made.ids, made.learn, strict=True) if ok]
            turns = [i for i, message in enumerate(sample.messages) if message.role == "assistant"]
            assert taught.count(tokenizer.eos_ids[0]) == len(turns)
            assert not {chat.format.token_id(role) for role in ("user", "assistant", "system")} & set(taught)
            assert all(content(sample, i) in tokenizer.decode(taught) for i in turns)


def test_source_of_synthetic_documents(tokenizer, config, tmp_path: Path):
    """The way into training: images at their places, an answer never apart from its question, a new cache for other
    documents."""
    sizes = ImageSizes.of(config)
    source = SourceConfig("s", kind="synth", kinds=("scene", "recall_short", "story=0.5"), documents=60, seed=2)
    corpus = cached(source, tokenizer, b"v", tmp_path, sizes)
    assert len(corpus) == 60 and len(list(tmp_path.iterdir())) == 1
    cached(source, tokenizer, b"v", tmp_path, sizes)
    cached(replace(source, seed=3), tokenizer, b"v", tmp_path, sizes)
    assert len(list(tmp_path.iterdir())) == 2
    stream = Stream([("s", corpus, 1.0)], tokens=3000, length=3000)
    pictures = 0
    for _ in range(12):
        batch = stream.next()
        start = 0
        for chunk in batch.chunks:
            labels = batch.labels[start : start + len(chunk.ids)]
            assert chunk.ids[0] == tokenizer.bos_id or (labels != IGNORE).all()  # only stories are cut
            start += len(chunk.ids)
        for one in batch.pictures:
            assert one.tokens == 22 and (one.grid_h, one.grid_w) == (12, 12)
            pictures += 1
    assert pictures
    short = Stream([("s", corpus, 1.0)], tokens=128, length=128)
    for _ in range(40):  # documents that are longer are cut, and nothing is asked of what comes after
        batch = short.next()
        for chunk, labels in zip(batch.chunks, batch.labels.split([len(c.ids) for c in batch.chunks]), strict=True):
            learned = labels != IGNORE
            assert chunk.ids[0] == tokenizer.bos_id or learned.all() or not learned.any()
    with pytest.raises(ConfigError, match="takes none"):
        cached(source, tokenizer, b"other", tmp_path, None)
    with pytest.raises(ConfigError, match="did you mean 'story'"):
        SourceConfig("s", kind="synth", kinds=("storys",))
    with pytest.raises(ConfigError, match="missing key path"):
        SourceConfig("s")
    with pytest.raises(ConfigError, match="no split"):
        next(documents("sum", split="tset"))


def test_processes_make_the_same_documents(tokenizer, monkeypatch):
    """Parts that come back out of order, or overlap, would train on other documents than one process makes."""
    from finback.train import synthetic as module

    def made() -> list[list[int]]:
        return [m.ids.tolist() for m in module.synthetic(["sum", "story"], 0, 23, tokenizer, None)]

    alone = made()
    monkeypatch.setattr(module, "_PART", 5)
    assert made() == alone and len(alone) == 23
