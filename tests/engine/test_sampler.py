"""Settings, processors and the sampler against plain loops over Python floats.

Would catch: a penalty that forgets the prompt or counts it twice, a filter applied in another order or cut off by one
at its border, ties that fall on another id, a ban that outlives its reason, draws that repeat between requests or
positions, a log probability that is not valid JSON.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from finback.base.runtime import ConfigError, RequestError
from finback.engine import sampler
from finback.engine.logits import Processors, bad_word_ids
from finback.engine.request import SamplingParams, SpeculativeConfig, json_logprob
from finback.engine.verify import Picker
from finback.io.text import Tokenizer
from finback.tools.tiny_tokenizer import byte_level_tokenizer

V = 24


def line_after(params: SamplingParams, logits: Tensor, prompt: list[int], output: list[int], ends: list[int]) -> Tensor:
    processors = Processors(params, prompt, V, ends=ends)
    for token in output:
        processors.push(token)
    return processors.line(logits)


def reference(p: SamplingParams, logits: list[float], prompt: list[int], output: list[int], ends: list[int]) -> list:
    """The settings' formulas, one token after another."""
    counts, result = Counter(output), []
    for token, value in enumerate(logits):
        value += (p.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        value -= p.frequency_penalty * counts[token] + p.presence_penalty * (counts[token] > 0)
        ends_word = any(
            list(word[:-1]) == output[len(output) - len(word) + 1 :]
            and word[-1] == token
            and len(word) <= len(output) + 1
            for word in p.bad_words
        )
        held_back = len(output) < p.min_tokens and token in ends
        left_out = p.allowed_token_ids is not None and token not in p.allowed_token_ids
        result.append(-math.inf if ends_word or held_back or left_out else value)
    return result


SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": -0.4},
    "bias": {"logit_bias": {3: 5.0, 7: -100, 0: 0.25}},
    "allowed": {"allowed_token_ids": [1, 5, 9, 9]},
    "bad words": {"bad_words": [[4], [2, 6], [6, 2, 6], [1, 2, 3, 4, 5]]},
    "min tokens": {"min_tokens": 4, "stop_token_ids": [8]},
    "all": {
        "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {2: 3.0, 11: -2.0},
        "bad_words": [[6, 11]], "min_tokens": 3, "stop_token_ids": [5],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_processors_follow_their_formulas(name: str, rng: torch.Generator):
    """Each setting, on outputs that trigger it and on outputs that do not. Also catches a processor that writes into
    the model's logits."""
    params = SamplingParams(**SETTINGS[name])
    ends = [1, *params.stop_token_ids]
    for output in ([], [2], [6, 2], [2, 6, 2], [6, 11, 6], [1, 2, 3, 4], [4, 4, 4, 6, 2, 2]):
        logits = 3 * torch.randn(V, generator=rng, dtype=torch.float64)
        before = logits.clone()
        got = line_after(params, logits, [3, 3, 10], list(output), ends)
        want = torch.tensor(reference(params, logits.tolist(), [3, 3, 10], list(output), ends), dtype=torch.float64)
        assert torch.equal(logits, before)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_taken_back_tokens_leave_no_trace(rng: torch.Generator):
    """A refused draft that stays in the counts or in the history would change every later token."""
    params = SamplingParams(**SETTINGS["all"])
    logits = torch.randn(V, generator=rng)
    processors = Processors(params, [1], V, ends=[0])
    for token in (6, 2):
        processors.push(token)
    before = processors.line(logits)
    for token in (6, 6, 11):
        processors.push(token)
    assert not torch.equal(processors.line(logits), before)
    processors.pop(3)
    assert torch.equal(processors.line(logits), before)
    assert processors.output == [6, 2]


def filtered(logits: list[float], p: SamplingParams) -> list[float]:
    """temperature, min-p, top-k, top-p by sorting and counting."""
    largest = max(logits)
    weights = [math.exp((x - largest) / p.temperature) for x in logits]
    total = sum(weights)
    probs = [w / total for w in weights]
    best = max(probs)
    probs = [x if x >= p.min_p * best else 0.0 for x in probs]
    ordered = sorted(probs, reverse=True)
    border = ordered[p.top_k - 1] if 0 < p.top_k < len(probs) else 0.0
    probs = [x if x >= border else 0.0 for x in probs]
    total, before, kept = sum(probs), 0.0, set()
    for value in sorted(probs, reverse=True):
        if before < p.top_p * total:
            kept.add(value)
        before += value
    probs = [x if x in kept else 0.0 for x in probs]
    total = sum(probs)
    return [x / total for x in probs]


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_p": 1e-9}, {"min_p": 0.2}, {"top_k": 1},
     {"top_k": 8, "top_p": 0.7, "min_p": 0.05}, {"top_k": 100, "min_p": 1.0}],
)  # fmt: skip
def test_distribution(settings: dict[str, Any], rng: torch.Generator):
    """Filters off by one, in another order, or renormalised in between give other tokens a chance."""
    for temperature in (0.3, 1.0, 2.5):
        params = SamplingParams(temperature=temperature, **settings)
        lines = 2 * torch.randn(4, V, generator=rng, dtype=torch.float64)
        lines[0, 3] = lines[0, 5] = 4.0  # ties at the border
        lines[1, ::2] = -math.inf
        want = torch.tensor([filtered(line, params) for line in lines.tolist()], dtype=torch.float64)
        torch.testing.assert_close(sampler.distribution(lines, params), want, rtol=1e-12, atol=1e-15)


