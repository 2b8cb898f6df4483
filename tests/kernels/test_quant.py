"""The released rounding rules against published vectors, and against a slow reference that shares no code."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finback.base.formats import (
    E2M1_R16,
    E2M1_R32,
    E4M3_B32,
    E4M3_B128,
    E4M3_B128_E8M0,
    E4M3_R32,
    F32,
    FORMATS,
    Format,
)
from finback.base.runtime import CheckpointError, ConfigError
from finback.kernels.torch import quant

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors_v41.json").read_text())
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]


# -- the slow reference: tables of all magnitudes and numpy's float32 --------------------------------------------------


def nearest_code(value: float, table: list[float]) -> int:
    """Index of the magnitude nearest to |value|; a tie goes to the even index; above the table: the last index."""
    size = abs(value)
    low = bisect_right(table, size) - 1
    if low == len(table) - 1:
        return low
    below, above = size - table[low], table[low + 1] - size  # exact: both are float32 in float64
    return low if below < above or (below == above and low % 2 == 0) else low + 1


def next_power_of_two(value: np.float32) -> np.float32:
    mantissa, exponent = math.frexp(float(value))  # value = mantissa * 2^exponent, 0.5 <= mantissa < 1
    return np.float32(math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))


def slow_scale(row: np.ndarray, rule: str) -> np.float32:
    top = np.float32(np.abs(row).max())
    if rule == "e4m3/pow2":
        return next_power_of_two(max(top, np.float32(1e-4)) * np.float32(1 / 448))
    if rule == "e4m3/float":
        return max(top, np.float32(1e-4)) * np.float32(1 / 448)
    if rule == "e2m1/e8m0":
        return next_power_of_two(max(top, np.float32(6 * 2.0**-126)) * np.float32(1 / 6))
    quotient = min(max(top, np.float32(6 * 2.0**-9)) / np.float32(6), np.float32(448))
    return np.float32(E4M3[nearest_code(float(quotient), E4M3)])


def slow_codes(row: np.ndarray, rule: str) -> tuple[list[int], np.float32, list[float]]:
    """Codes with the sign in their top bit, the scale and the float32 values of one block."""
    scale = slow_scale(row, rule)
    table, sign = (E4M3, 128) if rule.startswith("e4m3") else (E2M1, 8)
    codes, values = [], []
    for x in row:
        code = nearest_code(float(x / scale), table)
        codes.append(code | (sign if np.signbit(x) else 0))
        values.append(float(np.copysign(np.float32(table[code]) * scale, x)))
    return codes, scale, values


def fast_round(x: Tensor, rule: str, block: int) -> Tensor:
    if rule.startswith("e4m3"):
        return quant.round_e4m3(x, block, rule == "e4m3/pow2")
    return quant.round_e2m1(x, block, rule.removeprefix("e2m1/"))


def fast_codes(x: Tensor, rule: str, block: int) -> tuple[Tensor, Tensor]:
    if rule.startswith("e4m3"):
        q, scale = quant.quantize_e4m3(x, block, rule == "e4m3/pow2")
        return q.view(torch.uint8), scale
    packed, scale = quant.quantize_e2m1(x, block, rule.removeprefix("e2m1/"))
    return quant.unpack_e2m1(packed), scale


def bits(x: Tensor) -> Tensor:
    """Integers that tell -0 from 0."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


RULES = {"e4m3/pow2": 32, "e4m3/float": 128, "e2m1/e8m0": 32, "e2m1/e4m3": 16}
every_rule = pytest.mark.parametrize(("rule", "block"), RULES.items(), ids=list(RULES))


# -- published vectors -------------------------------------------------------------------------------------------------


def vector_input() -> Tensor:
    i = torch.arange(32, dtype=torch.float64)
    return ((-1.0) ** i * (0.003 * i * i + 0.01)).to(torch.float32).to(torch.bfloat16)


def test_published_e4m3_vector() -> None:
    """Catches any change of the activation rule: codes, scale and in-place values of the released act_quant."""
    expected, x = VECTORS["act_quant_32"], vector_input()
    q, scale = quant.quantize_e4m3(x)
    assert q.view(torch.uint8).tolist() == expected["q_bits"]
    assert scale.tolist() == expected["scale"]
    assert torch.equal(bits(quant.round_e4m3(x)), bits(torch.tensor(expected["inplace"], dtype=torch.bfloat16)))


