"""The Python surface: `LLM.score` and `LLM.generate` on a tiny DeepSeek-V4.1."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from finback import LLM, SamplingParams
from finback.base.runtime import CheckpointError, ConfigError, KernelUnavailable, NonFiniteError, RequestError
from finback.tools.fixtures import make, preset_config, write

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llm") / "plain"
    make(folder, preset="tiny-v41-plain")
    return folder


@pytest.fixture(scope="module")
def exact(plain: Path) -> LLM:
    return LLM(plain, dtype="float64", draft=None)


@pytest.fixture(scope="module")
def llm(plain: Path) -> LLM:
    return LLM(plain, draft=None)


def ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(8, 500, (256,), generator=torch.Generator().manual_seed(seed)).tolist()[:n]


def image(start: int, grid_h: int, grid_w: int, seed: int = 0) -> tuple[int, Tensor, int, int]:
    patches = torch.randn(grid_h * grid_w, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return start, patches, grid_h, grid_w


def spliced(llm: LLM, text: int, at: int, span: int) -> list[int]:
    """`text` tokens with `span` image tokens put in at position `at`."""
    words = ids(text)
    return words[:at] + [llm.config["image_token_id"]] * span + words[at:]


def worst(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


# -- score -------------------------------------------------------------------------------------------------------------


def test_splits_do_not_change_the_result(exact: LLM) -> None:
    """Chunks, single tokens and waiting steps; every position's logits come back, in order."""
    tokens = ids(64)
    whole = exact.score(tokens)
    assert whole.shape == (64, 512) and whole.dtype == torch.float64
    for splits in ([7, 1, 13, 43], [8, 8, 48], [0, 20, 0, 44, 0], [62, 1, 1]):
        assert worst(exact.score(tokens, splits=splits), whole) < 1e-9, splits
    assert worst(exact.score(tokens[:12], splits=[1] * 12), whole[:12]) < 1e-9


def test_float32_logits(llm: LLM, exact: LLM) -> None:
    """The promise in float32: 5e-5 however it is cut, and float32 results."""
    tokens = ids(40)
    whole = llm.score(tokens)
    assert whole.dtype == torch.float32
    assert worst(llm.score(tokens, splits=[9, 1, 1, 29]), whole) < 5e-5
    assert worst(whole.double(), exact.score(tokens)) < 1e-4


def test_several_sequences_score_as_each_alone(exact: LLM) -> None:
    """Lists in, lists out, in order; splits of each its own."""
    sequences = [ids(n, seed=n) for n in (1, 40, 7, 9, 8)]
    splits = [[1], [0, 0, 11, 29], [2, 5], [9], [0, 8]]
    for given in (None, splits):
        together = exact.score(sequences, splits=given)
        assert isinstance(together, list)
        for logits, sequence in zip(together, sequences, strict=True):
            assert worst(logits, exact.score(sequence)) < 1e-9
    assert worst(exact.score([sequences[2]])[0], exact.score(sequences[2])) < 1e-12


