"""Sizes of stored tensors, checked against the released checkpoint's own byte counts."""

from __future__ import annotations

import pytest
import torch

from finback.base import formats as f
from finback.base.runtime import ConfigError


def test_released_sizes() -> None:
    """Catches a wrong block, pack factor or scale width: bytes of the released checkpoint and of packed caches."""
    gate_up, down = (2304, 5120), (5120, 2304)
    assert 2 * f.E2M1_R32.nbytes(gate_up) + f.E2M1_R32.nbytes(down) == 18_800_640  # one routed expert
    assert f.E4M3_R32.nbytes((384_006_168, 256)) == 384_006_168 * 264  # an Engram table, not allocated
    assert f.E4M3_R32.nbytes((512,)) == 528  # a window KV row
    assert f.E2M1_R16.nbytes((512,)) == 288  # a compressed KV row
    assert f.E2M1_R32.nbytes((128,)) == 68  # an index key
    assert f.E4M3_B32.nbytes((1280, 5120)) == 1280 * 5120 + 40 * 160
    assert f.E4M3_B128.nbytes((1536, 7168)) == 1536 * 7168 + 12 * 56 * 4
    assert f.E4M3_B128_E8M0.nbytes((1536, 7168)) == 1536 * 7168 + 12 * 56
    assert f.BF16.nbytes((3, 5)) == 30 and f.F64.nbytes((3, 5)) == 120


@pytest.mark.parametrize(("size", "blocks"), [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_partial_blocks_have_a_scale(size: int, blocks: int) -> None:
    """Catches floor division at block edges, in either dimension and with leading dimensions."""
    assert f.E4M3_B32.scale_shape((size, 32)) == (blocks, 1)
    assert f.E4M3_B32.scale_shape((7, 64, size)) == (7, 2, blocks)
    assert f.E4M3_R32.scale_shape((7, size)) == (7, blocks)
    assert f.F32.scale_shape((size, size)) is None


def test_packed_shapes() -> None:
    """Catches an odd last dimension that loses its last element in packing."""
    assert f.E2M1_R32.storage_shape((3, 64)) == (3, 32)
    assert f.E4M3_R32.storage_shape((3, 63)) == (3, 63)
    with pytest.raises(ConfigError, match=r"multiple of 2; the shape is \(3, 63\)"):
        f.E2M1_R32.storage_shape((3, 63))


def test_a_vector_has_no_square_blocks() -> None:
    """Catches an IndexError, or a scale of the wrong rank, for a 1-D tensor that a table calls block-scaled."""
    with pytest.raises(ConfigError, match=r"e4m3_b32 has one scale per 32x32 block and needs at least 2"):
        f.E4M3_B32.scale_shape((64,))


def test_lookup_by_name() -> None:
    """Catches a constant that is missing from the table, and an unknown name without a hint."""
    constants = {value.name: value for value in vars(f).values() if isinstance(value, f.Format)}
    assert f.FORMATS == constants
    assert all(f.format_named(name) is fmt for name, fmt in constants.items())
    with pytest.raises(ConfigError, match=r"'e4m3_b23' \(did you mean 'e4m3_b32'\?\)"):
        f.format_named("e4m3_b23")


def test_element_limits_match_torch() -> None:
    """Catches a constant that differs from the dtype that stores it."""
    assert torch.finfo(torch.float8_e4m3fn).max == f.E4M3_MAX
    assert max(f.E2M1_VALUES) == f.E2M1_MAX
    for fmt in f.FORMATS.values():
        assert fmt.bits == 8 * fmt.storage.itemsize // fmt.pack
