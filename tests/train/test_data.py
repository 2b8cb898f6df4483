"""Documents and batches."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from finback.base.runtime import ConfigError
from finback.io.text import Tokenizer
from finback.train.data import Stream, held_out_batches
from finback.train.loss import IGNORE
from finback.train.sources import Corpus, SourceConfig, cached, documents
from finback.train.tokenizer import ASSISTANT, NO_THINK, USER, tokenizer_files, train_tokenizer


def corpus(tmp_path: Path, name: str, lines: list[list[int]]) -> Corpus:
    file = tmp_path / f"{name}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return cached(SourceConfig(name, str(file), "tokens"), None, b"", tmp_path / "cache")


def counting(first: int, count: int, length: int) -> list[list[int]]:
    """Documents whose every token tells the document and the place: first + 100 * document + place."""
    return [[first + 100 * i + k for k in range(length)] for i in range(count)]


@pytest.fixture
def two(tmp_path: Path) -> list[tuple[str, Corpus, float]]:
    short, long = corpus(tmp_path, "a", counting(0, 40, 11)), corpus(tmp_path, "b", counting(10_000, 10, 90))
    return [("a", short, 3.0), ("b", long, 1.0)]


def test_every_batch_is_full_and_pieces_stay_in_their_document(two):
    """A piece that ran on into the next document would attend across it; its label is the next token of its own."""
    stream = Stream(two, tokens=64, length=16)
    for _ in range(20):
        batch = stream.next()
        assert len(batch) == 64 == sum(len(c.ids) for c in batch.chunks)
        assert max(len(c.ids) for c in batch.chunks) <= 16
        for chunk, labels in zip(batch.chunks, batch.labels.split([len(c.ids) for c in batch.chunks]), strict=True):
            ids = np.asarray(chunk.ids)
            assert (np.diff(ids) == 1).all() and (labels.numpy() == ids + 1).all()


def test_a_pass_visits_every_token_once(two):
    """Cut pieces go on where they were cut: nothing is skipped and nothing comes twice."""
    stream = Stream(two[1:], tokens=50, length=32)
    seen = Counter(token for _ in range(2 * 890 // 50) for chunk in stream.next().chunks for token in chunk.ids)
    once = [t for line in counting(10_000, 10, 90) for t in line[:-1]]
    assert set(seen) <= set(once) and all(1 <= seen[t] <= 3 for t in once) and sum(seen.values()) == 1750


def test_shares_hold_inside_each_batch(two):
    """Batches that alternate between sources skew the experts' load; a long document must not fill whole batches."""
    stream = Stream(two, tokens=128, length=16)
    for _ in range(12):
        sources = stream.next().sources
        assert abs(sources["a"] - 96) <= 32


def test_a_change_of_shares_takes_effect_at_once(two):
    """The counts of the old mix would otherwise be made up for first."""
    stream = Stream(two, tokens=128, length=16)
    stream.next()
    stream.set_shares([0.0, 1.0])
    assert stream.next().sources == {"b": 128}
    with pytest.raises(ConfigError, match="share above 0"):
        Stream([(n, c, 0.0) for n, c, _ in two], tokens=8, length=8)


def test_resume_is_exact(two):
    """From any batch on, a stream put back by its state gives the same batches, over the end of a pass too."""
    straight = Stream(two, tokens=70, length=16, seed=5)
    for _ in range(13):
        straight.next()
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = Stream(two, tokens=70, length=16, seed=5)
    resumed.load_state_dict(state)
    for _ in range(30):
        one, other = straight.next(), resumed.next()
        assert [c.ids for c in one.chunks] == [c.ids for c in other.chunks]
    with pytest.raises(ConfigError, match="sources"):
        Stream(two[:1], tokens=70, length=16).load_state_dict(state)


