"""The released rounding rules for FP8 and FP4, and the way between stored tensors and numbers.

Activations, KV rows and index keys share a scale per `block` values of their last dimension. All arithmetic is float32:

    amax  = max(max|x|, floor)
    scale = 2^ceil(log2(amax * fl32(1 / max)))   power of two, by exponent bits, never by log; or
            amax * fl32(1 / max)                 e4m3 with float32 scales; or
            e4m3(amax / 6)                       e2m1 with e4m3 scales, a true division
    value = nearest(x / scale) * scale           ties to even, subnormals kept, saturating

`round_*` gives values in x's own dtype, `quantize_*` gives codes and scales, `dequantize` and `quantize_weight` convert
whole tensors of a `Format`. NaN in x stays NaN: it is never turned into a plausible number.

Source: act_quant and fp4_act_quant of DeepSeek-V4.1 (floors 1e-4, 6 * 2^-126 and 6 * 2^-9), act_quant of
DeepSeek-V3.2-Exp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec

import torch
from torch import Tensor
from torch.nn import functional as F

from finback.base.formats import E2M1_MAX, E4M3_MAX, Format
from finback.base.runtime import CheckpointError, ConfigError
from finback.kernels.torch.codes import E2M1_DTYPES, E4M3_DTYPES, as_bytes, encode_e2m1
from finback.kernels.torch.codes import decode_e2m1 as decode_e2m1
from finback.kernels.torch.codes import decode_e4m3 as decode_e4m3
from finback.kernels.torch.codes import decode_e8m0 as decode_e8m0
from finback.kernels.torch.codes import encode_e8m0 as encode_e8m0
from finback.kernels.torch.codes import pack_e2m1 as pack_e2m1
from finback.kernels.torch.codes import unpack_e2m1 as unpack_e2m1

P = ParamSpec("P")

AMAX_FLOOR_E4M3: Final = 1e-4
AMAX_FLOOR_E2M1_E8M0: Final = 6.0 * 2.0**-126
AMAX_FLOOR_E2M1_E4M3: Final = 6.0 * 2.0**-9
CHUNK = 1 << 20  # elements that dequantize decodes at a time: 4 MiB of float32


def _fixed(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")


# Ready 0-dim tensors: ATen wraps a Python number anew on every call, which takes longer than a small tensor's sums.
_MAGNITUDE = _fixed(0x7FFFFFFF, torch.int32)
_EXPONENT = _fixed(0x7F800000, torch.int32)
_MANTISSA = _fixed(0x007FFFFF, torch.int32)
_ONE_448TH = _fixed(1 / 448, torch.float32)
_ONE_6TH = _fixed(1 / 6, torch.float32)
_EIGHTH = _fixed(1 / 8, torch.float32)
_HALF = _fixed(1 / 2, torch.float32)
_TWO = _fixed(2, torch.float32)
# Added to the bits of amax, these give the exponent of the block's smallest normal number. 448 is 1.75 * 2^8 and 6 is
# 1.5 * 2^2: the scale goes up to the next power of two when amax has a mantissa above .75 (.5), and exactly then the
# addend carries into the exponent. For e4m3 the smallest normal number is 2^-6 * scale, for e2m1 it is the scale.
_TO_NORMAL_E4M3 = _fixed(0x1FFFFF - ((8 + 6) << 23), torch.int32)
_TO_NORMAL_E2M1 = _fixed(0x3FFFFF - (2 << 23), torch.int32)
_NORMAL_E4M3 = _fixed(2.0**-6, torch.float32).view(torch.int32)
_NORMAL_E2M1 = _fixed(1.0, torch.float32).view(torch.int32)
_FLOOR_E4M3 = _fixed(AMAX_FLOOR_E4M3, torch.float32).view(torch.int32)
_FLOOR_E2M1_E8M0 = _fixed(AMAX_FLOOR_E2M1_E8M0, torch.float32).view(torch.int32)
_FLOOR_E2M1_E4M3 = _fixed(AMAX_FLOOR_E2M1_E4M3, torch.float32).view(torch.int32)


class _StraightThrough(torch.autograd.Function):
    """Forward: a rounding. Backward: the identity, for clamped elements too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(rounding: Callable[Concatenate[Tensor, P], Tensor]) -> Callable[Concatenate[Tensor, P], Tensor]:
    """`rounding(x, ...)` with gradient 1 with respect to x; where no gradient is wanted, `rounding` itself."""

    @functools.wraps(rounding)
    def rounded(x: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return _StraightThrough.apply(x, lambda value: rounding(value, *args, **kwargs))
        return rounding(x, *args, **kwargs)

    return rounded


# -- activations -------------------------------------------------------------------------------------------------------


def power_of_two_scale(amax: Tensor, reciprocal: float | Tensor) -> Tensor:
    """2^ceil(log2(p)) of p = amax * reciprocal, one float32 product; p > 0. By exponent bits, not by log.

    amax: float32, any shape. A p that is a power of two stays; all others go to the next one. Subnormal p gives 2^-126,
    infinity gives infinity.
    """
    bits = (amax * reciprocal).view(torch.int32)
    return bits.add_(_MANTISSA).bitwise_and_(_EXPONENT).view(torch.float32)


def _groups(x: Tensor, block: int) -> Tensor:
    """x as a new float32 tensor [rows * K / block, block], which the caller may overwrite."""
    if x.shape[-1] % block:
        raise ConfigError(
            f"the last dimension must be a multiple of the {block} values that share a scale; it is {x.shape[-1]} "
            f"(shape {tuple(x.shape)}). Choose a dimension that is a multiple of {block}, or rounding='off'."
        )
    values = x.clone() if x.dtype == torch.float32 else x.float()
    return values.reshape(-1, block)


def _magnitude_bits(values: Tensor) -> Tensor:
    """Bits of |values| as a new int32 tensor. Such integers have the order of their floats, NaN highest."""
    return torch.bitwise_and(values.view(torch.int32), _MAGNITUDE)


def _block_amax(magnitude: Tensor, floor: Tensor) -> Tensor:
    """Bits of max(amax, floor), int32 [..., 1], from `_magnitude_bits`."""
    amax = magnitude.amax(-1, keepdim=True)
    return torch.maximum(amax, floor, out=amax)


def _leading_power(magnitude: Tensor, normal: Tensor) -> Tensor:
    """max(2^floor(log2|v|), 2^floor(log2 normal)) as float32, written over `magnitude` (bits, as is normal)."""
    return torch.maximum(magnitude, normal, out=magnitude).bitwise_and_(_EXPONENT).view(torch.float32)


def _snap(values: Tensor, quantum: Tensor) -> Tensor:
    """`values`, overwritten by their nearest multiples of `quantum` (powers of two), ties to even, the sign of 0 kept.

    Exact: with a quantum of 1/8 (e4m3) or 1/2 (e2m1) of a value's leading power the quotient is below 16 (4), and
    `round` is half-to-even. Several times faster than casts to float8.
    """
    return values.div_(quantum).round_().mul_(quantum)


def _snap_e4m3(scaled: Tensor) -> Tensor:
    """Values over their scale, within ±464, overwritten by the nearest e4m3 numbers."""
    return _snap(scaled, _leading_power(_magnitude_bits(scaled), _NORMAL_E4M3).mul_(_EIGHTH))


@straight_through
def round_e4m3(x: Tensor, block: int = 32, pow2: bool = True) -> Tensor:
    """x rounded to e4m3 with one scale per `block` values of the last dimension, and back.

    x: [..., K] of any float dtype, K % block == 0 (ConfigError otherwise). pow2: power-of-two scales, else float32.
    Returns a new tensor of x's shape and dtype. Gradient: identity. Blocks of zeros stay zero.
    """
    values = _groups(x, block)
    magnitude = _magnitude_bits(values)
    amax = _block_amax(magnitude, _FLOOR_E4M3)
    if pow2:  # the grid is scaled instead of x: neither a division nor a product by the scale
        _snap(values, _leading_power(magnitude, amax.add_(_TO_NORMAL_E4M3)).mul_(_EIGHTH))
    else:
        scale = amax.view(torch.float32).mul_(_ONE_448TH)
        _snap_e4m3(values.div_(scale)).mul_(scale)
    # No clamp: |x| / scale exceeds 448 by float32 rounding at most, and up to 464 everything rounds to 448.
    return values.view_as(x).to(x.dtype)


def quantize_e4m3(x: Tensor, block: int = 32, pow2: bool = True) -> tuple[Tensor, Tensor]:
    """Codes and scales of `round_e4m3`: (q float8_e4m3fn [..., K], s float32 [..., K / block]); round = q * s.

    NaN in x is NaN in q; the scale of a block that holds NaN or infinity is NaN.
    """
    values = _groups(x, block)
    amax = _block_amax(_magnitude_bits(values), _FLOOR_E4M3).view(torch.float32)
    scale = power_of_two_scale(amax, _ONE_448TH) if pow2 else amax * _ONE_448TH
    q = values.div_(scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return q.view_as(x), _stored_scale(scale, amax, x, block)


def _stored_scale(scale: Tensor, amax: Tensor, x: Tensor, block: int) -> Tensor:
    """scale [groups, 1] as [..., K / block], NaN where the block held NaN or infinity."""
    return torch.where(amax.isfinite(), scale, torch.nan).view(*x.shape[:-1], x.shape[-1] // block)


def _snap_e2m1(scaled: Tensor) -> Tensor:
    """Values over their scale, overwritten by the nearest e2m1 numbers."""
    scaled.clamp_(-E2M1_MAX, E2M1_MAX)  # an e4m3 scale that was rounded down leaves |x| / scale above 6
    return _snap(scaled, _leading_power(_magnitude_bits(scaled), _NORMAL_E2M1).mul_(_HALF))


def _scale_e2m1_e4m3(amax: Tensor) -> Tensor:
    # The divisor lies on amax's device: CUDA replaces division by a host scalar with a product by its reciprocal.
    return _snap_e4m3((amax / amax.new_full((1,), E2M1_MAX)).clamp_max_(E4M3_MAX))


def _check_e2m1_scale(scale: str) -> None:
    if scale not in ("e8m0", "e4m3"):
        raise ConfigError(f"FP4 scales are 'e8m0' or 'e4m3', not {scale!r}; choose one of them.")


@straight_through
def round_e2m1(x: Tensor, block: int = 32, scale: str = "e8m0") -> Tensor:
    """x rounded to e2m1 with one scale per `block` values of the last dimension, and back.

    x: [..., K] of any float dtype, K % block == 0 (ConfigError otherwise). scale: "e8m0" (power of two, released with
    block 32 for index queries and keys) or "e4m3" (released with block 16 for compressed KV). Returns a new tensor of
    x's shape and dtype. Gradient: identity.
    """
    _check_e2m1_scale(scale)
    values = _groups(x, block)
    magnitude = _magnitude_bits(values)
    if scale == "e8m0":
        amax = _block_amax(magnitude, _FLOOR_E2M1_E8M0)
        power = _leading_power(magnitude, amax.add_(_TO_NORMAL_E2M1))
        # As `_snap` with quantum power / 2, but that is subnormal for blocks of zeros and would divide 0 by 0 where the
        # processor flushes subnormals.
        values.div_(power).mul_(_TWO).round_().mul_(power.mul_(_HALF))
    else:
        factor = _scale_e2m1_e4m3(_block_amax(magnitude, _FLOOR_E2M1_E4M3).view(torch.float32))
        _snap_e2m1(values.div_(factor)).mul_(factor)
    return values.view_as(x).to(x.dtype)


def quantize_e2m1(x: Tensor, block: int = 32, scale: str = "e8m0") -> tuple[Tensor, Tensor]:
    """Codes and scales of `round_e2m1`: (packed uint8 [..., K / 2], s float32 [..., K / block]).

    e2m1 has no NaN, so a block of x that holds NaN or infinity is marked by a NaN scale.
    """
    _check_e2m1_scale(scale)
    values = _groups(x, block)
    magnitude = _magnitude_bits(values)
    if scale == "e8m0":
        amax = _block_amax(magnitude, _FLOOR_E2M1_E8M0).view(torch.float32)
        factor = power_of_two_scale(amax, _ONE_6TH)
    else:
        amax = _block_amax(magnitude, _FLOOR_E2M1_E4M3).view(torch.float32)
        factor = _scale_e2m1_e4m3(amax)
    codes = encode_e2m1(_snap_e2m1(values.div_(factor))).view_as(x)
    return pack_e2m1(codes), _stored_scale(factor, amax, x, block)


# -- whole tensors -----------------------------------------------------------------------------------------------------


def dequantize(
    data: Tensor, scale: Tensor | None, fmt: Format, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None
) -> Tensor:
    """Numbers of a stored tensor: element * scale of its block, the product in float32, rounded once to `dtype`.

    data: `fmt.storage_shape` of [..., N, K], in fmt's dtype or as raw bytes (uint8, int8, float4_e2m1fn_x2). scale:
    `fmt.scale_shape`; None for the float formats only. out: a tensor of the logical shape to fill, whose dtype then
    counts. Works in chunks that need about 10 MiB beside the result. NaN elements stay NaN. CheckpointError for a
    missing or misshapen scale, a wrong dtype, and scales that are NaN (byte 255) or infinite.
    """
    if fmt.block is None:
        if scale is not None:
            raise CheckpointError(f"{fmt.name} has no scales, but one was given: the tensor has another format.")
        return data.to(dtype) if out is None else out.copy_(data)
    codes = as_bytes(data, E4M3_DTYPES if fmt.kind == "e4m3" else E2M1_DTYPES)
    shape = (*data.shape[:-1], data.shape[-1] * fmt.pack)
    if scale is None:
        raise CheckpointError(
            f"{fmt.name} data cannot be read without its scale tensor; give the one stored beside it."
        )
    expected = fmt.scale_shape(shape)
    if tuple(scale.shape) != expected:
        raise CheckpointError(
            f"{fmt.name} data of logical shape {shape} needs a scale of shape {expected}, this one has "
            f"{tuple(scale.shape)}. Either it is another tensor's scale or the tensor has another format."
        )
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=data.device)
    elif tuple(out.shape) != shape:
        raise ConfigError(f"out has shape {tuple(out.shape)}, the data has {shape}; give a tensor of the data's shape.")
    _fill(codes, scale, fmt, out)
    return out


def _fill(data: Tensor, scale: Tensor, fmt: Format, out: Tensor) -> None:
    assert fmt.block is not None
    rows = fmt.block[0]
    if out.dim() == 1:
        _fill(data[None], scale[None], fmt, out[None])
    elif out.dim() == 2:
        step = max(1, CHUNK // max(1, out.shape[1] * rows)) * rows
        for start in range(0, out.shape[0], step):
            stop = min(start + step, out.shape[0])
            factors = _decode_scale(scale[start // rows : -(-stop // rows)], fmt)
            out[start:stop] = _scaled(data[start:stop], factors, fmt)
    elif rows == 1 and out.is_contiguous():
        _fill(data.flatten(0, -2), scale.flatten(0, -2), fmt, out.flatten(0, -2))
    else:
        for data_part, scale_part, out_part in zip(data, scale, out, strict=True):
            _fill(data_part, scale_part, fmt, out_part)


def _decode_scale(scale: Tensor, fmt: Format) -> Tensor:
    """Scales of `fmt` as float32; CheckpointError for NaN, infinity and a dtype of another code."""
    if fmt.scale_dtype == torch.float8_e8m0fnu:
        return decode_e8m0(scale)
    values = decode_e4m3(scale) if fmt.scale_dtype == torch.float8_e4m3fn else scale
    if values.dtype != torch.float32:
        raise CheckpointError(
            f"{fmt.name} has float32 scales, this one is {scale.dtype}: load it without a conversion."
        )
    if not bool(values.isfinite().all()):
        raise CheckpointError(
            f"a {fmt.name} scale is NaN or infinite: the tensor is damaged; download or convert again."
        )
    return values


def _scaled(data: Tensor, factors: Tensor, fmt: Format) -> Tensor:
    """float32 [N, K] of the bytes of 2-D data, times factors [ceil(N / rows), ceil(K / cols)], each over its block."""
    assert fmt.block is not None
    rows, cols = fmt.block
    values = decode_e4m3(data) if fmt.kind == "e4m3" else decode_e2m1(data)
    n, k = values.shape
    if n % rows == 0 and k % cols == 0:
        blocks = values.view(n // rows, rows, k // cols, cols)
        return blocks.mul_(factors[:, None, :, None]).view(n, k)
    columns = factors.repeat_interleave(cols, 1)[:, :k]
    return values.mul_(columns.repeat_interleave(rows, 0)[:n])


def quantize_weight(w: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """(data, scale) of `fmt` for w [..., N, K], nearest-even; the inverse of `dequantize` when writing a checkpoint.

    Scales follow the activations' rule without its floors: 2^ceil(log2(amax / max)), amax / 448 for float32 scales,
    e4m3(amax / 6) for e4m3 scales; a block of zeros gets 1 (2^-9 as e4m3). With power-of-two scales every number that
    the format can hold comes back exactly, whatever scale it had; with float32 scales this holds for tensors that this
    function wrote. Partial edge blocks are allowed; packed formats need an even K. Float formats give (w in that dtype,
    None). Raises CheckpointError for NaN and infinity in w.
    """
    storage_shape, scale_shape = fmt.storage_shape(w.shape), fmt.scale_shape(w.shape)
    if fmt.block is None or scale_shape is None:
        return w.detach().to(fmt.storage), None
    blocks = _weight_blocks(w, fmt.block)
    amax = blocks.abs().amax((-3, -1))
    if not bool(amax.isfinite().all()):
        raise CheckpointError(f"a tensor with NaN or infinity cannot be written as {fmt.name}; find where they arose.")
    factors = _weight_scale(amax, fmt)
    scaled = _without_edges(blocks / factors[..., :, None, :, None], w.shape)
    if fmt.kind == "e4m3":
        data = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(fmt.storage)
    else:
        data = pack_e2m1(encode_e2m1(_snap_e2m1(scaled.contiguous()))).view(fmt.storage)
    return data.reshape(storage_shape), _encode_scale(factors.reshape(scale_shape), fmt)


def round_weight(w: Tensor, fmt: Format) -> Tensor:
    """float32 numbers of w [..., N, K] after writing as `fmt` and reading: `dequantize` of `quantize_weight`, to the
    bit, but without bytes and without waiting for the device. Nothing is refused: NaN stays NaN. No gradient.
    """
    if fmt.block is None:
        return w.detach().to(fmt.storage).to(torch.float32)
    blocks = _weight_blocks(w, fmt.block)
    factors = _weight_scale(blocks.abs().amax((-3, -1)), fmt)[..., :, None, :, None]
    snapped = (_snap_e4m3 if fmt.kind == "e4m3" else _snap_e2m1)(blocks / factors)
    return _without_edges(snapped.mul_(factors), w.shape)


def _weight_blocks(w: Tensor, block: tuple[int, int]) -> Tensor:
    """w [..., N, K] (or [K]) as float32 [..., N', rows, K', cols], filled up with zeros at the lower and right edge."""
    rows, cols = block
    values = w.detach().to(torch.float32)
    values = values.view(1, -1) if w.dim() == 1 else values
    padded = F.pad(values, (0, -values.shape[-1] % cols, 0, -values.shape[-2] % rows))
    return padded.unflatten(-1, (-1, cols)).unflatten(-3, (-1, rows))


def _without_edges(blocks: Tensor, shape: torch.Size) -> Tensor:
    """[..., N', rows, K', cols] of `_weight_blocks` back in `shape`."""
    n, k = (1, *shape)[-2:]
    return blocks.flatten(-2).flatten(-3, -2)[..., :n, :k].reshape(shape)


def _weight_scale(amax: Tensor, fmt: Format) -> Tensor:
    if fmt.scale_dtype == torch.float8_e4m3fn:
        return _scale_e2m1_e4m3(amax.clamp_min(AMAX_FLOOR_E2M1_E4M3))
    if fmt.scale_dtype == torch.float8_e8m0fnu:
        ratio = amax * (_ONE_448TH if fmt.kind == "e4m3" else _ONE_6TH)
        smallest = 2.0**-127
        scale = torch.where(ratio <= smallest, smallest, power_of_two_scale(ratio, 1.0))
    else:  # a quotient, not the activations' product: reading and writing again then gives the same scale
        scale = amax / amax.new_full((1,), E4M3_MAX)
    return torch.where(amax == 0, 1.0, scale)


def _encode_scale(scale: Tensor, fmt: Format) -> Tensor:
    if fmt.scale_dtype == torch.float8_e8m0fnu:
        return encode_e8m0(scale).view(torch.float8_e8m0fnu)
    assert fmt.scale_dtype is not None
    return scale.to(fmt.scale_dtype)


# -- Hadamard ----------------------------------------------------------------------------------------------------------


class _Hadamard(torch.autograd.Function):
    """Symmetric, hence its own transpose: backward is forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _hadamard(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return hadamard(grads[0])


def _hadamard(x: Tensor) -> Tensor:
    """Each stage takes adjacent pairs and writes sums into the lower half, differences into the upper; log2(d) stages.

    Only elementwise sums: a row's result does not depend on its neighbours, which a matrix product does not promise.
    """
    width, half = x.shape[-1], x.shape[-1] // 2
    source = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32) * width**-0.5
    spare = torch.empty_like(source)
    stages = [(b, b[..., 0::2], b[..., 1::2], b[..., :half], b[..., half:]) for b in (source, spare)]
    for _ in range(width.bit_length() - 1):
        (_, even, odd, _, _), (_, _, _, lower, upper) = stages
        torch.add(even, odd, out=lower)
        torch.sub(even, odd, out=upper)
        stages.reverse()
    return stages[0][0].to(x.dtype)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension, Sylvester order: y = x H / sqrt(d), H symmetric.

    x: [..., d], d a power of two (ConfigError otherwise). Computed in float32 (float64 for float64), returned in x's
    dtype. Differentiable any number of times. Source: rotate_activation of DeepSeek-V3.2-Exp.
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ConfigError(f"the Hadamard transform needs a power of two as last dimension, not {width}.")
    if x.requires_grad and torch.is_grad_enabled():
        return _Hadamard.apply(x)
    return _hadamard(x)