def test_more_tokens_than_one_forward_takes(exact: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt longer than a forward is fed in pieces without being asked to."""
    import finback.engine.llm as module

    whole = exact.score(ids(50))
    monkeypatch.setattr(module, "FORWARD_TOKENS", 16)
    assert worst(exact.score(ids(50)), whole) < 1e-9


def test_images_may_be_cut_anywhere(exact: LLM) -> None:
    """An image dropped, encoded for another place, or lost in the second chunk of its span."""
    tokens = spliced(exact, 12, 3, 8)
    pictures = [image(3, 6, 6)]
    whole = exact.score(tokens, images=pictures)
    for splits in ([5, 15], [3, 8, 9], [4, 1, 15]):
        assert worst(exact.score(tokens, splits=splits, images=pictures), whole) < 1e-9
    assert worst(exact.score(tokens, images=[image(3, 6, 6, seed=1)]), whole) > 1e-3
    both = exact.score([tokens, ids(9)], images=[pictures, None])
    assert worst(both[0], whole) < 1e-9 and worst(both[1], exact.score(ids(9))) < 1e-9


def test_images_at_both_ends(exact: LLM) -> None:
    """Two images, in any order of the list; nothing before the first, nothing after the last."""
    token = exact.config["image_token_id"]
    tokens = [token] * 8 + ids(4) + [token] * 6
    pictures = [image(12, 3, 7), image(0, 6, 6)]
    whole = exact.score(tokens, images=pictures)
    assert worst(exact.score(tokens, images=pictures[::-1], splits=[2, 8, 8]), whole) < 1e-9


def test_trace_and_replay(exact: LLM) -> None:
    """The names of the golden data; a recorded trace fed back gives the same logits, other choices give others."""
    tokens = ids(30)
    logits, trace = exact.score(tokens, trace=True)
    names = {f"layer{i}.experts" for i in range(5)} | {f"layer{i}.selected" for i in range(1, 5)}
    assert names <= set(trace)
    for name in names:
        assert len(trace[name]) == 30 and not trace[name].is_floating_point()
    choices = {name: trace[name] for name in names}
    assert exact.score(tokens, replay=choices).equal(logits)
    assert worst(exact.score(tokens, replay=choices, splits=[13, 1, 16]), logits) < 1e-9
    as_lists = {"layer1.selected": choices["layer1.selected"].tolist()}
    assert worst(exact.score(tokens, replay=as_lists), logits) < 1e-9
    changed = choices["layer1.selected"].clone()
    changed[-1] = torch.tensor([0, 1, 2, -1])
    moved = (exact.score(tokens, replay={"layer1.selected": changed}) - logits).abs().amax(1)
    assert moved[-1] > 1e-6 and moved[:-1].max() < 1e-12


def test_trace_does_not_depend_on_the_cut(exact: LLM) -> None:
    """Selections are rows of the sequence, never places in a store; short chunks' narrow selections are filled up."""
    sequences = [ids(30), ids(5, seed=3)]
    _, whole = exact.score(sequences, trace=True)
    _, parts = exact.score(sequences, splits=[[2, 1, 9, 18], [0, 0, 1, 4]], trace=True)
    for a, b in zip(whole, parts, strict=True):
        for name in a:
            left, right = a[name], b[name]
            if name.endswith(".selected"):
                width = max(left.shape[1], right.shape[1])
                left, right = (
                    torch.nn.functional.pad(t, (0, width - t.shape[1]), value=-1).sort(1).values for t in (left, right)
                )
            assert left.shape == right.shape, name
            assert left.equal(right) if not left.is_floating_point() else worst(left, right) < 1e-8, name


# -- generate ----------------------------------------------------------------------------------------------------------


def greedy_by_scoring(llm: LLM, prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(llm.score(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_generation_is_scoring_one_token_after_another(exact: LLM) -> None:
    """A decode step that reads a stale row drifts from what a prefill of the same tokens says."""
    for n in (1, 7, 24):
        (out,) = exact.generate(ids(n), GREEDY)
        assert out.token_ids == greedy_by_scoring(exact, ids(n), 8)
        assert out.prompt_token_ids == ids(n) and out.finish_reason == "length"


def test_prompts_together_and_alone(exact: LLM) -> None:
    """Results in the order of the prompts, none touched by its neighbours, each with its own settings."""
    prompts = [ids(n, seed=n) for n in (1, 7, 8, 9, 40)]
    params = [SamplingParams(max_tokens=3 + i, temperature=0.0, ignore_eos=True) for i in range(5)]
    together = exact.generate(prompts, params)
    for i, (out, prompt, p) in enumerate(zip(together, prompts, params, strict=True)):
        assert out.token_ids == exact.generate([prompt], p)[0].token_ids, i
        assert len(out.token_ids) == 3 + i


def test_forms_of_a_prompt(exact: LLM) -> None:
    """Text, ids and mappings are the same prompt; text gets the beginning-of-sequence token and no control tokens."""
    text = "The fin whale is fast."
    tokens = exact.encode(text)
    assert tokens[0] == 0
    outs = [
        exact.generate(form, GREEDY)[0]
        for form in (text, tokens, torch.tensor([tokens]), {"prompt": text}, [{"prompt_token_ids": tokens}])
    ]
    assert len({tuple(out.token_ids) for out in outs}) == 1
    assert outs[0].prompt_token_ids == tokens
    assert len(exact.encode("<｜User｜>")) > 2, "control tokens must not come from user text"


def test_images_in_prompts(exact: LLM) -> None:
    """An image that is in the prompt but not in the answer."""
    tokens = spliced(exact, 8, 2, 8)
    outs = [
        exact.generate({"prompt_token_ids": tokens, "images": [image(2, 6, 6, seed)]}, GREEDY)[0].token_ids
        for seed in range(4)
    ]
    assert len({tuple(o) for o in outs}) > 1
    expected = int(exact.score(tokens, images=[image(2, 6, 6)])[-1].argmax())
    assert outs[0][0] == expected


def test_text_is_the_tokens_text(exact: LLM) -> None:
    """Streaming and waiting give one text; special tokens are not printed."""
    (out,) = exact.generate("What does the whale hear?", GREEDY)
    assert out.text == exact.tokenizer.decode(out.token_ids)


def test_end_of_sequence_and_stops(exact: LLM) -> None:
    """Nothing after the end token; a stop id ends the text and is reported; ignoring the end goes on."""
    free = exact.generate(ids(9), GREEDY)[0].token_ids
    stop = free[3]
    (out,) = exact.generate(ids(9), SamplingParams(max_tokens=8, stop_token_ids=[stop], ignore_eos=True))
    assert out.token_ids == free[: free.index(stop) + 1] and out.finish_reason == "stop"
    (text,) = exact.generate(ids(9), GREEDY)
    needle = text.text[3:5]
    (out,) = exact.generate(ids(9), SamplingParams(max_tokens=8, stop=needle, ignore_eos=True))
    assert out.text == text.text[: text.text.index(needle)] and out.finish_reason == "stop"


def test_a_stop_string_that_the_last_bytes_complete(exact: LLM) -> None:
    """Half a character becomes text at the end only; a stop string in it is a stop, not a length."""
    half = next(i for i in range(512) if exact.tokenizer.token_bytes(i) == b"\xe6")  # type: ignore[union-attr]
    params = SamplingParams(max_tokens=1, allowed_token_ids=[half], stop="\ufffd")
    (out,) = exact.generate([7], params)
    assert (out.text, out.finish_reason, out.token_ids) == ("", "stop", [half])


def test_seeds_repeat_whatever_runs_beside(exact: LLM) -> None:
    """A draw that depends on the batch, or a generator shared between requests."""
    warm = [SamplingParams(max_tokens=8, temperature=1.0, seed=s, ignore_eos=True) for s in (5, 6, 5)]
    alone = exact.generate(ids(6), warm[0])[0].token_ids
    a, b, c = (out.token_ids for out in exact.generate([ids(6)] * 3, warm))
    assert a == c == alone and a != b


def test_log_probabilities(exact: LLM) -> None:
    """Of the model, before temperature; the chosen token's, and the likeliest first."""
    prompt = ids(10)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=3)
    (out,) = exact.generate(prompt, params)
    assert out.logprobs is not None and len(out.logprobs) == 4
    scores = exact.score(prompt + out.token_ids)[len(prompt) - 1 : -1].log_softmax(1)
    for entry, line, token in zip(out.logprobs, scores, out.token_ids, strict=True):
        assert entry.token_id == token and abs(entry.logprob - float(line[token])) < 1e-6
        best = line.topk(3)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert max(abs(p - float(q)) for (_, p), q in zip(entry.top, best.values, strict=True)) < 1e-6


def test_extreme_sampling_settings_stay_finite(exact: LLM) -> None:
    """temperature 1e-9 divides logits into overflow; it must be greedy, not an error."""
    greedy = exact.generate(ids(8), GREEDY)[0].token_ids
    cold = SamplingParams(max_tokens=8, temperature=1e-9, seed=1, ignore_eos=True)
    assert exact.generate(ids(8), cold)[0].token_ids == greedy
    one = SamplingParams(max_tokens=8, temperature=5.0, top_k=1, seed=1, ignore_eos=True, logprobs=5)
    (out,) = exact.generate(ids(8), one)
    assert out.token_ids == greedy
    assert all(math.isfinite(p) for entry in out.logprobs or () for _, p in entry.top)


def test_a_full_context_ends_the_text(exact: LLM) -> None:
    """The last position may be filled, and nothing may be written beyond it."""
    limit = exact.model.max_positions
    (out,) = exact.generate(ids(256) * 3 + ids(limit - 3 - 768), GREEDY)
    assert len(out.token_ids) == 3 and out.finish_reason == "length"


# -- what cannot be done -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.score([5, 512]), ["token id 512 at position 1", "0..511"]),
        (lambda m: m.score([-1, 5]), ["token id -1 at position 0"]),
        (lambda m: m.generate([5, 6, 999]), ["token id 999 at position 2"]),
        (lambda m: m.score(ids(9), splits=[4, 4]), ["[4, 4]", "8", "9 tokens"]),
        (lambda m: m.score(ids(9), splits=[10, -1]), ["[10, -1]"]),
        (lambda m: m.score([ids(9), ids(3)], splits=[[9], [4]]), ["sequence 1", "[4]"]),
        (lambda m: m.score([5] * 1025), ["1025", "1024 positions"]),
        (lambda m: m.generate([5] * 1024), ["1024 positions"]),
        (lambda m: m.score(ids(9), replay={"layer1.selectd": torch.zeros(9, 4)}), ["did you mean 'layer1.selected'"]),
        (lambda m: m.score(ids(9), replay={"layer0.selected": torch.zeros(9, 4)}), ["'layer0.selected'"]),
        (lambda m: m.score(ids(9), replay={"layer1.selected": torch.zeros(8, 4)}), ["(8, 4)", "[9, k]"]),
        (lambda m: m.score(ids(9), replay={"layer1.selected": torch.zeros(9)}), ["(9,)", "[9, k]"]),
        (lambda m: m.score(spliced(m, 5, 2, 8), images=[image(2, 6, 7)]), ["image 0", "2..11", "token 10"]),
        (
            lambda m: m.score(spliced(m, 5, 2, 8), images=[(2, torch.zeros(35, 3, 4, 4), 6, 6)]),
            ["image 0", "35", "36"],
        ),
        (
            lambda m: m.score(spliced(m, 5, 2, 8), images=[(2, torch.full((36, 3, 4, 4), math.nan), 6, 6)]),
            ["image 0"],
        ),
        (lambda m: m.score(spliced(m, 5, 2, 8), images=[image(9, 6, 6)]), ["9..16", "0..12"]),
        (lambda m: m.score(spliced(m, 5, 2, 8), images=[image(1, 6, 6)]), ["token 1", "image token"]),
        (lambda m: m.score(spliced(m, 5, 2, 8), images=[image(2, 6, 6), image(3, 3, 3)]), ["another image"]),
        (lambda m: m.generate({"prompt_ids": [1]}), ["prompt_ids", "prompt_token_ids"]),
        (lambda m: m.generate([[5, 6], [7]], [GREEDY]), ["2", "1"]),
        (lambda m: m.generate(5), ["int"]),
        (lambda m: m.generate([7, "a"]), ["'a'", "ids are integers"]),
        (lambda m: m.score([7, 1.5]), ["1.5", "ids are integers"]),
        (lambda m: m.generate([[]]), ["no tokens"]),
        (lambda m: m.generate(b"abc"), ["bytes"]),
        (lambda m: m.generate("ab\ud83d"), ["place 2", "half of a surrogate pair"]),
        (lambda m: m.generate({"prompt_token_ids": [7], "images": 5}), ["images is int"]),
        (lambda m: m.generate([7], {"max_tokens": 3}), ["{'max_tokens': 3}", "SamplingParams"]),
        (lambda m: m.score(ids(9), splits=[4.5, 4.5]), ["sequence 0", "integers"]),
        (lambda m: m.score([ids(9), ids(3)], splits=[[9]]), ["1 lists for 2 sequences"]),
        (lambda m: m.score([]), ["no tokens"]),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_served(llm: LLM, call: Any, words: list[str]) -> None:
    """A shape error deep in the model, an index into other memory, or an answer with the image dropped."""
    with pytest.raises(RequestError) as error:
        call(llm)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"backend": "trton"}, KernelUnavailable, ["'trton'", "use one of"]),
        ({"prefill": "exact"}, ConfigError, ["'exact'", "exact_tail"]),
        ({"device": "gpu"}, ConfigError, ["'gpu'"]),
        ({"dtype": "half"}, ConfigError, ["'half'", "float32"]),
        ({"rounding": "on"}, ConfigError, ["'on'", "released"]),
    ],
)
def test_options_that_cannot_be_used(plain: Path, options: dict[str, Any], kind: type, words: list[str]) -> None:
    """A misspelt option that silently means its default."""
    with pytest.raises(kind) as error:
        LLM(plain, **options)
    for word in words:
        assert word in str(error.value)