@pytest.mark.parametrize(("name", "scale_kind", "block"), [("fp4_32_e8m0", "e8m0", 32), ("fp4_16_e4m3", "e4m3", 16)])
def test_published_e2m1_vectors(name: str, scale_kind: str, block: int) -> None:
    """Catches any change of the FP4 rules, the nibble order and the sign of a negative that rounds to zero."""
    expected, x = VECTORS[name], vector_input()
    packed, scale = quant.quantize_e2m1(x, block, scale_kind)
    assert packed.tolist() == expected["packed"]
    assert scale.tolist() == expected["scale"]
    rounded = quant.round_e2m1(x, block, scale_kind)
    assert torch.equal(bits(rounded), bits(torch.tensor(expected["inplace"], dtype=torch.bfloat16)))


def test_published_scales_of_zeros() -> None:
    """Catches a missing floor: a block of zeros must have the released scale and stay zero, never become 0 / 0."""
    zeros, expected = torch.zeros(1, 32, dtype=torch.bfloat16), VECTORS["zeros"]
    assert quant.quantize_e4m3(zeros)[1].item() == expected["act_scale"]
    assert quant.quantize_e2m1(zeros)[1].item() == expected["fp4_e8m0_scale"]
    assert quant.quantize_e2m1(zeros, 16, "e4m3")[1].flatten().tolist() == expected["fp4_e4m3_scale"]
    for rule, block in RULES.items():
        wide = torch.zeros(2, 2 * block)
        assert torch.equal(bits(fast_round(wide, rule, block)), bits(wide)), rule


# -- against the slow reference ----------------------------------------------------------------------------------------

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
TIES = st.integers(-4096, 4096).map(lambda n: n / 64.0)
SIZES = st.sampled_from(
    [0.0, -0.0, 2.0**-149, -(2.0**-126), 1e-4, 6 * 2.0**-9, 448.0, 449.0, 464.0, 6.0, -5.0, 3e38, -1e30]
)


@st.composite
def blocks(draw: st.DrawFn, width: int) -> list[float]:
    """One block: numbers of one magnitude, of all magnitudes, or multiples of 1/64, which hold ties of both codes."""
    kind = draw(st.sampled_from(["any", "near", "ties", "edges"]))
    if kind == "near":
        generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        return (generator.standard_normal(width) * 2.0 ** draw(st.integers(-140, 120))).astype(np.float32).tolist()
    source = {"any": FLOATS, "ties": TIES, "edges": st.one_of(SIZES, TIES)}[kind]
    return draw(st.lists(source, min_size=width, max_size=width))


@every_rule
@settings(max_examples=60)
@given(data=st.data())
def test_rounding_equals_the_slow_reference(rule: str, block: int, data: st.DataObject) -> None:
    """Catches a wrong tie, a lost subnormal, a scale off by a factor 2, a missing clamp or a lost sign, bit for bit."""
    row = np.array(data.draw(blocks(block)), dtype=np.float32)
    with np.errstate(over="ignore", under="ignore"):
        codes, scale, values = slow_codes(row, rule)
    x = torch.from_numpy(row)[None]
    got_codes, got_scale = fast_codes(x, rule, block)
    assert got_scale.tolist() == [[float(scale)]]
    assert got_codes[0].tolist() == codes
    expected = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(bits(fast_round(x, rule, block)[0]), bits(expected))
    # numbers of another dtype are rounded as their float32 values, and the result once to that dtype
    assert torch.equal(bits(fast_round(x.double(), rule, block)[0]), bits(expected.double()))


@every_rule
def test_all_bfloat16_numbers(rule: str, block: int) -> None:
    """Catches a bit pattern that the fast rounding and the codes treat differently, over every finite bfloat16."""
    patterns = torch.arange(0x7F80, dtype=torch.int32)
    x = torch.cat((patterns, patterns - 0x8000)).to(torch.int16).view(torch.bfloat16).view(-1, block)
    codes, scale = fast_codes(x, rule, block)
    table = torch.tensor([*E4M3, math.nan] if rule.startswith("e4m3") else E2M1, dtype=torch.float32)
    values = torch.cat((table, -table))[codes.int()] * scale
    assert torch.equal(bits(fast_round(x, rule, block)), bits(values.bfloat16()))


