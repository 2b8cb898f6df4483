"""DeepSeek-V4.1's parts against plain float64 loops, and the choices that its layers make and hand down."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from finback import kernels
from finback.base.runtime import NonFiniteError
from finback.models.base import Model
from finback.models.deepseek_v41.attention import Attention
from finback.nn.moe import Router
from finback.nn.rows import BatchRows, ForwardBatch
from finback.nn.tape import Tape

WINDOW, TOP_K = 8, 4
SWAPPED: dict[str, Any] = {"compress_ratios": [0, 1, 1, 2, 2, 0, 0]}
ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1, "compress_ratios": [0, 0, 0], "kv_source_layer_ids": [], "index_source_layer_ids": [],
    "candidate_source_layer_id": -1, "engram_layer_ids": [], "engram_num_embeddings": [],
    "dspark_target_layer_ids": [0],
}  # fmt: skip


class Calls:
    """First inputs and first outputs of modules, by name, joined over all forwards."""

    def __init__(self) -> None:
        self.inputs: dict[str, list[Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}

    def given(self, name: str) -> Tensor:
        return torch.cat(self.inputs[name])

    def gave(self, name: str) -> Tensor:
        return torch.cat(self.outputs[name])


@contextlib.contextmanager
def watching(model: Model, suffixes: Sequence[str]) -> Iterator[Calls]:
    calls, handles = Calls(), []

    def watch(name: str, module: nn.Module) -> None:
        def note(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            calls.inputs.setdefault(name, []).append(inputs[0].clone())
            calls.outputs.setdefault(name, []).append((output[0] if isinstance(output, tuple) else output).clone())

        handles.append(module.register_forward_hook(note))

    for name, module in model.named_modules():
        if name.endswith(tuple(suffixes)) and not name.startswith("mtp"):
            watch(name, module)
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


# -- attention against dense masks -------------------------------------------------------------------------------------


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt() * weight


def turned(x: Tensor, positions: Sequence[int], freqs: Tensor, sign: int = 1) -> Tensor:
    """x [n, ..., h] with its last 2 len(freqs) values rotated pair by pair, value by value."""
    x, first = x.clone(), x.shape[-1] - 2 * len(freqs)
    for row, position in zip(x, positions, strict=True):
        for j, freq in enumerate(freqs):
            angle = sign * float(torch.tensor(float(position), dtype=torch.float32) * freq)
            a, b = row[..., first + 2 * j].clone(), row[..., first + 2 * j + 1].clone()
            row[..., first + 2 * j] = a * math.cos(angle) - b * math.sin(angle)
            row[..., first + 2 * j + 1] = a * math.sin(angle) + b * math.cos(angle)
    return x


def best(scores: dict[int, float], k: int) -> list[int]:
    return sorted(sorted(scores, key=lambda row: (-scores[row], row))[:k])


class Dense:
    """Attention of a stack of layers, every token over all rows with a mask. One sequence, all of it at once."""

    def __init__(self, model: Model):
        self.model, self.c = model, model.config.text_config
        self.rows = self.keys = torch.empty(0)
        self.picked: list[list[int]] = []
        self.blocks: list[list[int]] | None = None

    def layer(self, attn: Attention, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]."""
        c, ratio, n = self.c, attn.ratio, len(x)
        freqs = self.model.compressed_freqs if ratio else self.model.window_freqs
        every = range(n)
        w = {name: p.double() for name, p in attn.named_parameters()}
        qr = normed(x @ w["wq_a.weight"].T, w["q_norm.weight"])
        q = turned((qr @ w["wq_b.weight"].T).view(n, c.num_attention_heads, c.head_dim), every, freqs)
        window = turned(normed(x @ w["wkv.weight"].T, w["kv_norm.weight"]), every, freqs)
        near = torch.tensor([[0 <= t - s < c.sliding_window for s in every] for t in every])
        if ratio and attn.layer in c.kv_source_layer_ids:
            self.compress(w, x, ratio, freqs)
        if ratio and attn.layer in c.index_source_layer_ids:
            self.pick(w, x, qr, ratio, freqs, attn.layer)
        rows, mask = window, near
        if ratio:
            chosen = torch.zeros(n, len(self.rows), dtype=torch.bool)
            for t, picks in enumerate(self.picked):
                chosen[t, picks] = True
            rows, mask = torch.cat([window, self.rows]), torch.cat([near, chosen], dim=1)
        z = torch.einsum("thd,sd->ths", q, rows) * c.head_dim**-0.5
        z = z.masked_fill(~mask.unsqueeze(1), -math.inf)
        e, sink = z.exp(), w["attn_sink"].exp().view(1, -1, 1)
        o = turned(torch.einsum("ths,sd->thd", e / (e.sum(2, keepdim=True) + sink), rows), every, freqs, sign=-1)
        parts = zip(o.reshape(n, c.o_groups, -1).unbind(1), w["wo_a.weight"].chunk(c.o_groups), strict=True)
        return torch.cat([part @ weight.T for part, weight in parts], dim=1) @ w["wo_b.weight"].T

    def compress(self, w: dict[str, Tensor], x: Tensor, ratio: int, freqs: Tensor) -> None:
        latents = []
        for g in range(len(x) // ratio):
            group = x[g * ratio : (g + 1) * ratio]
            values = group @ w["compressor.wkv.weight"].T
            gates = (group @ w["compressor.wgate.weight"].T).exp() if ratio > 1 else torch.ones_like(values)
            latents.append((gates / gates.sum(0) * values).sum(0))
        latent = normed(torch.stack(latents), w["compressor.norm.weight"])
        firsts = range(0, len(latents) * ratio, ratio)
        self.rows = turned(latent, firsts, freqs)
        self.keys = turned(normed(latent @ w["indexer.wk.weight"].T, w["indexer.k_norm.weight"]), firsts, freqs)
        self.blocks = None

    def pick(self, w: dict[str, Tensor], x: Tensor, qr: Tensor, ratio: int, freqs: Tensor, layer: int) -> None:
        c = self.c
        q = (qr @ w["indexer.wq_b.weight"].T).view(len(x), c.index_n_heads, c.index_head_dim)
        q = turned(q, range(len(x)), freqs)
        weights = x @ w["indexer.weights_proj.weight"].T * c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        scores = torch.einsum("th,thn->tn", weights, torch.einsum("thd,nd->thn", q, self.keys).relu())
        size, blocks = c.candidate_block_size, self.blocks
        self.picked, kept = [], []
        for t, line in enumerate(scores.tolist()):
            seen = dict(enumerate(line[: (t + 1) // ratio]))
            worth = {b: max(line[b * size : min((b + 1) * size, len(seen))]) for b in {r // size for r in seen}}
            if seen:
                worth[(len(seen) - 1) // size] = math.inf
            kept.append(best(worth, c.candidate_topk_blocks))
            if blocks is not None:
                seen = {r: s for r, s in seen.items() if r // size in blocks[t]}
            self.picked.append(best(seen, c.index_topk))
        if layer == c.candidate_source_layer_id:
            self.blocks = kept


@pytest.mark.parametrize("splits", [[2 * WINDOW], [31], [7, 2, 22], [1] * 2 * WINDOW], ids=["16", "31", "cut", "ones"])
@pytest.mark.parametrize("changes", [{}, SWAPPED], ids=["2:1", "1:1 then 2:1"])
def test_attention_equals_dense_masks(lab: Any, changes: dict[str, Any], splits: list[int]) -> None:
    """A row at distance window - 1 lost or one at distance window kept; a group visible before its last token; wrong
    rotation of rows, keys, queries or outputs; a shared selection of the wrong layer; candidates ignored; one norm too
    many on the queries. Every layer is checked on the inputs that it really got."""
    model = lab.model(**changes)
    with watching(model, [".attn"]) as calls:
        fed = lab.feed(model, [lab.illustrated(model, sum(splits))], [[n] for n in splits])
    dense = Dense(model)
    for i, layer in enumerate(model.layers):
        y = dense.layer(layer.attn, calls.given(f"layers.{i}.attn"))
        assert (calls.gave(f"layers.{i}.attn") - y).abs().max() < 1e-9, f"layer {i}"
        if layer.attn.ratio:
            picked = [[row for row in line if row >= 0] for line in lab.choices(fed)[f"layer{i}.selected"]]
            assert picked == dense.picked, f"layer {i}"


@pytest.mark.parametrize("n", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_a_needle_is_seen_from_window_minus_one(lab: Any, n: int) -> None:
    """A ring that loses its oldest row one step early, or keeps it one step longer, at lengths around the window."""
    model = lab.model(**ONE_LAYER)
    prompt, needle = lab.illustrated(model, n), lab.illustrated(model, n)
    needle.ids[0] = 499
    for schedule in ([[n]], [[1]] * n, [[n - 1], [1]]):
        before, after = (lab.feed(model, [p], schedule).logits[0] for p in (prompt, needle))
        moved = (before - after).abs().amax(1) > 1e-9
        assert moved.tolist() == [t < WINDOW for t in range(n)]


def test_rotations_by_kind_of_layer(lab: Any) -> None:
    """YaRN on window layers, or its ramp over the wrong dims. Frequencies by the formula in float64; which layer uses
    which is settled by `test_attention_equals_dense_masks`."""
    model = lab.model()
    c, dim = model.config.text_config, 16
    plain = np.array([c.rope_theta ** (-2 * j / dim) for j in range(dim // 2)])
    assert np.allclose(model.window_freqs.double().numpy(), plain, rtol=1e-6, atol=0)
    base = np.array([c.compress_rope_theta ** (-2 * j / dim) for j in range(dim // 2)])
    yarn = c.rope_scaling
    low, high = (
        dim
        * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi))
        / (2 * math.log(c.compress_rope_theta))
        for turns in (yarn.beta_fast, yarn.beta_slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    mixed = []
    for j, freq in enumerate(base):
        blend = min(max((j - low) / (high - low), 0), 1)
        mixed.append(freq / yarn.factor * blend + freq * (1 - blend))
    assert np.allclose(model.compressed_freqs.double().numpy(), mixed, rtol=1e-6, atol=0)
    assert not np.allclose(mixed, base, rtol=0.1)


@torch.no_grad()
def test_queries_have_no_norm_of_their_own(lab: Any) -> None:
    """DeepSeek-V4 normalises every query head, V4.1 only the low-rank query: heads keep the length that wq_b gives."""
    model = lab.copy_of(lab.model())
    prompt, attn = lab.illustrated(model, 12), model.layers[0].attn
    with watching(model, ["layers.0.attn"]) as calls:
        lab.feed(model, [prompt])
        attn.wq_b.weight[:32] *= 3  # the first head
        lab.feed(model, [prompt])
    before, after = calls.outputs["layers.0.attn"]
    assert (before - after).abs().max() > 1e-2
    assert (after - Dense(model).layer(attn, calls.inputs["layers.0.attn"][1])).abs().max() < 1e-9


# -- hyper-connections -------------------------------------------------------------------------------------------------


def loop_mixes(hc: nn.Module, streams: np.ndarray, copies: int, iterations: int) -> tuple[np.ndarray, ...]:
    """pre [M], post [M], comb [M, M] of one token, with the published eps of 1e-6."""
    eps, flat = 1e-6, streams.reshape(-1)
    fn, scale, base = (getattr(hc, name).double().numpy() for name in ("fn", "scale", "base"))
    z = fn @ flat / math.sqrt(np.mean(flat**2))
    pre = [1 / (1 + math.exp(-(z[k] * scale[0] + base[k]))) + eps for k in range(copies)]
    post = [2 / (1 + math.exp(-(z[copies + k] * scale[1] + base[copies + k]))) for k in range(copies)]
    logits = (z[2 * copies :] * scale[2] + base[2 * copies :]).reshape(copies, copies)
    comb = np.exp(logits)
    comb = comb / comb.sum(1, keepdims=True) + eps
    comb = comb / (comb.sum(0, keepdims=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(1, keepdims=True) + eps)
        comb = comb / (comb.sum(0, keepdims=True) + eps)
    return np.array(pre), np.array(post), comb


@pytest.mark.parametrize(("copies", "iterations"), [(4, 20), (4, 1), (2, 20), (1, 20)])
def test_hyper_connections_equal_a_loop(lab: Any, copies: int, iterations: int) -> None:
    """The mixing matrix transposed, the order pre/post/comb, Sinkhorn starting with columns, and above all the delay:
    `pre` of a sublayer is used by the next one. Inputs of all sublayers follow from their outputs alone."""
    model = lab.model(hc_mult=copies, hc_sinkhorn_iters=iterations, engram_layer_ids=[], engram_num_embeddings=[])
    prompt = lab.illustrated(model, 5)
    with watching(model, [".attn", ".ffn"]) as calls:
        fed = lab.feed(model, [prompt], trace=True)
    for t, token in enumerate(prompt.ids):
        streams = np.tile(model.embed.weight[token].numpy(), (copies, 1))
        pre = np.eye(copies)[0]
        for i, layer in enumerate(model.layers):
            for name in ("attn", "ffn"):
                weight = getattr(layer, f"{name}_norm").weight.double()
                x = normed(torch.from_numpy((pre[:, None] * streams).sum(0)), weight)
                assert (calls.given(f"layers.{i}.{name}")[t] - x).abs().max() < 1e-9, (i, name)
                pre, post, comb = loop_mixes(getattr(layer, f"hc_{name}"), streams, copies, iterations)
                y = calls.gave(f"layers.{i}.{name}")[t].numpy()
                streams = np.stack(
                    [post[k] * y + sum(comb[m, k] * streams[m] for m in range(copies)) for k in range(copies)]
                )
                if iterations == 20:
                    assert abs(comb.sum(0) - 1).max() < 1e-4 and abs(comb.sum(1) - 1).max() < 1e-4
            assert abs(fed.seen[f"layer{i}.stream"][0][t].numpy() - streams).max() < 1e-9
        hidden = normed(torch.from_numpy((pre[:, None] * streams).sum(0)), model.norm.weight.double())
        assert (fed.logits[0][t] - model.head.weight.double() @ hidden).abs().max() < 1e-9


# -- selection ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("split", [[40], [39, 1], [7, 1, 13, 19]], ids=str)
def test_ties_go_to_the_lowest_rows(lab: Any, split: list[int]) -> None:
    """With all scores equal, top-k routines pick by width and device; then a prefix depends on what follows it."""
    model = lab.copy_of(lab.model())
    for layer in (1, 3, 4):
        model.layers[layer].attn.indexer.weights_proj.weight.zero_()
    fed = lab.feed(model, [lab.illustrated(model, 40)], [[n] for n in split])
    for layer, ratio in ((1, 2), (2, 2), (3, 1)):
        for t, rows in enumerate(lab.choices(fed)[f"layer{layer}.selected"]):
            assert [r for r in rows if r >= 0] == list(range(min(TOP_K, (t + 1) // ratio)))
    for t, rows in enumerate(lab.choices(fed)["layer4.selected"]):  # candidates: the lowest block and the newest one
        candidates = {0, 1, 2 * (t // 2), 2 * (t // 2) + 1} | ({2, 3} if t < 4 else set())
        assert [r for r in rows if r >= 0] == sorted(r for r in candidates if r <= t)[:TOP_K]


@torch.no_grad()
def test_many_zero_scores_beside_a_positive_one(lab: Any) -> None:
    """The published report: one positive score and many exact zeros, where a prompt of 39 and one of 40 tokens picked
    differently for the same prefix. Positive head weights make ReLU's zeros the lowest scores."""
    model = lab.copy_of(lab.model("float32"))
    for layer in (1, 3, 4):
        indexer = model.layers[layer].attn.indexer
        weights = indexer.weights_proj.weight
        weights.copy_(torch.where(torch.arange(16).unsqueeze(1) == 0, weights, torch.zeros(())))  # one head only
    ties = 0
    for n in range(36, 41):
        fed, longer = (lab.feed(model, [lab.illustrated(model, k)]) for k in (n, n + 1))
        for name in ("layer1.selected", "layer3.selected", "layer4.selected"):
            assert lab.choices(fed)[name] == lab.choices(longer)[name][:n], name
        ties += sum(rows[:2] == [0, 1] for rows in lab.choices(fed)["layer3.selected"])
    assert ties > 5, "the case never arose"


def test_candidates_bound_the_work_of_later_sources(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second level that scores all rows and masks gives the same picks and none of the speed."""
    model = lab.model()
    whole: list[tuple[int, int]] = []
    parts: list[tuple[int, int]] = []
    scores, scores_at = kernels.index_scores, kernels.index_scores_at

    def all_rows(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        whole.append((len(q), len(keys)))
        return scores(q, weights, keys)

    def some_rows(q: Tensor, weights: Tensor, table: Tensor, index: Tensor) -> Tensor:
        parts.append((len(q), index.shape[1]))
        return scores_at(q, weights, table, index)

    monkeypatch.setattr(kernels, "index_scores", all_rows)
    monkeypatch.setattr(kernels, "index_scores_at", some_rows)
    for n in (40, 120):
        whole.clear(), parts.clear()
        lab.feed(model, [lab.illustrated(model, n)], [[n - 1], [1]])
        assert whole == [(n - 1, (n - 1) // 2), (n - 1, n - 1), (1, n // 2), (1, n)]  # layers 1 and 3, twice
        assert parts == [(n - 1, 4), (1, 4)]  # layer 4: two blocks of two rows, however long the sequence is


def test_candidates_limit_the_picks(lab: Any) -> None:
    """Candidates that bind: without them layer 4 must pick other rows for most tokens, or the limit is not tested."""
    model, free = lab.model(), lab.model(candidate_source_layer_id=-1, candidate_topk_blocks=0, candidate_block_size=0)
    limited, unlimited = (lab.feed(m, [lab.illustrated(m, 40)]) for m in (model, free))
    assert lab.choices(limited)["layer3.selected"] == lab.choices(unlimited)["layer3.selected"]
    pairs = zip(*(lab.choices(fed)["layer4.selected"] for fed in (limited, unlimited)), strict=True)
    assert sum(a != b for a, b in pairs) > 20


def test_replay_gives_the_same_and_obeys(lab: Any) -> None:
    """Recorded choices fed back must give the logits to the last bit, in any cut; other choices must be obeyed."""
    model = lab.model()
    prompt = lab.illustrated(model, 30)
    fed = lab.feed(model, [prompt])
    choices = {name: fed.seen[name] for name in model.choice_names()}
    assert lab.feed(model, [prompt], replay=choices).logits[0].equal(fed.logits[0])
    again = lab.feed(model, [prompt], [[11], [1], [18]], replay=choices)
    assert (again.logits[0] - fed.logits[0]).abs().max() < 1e-9
    for name in ("layer1.selected", "layer4.selected", "layer2.experts"):
        other = choices[name][0].clone()
        other[-1] = torch.tensor([0, 1, 2, -1]) if name.endswith("selected") else (other[-1] + 3) % 8
        assert not other.equal(choices[name][0])
        moved = (lab.feed(model, [prompt], replay={**choices, name: [other]}).logits[0] - fed.logits[0]).abs().amax(1)
        assert moved[-1] > 1e-6 and moved[:-1].max() < 1e-12, name
    # Layers that share a selection follow the one they share.
    other = choices["layer1.selected"][0].clone()
    other[-1] = torch.tensor([0, 1, 2, -1])
    followed = lab.feed(model, [prompt], replay={"layer1.selected": [other]})
    assert lab.choices(followed)["layer2.selected"][-1] == [-1, 0, 1, 2]


def test_nan_scores_select_nothing(lab: Any) -> None:
    """NaN compares false with everything, so a selection over NaN scores would be rows at random."""
    model = lab.copy_of(lab.model())
    with torch.no_grad():
        model.layers[1].attn.indexer.wk.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError):
        lab.feed(model, [lab.illustrated(model, 20)])


# -- Engram ------------------------------------------------------------------------------------------------------------


def loop_hashes(model: Model, prompt: Any) -> list[list[list[int]]]:
    """[T][L][C] table rows from token ids alone, in Python's unbounded integers."""
    layout, c = model.layout, model.config.text_config
    dead = {at + i for at, rows in prompt.spans.items() for i in range(len(rows))}
    pad, found = int(model.token_map[c.engram_pad_token_id]), []
    for t in range(len(prompt.ids)):
        history, alive = [], True
        for s in range(c.engram_max_ngram_size):
            alive = alive and t - s >= 0 and t - s not in dead
            history.append(int(model.token_map[prompt.ids[t - s]]) if alive else pad)
        lines = []
        for numbers, primes, offsets in zip(layout.multipliers, layout.primes, layout.offsets, strict=True):
            value, rows = history[0] * numbers[0], []
            for n in range(1, c.engram_max_ngram_size):
                value ^= history[n] * numbers[n]
                for head in range(c.engram_n_heads):
                    column = (n - 1) * c.engram_n_heads + head
                    rows.append(value % primes[column] + offsets[column])
            lines.append(rows)
        found.append(lines)
    return found


def test_ngram_ids_follow_from_the_tokens_alone(lab: Any) -> None:
    """Ids before the start, of a packed neighbour or across an image in an n-gram; a history lost at a cut."""
    model = lab.model()
    prompts = [
        lab.illustrated(model, 11),
        lab.illustrated(model, 2, lab.picture(model, 3, 7), 5, lab.picture(model, 3, 3), seed=1),
        lab.illustrated(model, lab.picture(model, 3, 3), 7, seed=2),
        lab.illustrated(model, 1, seed=3),
    ]
    expected = [loop_hashes(model, p) for p in prompts]
    lengths = [len(p.ids) for p in prompts]
    halves = [[n // 2 for n in lengths], [n - n // 2 for n in lengths]]
    single = [[int(i < n) for n in lengths] for i in range(max(lengths))]
    for schedule in (None, halves, single):
        fed = lab.feed(model, prompts, schedule, trace=True)
        assert [lines.tolist() for lines in fed.seen["engram_hashes"]] == expected
    tape = Tape(trace=True)
    with torch.no_grad():
        lab.score(model, prompts, tape)
    assert [lines.tolist() for lines in tape.seen["engram_hashes"].split(lengths)] == expected


def test_images_get_nothing_from_engram(lab: Any) -> None:
    """N-grams of image tokens are all the same padding: adding that row to every image token is a silent bias."""
    model = lab.model()
    prompt = lab.illustrated(model, 4, lab.picture(model, 6, 6), 5)
    with watching(model, ["engrams.1", "engrams.3"]) as calls:
        lab.feed(model, [prompt], [[6], [11]])
    image = torch.tensor(prompt.types) >= 0
    for name in ("engrams.1", "engrams.3"):
        change = (calls.gave(name) - calls.given(name)).abs().amax((1, 2))
        assert bool((change[image] == 0).all()) and bool((change[~image] > 1e-3).all())


# -- experts -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_image_tokens_are_routed_with_their_own_bias(lab: Any) -> None:
    """Image tokens routed with the text bias: no error, only worse answers about images. The whole span counts, its
    start, newlines and end included."""
    model = lab.copy_of(lab.model())
    prompt = lab.illustrated(model, 4, lab.picture(model, 6, 6), 5)
    before = lab.feed(model, [prompt], trace=True)
    for layer in model.layers:
        layer.ffn.gate.bias_vl.copy_(torch.tensor([9.0, 9, 0, 0, 0, 0, 0, 0]))
    after = lab.feed(model, [prompt], [[7], [10]], trace=True)
    image = torch.tensor(prompt.types) >= 0
    for i in range(5):
        experts = after.seen[f"layer{i}.experts"][0]
        assert {tuple(sorted(line)) for line in experts[image].tolist()} == {(0, 1)}
        assert experts[:4].equal(before.seen[f"layer{i}.experts"][0][:4])
    assert after.seen["layer0.experts"][0][~image].equal(before.seen["layer0.experts"][0][~image])
    weights = after.seen["layer0.expert_weights"][0]
    assert torch.allclose(weights.sum(1), torch.tensor(1.5, dtype=weights.dtype)), "the bias must not weigh"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_router_far_from_zero(dtype: torch.dtype) -> None:
    """softplus that underflows to 0 at -16.6 (bf16 sums), 0 / 0 where all scores vanish, a bias that weighs."""
    torch.set_default_dtype(dtype)
    try:
        router = Router(1, 4, 2, score="sqrtsoftplus", scale=1.5, normalise=True, bias=True)
    finally:
        torch.set_default_dtype(torch.float32)
    router.weight.fill_(1)
    router.bias.copy_(torch.tensor([0.0, 5.0, 4.0, 0.0]))
    for logit in (-16.625, -20.0, -90.0, 200.0):
        weights, experts = router(torch.tensor([[logit]], dtype=dtype), None, Tape(), "layer0")
        assert experts.tolist() == [[1, 2]]
        share = math.sqrt(math.log1p(math.exp(logit)) if logit < 100 else logit)
        assert weights.dtype == torch.float32
        expected = 1.5 * share / (2 * share + 1e-20)
        assert torch.allclose(weights, torch.full_like(weights, expected), rtol=1e-5, atol=0)
    weights, _ = router(torch.tensor([[-400.0]], dtype=dtype), None, Tape(), "layer0")
    assert weights.tolist() == [[0.0, 0.0]]  # scores vanish in float32: nothing, and not NaN


# -- rows and results --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"num_nextn_predict_layers": 0, "compress_ratios": [0, 4, 4, 1, 1]}])
def test_row_groups_hold_what_later_tokens_read(lab: Any, changes: dict[str, Any]) -> None:
    """A group or a layer that is missing here has no memory in serving, one too many wastes it for every token."""
    ratio = changes.get("compress_ratios", [0, 2])[1]
    groups = {g.name: (g.layers, g.stride, g.window, g.width) for g in lab.model(**changes).row_groups()}
    drafts = {"draft_window": ((5, 6), 1, WINDOW, 32)} if not changes else {}
    assert groups == drafts | {
        "window": ((0, 1, 2, 3, 4), 1, WINDOW, 32),
        "compressed/1": ((3,), 1, None, 32),
        "index_key/1": ((3,), 1, None, 32),
        f"compressed/{ratio}": ((1,), ratio, None, 32),
        f"index_key/{ratio}": ((1,), ratio, None, 32),
        f"raw/{ratio}": ((1,), 1, ratio, 64),
    }


@torch.no_grad()
def test_logits_of_wanted_rows_only(lab: Any) -> None:
    """`logits` is separate from the forward: rows must not influence each other."""
    model = lab.model()
    prompt = lab.illustrated(model, 9)
    batch = ForwardBatch([prompt.chunk(0, 9)])
    hidden = model(batch, BatchRows(model.row_groups()).view(batch))
    rows = torch.tensor([8, 2])
    assert (model.logits(hidden[rows]) - model.logits(hidden)[rows]).abs().max() < 1e-12


@torch.no_grad()
def test_bfloat16_logits_are_summed_in_float32(lab: Any) -> None:
    """Logits of 129k tokens in bfloat16 have ties everywhere: greedy text then depends on the order of ids."""
    model = lab.model("bfloat16")
    logits = lab.score(model, [lab.illustrated(model, 12)])
    exact = lab.score(lab.model(), [lab.illustrated(model, 12)])
    assert logits.dtype == torch.float32 and not logits.equal(logits.bfloat16().float())
    assert torch.nn.functional.cosine_similarity(logits.double(), exact, dim=1).mean() > 0.9