def test_models_without_images(tmp_path: Path) -> None:
    """A text model given an image must not answer as if there were none."""
    config = preset_config("tiny-v41-plain")
    del config["vision_config"]
    config["text_config"].update(engram_layer_ids=[], engram_num_embeddings=[])
    write(tmp_path / "x", config)
    model = LLM(tmp_path / "x")
    with pytest.raises(RequestError, match="takes no images"):
        model.score(ids(9), images=[image(0, 6, 6)])


def test_checkpoints_without_a_tokenizer_work_on_ids(plain: Path, exact: LLM, tmp_path: Path) -> None:
    """No tokenizer: ids in, ids out; text is refused with what to do."""
    bare = tmp_path / "bare"
    shutil.copytree(plain, bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"token_map\.json"):
        LLM(bare)
    (bare / "token_map.json").write_text(json.dumps(exact.model.token_map.tolist()))
    model = LLM(bare, dtype="float64", draft=None)
    (out,) = model.generate(ids(9), GREEDY)
    assert out.token_ids == exact.generate(ids(9), GREEDY)[0].token_ids and out.text == ""
    with pytest.raises(RequestError, match="no tokenizer"):
        model.generate("text", GREEDY)


# -- numbers that are none ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "factor", "where"),
    [
        ("layers.2.attn.wo_b.weight", 1e38, ["layer2", "layer3"]),  # sums may overflow at once, or squares of them next
        ("layers.3.ffn.shared_experts.w2.weight", math.nan, ["layer3"]),
        ("layers.0.ffn_norm.weight", math.nan, ["layer0"]),
        ("layers.1.attn.indexer.wk.weight", math.nan, ["layer1.selected"]),
        ("head.weight", math.nan, ["after the last layer"]),
    ],
)
def test_overflow_is_an_error_that_names_the_layer(plain: Path, name: str, factor: float, where: list[str]) -> None:
    """Text made from NaN logits looks like text. The error must say where the first bad number came from, whether it
    is met in the logits or while rows are selected."""
    model = LLM(plain, dtype="float32", draft=None)
    with torch.no_grad():
        dict(model.model.named_parameters())[name].mul_(factor)
    for call in (lambda: model.score(ids(19)), lambda: model.generate(ids(19), GREEDY)):
        with pytest.raises(NonFiniteError) as error:
            call()
        assert any(word in str(error.value) for word in where), str(error.value)