@pytest.mark.parametrize(
    ("rule", "mantissa", "small"), [("e4m3/pow2", 0x600000, 2.0**-17), ("e2m1/e8m0", 0x400000, 2.0**-3)]
)
def test_scale_steps_where_the_released_product_does(rule: str, mantissa: int, small: float) -> None:
    """Catches a carry constant that disagrees with the float32 product amax * fl(1/max) next to the step of the scale.

    `small` is one quantum under the lower scale and half of one, hence 0, under the higher.
    """
    nearby = torch.arange(mantissa - 2000, mantissa + 2000)
    spread = torch.arange(0, 1 << 23, 4999)
    amax = (torch.cat((nearby, spread)).to(torch.int32) | (127 << 23)).view(torch.float32)
    x = torch.stack((amax, torch.full_like(amax, small)), -1)
    codes, scale = fast_codes(x, rule, 2)
    rounded = fast_round(x, rule, 2)[:, 1]
    assert torch.equal(rounded, torch.where(scale[:, 0] == scale.min(), small, 0.0))
    assert scale.unique().numel() == 2 and codes[:, 1].unique().numel() == 2
    reciprocal = np.float32(1 / 448) if rule == "e4m3/pow2" else np.float32(1 / 6)
    slow = [float(next_power_of_two(value * reciprocal)) for value in amax[::97].numpy()]
    assert scale[::97, 0].tolist() == slow


def test_e4m3_scale_is_a_true_division() -> None:
    """Catches amax * fl(1/6) in place of amax / 6: just below the tie 7.125 / 6 = 1.1875 they give different scales."""
    amax = float.fromhex("0x1.c7fffep+2")
    x = torch.zeros(1, 16)
    x[0, 5] = amax
    assert np.float32(amax) / np.float32(6) < 1.1875 == np.float32(amax) * np.float32(1 / 6)
    assert quant.quantize_e2m1(x, 16, "e4m3")[1].item() == 1.125
    assert quant.round_e2m1(x, 16, "e4m3")[0, 5].item() == 6 * 1.125


@every_rule
def test_nan_and_infinity_stay_visible(rule: str, block: int) -> None:
    """Catches NaN activations that come out as plausible numbers, in values and in stored codes."""
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(2, block)
        x[0, 3] = bad
        rounded = fast_round(x, rule, block)
        if rule != "e2m1/e4m3" or math.isnan(bad):  # an infinite row saturates there, as released
            assert not rounded[0, 3].isfinite()
        assert rounded[1].isfinite().all()
        scale = fast_codes(x, rule, block)[1]
        assert scale[0].isnan().all() and scale[1].isfinite().all()


@every_rule
def test_layouts_and_input_left_alone(rule: str, block: int, rng: torch.Generator) -> None:
    """Catches rounding in place, and strides that regroup the elements: transposed, strided and expanded inputs."""
    base = torch.randn(2 * block, 6 * block, generator=rng)
    for x in (base.t(), base[:, ::2], base[:, None].expand(-1, 2, -1), base.view(2, block, 6 * block).transpose(0, 1)):
        before = x.clone()
        assert torch.equal(fast_round(x, rule, block), fast_round(x.contiguous(), rule, block))
        for got, expected in zip(fast_codes(x, rule, block), fast_codes(x.contiguous(), rule, block), strict=True):
            assert torch.equal(got, expected)
        assert torch.equal(x, before)


@every_rule
def test_empty_and_indivisible_rows(rule: str, block: int) -> None:
    """Catches a crash on a step without tokens, and silent padding of a dimension that has no whole blocks."""
    assert fast_round(torch.zeros(0, 3, 2 * block), rule, block).shape == (0, 3, 2 * block)
    assert fast_codes(torch.zeros(0, 2 * block), rule, block)[1].shape == (0, 2)
    for width in (block - 1, block + 1):
        with pytest.raises(ConfigError, match=f"multiple of the {block} values"):
            fast_round(torch.zeros(2, width), rule, block)
        with pytest.raises(ConfigError, match=f"multiple of the {block} values"):
            fast_codes(torch.zeros(2, width), rule, block)


def test_unknown_fp4_scale() -> None:
    """Catches a misspelt scale that falls through to one of the two rules."""
    with pytest.raises(ConfigError, match=r"'e8m0' or 'e4m3', not 'ue8m0'"):
        quant.round_e2m1(torch.zeros(32), 32, "ue8m0")


