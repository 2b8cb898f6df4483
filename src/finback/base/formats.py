"""Number formats as data: how the elements of a tensor are stored, and how its scales lie beside it.

A quantised tensor is `data` plus `scale`: element = decode(data) * decode(scale of its block), the product in float32.
One scale covers a block of (rows, cols) elements of the last two dimensions; (1, n) means runs of n along the last
dimension. Blocks at the lower and right edge may be partial.

Element codes
    e4m3     1 sign, 4 exponent (bias 7), 3 mantissa bits. Largest 448, smallest 2^-9. Bytes 0x7F and 0xFF are NaN;
             there is no infinity.
    e2m1     1 sign (bit 3), 2 exponent, 1 mantissa bit. Codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; 8..15 the same,
             negative (8 is -0). No NaN. Two codes a byte: byte j holds element 2j in its low nibble and element 2j+1 in
             its high nibble.

Scale codes
    e8m0     byte b is 2^(b - 127): no sign, no mantissa, no zero.
                 0          2^-127, in float32 a subnormal number and not zero
                 1          2^-126, the smallest normal float32
                 127        1
                 254        2^127
                 255        NaN. A tensor that holds it is damaged: it is refused with an error and never decoded.
    e4m3     the element code above, without any further scale per tensor. 0x7F and 0xFF (NaN) are refused.
    float32  any finite number. NaN and infinity are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from finback.base.runtime import ConfigError, nearest

E8M0_BIAS: Final = 127
E8M0_NAN: Final = 255
E4M3_MAX: Final = 448.0
E2M1_MAX: Final = 6.0
E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Format:
    """How a tensor of logical shape [..., N, K] is stored.

    name         key in `FORMATS`
    kind         element code: "float" (the storage dtype is the number), "e4m3" or "e2m1"
    storage      dtype of the data tensor; packed e2m1 is int8, as released
    bits         bits per element, scales not counted
    pack         elements per stored item along the last dimension
    block        (rows, cols) of the elements that share a scale; None: no scales
    scale_dtype  dtype of the scale tensor, which also names its code: float8_e8m0fnu, float8_e4m3fn or float32;
                 None: no scales
    """

    name: str
    kind: Literal["float", "e4m3", "e2m1"]
    storage: torch.dtype
    bits: int
    pack: int = 1
    block: tuple[int, int] | None = None
    scale_dtype: torch.dtype | None = None

    def storage_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the data tensor for elements of `shape`. ConfigError when the last dimension cannot be packed."""
        if self.pack == 1:
            return tuple(shape)
        if not shape or shape[-1] % self.pack:
            raise ConfigError(
                f"{self.name} stores {self.pack} elements per byte, so the last dimension must be a multiple of "
                f"{self.pack}; the shape is {tuple(shape)}. Pad it or store this tensor in an unpacked format."
            )
        return (*shape[:-1], shape[-1] // self.pack)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Shape of the scale tensor for elements of `shape`, partial edge blocks counted; None: the format has none."""
        if self.block is None:
            return None
        rows, cols = self.block
        needed = 2 if rows > 1 else 1
        if len(shape) < needed:
            raise ConfigError(
                f"{self.name} has one scale per {rows}x{cols} block and needs at least {needed} dimension(s); the "
                f"shape is {tuple(shape)}. Use a float format for this tensor."
            )
        if rows == 1:
            return (*shape[:-1], -(-shape[-1] // cols))
        return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // cols))

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of data and scale for elements of `shape`."""
        data = math.prod(self.storage_shape(shape)) * self.storage.itemsize
        scales = self.scale_shape(shape)
        if scales is None or self.scale_dtype is None:
            return data
        return data + math.prod(scales) * self.scale_dtype.itemsize


_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu

F64 = Format("f64", "float", torch.float64, 64)
F32 = Format("f32", "float", torch.float32, 32)
BF16 = Format("bf16", "float", torch.bfloat16, 16)
F16 = Format("f16", "float", torch.float16, 16)
# V4.1 linears; V3.2 linears with float32 scales, and the same blocks with power-of-two scale bytes.
E4M3_B32 = Format("e4m3_b32", "e4m3", _E4M3, 8, block=(32, 32), scale_dtype=_E8M0)
E4M3_B128 = Format("e4m3_b128", "e4m3", _E4M3, 8, block=(128, 128), scale_dtype=torch.float32)
E4M3_B128_E8M0 = Format("e4m3_b128_e8m0", "e4m3", _E4M3, 8, block=(128, 128), scale_dtype=_E8M0)
# Engram tables, activations and window KV; experts and index keys; compressed KV.
E4M3_R32 = Format("e4m3_r32", "e4m3", _E4M3, 8, block=(1, 32), scale_dtype=_E8M0)
E2M1_R32 = Format("e2m1_r32", "e2m1", torch.int8, 4, pack=2, block=(1, 32), scale_dtype=_E8M0)
E2M1_R16 = Format("e2m1_r16", "e2m1", torch.int8, 4, pack=2, block=(1, 16), scale_dtype=_E4M3)

FORMATS: Final[dict[str, Format]] = {
    fmt.name: fmt for fmt in (F64, F32, BF16, F16, E4M3_B32, E4M3_B128, E4M3_B128_E8M0, E4M3_R32, E2M1_R32, E2M1_R16)
}


def format_named(name: str) -> Format:
    """The Format called `name`; ConfigError with the nearest known name otherwise."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(
            f"Unknown number format {name!r}{nearest(name, FORMATS)}. Known formats: {', '.join(FORMATS)}."
        ) from None
