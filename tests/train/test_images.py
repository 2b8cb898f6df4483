"""Images in training: where they stand, that they are never cut, and that the vision tower learns from them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from finback.base.runtime import ConfigError
from finback.engine.llm import LLM
from finback.io.chat import ImageSizes
from finback.io.images import prepare_image
from finback.io.text import Tokenizer
from finback.models.base import family
from finback.nn.rows import BatchRows
from finback.train.data import Batch, Stream, held_out_batches
from finback.train.images import Picture, picture
from finback.train.init import initialise
from finback.train.objective import Objective
from finback.train.optim import OptimConfig, Optimiser
from finback.train.recipe import LossConfig, Stage
from finback.train.sources import Corpus, Document, SourceConfig, documents, illustrated, write_documents
from finback.train.state import save_weights
from finback.train.tokenizer import ASSISTANT, IMAGE, NO_THINK, USER, tokenizer_files, train_tokenizer

PAD, VOCAB = 47, 48  # the image token of the tiny model, and its vocabulary
VISION = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "patch_size": 4,
    "downsample_ratio": 2, "max_image_tokens": 64, "min_pixels": 0,
}  # fmt: skip
SIZES = ImageSizes(PAD, 4, 2, 64, 0, None)


def drawn(rng: torch.Generator, height: int, width: int) -> np.ndarray:
    return torch.randint(0, 256, (height, width, 3), generator=rng, dtype=torch.uint8).numpy()


def document(ids: list[int], *images: np.ndarray) -> Document:
    """A document with an image at every PAD."""
    return illustrated(ids, None, [picture(i, SIZES, Path()) for i in images], SIZES, 1)


def corpus(folder: Path, *found: Document) -> Corpus:
    folder.mkdir(parents=True)
    write_documents(iter(found), "test", folder)
    return Corpus(folder)


@pytest.fixture
def seeing(tiny_config, seed: int):
    """seeing(dtype) -> (model, config) of a tiny V4.1 with a vision tower."""

    def build(dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
        config = {**tiny_config("v41"), "vision_config": VISION, "image_token_id": PAD}
        model = family(config).from_config(config, dtype=dtype, trainable=True)
        initialise(model, seed % 1000)
        model.set_token_map(torch.arange(VOCAB))
        return model.train(), config

    return build


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files(train_tokenizer(["what is it? a cat on a mat"] * 4, 340)).items():
        (folder / name).write_bytes(content)
    return Tokenizer.load(folder)


def test_chat_with_images_from_files(tmp_path: Path, tokenizer: Tokenizer, rng):
    """Both ways to place an image give the tokens and the pixels that serving makes of the same file; nothing of the
    span is learned; what is learned stands where it stood before the span was expanded."""
    names = ["a.png", "b.png"]
    for name, size in zip(names, ((20, 13), (8, 16)), strict=True):
        Pillow.fromarray(drawn(rng, *size)).save(tmp_path / name)
    sizes = ImageSizes(tokenizer.token_to_id(IMAGE) or 0, 4, 2, 64, 0, None)
    parts = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    inline = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a cat"}]
    inline += [{"role": "user", "content": f"{IMAGE}"}, {"role": "assistant", "content": "a mat"}]
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"text": inline, "images": names}) + "\n")
    (found,) = documents(SourceConfig("c", str(file), "chat"), tokenizer, sizes)
    prepared = [
        prepare_image(Pillow.open(tmp_path / name), patch=4, downsample=2, max_tokens=64, min_pixels=0)
        for name in names
    ]
    user, assistant, plain = (tokenizer.token_to_id(t) or 0 for t in (USER, ASSISTANT, NO_THINK))
    spans = [[sizes.image_token_id] * len(p.token_types) for p in prepared]
    cat, mat = tokenizer.encode("a cat"), tokenizer.encode("a mat")
    wanted = [0, user, *spans[0], *tokenizer.encode("what is it?"), assistant, plain, *cat, 1]
    wanted += [user, *spans[1], assistant, plain, *mat, 1]
    assert found.ids.tolist() == wanted
    for one, two in zip(found.pictures, prepared, strict=True):
        assert torch.equal(one.patches(), two.patches) and (one.grid_h, one.grid_w) == (two.grid_h, two.grid_w)
        assert set(wanted[one.start : one.end]) == {sizes.image_token_id}
    assert found.learn is not None and [t for t, told in zip(wanted, found.learn, strict=True) if told] == [
        *cat, 1, *mat, 1,
    ]  # fmt: skip


def test_images_that_do_not_fit_their_text(tmp_path: Path, tokenizer: Tokenizer, rng):
    """An image without a place, a place without an image, a missing file, and a model without eyes: each says so; the
    image token in a text without images is ordinary text."""
    Pillow.fromarray(drawn(rng, 8, 8)).save(tmp_path / "a.png")
    sizes = ImageSizes(tokenizer.token_to_id(IMAGE) or 0, 4, 2, 64, 0, None)

    def read(row: dict[str, Any], sizes: ImageSizes | None = sizes) -> Document:
        (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
        return next(documents(SourceConfig("t", str(tmp_path / "t.jsonl"), "jsonl"), tokenizer, sizes))

    for row, text in (
        ({"text": "a cat", "images": ["a.png"]}, "have no place"),
        ({"text": f"{IMAGE} {IMAGE}{IMAGE}", "images": ["a.png"] * 4}, "4 images, 1 of which have no place"),
        ({"text": IMAGE, "images": ["b.png"]}, "b.png cannot be read"),
        ({"text": [{"type": "image"}], "images": []}, "does not have"),
    ):
        with pytest.raises(ConfigError, match=f"document 1: .*{text}"):
            read(row)
    with pytest.raises(ConfigError, match="no vision_config"):
        read({"text": IMAGE, "images": ["a.png"]}, None)
    assert sizes.image_token_id not in read({"text": f"a {IMAGE} cat"}).ids


def test_a_corpus_keeps_images_small_and_whole(tmp_path: Path, rng):
    """Pixels come back to the bit, each with its own document; a drawn scene takes a fraction of its bytes. The split
    between training and held-out documents looks at images too: questions repeat, images do not."""
    flat = np.zeros((40, 40, 3), np.uint8)
    flat[10:30, 5:20] = (200, 30, 30)
    images = [drawn(rng, 8, 12), flat, drawn(rng, 16, 8)]
    found = [document([0, PAD, 5, PAD, 6, 1], *images[:2]), document([0, 5, 1]), document([0, PAD, 1], images[2])]
    stored = corpus(tmp_path / "c", *found)
    for i, wanted in enumerate(found):
        got = stored.document(i)
        assert got.pictures == wanted.pictures and np.array_equal(got.ids, wanted.ids)
    assert len(found[0].pictures[1].packed) < flat.size / 20
    same = [document([0, PAD, 5, 1], drawn(rng, 8, 8)) for _ in range(60)]
    many = corpus(tmp_path / "s", *same)
    assert set(many.held_out(0.5).tolist()) == {True, False}


def check_whole(batch: Batch) -> int:
    """Every image of a batch lies whole in one piece, its tokens and no others are marked, and none is a label."""
    starts = np.cumsum([0, *(len(c.ids) for c in batch.chunks)])
    for one in batch.pictures:
        piece = int(np.searchsorted(starts, one.start, side="right")) - 1
        assert one.end <= starts[piece + 1]
    types = np.concatenate([np.full(len(c.ids), -1) if c.types is None else c.types for c in batch.chunks])
    ids = np.concatenate([c.ids for c in batch.chunks])
    assert np.array_equal(types >= 0, ids == PAD) and int((types >= 0).sum()) == sum(p.tokens for p in batch.pictures)
    assert not (batch.labels == PAD).any()
    return len(batch.pictures)


def test_images_are_never_cut(tmp_path: Path, rng):
    """Whatever room and length are left: pieces end before a span that does not fit, a document with an image is kept
    together where the length allows it, text fills the rest, and the state still resumes to the token."""
    texts = [Document(np.arange(20, 20 + n, dtype=np.int64) % 8 + 20) for n in (9, 30, 14, 50)]
    shown = [document([2, *[11] * (i % 5), PAD, *[12] * (i % 7), 1], drawn(rng, 8, 8 + 8 * (i % 3))) for i in range(12)]
    long = [document([0, *[7] * 20, PAD, *[9] * 25, PAD, 1], drawn(rng, 16, 16), drawn(rng, 8, 8))]
    named = [("text", corpus(tmp_path / "t", *texts), 1.0), ("shown", corpus(tmp_path / "s", *shown, *long), 1.0)]
    stream = Stream(named, tokens=50, length=25)
    seen, states, batches = 0, [], []
    for _ in range(40):
        states.append(json.loads(json.dumps(stream.state_dict())))
        batches.append(stream.next())
        assert len(batches[-1]) == 50
        seen += check_whole(batches[-1])
    assert seen > 60
    whole = {tuple(d.ids[:-1].tolist()) for d in shown}
    for batch in batches:
        assert all(tuple(c.ids) in whole for c in batch.chunks if {2, 11, 12} & set(c.ids) and PAD in c.ids)
    again = Stream(named, tokens=50, length=25)
    again.load_state_dict(states[17])
    for wanted in batches[17:25]:
        got = again.next()
        assert got.chunks == wanted.chunks and got.pictures == wanted.pictures
        assert torch.equal(got.labels, wanted.labels)
    alone = Stream(named[1:], tokens=50, length=25)
    sizes = [len(batch) for batch in (alone.next() for _ in range(20)) if check_whole(batch) or True]
    assert max(sizes) <= 50 and min(sizes) > 15
    held = list(held_out_batches(named[1][1], 1.0, tokens=50, length=25, limit=10**6))
    assert sum(map(check_whole, held)) == len(shown) + 2
    with pytest.raises(ConfigError, match="shown: an image of 8 tokens does not fit into a piece of 7"):
        for _ in range(20):
            alone.next(7)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 5e-5)])
def test_training_logits_with_images_are_those_of_score(dtype, bound, seeing, tmp_path: Path, rng):
    """Two images of different sizes, packed beside a text: the tower's rows must land in their own places, be marked as
    images for routers and n-grams, and be what serving computes."""
    model, config = seeing(dtype)
    with torch.no_grad():
        for p in model.state_dict().values():
            if p.is_floating_point():
                p.copy_((p + 0.05 * torch.randn(p.shape)).float())
    images = [drawn(rng, 12, 20), drawn(rng, 8, 8)]
    first = document([0, 5, PAD, 9, 8, 7, PAD, 6, 1, 2], *images)
    stored = corpus(tmp_path / "c", first, document([3, 4, 5, 6, 7]), document([0, PAD, 8, 1], images[1]))
    batch = Stream([("c", stored, 1.0)], tokens=len(first.ids) + 13, length=99).next()
    assert len(batch.pictures) == 3
    packed = batch.forward_batch("cpu", model=model)
    logits = model.logits(model(packed, BatchRows(model.row_groups()).view(packed))).detach()
    extra = {"token_map.json": json.dumps(list(range(VOCAB))).encode()}
    values = Optimiser(model, OptimConfig()).masters()
    save_weights(tmp_path / "m", model, {**config, "dtype": str(dtype).removeprefix("torch.")}, values, extra)
    starts = np.cumsum([0, *(len(c.ids) for c in batch.chunks)])
    given = [
        [(p.start - int(a), p.patches().to(dtype), p.grid_h, p.grid_w) for p in batch.pictures if a <= p.start < b]
        for a, b in pairwise(starts)
    ]
    scored = LLM(tmp_path / "m", draft=None).score([list(c.ids) for c in batch.chunks], images=given)
    assert float((torch.cat(scored) - logits).abs().max()) < bound


def test_the_tower_learns_to_see(seeing, tmp_path: Path, rng):
    """The same question, four images, four answers: a loss below 0.05 is out of reach (1.39 at best) unless pixels
    reach the answer and the gradient reaches tower, aligner and the vectors around an image."""
    model, _ = seeing()
    found = [document([0, 5, PAD, 9, 20 + i], drawn(rng, 8, 8)) for i in range(4)]
    for one in found:
        assert one.learn is not None
        one.learn[:-1] = False
    batch = Stream([("c", corpus(tmp_path / "c", *found), 1.0)], tokens=4 * (len(found[0].ids) - 1), length=99).next()
    run = Objective(model, LossConfig(indexer=0, balance=0))
    optimiser = Optimiser(model, OptimConfig(matrix_lr=2e-2, lr=1e-2, head_lr=1e-2, weight_decay=0, warmup=5, decay=0))
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "vision" in name or "align" in name}
    loss = 9.0
    for step in range(80):
        result = run(batch, Stage(select=False), batch.targets())
        result.total.backward()
        if step == 0:
            still = [n for n, p in model.named_parameters() if n in before and p.grad is None]
            assert not still and model.image_start.grad is not None and model.image_newline.grad is not None
            counted = sum(int(c[1].sum()) for c in result.counts.values())
            assert counted == 2 * len(result.counts) * sum(p.tokens for p in batch.pictures)
        optimiser.collect()
        optimiser.step(step, 80)
        loss = float(result.nats) / result.targets
        if loss < 0.05:
            break
    print(step)
    assert loss < 0.05
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters() if name in before)


def test_arrays_need_the_shape_of_pixels(rng):
    """A float image, or one with channels first, would be read as noise without anybody noticing."""
    for wrong in (np.zeros((8, 8, 3), np.float32), np.zeros((3, 8, 8), np.uint8), 7):
        with pytest.raises(ConfigError, match="uint8 array"):
            picture(wrong, SIZES, Path())
    assert picture(drawn(rng, 9, 8), SIZES, Path()).grid_h == 3  # resized to whole patches


def test_pictures_pack_to_what_they_were():
    """The side of a patch is not stored: it follows from the number of bytes."""
    pixels = np.arange(2 * 28 * 14 * 3, dtype=np.uint8).reshape(28, 28, 3)
    one = picture(pixels, ImageSizes(PAD, 14, 1, 64, 0, None), Path())
    assert isinstance(one, Picture) and one.pixels().shape == (4, 3, 14, 14)
    assert torch.equal(one.pixels()[1, :, 0, 0], torch.from_numpy(pixels[0, 14].copy()))
