"""Stored bytes of FP8 and FP4 as numbers: scale bytes, e4m3 codes, packed e2m1 codes. Scales are not applied here.

The meaning of every byte is written in `finback.base.formats`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from finback.base.formats import E2M1_VALUES, E8M0_NAN
from finback.base.runtime import CheckpointError, ConfigError

E4M3_DTYPES = (torch.float8_e4m3fn, torch.uint8, torch.int8)
E2M1_DTYPES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
E8M0_DTYPES = (torch.float8_e8m0fnu, torch.uint8)


def as_bytes(data: Tensor, allowed: tuple[torch.dtype, ...]) -> Tensor:
    """`data` as uint8, without a copy; CheckpointError unless its dtype is one of `allowed`."""
    if data.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise CheckpointError(
            f"these codes are stored as bytes ({names}), but the tensor is {data.dtype}. Either its bytes were "
            "converted to numbers (load it without a dtype conversion) or it has another format."
        )
    return data.view(torch.uint8)


def decode_e8m0(scale: Tensor) -> Tensor:
    """Scale bytes (uint8 or float8_e8m0fnu) as float32: 2^(byte - 127), exact, 0 giving the subnormal 2^-127.

    Raises CheckpointError for byte 255 (NaN) and for any other dtype.
    """
    codes = as_bytes(scale, E8M0_DTYPES)
    if codes.numel() and int(codes.max()) == E8M0_NAN:
        count = int((codes == E8M0_NAN).sum())
        raise CheckpointError(
            f"{count} of {codes.numel()} scale bytes are 255, which means NaN; bytes 0..254 mean 2^(byte - 127). The "
            "tensor is damaged or is not a scale: download or convert it again."
        )
    bits = codes.to(torch.int32).bitwise_left_shift_(23)
    return bits.clamp_min_(0x00400000).view(torch.float32)  # the bits of 2^-127; byte 1 is 0x00800000 already


def encode_e8m0(scale: Tensor) -> Tensor:
    """float32 powers of two, 2^-127 .. 2^127, as uint8 exponent bytes. CheckpointError for all else, NaN too."""
    bits = scale.to(torch.float32).view(torch.int32)
    normal = (bits > 0) & (bits < 0x7F800000) & (bits & 0x007FFFFF == 0)
    valid = normal | (bits == 0x00400000)
    if not bool(valid.all()):
        raise CheckpointError(
            f"{float(scale[~valid][0])!r} cannot be a power-of-two scale byte; allowed are 2^-127 .. 2^127. NaN here "
            "means that the scaled block held NaN or infinity: find where they arose."
        )
    return (bits >> 23).to(torch.uint8)


def decode_e4m3(data: Tensor) -> Tensor:
    """e4m3 codes (float8_e4m3fn, uint8 or int8, any shape) as float32, NaN included.

    On a CPU the code is shifted into float16, which differs by the exponent's bias only (15 instead of 7, hence 2^8):
    ten times faster than the cast. 0x7F and 0xFF would become 480 there, so data with NaN takes the cast.
    """
    codes = as_bytes(data, E4M3_DTYPES)
    if codes.device.type != "cpu" or (codes.numel() and int((codes & 0x7F).max()) == 0x7F):
        return codes.view(torch.float8_e4m3fn).to(torch.float32)
    bits = codes.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(0xBF80 - 0x10000)
    return bits.view(torch.float16).to(torch.float32).mul_(256.0)


@functools.cache
def _codes_of_halves(device: torch.device) -> Tensor:
    """uint8 [13]: e2m1 code of n / 2, for each n / 2 that is an e2m1 number."""
    table = torch.zeros(13, dtype=torch.uint8)
    table[[int(2 * value) for value in E2M1_VALUES]] = torch.arange(8, dtype=torch.uint8)
    return table.to(device)


def encode_e2m1(values: Tensor) -> Tensor:
    """Codes 0..15 (uint8) of float32 values that are e2m1 numbers already; -0 is 8."""
    halves = values.abs().mul_(2).to(torch.int32).clamp_(0, 12)  # 0, 1, 2, 3, 4, 6, 8 or 12; NaN gives some code
    codes = _codes_of_halves(values.device).index_select(0, halves.flatten()).view_as(values)
    return codes.bitwise_or_(values.signbit().to(torch.uint8).mul_(8))


def pack_e2m1(codes: Tensor) -> Tensor:
    """Codes 0..15 (uint8 [..., K], K even) -> bytes (uint8 [..., K / 2]), the even element in the low nibble."""
    if codes.shape[-1] % 2:
        raise ConfigError(
            f"two FP4 codes share a byte: the last dimension must be even, not {codes.shape[-1]}; pad it."
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Bytes (uint8, int8 or float4_e2m1fn_x2 [..., n]) -> codes 0..15 (uint8 [..., 2 n]), low nibble first."""
    codes = as_bytes(packed, E2M1_DTYPES)
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


@functools.cache
def _byte_pairs(device: torch.device) -> Tensor:
    """int64 [256]: the two float32 values of every byte as one item, so that one look-up decodes two elements."""
    half = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)
    values = torch.cat((half, -half))
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), -1).view(torch.int64).flatten()


def decode_e2m1(packed: Tensor) -> Tensor:
    """Bytes (uint8, int8 or float4_e2m1fn_x2 [..., n]) -> float32 values [..., 2 n], low nibble first."""
    codes = as_bytes(packed, E2M1_DTYPES)
    pairs = _byte_pairs(codes.device).index_select(0, codes.reshape(-1).to(torch.int32))
    return pairs.view(torch.float32).view(*codes.shape[:-1], 2 * codes.shape[-1])
