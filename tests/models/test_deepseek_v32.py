"""DeepSeek-V3.2: golden results of the reference, an independent formula, any split, stores, gradients, FP8."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from finback.base.formats import E4M3_B128, E4M3_B128_E8M0, Format
from finback.base.runtime import CheckpointError, ConfigError
from finback.io.checkpoint_write import save_checkpoint
from finback.io.load import load_model
from finback.kernels.torch.quant import dequantize, quantize_weight
from finback.models.base import Model, family
from finback.models.deepseek_v32.attention import Step
from finback.models.deepseek_v32.config import DeepseekV32Config
from finback.nn.norm_rope import turns_at
from finback.nn.rows import BatchRows, Chunk, ForwardBatch, PagedRows
from finback.nn.tape import Tape

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
QUANTISED_ROLES = ("attention", "ffn", "expert", "shared_expert", "indexer")
TINY: dict[str, Any] = {
    "model_type": "deepseek_v32", "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 32, "index_n_heads": 16, "index_head_dim": 128,
    "index_topk": 8, "vocab_size": 96, "max_position_embeddings": 64, "routed_scaling_factor": 2.5,
    "rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 16, "mscale": 0.7,
                     "mscale_all_dim": 0.7},
}  # fmt: skip


# -- running -----------------------------------------------------------------------------------------------------------


def forward(model: Model, sequences: Sequence[Sequence[int]], tape: Tape | None = None) -> Tensor:
    """Logits [T, V] of whole sequences in one differentiable forward."""
    batch = ForwardBatch([Chunk(ids) for ids in sequences], tape=tape)
    return model.logits(model(batch, BatchRows(model.row_groups()).view(batch)))


Schedule = Sequence[Sequence[int]]  # one list a step: how many tokens each sequence is fed


@torch.no_grad()
def feed(model: Model, sequences: Sequence[Sequence[int]], schedule: Schedule) -> tuple[list[Tensor], list[set]]:
    """Feed sequences step by step through pages in shuffled places. Returns the logits of each sequence and every pick
    it made, as (layer, position, picked position)."""
    page, pages = 4, math.ceil(max(map(len, sequences)) / 4)
    places = torch.randperm(pages * len(sequences), generator=torch.Generator().manual_seed(3)).split(pages)
    store = PagedRows(model.row_groups(), {"full": pages * len(sequences)}, page_tokens=page, dtype=model.dtype)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    picks: list[set] = [set() for _ in sequences]
    done = [0] * len(sequences)
    for counts in schedule:
        chunks = [
            Chunk(ids[at : at + n], at, pages={"full": place.tolist()})
            for ids, at, n, place in zip(sequences, done, counts, places, strict=True)
        ]
        tape = Tape(record=True)
        batch = ForwardBatch(chunks, tape=tape)
        out = model.logits(model(batch, store.view(batch))).split(batch.lengths)
        for layer in range(model.config.num_hidden_layers):
            for s, rows in enumerate(tape.seen[f"layer{layer}.selected"].split(batch.lengths)):
                for i, line in enumerate(rows.tolist()):
                    picks[s] |= {(layer, done[s] + i, row) for row in line if row >= 0}
        for s, n in enumerate(counts):
            logits[s].append(out[s])
            done[s] += n
    assert done == [len(ids) for ids in sequences]
    return [torch.cat(parts) for parts in logits], picks


def random_model(rng: torch.Generator, dtype: torch.dtype = torch.float64, **changes: Any) -> Model:
    config = {**TINY, **changes}
    model = family(config).from_config(config, dtype=dtype)
    with torch.no_grad():
        for spec, out in model.weights():
            values = torch.randn(spec.shape, generator=rng)
            if spec.role == "norm" and not spec.name.endswith("bias"):
                out.copy_(1 + 0.2 * values)
            elif len(spec.shape) == 1:
                out.copy_(0.1 * values)
            else:
                out.copy_(values if spec.role == "embedding" else values * spec.shape[1] ** -0.5)
    return model


def random_ids(rng: torch.Generator, n: int, vocab: int = 96) -> list[int]:
    return torch.randint(vocab, (n,), generator=rng).tolist()


# -- golden ------------------------------------------------------------------------------------------------------------


def golden(name: str, dtype: str = "float32") -> tuple[Model, dict[str, Tensor], list[list[int]]]:
    values = load_file(GOLDEN / name / "golden.safetensors")
    return load_model(GOLDEN / name, dtype=dtype), values, values["text.ids"].tolist()


def as_sets(rows: Tensor) -> list[set[int]]:
    """Picks of each position [n, k] without the empty places; the reference fills up with positions to come."""
    return [{row for row in line if 0 <= row <= i} for i, line in enumerate(rows.tolist())]


@pytest.mark.parametrize("name", ["v32-math", "v32-softmax-math"])
@torch.no_grad()
def test_prefill_equals_the_reference(name: str):
    """Any wrong formula: rotation, YaRN, softmax scale, norms, indexer, routing with and without groups and bias."""
    model, g, ids = golden(name)
    tape = Tape(trace=True)
    logits = forward(model, ids, tape)
    n = len(ids[0])
    assert (logits[:n] - g["text.prefill_logits"]).abs().max() < 1e-4
    for i in range(4):
        selected = tape.seen[f"layer{i}.selected"].split(n)
        assert [as_sets(s) for s in selected] == [as_sets(s) for s in g[f"text.layer{i}.selected"]]
        if i:
            experts, wanted = tape.seen[f"layer{i}.experts"], g[f"text.layer{i}.experts"]
            assert torch.equal(experts.sort().values, wanted.long().sort().values)
        if (out := g.get(f"text.layer{i}.out")) is not None:
            assert (tape.seen[f"layer{i}.out"][:n] - out).abs().max() < 1e-5 * out.abs().max()


@torch.no_grad()
def test_decoding_equals_the_reference():
    """State that only a later step reads: rows and index keys written by the prompt, read by every decoded token."""
    model, g, ids = golden("v32-math")
    n = len(ids[1])
    logits, picks = feed(model, [ids[1]], [[21]] + [[1]] * (n - 21))
    assert (logits[0] - g["text.decode_logits"]).abs().max() < 1e-4
    wanted = {
        (i, at, row)
        for i in range(4)
        for at, rows in enumerate(as_sets(g[f"text.layer{i}.selected"][1]))
        for row in rows
    }
    assert picks[0] == wanted


@torch.no_grad()
def test_replayed_picks_of_the_reference_stay_causal():
    """The reference's picks of early positions name positions to come, which it masks afterwards. Replaying them as
    they stand must not let a token see the future, and must give what the model picks on its own."""
    model, g, ids = golden("v32-math", "float64")
    assert (g["text.layer0.selected"][0, 0] > 0).any()
    replay = {name: g[f"text.{name}"].long().flatten(0, -2) for name in model.choice_names()}
    assert (forward(model, ids, Tape(replay)) - forward(model, ids)).abs().max() < 1e-9


# -- an independent formula --------------------------------------------------------------------------------------------


def act_quant(x: Tensor) -> Tensor:
    """FP8 with one power-of-two scale per 128 values, by way of real float8 numbers."""
    blocks = x.unflatten(-1, (-1, 128))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    return ((blocks / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


class Formula:
    """V3.2's forward of one sequence in float64 as the paper writes it: keys and values of every position are expanded,
    scores of all positions are masked. w: decoded weights by released name. rounds: applied to inputs of quantised
    products, latents, index queries and keys. Choices are those of `replay`, except for `selected` of layer 0."""

    def __init__(self, config: dict[str, Any], w: dict[str, Tensor], rounds: Callable[[Tensor], Tensor]):
        self.c, self.rounds = DeepseekV32Config.from_dict(config), rounds
        self.w = {name: value.double() for name, value in w.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.rounds(x) @ self.w[f"{name}.weight"].T

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps).sqrt() * self.w[f"{name}.weight"]

    def angles(self, n: int) -> Tensor:
        c, y, dim = self.c, self.c.rope_scaling, self.c.qk_rope_head_dim
        freqs = torch.tensor([c.rope_theta ** (-2 * j / dim) for j in range(dim // 2)], dtype=torch.float64)
        if y is not None:
            turns = [
                dim * math.log(16 / (b * 2 * math.pi)) / (2 * math.log(c.rope_theta))
                for b in (y.beta_fast, y.beta_slow)
            ]
            low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), dim - 1)
            far = ((torch.arange(dim // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
            freqs = freqs * (1 - far) + freqs / y.factor * far
        return torch.arange(n).unsqueeze(1) * freqs

    def interleaved(self, x: Tensor) -> Tensor:
        """Rotate x [n, ..., r] in adjacent pairs."""
        a = self.angles(len(x)).view(len(x), *[1] * (x.ndim - 2), -1)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * a.cos() - odd * a.sin(), even * a.sin() + odd * a.cos()], -1).flatten(-2)

    def halves(self, x: Tensor) -> Tensor:
        """Rotate the first r values of x [n, ..., h], first half against second half."""
        r = self.c.qk_rope_head_dim
        mixed = torch.stack(x[..., :r].chunk(2, -1), -1).flatten(-2)
        turned = self.interleaved(mixed)
        return torch.cat([turned[..., 0::2], turned[..., 1::2], x[..., r:]], -1)

    def index(self, name: str, x: Tensor, qr: Tensor) -> Tensor:
        """Causal index scores [n, n]."""
        c, width = self.c, self.c.index_head_dim
        sylvester = torch.ones(1, 1, dtype=torch.float64)
        while len(sylvester) < width:
            sylvester = torch.cat([torch.cat([sylvester, sylvester], 1), torch.cat([sylvester, -sylvester], 1)])
        place = lambda t: self.rounds(self.halves(t) @ sylvester / width**0.5)  # noqa: E731
        q = place(self.linear(f"{name}.wq_b", qr).unflatten(-1, (c.index_n_heads, width)))
        k_norm = self.w[f"{name}.k_norm.weight"], self.w[f"{name}.k_norm.bias"]
        k = place(F.layer_norm(self.linear(f"{name}.wk", x), (width,), *k_norm, 1e-6))
        weights = x @ self.w[f"{name}.weights_proj.weight"].T * (c.index_n_heads * width) ** -0.5
        scores = torch.einsum("nh,nhm->nm", weights, torch.einsum("nhd,md->nhm", q, k).relu())
        return scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)

    def attention(self, i: int, x: Tensor, replay: dict[str, Tensor]) -> Tensor:
        c, name, n = self.c, f"model.layers.{i}.self_attn", len(x)
        qr = self.norm(f"{name}.q_a_layernorm", self.linear(f"{name}.q_a_proj", x))
        if i == 0:
            self.first_scores = self.index(f"{name}.indexer", x, qr)
        q = self.linear(f"{name}.q_b_proj", qr).unflatten(-1, (c.num_attention_heads, -1))
        latent, rope = self.linear(f"{name}.kv_a_proj_with_mqa", x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        latent = self.rounds(self.norm(f"{name}.kv_a_layernorm", latent))
        expanded = (latent @ self.w[f"{name}.kv_b_proj.weight"].T).unflatten(-1, (c.num_attention_heads, -1))
        k, v = expanded.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        scores = torch.einsum("nhd,mhd->hnm", q_nope, k)
        scores = scores + torch.einsum("nhd,md->hnm", self.interleaved(q_rope), self.interleaved(rope))
        m = 0.1 * c.rope_scaling.mscale * math.log(c.rope_scaling.factor) + 1 if c.rope_scaling else 1
        scores = scores * m * m / math.sqrt(c.qk_nope_head_dim + c.qk_rope_head_dim)
        mask = torch.full((n, n), -math.inf, dtype=torch.float64)
        for line, rows in zip(mask, replay[f"layer{i}.selected"], strict=True):
            line[rows[rows >= 0]] = 0
        out = torch.einsum("hnm,mhd->nhd", (scores + mask).softmax(-1), v)
        return self.linear(f"{name}.o_proj", out.flatten(1))

    def swiglu(self, name: str, x: Tensor) -> Tensor:
        return self.linear(
            f"{name}.down_proj", F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        )

    def moe(self, i: int, x: Tensor, replay: dict[str, Tensor]) -> Tensor:
        name, out = f"model.layers.{i}.mlp", []
        scores = (x @ self.w[f"{name}.gate.weight"].T).sigmoid()
        for t, experts in enumerate(replay[f"layer{i}.experts"].tolist()):
            total = sum(scores[t, e] for e in experts)
            parts = [scores[t, e] / total * self.swiglu(f"{name}.experts.{e}", x[t]) for e in experts]
            out.append(self.c.routed_scaling_factor * sum(parts) + self.swiglu(f"{name}.shared_experts", x[t]))
        return torch.stack(out)

    def logits(self, ids: list[int], replay: dict[str, Tensor]) -> Tensor:
        h = self.w["model.embed_tokens.weight"][ids]
        for i in range(self.c.num_hidden_layers):
            name = f"model.layers.{i}"
            h = h + self.attention(i, self.norm(f"{name}.input_layernorm", h), replay)
            x = self.norm(f"{name}.post_attention_layernorm", h)
            h = h + (self.swiglu(f"{name}.mlp", x) if i < self.c.first_k_dense_replace else self.moe(i, x, replay))
        return self.norm("model.norm", h) @ self.w["lm_head.weight"].T


@torch.no_grad()
def test_absorbed_form_equals_expanded_keys_and_values(rng: torch.Generator):
    """A key or value half of wkv_b from the wrong side, an mscale that is not squared, halves and pairs swapped."""
    model = random_model(rng)
    ids, tape = random_ids(rng, 24), Tape(record=True)
    logits = forward(model, [ids], tape)
    formula = Formula(TINY, {spec.name: value for spec, value in model.weights()}, lambda x: x)
    assert (logits - formula.logits(ids, tape.seen)).abs().max() < 1e-5  # angles are float32 in the model
    best = formula.first_scores.topk(TINY["index_topk"]).indices
    assert as_sets(tape.seen["layer0.selected"]) == as_sets(best)


@torch.no_grad()
def test_each_rotation_has_its_own_layout(rng: torch.Generator):
    """Indexer and attention swapped, which still gives fluent text: the erratum of the released code. Attention turns
    (2j, 2j + 1) at the end of a row, the indexer (j, j + r/2) at the start of a key."""
    model = random_model(rng, num_hidden_layers=1)
    attn, c = model.layers[0].attn, model.config
    position = torch.tensor([5])
    turns = turns_at(position, model.freqs, torch.float64)
    x = torch.randn(1, c.hidden_size, generator=rng, dtype=torch.float64)

    row = attn.rows(x, turns)[0, c.kv_lora_rank :]
    plain = attn.rows(x, torch.ones_like(turns))[0, c.kv_lora_rank :]
    for j, turn in enumerate(turns[0]):
        assert torch.allclose(
            torch.complex(row[2 * j], row[2 * j + 1]), turn * torch.complex(plain[2 * j], plain[2 * j + 1])
        )

    batch = ForwardBatch([Chunk([0])])
    key = lambda t: attn.indexer.store_keys(x, Step(BatchRows(model.row_groups()).view(batch), t))  # noqa: E731
    unmix = torch.linalg.inv(_hadamard_matrix(c.index_head_dim))
    turned, plain = (key(turns) @ unmix)[0], (key(torch.ones_like(turns)) @ unmix)[0]
    half = c.qk_rope_head_dim // 2
    for j, turn in enumerate(turns[0]):
        assert torch.allclose(
            torch.complex(turned[j], turned[j + half]), turn * torch.complex(plain[j], plain[j + half])
        )
    assert torch.allclose(turned[2 * half :], plain[2 * half :])


def _hadamard_matrix(width: int) -> Tensor:
    signs = [[(-1) ** bin(i & j).count("1") for j in range(width)] for i in range(width)]
    return torch.tensor(signs, dtype=torch.float64) / width**0.5


# -- any split ---------------------------------------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn, lengths: Sequence[int]) -> Schedule:
    """Random cuts of every sequence; each starts at a step of its own, so that some join late and wait in between."""
    columns = []
    for n in lengths:
        cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=4)))
        parts = [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
        columns.append([0] * draw(st.integers(0, 2)) + parts)
    steps = max(map(len, columns))
    return list(zip(*[c + [0] * (steps - len(c)) for c in columns], strict=True))


@pytest.mark.parametrize(("dtype", "bar"), [("float64", 1e-9), ("float32", 5e-5)])
@settings(max_examples=8)
@given(data=st.data())
def test_any_split_and_batch_gives_the_same(dtype: str, bar: float, data: st.DataObject):
    """Rows of another sequence, positions counted from the chunk, selection over the chunk instead of the sequence, a
    shortcut for short sequences that depends on their neighbours; and the two row stores disagreeing."""
    model, _, ids = _cached_golden(dtype)
    sequences = [ids[0][:40], ids[1][:23], ids[1][30:37]]
    logits, picks = feed(model, sequences, data.draw(schedules([len(s) for s in sequences])))
    for s, ids in enumerate(sequences):
        alone, alone_picks = feed(model, [ids], [[len(ids)]])
        with torch.no_grad():
            trained = forward(model, [ids])
        assert (logits[s] - alone[0]).abs().max() < bar
        assert (trained - alone[0]).abs().max() < bar
        assert picks[s] == alone_picks[0]


@torch.no_grad()
def test_only_wanted_positions_come_back(rng: torch.Generator):
    """A caller that asks for the end of a prompt gets exactly those rows, of every sequence, not the first ones."""
    model = random_model(rng)
    first, second = random_ids(rng, 20), random_ids(rng, 9)
    every = forward(model, [first, second])
    batch = ForwardBatch([Chunk(first, exact_from=17), Chunk(second, exact_from=8)])
    some = model.logits(model(batch, BatchRows(model.row_groups()).view(batch)))
    assert (some - every[[17, 18, 19, 28]]).abs().max() < 1e-12


_models: dict[str, Any] = {}


def _cached_golden(dtype: str) -> tuple[Model, dict[str, Tensor], list[list[int]]]:
    if dtype not in _models:
        _models[dtype] = golden("v32-math", dtype)
    return _models[dtype]


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_gradients_reach_every_weight_but_the_indexer(rng: torch.Generator):
    """A detached row or query: with choices held fixed, the gradient is the slope of the loss along any direction."""
    model = random_model(rng).requires_grad_(True)
    sequences = [random_ids(rng, 17), random_ids(rng, 6)]
    tape = Tape(record=True)
    forward(model, sequences, tape)

    def loss() -> Tensor:
        return forward(model, sequences, Tape(tape.seen)).logsumexp(1).square().mean()

    loss().backward()
    slope = torch.tensor(0.0, dtype=torch.float64)
    directions = {}
    for name, p in model.named_parameters():
        if "indexer" in name or name.endswith("gate.bias"):
            assert p.grad is None, name
            continue
        assert p.grad is not None and bool(p.grad.isfinite().all()) and bool(p.grad.any()), name
        directions[p] = torch.randn(p.shape, generator=rng, dtype=p.dtype) * p.detach().std()
        slope += (p.grad * directions[p]).sum()
    ends = []
    for sign in (1, -2):
        with torch.no_grad():
            for p, d in directions.items():
                p += sign * 1e-6 * d
            ends.append(loss())
    measured = (ends[0] - ends[1]) / 2e-6
    assert abs(measured - slope) < 1e-5 * abs(slope)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def quantised(model: Model, config: dict[str, Any], fmt: Format, folder: Path, **quant: Any) -> dict[str, Tensor]:
    """Write `model` as a released FP8 checkpoint with a draft layer; returns the decoded weights."""
    stored, decoded = [], {}
    for spec, value in model.weights():
        value = value.detach().float()
        if spec.role in QUANTISED_ROLES and "weights_proj" not in spec.name:
            data, scale = quantize_weight(value, fmt)
            stored += [(spec.name, data), (spec.name + "_scale_inv", scale)]
            decoded[spec.name] = dequantize(data, scale, fmt)
        else:
            stored.append((spec.name, value))
            decoded[spec.name] = value
    draft = f"model.layers.{config['num_hidden_layers']}."
    stored += [(draft + "eh_proj.weight", torch.zeros(4, 8)), (draft + "embed_tokens.weight", torch.zeros(4, 4))]
    keys = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    save_checkpoint(folder, {**config, "quantization_config": {**keys, **quant}}, stored)
    return decoded


@pytest.mark.parametrize("fmt", [E4M3_B128, E4M3_B128_E8M0], ids=lambda f: f.name)
@torch.no_grad()
def test_fp8_checkpoint_equals_its_own_dequantisation(fmt: Format, tmp_path: Path):
    """Scales of the wrong block (partial edge blocks included), gate and up exchanged, a scale divided instead of
    multiplied as "scale_inv" suggests, rounding that does not switch off, a draft layer that is loaded or refused."""
    config = json.loads((GOLDEN / "v32-math" / "config.json").read_text())
    decoded = quantised(load_model(GOLDEN / "v32-math", trainable=True), config, fmt, tmp_path / "fp8")
    plain = family(config).from_config(config, dtype=torch.float32)
    for spec, out in plain.weights():
        out.copy_(decoded[spec.name])
    model = load_model(tmp_path / "fp8", dtype="float32", rounding="off")
    ids = _cached_golden("float32")[2]
    assert (forward(model, ids) - forward(plain, ids)).abs().max() < 1e-4
    with pytest.raises(ConfigError, match=r"q_lora_rank 64.*multiples of 128"):
        load_model(tmp_path / "fp8")


@pytest.mark.parametrize("fmt", [E4M3_B128, E4M3_B128_E8M0], ids=lambda f: f.name)
@torch.no_grad()
def test_released_rounding(fmt: Format, rng: torch.Generator, tmp_path: Path):
    """A product, latent, index query or key that is not rounded, or a routing weight that is applied before a rounding:
    in float64 every FP8 code must be that of the formula."""
    decoded = quantised(random_model(rng), TINY, fmt, tmp_path / "fp8", scale_fmt="ue8m0")
    ids, tape = random_ids(rng, 24), Tape(record=True)
    formula = Formula(TINY, decoded, act_quant)
    logits = forward(load_model(tmp_path / "fp8", dtype="float64"), [ids], tape)
    wanted = formula.logits(ids, tape.seen)
    assert (logits - wanted).norm() < 2e-3 * wanted.norm()
    assert as_sets(tape.seen["layer0.selected"]) == as_sets(formula.first_scores.topk(TINY["index_topk"]).indices)


@pytest.mark.parametrize("fmt", [E4M3_B128, E4M3_B128_E8M0], ids=lambda f: f.name)
@torch.no_grad()
def test_fp8_in_bfloat16_is_close_to_float32(fmt: Format, rng: torch.Generator, tmp_path: Path):
    """What a user runs: defaults of a quantised checkpoint against its own float32 dequantisation, choices replayed.
    Bad mixtures of dtypes and sums in bfloat16 show here. Sublayers are weak, or FP8's own error would hide all."""
    model = random_model(rng)
    with torch.no_grad():
        for spec, value in model.weights():
            value *= 0.1 if spec.name.endswith(("o_proj.weight", "down_proj.weight")) else 1
    quantised(model, TINY, fmt, tmp_path / "fp8", scale_fmt="ue8m0")
    ids, tape = random_ids(rng, 24), Tape(record=True)
    wanted = forward(load_model(tmp_path / "fp8", dtype="float32", rounding="off"), [ids], tape)
    released = load_model(tmp_path / "fp8")
    assert released.dtype == torch.bfloat16 and released.rounding
    assert (forward(released, [ids], Tape(tape.seen)) - wanted).norm() < 3e-2 * wanted.norm()