@contextmanager
def subnormals_flushed() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@every_rule
def test_zeros_where_subnormals_are_flushed(rule: str, block: int) -> None:
    """Catches 0 / 0 = NaN: some libraries switch subnormals off for the process, and FP4's smallest quantum is one."""
    with subnormals_flushed():
        rounded = fast_round(torch.zeros(1, block), rule, block)
    assert torch.equal(rounded, torch.zeros(1, block))


@every_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradient_is_the_identity(rule: str, block: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Catches zero gradients through rounding, gradients cut at clamped elements, and other values in training."""
    x = (torch.randn(3, 2 * block, generator=rng) * 5).to(dtype)
    x[:, 0] = 1e6
    leaf = x.clone().requires_grad_()
    rounded = fast_round(leaf, rule, block)
    assert torch.equal(rounded.detach(), fast_round(x, rule, block))
    upstream = torch.randn(x.shape, generator=rng).to(dtype)
    rounded.backward(upstream)
    assert leaf.grad is not None and torch.equal(leaf.grad, upstream)
    with torch.no_grad():
        assert not fast_round(leaf, rule, block).requires_grad


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_every_scale_byte() -> None:
    """Catches byte 0 read as zero (its float32 is subnormal), an exponent off by one, and a decoded 255."""
    codes = torch.arange(255, dtype=torch.uint8)
    expected = torch.tensor([math.ldexp(1.0, b - 127) for b in range(255)], dtype=torch.float64)
    for stored in (codes, codes.view(torch.float8_e8m0fnu)):
        assert torch.equal(quant.decode_e8m0(stored).double(), expected)
    assert torch.equal(quant.encode_e8m0(expected.float()), codes)
    with pytest.raises(CheckpointError, match="1 of 2 scale bytes are 255, which means NaN"):
        quant.decode_e8m0(torch.tensor([127, 255], dtype=torch.uint8))


def test_scale_that_lost_its_bytes() -> None:
    """Catches exponent bytes that a loader converted to numbers: fluent garbage without this error."""
    for wrong in (torch.tensor([121.0]), torch.tensor([121], dtype=torch.int32)):
        with pytest.raises(CheckpointError, match="float8_e8m0fnu, uint8"):
            quant.decode_e8m0(wrong)


@pytest.mark.parametrize("value", [3.0, 0.0, -1.0, math.nan, math.inf, 2.0**-128, 1.5 * 2.0**-127])
def test_scale_that_is_no_power_of_two(value: float) -> None:
    """Catches a scale that is silently cut down to its exponent when it is written."""
    with pytest.raises(CheckpointError, match="cannot be a power-of-two scale byte"):
        quant.encode_e8m0(torch.tensor([1.0, value]))


@pytest.mark.parametrize("byte", [0, 1, 110, 127, 254, 255])
def test_all_nibbles_times_scale_bytes(byte: int) -> None:
    """Catches the nibble order, a wrong table entry and extreme scales, for each dtype that holds packed bytes."""
    codes = [*range(16), *range(15, -1, -1)]
    packed = torch.tensor([[codes[i] | codes[i + 1] << 4 for i in range(0, 32, 2)]], dtype=torch.uint8)
    scale = torch.tensor([[byte]], dtype=torch.uint8)
    expected = np.array([E2M1[c & 7] * (-1.0 if c > 7 else 1.0) for c in codes]) * 2.0 ** (byte - 127)
    with np.errstate(over="ignore"):
        number = torch.from_numpy(expected.astype(np.float32))
    for dtype in (torch.uint8, torch.int8, torch.float4_e2m1fn_x2):
        if byte == 255:
            with pytest.raises(CheckpointError, match="scale bytes are 255"):
                quant.dequantize(packed.view(dtype), scale, E2M1_R32)
        else:
            assert torch.equal(bits(quant.dequantize(packed.view(dtype), scale, E2M1_R32)[0]), bits(number))
    assert quant.unpack_e2m1(packed).tolist() == [codes]
    assert torch.equal(quant.pack_e2m1(torch.tensor([codes], dtype=torch.uint8)), packed)


@pytest.mark.parametrize("byte", [0, 1, 110, 127, 254])
def test_all_e4m3_codes_times_scale_bytes(byte: int) -> None:
    """Catches wrong subnormals, NaN codes decoded as 480, and a scale factor that overflows before the product."""
    magnitude = np.array([*E4M3, math.nan])
    with np.errstate(over="ignore"):
        number = torch.from_numpy((np.concatenate((magnitude, -magnitude)) * 2.0 ** (byte - 127)).astype(np.float32))
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    got = quant.dequantize(codes.view(torch.float8_e4m3fn), torch.full((8, 1), byte, dtype=torch.uint8), E4M3_R32)
    finite = number.view(8, 32).isfinite() | number.view(8, 32).isinf()
    assert torch.equal(got.isnan(), ~finite)
    assert torch.equal(bits(got[finite]), bits(number.view(8, 32)[finite]))
    clean = codes.clone()
    clean[codes & 127 == 127] = 0  # without NaN another path decodes
    got_clean = quant.dequantize(clean, torch.full((8, 1), byte, dtype=torch.uint8), E4M3_R32)
    assert torch.equal(bits(got_clean[finite]), bits(got[finite]))


# -- whole tensors -----------------------------------------------------------------------------------------------------

SCALED = [fmt for fmt in FORMATS.values() if fmt.block is not None]
every_format = pytest.mark.parametrize("fmt", SCALED, ids=[fmt.name for fmt in SCALED])


def random_stored(
    shape: tuple[int, ...], fmt: Format, rng: torch.Generator, low: int, high: int
) -> tuple[Tensor, Tensor]:
    """Random codes without NaN and random scales; power-of-two scale bytes in [low, high)."""
    data = torch.randint(0, 256, fmt.storage_shape(shape), generator=rng, dtype=torch.uint8)
    if fmt.kind == "e4m3":
        data[data & 127 == 127] = 126
    scale_shape = fmt.scale_shape(shape)
    assert scale_shape is not None and fmt.scale_dtype is not None
    if fmt.scale_dtype == torch.float8_e8m0fnu:
        scale = torch.randint(low, high, scale_shape, generator=rng, dtype=torch.uint8).view(fmt.scale_dtype)
    else:
        scale = (torch.rand(scale_shape, generator=rng) + 0.01).to(fmt.scale_dtype)
    return data.view(fmt.storage), scale


def slow_dequantize(data: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """One element at a time: table value times the scale at (row // rows, col // cols), in float32. 2-D data."""
    assert fmt.block is not None
    raw, scales = data.view(torch.uint8).tolist(), scale.double().tolist()
    out = []
    for n, row in enumerate(raw):
        codes = row if fmt.kind == "e4m3" else [code for byte in row for code in (byte & 15, byte >> 4)]
        table, sign = (E4M3, 128) if fmt.kind == "e4m3" else (E2M1, 8)
        numbers = [math.copysign(table[c & (sign - 1)], -1.0 if c & sign else 1.0) for c in codes]
        out.append([v * scales[n // fmt.block[0]][k // fmt.block[1]] for k, v in enumerate(numbers)])
    return torch.tensor(out, dtype=torch.float64).float()  # a product of 4 and 24 bits is exact before this rounding


@every_format
@pytest.mark.parametrize("shape", [(32, 32), (31, 64), (33, 34), (1, 2), (64, 30), (130, 132)])
def test_dequantize_by_element(
    fmt: Format, shape: tuple[int, int], rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches scales applied to the wrong rows or columns at partial blocks, and at the borders of decoding chunks."""
    data, scale = random_stored(shape, fmt, rng, 100, 140)
    expected = slow_dequantize(data, scale, fmt)
    for chunk in (1, 2000, 1 << 20):
        monkeypatch.setattr(quant, "CHUNK", chunk)
        assert torch.equal(bits(quant.dequantize(data, scale, fmt)), bits(expected))
        out = torch.full((shape[0], 2 * shape[1]), -7.0, dtype=torch.bfloat16)[:, ::2]
        assert quant.dequantize(data, scale, fmt, out=out) is out
        assert torch.equal(bits(out), bits(expected.bfloat16()))
    assert torch.equal(quant.dequantize(data, scale, fmt, torch.float64), expected.double())


@every_format
def test_dequantize_stacks(fmt: Format, rng: torch.Generator) -> None:
    """Catches blocks that reach over the border of stacked matrices, with contiguous and transposed results."""
    shape = (3, 40, 36)
    data, scale = random_stored(shape, fmt, rng, 100, 140)
    expected = torch.stack([slow_dequantize(d, s, fmt) for d, s in zip(data, scale, strict=True)])
    assert torch.equal(quant.dequantize(data, scale, fmt), expected)
    out = torch.zeros(40, 3, 36).transpose(0, 1)
    quant.dequantize(data, scale, fmt, out=out)
    assert torch.equal(out, expected)
    assert quant.dequantize(data[:0], scale[:0], fmt).shape == (0, 40, 36)


@pytest.mark.parametrize("fmt", [E4M3_R32, E2M1_R32, E2M1_R16], ids=lambda fmt: fmt.name)
def test_dequantize_one_row(fmt: Format, rng: torch.Generator) -> None:
    """Catches a single row (one n-gram, one cached key) that needs a batch dimension to decode."""
    data, scale = random_stored((64,), fmt, rng, 100, 140)
    assert torch.equal(quant.dequantize(data, scale, fmt), slow_dequantize(data[None], scale[None], fmt)[0])


def test_dequantize_refuses() -> None:
    """Catches weights used without, or with another tensor's scale, and bytes that were converted to numbers."""
    data, scale = torch.zeros(64, 64, dtype=torch.uint8), torch.full((2, 2), 127, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="cannot be read without its scale"):
        quant.dequantize(data, None, E4M3_B32)
    with pytest.raises(CheckpointError, match=r"needs a scale of shape \(2, 2\), this one has \(64, 2\)"):
        quant.dequantize(data, scale.repeat(32, 1), E4M3_B32)
    with pytest.raises(CheckpointError, match=r"torch.bfloat16"):
        quant.dequantize(data.bfloat16(), scale, E4M3_B32)
    with pytest.raises(CheckpointError, match="scale bytes are 255"):
        quant.dequantize(data, torch.full((2, 2), 255, dtype=torch.uint8), E4M3_B32)
    with pytest.raises(CheckpointError, match=r"float32 scales, this one is torch\.uint8"):
        quant.dequantize(data, scale[:1, :1], E4M3_B128)
    with pytest.raises(CheckpointError, match="e4m3_b128 scale is NaN or infinite"):
        quant.dequantize(data, torch.full((1, 1), math.nan), E4M3_B128)
    with pytest.raises(CheckpointError, match="e2m1_r16 scale is NaN"):
        quant.dequantize(data, torch.full((64, 8), 0x7F, dtype=torch.uint8), E2M1_R16)
    with pytest.raises(CheckpointError, match="f32 has no scales"):
        quant.dequantize(data.float(), scale, F32)
    with pytest.raises(ConfigError, match=r"out has shape \(64, 32\)"):
        quant.dequantize(data, scale, E4M3_B32, out=torch.zeros(64, 32))


POW2 = [fmt for fmt in SCALED if fmt.scale_dtype == torch.float8_e8m0fnu]


@pytest.mark.parametrize("fmt", POW2, ids=[fmt.name for fmt in POW2])
@pytest.mark.parametrize(("low", "high"), [(0, 3), (100, 140), (244, 247)])
def test_stored_numbers_come_back(fmt: Format, low: int, high: int, rng: torch.Generator) -> None:
    """Catches a writer that loses bits of what it read: any codes, ordinary and extreme scales, blocks of zeros."""
    data, scale = random_stored((70, 70), fmt, rng, low, high)
    data[:, :16] = 0  # blocks of zeros in the row formats
    data[:32] = 0
    numbers = quant.dequantize(data, scale, fmt)
    written = quant.quantize_weight(numbers, fmt)
    again = quant.dequantize(*written, fmt)
    assert torch.equal(bits(again), bits(numbers))
    rewritten = quant.quantize_weight(again, fmt)
    for first, second in zip(written, rewritten, strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@every_format
def test_writing_is_idempotent_and_near(fmt: Format, rng: torch.Generator) -> None:
    """Catches a scale that drifts when a checkpoint is read and written again, and a writer that clips or is coarse."""
    w = torch.randn(2, 34, 6402, generator=rng)
    if fmt is E2M1_R16:
        w += w.sign()  # its scales have three bits less below 2^-6, where writing is not idempotent
    data, scale = quant.quantize_weight(w, fmt)
    assert scale is not None and data.dtype == fmt.storage and scale.dtype == fmt.scale_dtype
    assert data.shape == fmt.storage_shape(w.shape) and scale.shape == fmt.scale_shape(w.shape)
    numbers = quant.dequantize(data, scale, fmt)
    again = quant.quantize_weight(numbers, fmt)
    assert torch.equal(quant.dequantize(*again, fmt), numbers)
    # a power-of-two scale may halve once, where the largest number of a block was rounded down to 224 or to 3
    for old, new in zip(again, quant.quantize_weight(quant.dequantize(*again, fmt), fmt), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
    steps = {"e4m3": 2.0**-4, "e2m1": 2.0**-2}[fmt.kind]
    floor = scale.float().max() * {"e4m3": 2.0**-10, "e2m1": 0.25}[fmt.kind]
    assert ((numbers - w).abs() <= w.abs() * steps + floor).all()


def test_weight_scale_is_the_next_power_of_two() -> None:
    """Catches a block scale taken from part of its block, or one power too high, which costs a bit of every weight."""
    w = torch.full((33, 33), 1e-6)
    w[31, 31], w[32, 0], w[0, 32], w[32, 32] = 448.0, 448.5, -7.0, 0.0
    data, scale = quant.quantize_weight(w, E4M3_B32)
    assert scale is not None
    assert quant.decode_e8m0(scale).tolist() == [[1.0, 2.0**-6], [2.0, 1.0]]
    assert data.float()[31, 31] == 448.0 and data.float()[0, 32] == -448.0


def test_non_finite_weights_are_not_written() -> None:
    """Catches NaN or infinity that is saved as a number, in the last, partial block."""
    for bad in (math.nan, math.inf):
        w = torch.zeros(33, 34)
        w[32, 33] = bad
        for fmt in SCALED:
            with pytest.raises(CheckpointError, match="NaN or infinity cannot be written"):
                quant.quantize_weight(w, fmt)


def test_float_formats_pass_through(rng: torch.Generator) -> None:
    """Catches a scale invented for a format that has none."""
    w = torch.randn(3, 5, generator=rng)
    data, scale = quant.quantize_weight(w, F32)
    assert scale is None and torch.equal(data, w)
    assert torch.equal(quant.dequantize(data, None, F32, torch.bfloat16), w.bfloat16())


def test_block_formats_of_v32_share_elements(rng: torch.Generator) -> None:
    """Catches the two 128-blocks drifting apart: with power-of-two scales both give the same numbers."""
    data, scale = random_stored((150, 140), E4M3_B128_E8M0, rng, 120, 134)
    same = quant.dequantize(data, quant.decode_e8m0(scale), E4M3_B128)
    assert torch.equal(quant.dequantize(data, scale, E4M3_B128_E8M0), same)


# -- Hadamard ----------------------------------------------------------------------------------------------------------


def dense_hadamard(width: int) -> Tensor:
    """Sylvester's matrix by its definition: entry (i, j) is (-1)^(number of ones in i & j)."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    return torch.tensor(signs, dtype=torch.float64) / math.sqrt(width)


@pytest.mark.parametrize("width", [1, 2, 8, 128])
def test_hadamard_is_the_dense_matrix(width: int, rng: torch.Generator) -> None:
    """Catches a wrong order of the outputs, a wrong norm, writing over the input, and bf16 rounded more than once."""
    x = torch.randn(3, 5, width, generator=rng, dtype=torch.float64)
    expected = x @ dense_hadamard(width)
    before = x.clone()
    assert (quant.hadamard(x) - expected).abs().max() < 1e-14 * width
    assert torch.equal(x, before)
    assert (quant.hadamard(x.transpose(0, 1)).transpose(0, 1) - expected).abs().max() < 1e-14 * width
    assert (quant.hadamard(x.float()).double() - expected).abs().max() < 1e-6
    half = x.bfloat16()
    assert torch.equal(quant.hadamard(half), quant.hadamard(half.float()).bfloat16())


def test_hadamard_rows_do_not_depend_on_the_batch(rng: torch.Generator) -> None:
    """Catches a matrix product, whose order of sums changes with the number of rows and flips later roundings."""
    x = torch.randn(70, 128, generator=rng)
    whole = quant.hadamard(x)
    for rows in (1, 2, 3, 64):
        assert torch.equal(quant.hadamard(x[:rows]), whole[:rows])


def test_hadamard_gradients(rng: torch.Generator) -> None:
    """Catches a backward that is not the transpose, first and second order."""
    x = torch.randn(2, 8, generator=rng, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(quant.hadamard, x)
    assert torch.autograd.gradgradcheck(lambda v: quant.hadamard(v) ** 2, x)


@pytest.mark.parametrize("width", [0, 3, 48])
def test_hadamard_width(width: int) -> None:
    """Catches a transform that silently drops the columns above a power of two."""
    with pytest.raises(ConfigError, match="needs a power of two"):
        quant.hadamard(torch.zeros(2, width))