def test_top_p_of_a_large_vocabulary(rng: torch.Generator):
    """It looks at the likeliest tokens first and sorts all only where those do not hold enough."""
    lines = torch.randn(3, 5000, generator=rng, dtype=torch.float64) * torch.tensor([[0.0], [0.5], [4.0]])
    lines[0, 7] = 0.1
    for top_p in (0.1, 0.5, 0.999):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        want = torch.tensor([filtered(line, params) for line in lines.tolist()], dtype=torch.float64)
        torch.testing.assert_close(sampler.distribution(lines, params), want, rtol=1e-10, atol=1e-15)


def test_greedy_ties_go_to_the_lowest_id():
    """Also at temperatures so small that they mean 0: dividing by 1e-9 would leave ties to chance, or overflow."""
    logits = torch.zeros(1, V)
    logits[0, [7, 9, 20]] = 1e30
    for temperature in (0.0, 1e-9, 9e-6):
        for seed in range(5):
            assert Picker(SamplingParams(temperature=temperature, seed=seed), [0], V).verify(logits).tokens == [7]
    spread = {Picker(SamplingParams(temperature=1.0, seed=s), [0], V).verify(logits).tokens[0] for s in range(40)}
    assert spread == {7, 9, 20}


def test_one_token_left(rng: torch.Generator):
    """All but one token ruled out: that one comes, greedy or sampled; none left is an error that says why."""
    logits = torch.randn(1, V, generator=rng)
    for temperature in (0.0, 1.0):
        banned = [[i] for i in range(V) if i != 13]
        params = SamplingParams(
            temperature=temperature, seed=1, bad_words=banned, logprobs=2, logprobs_mode="processed_logprobs"
        )
        found = Picker(params, [0], V).verify(logits)
        assert found.tokens == [13]
        assert found.logprobs is not None and found.logprobs[0].logprob == 0.0
        assert found.logprobs[0].top == ((13, 0.0), (0, -math.inf))  # ties by id
        nothing = SamplingParams(temperature=temperature, bad_words=[*banned, [13]])
        with pytest.raises(RequestError, match=r"no token is allowed at position 0.*bad_words"):
            Picker(nothing, [0], V).verify(logits)


def test_the_smallest_top_p_keeps_the_best_one():
    """Times a sum below 1 it would be zero, and then nothing would be left to draw from."""
    params = SamplingParams(temperature=1.0, top_p=5e-324, top_k=2)
    probs = sampler.distribution(torch.tensor([0.0, 1.0, 0.5, 0.9]), params)
    assert probs.tolist() == [0, 1, 0, 0]


def test_logprobs(rng: torch.Generator):
    """top_k 1 with 5 log probabilities: raw ones are the model's own, processed ones are -inf but for one, and what is
    sent is JSON. Would catch log probabilities of the filtered logits, and `-Infinity` in a response."""
    logits = 2 * torch.randn(1, V, generator=rng)
    lines = torch.log_softmax(logits[0].double(), dim=0).tolist()
    best = sorted(range(V), key=lambda i: -lines[i])
    for temperature in (0.0, 0.7):
        settings = {"temperature": temperature, "top_k": 1, "logprobs": 5, "seed": 3}
        raw = Picker(SamplingParams(**settings), [0], V).verify(logits).logprobs
        assert raw is not None and raw[0].token_id == best[0]
        assert [i for i, _ in raw[0].top] == best[:5]
        assert [x for _, x in raw[0].top] == pytest.approx([lines[i] for i in best[:5]], abs=1e-12)
    processed = Picker(SamplingParams(**settings, logprobs_mode="processed_logprobs"), [0], V).verify(logits).logprobs
    assert processed is not None and [x for _, x in processed[0].top] == [0.0] + [-math.inf] * 4
    sent = json.dumps([json_logprob(x) for _, x in processed[0].top], allow_nan=False)
    assert json.loads(sent) == [0.0, None, None, None, None]
    none = Picker(SamplingParams(logprobs=0), [0], V).verify(logits).logprobs
    assert none is not None and none[0].top == () and none[0].logprob == pytest.approx(lines[best[0]])


def test_raw_logprobs_ignore_settings(rng: torch.Generator):
    """What a penalty did to the choice is not the model's opinion."""
    logits = torch.randn(1, V, generator=rng)
    params = SamplingParams(temperature=0.0, logit_bias={5: 100}, logprobs=1)
    found = Picker(params, [0], V).verify(logits)
    assert found.tokens == [5] and found.logprobs is not None
    assert found.logprobs[0].logprob == pytest.approx(float(torch.log_softmax(logits[0].double(), 0)[5]))