@torch.no_grad()
def test_float32_activation_scales(rng: torch.Generator, tmp_path: Path):
    """Without "ue8m0" activations have float32 scales; power-of-two ones would be coarser than released."""
    folder = tmp_path / "fp8"
    decoded = quantised(random_model(rng, num_hidden_layers=1), {**TINY, "num_hidden_layers": 1}, E4M3_B128, folder)
    ids, tape = random_ids(rng, 12), Tape(record=True)

    def rounds(x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, 128))
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
        return ((blocks / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)

    logits = forward(load_model(folder, dtype="float64"), [ids], tape)
    wanted = Formula({**TINY, "num_hidden_layers": 1}, decoded, rounds).logits(ids, tape.seen)
    assert (logits - wanted).norm() < 2e-3 * wanted.norm()


@torch.no_grad()
def test_packed_weights_give_the_same_as_plain_ones(tmp_path: Path):
    """Packing takes wkv_b apart by heads and halves; a transposed or shifted half would not be noticed in float32."""
    folder = GOLDEN / "v32-math"
    ids = _cached_golden("float32")[2]
    packed, plain = load_model(folder, dtype="bfloat16"), load_model(folder, dtype="bfloat16", trainable=True)
    tape = Tape(record=True)
    wanted = forward(plain, ids, tape)
    if packed.layers[0].attn.wkv_b.packed is None:
        pytest.skip("this torch has no packed float16 products")
    assert (forward(packed, ids, Tape(tape.seen)) - wanted).norm() < 2e-2 * wanted.norm()


def test_a_missing_router_bias_is_refused_where_it_matters(tmp_path: Path):
    """Absent means zero for a softmax router without groups only; a sigmoid router would silently route otherwise."""
    tensors = load_file(GOLDEN / "v32-math" / "model.safetensors")
    config = json.loads((GOLDEN / "v32-math" / "config.json").read_text())
    gone = "model.layers.2.mlp.gate.e_score_correction_bias"
    save_checkpoint(tmp_path / "cut", config, [(k, v) for k, v in tensors.items() if k != gone])
    with pytest.raises(CheckpointError, match=gone):
        load_model(tmp_path / "cut")
    assert not load_model(GOLDEN / "v32-softmax-math").layers[1].ffn.gate.bias.any()


def test_only_declared_draft_layers_are_left_out():
    """A config with too few layers must not hide the rest of the checkpoint."""
    model = random_model(torch.Generator(), num_nextn_predict_layers=1)
    assert model.ignored("model.layers.3.enorm.weight")
    assert not any(
        map(model.ignored, ["model.layers.2.mlp.gate.weight", "model.layers.4.enorm.weight", "model.layers.30.x"])
    )


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"index_topkk": 4}, "unknown key 'index_topkk'.*index_topk"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ({"n_group": 3}, "3 n_group"),
        ({"topk_group": 5}, "5 topk_group"),
        ({"n_group": 8, "topk_group": 4}, "at least 2 n_group"),
        ({"num_experts_per_tok": 5}, "must be 1..4"),
        ({"index_head_dim": 96}, "index_head_dim 96 must be a power of two"),
        ({"rope_scaling": {**TINY["rope_scaling"], "mscale_all_dim": 1.0}}, "must be equal"),
        ({"rope_scaling": {**TINY["rope_scaling"], "type": "linear"}}, "'linear'; V3.2 uses 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"scoring_func": "sqrtsoftplus"}, "'softmax' or 'sigmoid'"),
        ({"mlp_layer_types": ["dense", "sparse", "dense"]}, "dense layers first"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}, r"\[32, 32\]"),
    ],
)
def test_config_errors_name_the_key(changes: dict[str, Any], text: str):
    """A setting that is silently ignored, or fails deep inside a forward."""
    with pytest.raises(ConfigError, match=text):
        DeepseekV32Config.from_dict({**TINY, **changes})


def test_yarn_needs_a_context_beyond_the_original_one():
    """With max_position_embeddings at the original length, neither frequencies nor the softmax are changed."""
    short = DeepseekV32Config.from_dict({**TINY, "max_position_embeddings": 16})
    assert short.yarn is None and short.softmax_scale == (24 + 16) ** -0.5
    long = DeepseekV32Config.from_dict(TINY)
    assert long.softmax_scale == pytest.approx((24 + 16) ** -0.5 * (1 + 0.07 * math.log(8)) ** 2)