def test_ranks_share_the_documents(two):
    """Two ranks that saw the same documents would only double the learning rate."""
    halves = []
    for rank in range(2):
        stream = Stream(two[:1], tokens=200, length=16, rank=rank, world=2)
        halves.append({chunk.ids[0] // 100 for chunk in stream.next().chunks})
    assert not halves[0] & halves[1] and len(halves[0] | halves[1]) == 40


def test_held_out_documents_are_never_trained_on(two):
    """By hash, so that the answer does not depend on the order or on what was added since."""
    held = held_out_batches(two[0][1], 0.3, tokens=64, length=16, limit=10**6)
    kept = {t // 100 for batch in held for chunk in batch.chunks for t in chunk.ids}
    stream = Stream(two[:1], tokens=400, length=16, held_out=0.3)
    seen = {t // 100 for _ in range(4) for c in stream.next().chunks for t in c.ids}
    assert kept and seen and not kept & seen and kept | seen == set(range(40))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = train_tokenizer(["the cat sat on the mat, the cat sat in 1984"] * 4, 340)
    for name, content in tokenizer_files(backend).items():
        (folder / name).write_bytes(content)
    return Tokenizer.load(folder)


def test_trained_tokenizer(tokenizer):
    """Exactly the asked size, single digits, V4.1's control tokens, and typed markup stays text."""
    assert tokenizer.vocab_size == 340 and (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, (1,), 2)
    assert len(tokenizer.encode("1984")) == 4
    assert tokenizer.token_to_id(USER) is not None and tokenizer.token_to_id(USER) not in tokenizer.encode(USER)
    text = "the cat: äöü 你好 \n\t 12"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(ConfigError, match="too small"):
        train_tokenizer(["a"], 100)


def test_kinds_of_sources(tmp_path, tokenizer):
    """Plain text by paragraphs, jsonl under xz with its own field, and what is wrong in one of them."""
    (tmp_path / "a.txt").write_text("one cat\n\ntwo cats\n\n\n")
    with lzma.open(tmp_path / "a.jsonl.xz", "wt") as file:
        file.write('{"story": "one cat"}\n{"story": "two cats"}\n')
    wanted = [[0, *tokenizer.encode(t), 1] for t in ("one cat", "two cats")]
    text = SourceConfig("t", str(tmp_path / "a.txt"))
    packed = SourceConfig("j", str(tmp_path / "a.jsonl.xz"), "jsonl", field="story")
    for source in (text, packed):
        assert [d.ids.tolist() for d in documents(source, tokenizer)] == wanted
    with pytest.raises(ConfigError, match=r"no field 'storys' .did you mean 'story'"):
        list(documents(SourceConfig("j", packed.path, "jsonl", field="storys"), tokenizer))
    with pytest.raises(ConfigError, match="did you mean 'jsonl'"):
        SourceConfig("j", "x", "json")
    with pytest.raises(ConfigError, match="nothing at"):
        list(documents(SourceConfig("j", str(tmp_path / "missing")), tokenizer))


def test_only_the_assistant_is_learned(tmp_path, tokenizer):
    """Learning the user's turns makes a model that asks itself questions; the end of a turn must be learned."""
    turns = [{"role": "user", "content": "cat?"}, {"role": "assistant", "content": "mat"}]
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"text": turns}) + "\n" + json.dumps({"text": json.dumps(["cat?", "mat"])}) + "\n")
    first, second = documents(SourceConfig("c", str(file), "chat"), tokenizer)
    marks = [tokenizer.token_to_id(t) for t in (USER, ASSISTANT, NO_THINK)]
    cat, mat = tokenizer.encode("cat?"), tokenizer.encode("mat")
    assert first.ids.tolist() == [0, marks[0], *cat, marks[1], marks[2], *mat, 1] == second.ids.tolist()
    stored = cached(SourceConfig("c", str(file), "chat"), tokenizer, b"", tmp_path / "cache")
    batch = Stream([("c", stored, 1.0)], tokens=len(first.ids) - 1, length=99).next()
    taught = [int(t) for t in batch.labels if t != IGNORE]
    assert taught == [*mat, 1]