# -- draws ---------------------------------------------------------------------------------------------------------


def test_tensor_and_integer_arithmetic_agree(rng: torch.Generator):
    """Keys are mixed in Python and streams in int64 tensors, which must wrap and shift as 64-bit words do."""
    keys = [
        sampler.draw_key(seed, purpose, position)
        for seed in (0, 1, -5, 2**63)
        for purpose in (1, 2)
        for position in (0, 9)
    ]
    assert len(set(keys)) == len(keys) and all(-(2**63) <= key < 2**63 for key in keys)
    ids = torch.arange(5)
    got = sampler.uniform(sampler.key_tensor(keys).unsqueeze(1), ids)
    for key, row in zip(keys, got.tolist(), strict=True):
        for i, value in enumerate(row):
            word = sampler._mix_int(key + (i + 1) * sampler._STEP)
            assert value == ((word >> 12) + 0.5) / 2**52
            assert 0 < value < 1


def test_published_splitmix_numbers():
    """The stream of seed 1234567 begins with the numbers that the generator's author gives for testing."""
    words = [sampler._mix_int(1234567 + i * sampler._STEP) for i in (1, 2, 3)]
    assert words == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_draws_belong_to_seed_and_position(rng: torch.Generator):
    """The same seed repeats, another one differs, and what a neighbour or an earlier step consumed changes nothing."""
    logits = torch.randn(12, V, generator=rng)

    def text(seed: int | None, before: int = 0) -> list[int]:
        picker = Picker(SamplingParams(temperature=1.0, seed=seed), [0], V)
        other = Picker(SamplingParams(temperature=1.0, seed=99), [0], V)
        tokens = []
        for line in logits:
            for _ in range(before):
                other.verify(line.unsqueeze(0))
            tokens += picker.verify(line.unsqueeze(0)).tokens
        return tokens

    assert text(5) == text(5) == text(5, before=3)
    assert text(5) != text(6)
    assert text(None) != text(None)  # no seed: a new one each time
    flat = Picker(SamplingParams(temperature=1.0, seed=5), [0], V)
    assert len({flat.verify(torch.zeros(1, V)).tokens[0] for _ in range(30)}) > 5  # positions differ


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"), ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": "1"}, "temperature is '1'"), ({"top_p": 0}, "top_p is 0"), ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 1.5}, "top_k is 1.5"), ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"), ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"), ({"min_tokens": 65}, "in 0..64"),
        ({"max_tokens": True}, "max_tokens is True"), ({"logit_bias": {1: 101}}, "logit_bias"),
        ({"logit_bias": {"1": 1}}, "logit_bias"), ({"bad_words": ["a", ""]}, "bad_words"),
        ({"bad_words": [[]]}, "bad_words"), ({"stop": [""]}, "stop"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"), ({"seed": 0.5}, "seed is 0.5"),
        ({"logprobs": 101}, "logprobs is 101"), ({"logprobs_mode": "raw"}, "'raw_logprobs' or 'processed_logprobs'"),
        ({"json_schema": "{}", "regex": "a"}, "json_schema and regex"), ({"regex": ""}, "regex is ''"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"), ({"json_schema": 3}, "json_schema is 3"),
        ({"temperature": 10**400}, "temperature is 1000"), ({"repetition_penalty": 1e-308}, "in [0.01, 100]"),
        ({"repetition_penalty": 1e308}, "in [0.01, 100]"), ({"bad_words": ["a\ud83d"]}, "place 1, half of a surrogate"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(settings: dict[str, Any], message: str):
    """What would be ignored, or become infinity, NaN or another library's exception in the middle of a step."""
    with pytest.raises(RequestError) as error:
        SamplingParams(**settings)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias", "bad_words"])
def test_ids_outside_the_vocabulary(name: str):
    """An index error in the middle of a step would take the other requests down."""
    value: Any = {"logit_bias": {V: 1.0}, "bad_words": [[1, V]]}.get(name, [V])
    with pytest.raises(RequestError, match=rf"{name} holds the token id {V}; the vocabulary has ids 0..{V - 1}"):
        Picker(SamplingParams(**{name: value}), [0], V)


def test_bad_word_strings():
    """A string is banned at the start of a text and after a blank, which are different tokens."""
    tokenizer = Tokenizer(byte_level_tokenizer(), bos_id=0, eos_ids=(1,), pad_id=2)
    params = SamplingParams(bad_words=["whale", [5, 6]])
    words = bad_word_ids(params, tokenizer)
    assert words == [tuple(tokenizer.encode("whale")), tuple(tokenizer.encode(" whale")), (5, 6)]
    with pytest.raises(RequestError, match=r"'whale'.*no tokenizer"):
        bad_word_ids(params, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "blok"}, "rule is 'blok' .did you mean 'block'"),
        ({"method": "dspark"}, "method is 'dspark'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min, _max are 5, 4"),
    ],
)
def test_bad_speculation_is_named(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**settings)
