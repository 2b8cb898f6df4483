"""Engram's hash against the released figures and against the formula in Python's unbounded integers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from finback.base.runtime import ConfigError
from finback.models.deepseek_v41.ngram import NgramLayout, hash_rows, ngram_history

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors_v41.json").read_text("utf-8"))
RELEASED_ROWS = [384_006_168, 384_016_682]
PAD = 2


def released(rows: list[int] = RELEASED_ROWS) -> NgramLayout:
    return NgramLayout.build([1, 14], rows, 4, 16_000_000, 8, 256, 99_092)


def tiny(layer_ids: tuple[int, ...] = (0, 3), rows: tuple[int, ...] = (660, 864)) -> NgramLayout:
    return NgramLayout.build(layer_ids, rows, 4, 101, 2, 32, 300)


def previous_of(compressed: list[int], distance: int = 3) -> Tensor:
    """[T, distance] the ids before each token of one sequence; -1 before its start."""
    padded = [-1] * distance + compressed
    return torch.tensor([padded[t : t + distance][::-1] for t in range(len(compressed))])


def hashes(layout: NgramLayout, compressed: list[int]) -> Tensor:
    history = ngram_history(torch.tensor(compressed), previous_of(compressed), PAD)
    return hash_rows(history, layout.tables("cpu"))


def test_primes_and_multipliers_are_the_released_ones() -> None:
    """A prime reused between layers, a search that does not start anew for each n-gram size, or multipliers that went
    through a float would look up unrelated rows of the released tables."""
    layout = released()
    expected = [[prime for group in layer for prime in group] for layer in VECTORS["engram_primes"]]
    assert [list(columns) for columns in layout.primes] == expected
    assert [[str(m) for m in layer] for layer in layout.multipliers] == VECTORS["engram_mult"]


def test_hashes_are_the_released_ones() -> None:
    """A wrong order of distances, columns or offsets, or a start that is not padded."""
    vector = VECTORS["engram_hash"]
    assert hashes(released(), vector["compressed"])[:, 0].tolist() == vector["hash_layer1"]


def test_a_masked_span_blocks_everything_beyond_it() -> None:
    """Text after an image must not see across it, and a masked token must be pad at distance 0 too: an n-gram that
    skips over the span instead of ending there gives other rows at positions 6 and 8."""
    compressed = list(VECTORS["engram_hash"]["compressed"])
    compressed[4] = compressed[5] = -1
    rows = hashes(released(), compressed)[:, 0].tolist()
    for key, expected in VECTORS["engram_hash_masked_4_5"].items():
        assert rows[int(key.removeprefix("layer1_pos"))] == expected


def test_history_is_pad_from_the_first_dead_token_on() -> None:
    """A rule that only replaces the dead ids themselves would keep the 9 and the 5 behind them."""
    compressed = torch.tensor([7, 7, -1, 7, 7])
    previous = torch.tensor([[5, 6, 9], [-1, 6, 9], [5, 6, 9], [5, -2, 9], [5, 6, -1]])
    assert ngram_history(compressed, previous, PAD).tolist() == [
        [7, 5, 6, 9],
        [7, PAD, PAD, PAD],
        [PAD, PAD, PAD, PAD],
        [7, 5, PAD, PAD],
        [7, 5, 6, PAD],
    ]


@pytest.mark.parametrize("layout", [released(), tiny()], ids=["released", "tiny"])
def test_rows_follow_the_formula_in_unbounded_integers(layout: NgramLayout, rng: torch.Generator) -> None:
    """An overflow or a detour over floating point shows only for large ids; a wrong axis only with several layers."""
    ids = 99_092 if layout.num_embeddings[0] > 1000 else 300
    history = torch.randint(0, ids, (32, 4), generator=rng)
    history[0] = ids - 1
    rows = hash_rows(history, layout.tables("cpu"))
    assert rows.shape == (32, 2, 3 * layout.n_heads)
    for token, layer_rows in zip(history.tolist(), rows.tolist(), strict=True):
        for layer, actual in enumerate(layer_rows):
            value, start, expected = token[0] * layout.multipliers[layer][0], 0, []
            for n in range(1, 4):
                value ^= token[n] * layout.multipliers[layer][n]
                for prime in layout.primes[layer][(n - 1) * layout.n_heads : n * layout.n_heads]:
                    expected.append(start + value % prime)
                    start += prime
            assert actual == expected
            assert max(actual) < start == layout.num_embeddings[layer]


def test_live_text_does_not_share_one_bucket(rng: torch.Generator) -> None:
    """With degenerate multipliers every n-gram falls into bucket 0, and Engram silently does nothing."""
    history = torch.randint(0, 300, (2000, 4), generator=rng)
    rows = hash_rows(history, tiny().tables("cpu"))
    for layer, total in enumerate((660, 864)):
        assert rows[:, layer].unique().numel() > 0.98 * total


@pytest.mark.parametrize("start", [1, 2, 30, 101, 1000])
def test_primes_follow_a_plain_search(start: int) -> None:
    """The fast primality test is wrong for the small primes it divides by, or for prime squares such as 31 * 37."""
    seen: list[int] = []
    layers = []
    for _ in range(2):
        first = len(seen)
        for _ in range(3):
            candidate = start
            for _ in range(4):
                while candidate in seen or candidate < 2 or any(candidate % d == 0 for d in range(2, candidate)):
                    candidate += 1
                seen.append(candidate)
        layers.append(tuple(seen[first:]))
    layout = NgramLayout.build([2, 5], [sum(layer) for layer in layers], 4, start, 4, 8, 50)
    assert layout.primes == tuple(layers)


def test_tables_of_another_size_are_refused_with_both_numbers() -> None:
    """A table that is one row off would otherwise be read past its end, or with every later column shifted."""
    with pytest.raises(ConfigError, match=r"384,016,683 rows for layer 14.*need 384,016,682"):
        released([384_006_168, 384_016_683])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_ngram_size": 1}, "engram_max_ngram_size must be at least 2"),
        ({"n_heads": 0}, "engram_n_heads must be at least 1, not 0"),
        ({"compressed_vocab_size": 0}, "engram_compressed_vocab_size must be at least 1"),
        ({"num_embeddings": [660]}, "one entry each"),
        ({"layer_ids": [3, 3]}, "different layers"),
    ],
)
def test_impossible_configs_are_refused(changes: dict[str, object], message: str) -> None:
    """Each would otherwise end in a division by zero, an empty table or two layers with the same multipliers."""
    arguments = {
        "layer_ids": [0, 3],
        "num_embeddings": [660, 864],
        "max_ngram_size": 4,
        "vocab_size": 101,
        "n_heads": 2,
        "head_dim": 32,
        "compressed_vocab_size": 300,
    }
    with pytest.raises(ConfigError, match=message):
        NgramLayout.build(**{**arguments, **changes})
