"""Decoding, resize plans, patches and spans of images."""

from __future__ import annotations

import base64
import io
import json
import math
import struct
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from finback.base.runtime import ConfigError, RequestError
from finback.io.images import (
    ImageInput,
    PreparedImage,
    decode_base64,
    decode_image,
    expand_placeholders,
    image_patches,
    image_span,
    prepare_image,
    resize_plan,
    validate_images,
)

PIL_Image = pytest.importorskip("PIL.Image")
PIL_ImageOps = pytest.importorskip("PIL.ImageOps")

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors_v41.json").read_text())
PLANS = VECTORS["image_plan(w,h)->(n_llm_h,n_llm_w,best_h,best_w)"]
IMAGE_ID = 99
TINY = {"patch": 2, "downsample": 3, "max_tokens": 64, "min_pixels": 0}


def encode(image: Any, file_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def noise(width: int, height: int) -> Any:
    pixels = torch.randint(0, 256, (height * width * 3,), dtype=torch.uint8)
    return PIL_Image.frombytes("RGB", (width, height), bytes(pixels.tolist()))


def png_header(width: int, height: int) -> bytes:
    """A PNG of a few dozen bytes that claims any size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("size", PLANS)
def test_plan_equals_the_reference_vectors(size: str) -> None:
    """Catches another rounding, order of steps, or a shrink that starts from the rounded sides."""
    width, height = map(int, size.split("x"))
    plan = resize_plan(width, height)
    assert [plan.grid_h, plan.grid_w, plan.best_h, plan.best_w] == PLANS[size]
    assert plan.tokens == plan.grid_h * (plan.grid_w + 1) + 2


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        # Enlarged to 8 x 34407 pixels this is a column of 1642 tokens: the longest column that fits is 511 rows.
        ((1, 4000), (511, 1, 21462, 42)),
        # As a row it costs 822 tokens and fits without shrinking.
        ((4000, 1), (1, 820, 14, 34412)),
        # So thin that even enlarging leaves one pixel; the longest row is 1021 columns.
        ((300000, 1), (1, 1021, 42, 42882)),
    ],
    ids=str,
)
def test_plan_of_thin_images(size: tuple[int, int], wanted: tuple[int, int, int, int]) -> None:
    """Catches thin images planned with a side of zero or more tokens than allowed."""
    plan = resize_plan(*size)
    assert (plan.grid_h, plan.grid_w, plan.best_h, plan.best_w) == wanted
    assert plan.tokens <= 1024


@given(
    width=st.integers(1, 300_000),
    height=st.integers(1, 300_000),
    patch=st.integers(1, 16),
    downsample=st.integers(1, 4),
    max_tokens=st.integers(4, 1024),
    min_pixels=st.sampled_from([0, 144, 544 * 544]),
    max_wh_ratio=st.sampled_from([None, 1, 5]),
)
def test_every_plan_is_whole_patches_within_the_budget(
    width: int, height: int, patch: int, downsample: int, max_tokens: int, min_pixels: int, max_wh_ratio: int | None
) -> None:
    """Catches a side of zero (an image resized away), cut patches, and a span above the budget."""
    plan = resize_plan(
        width,
        height,
        patch=patch,
        downsample=downsample,
        max_tokens=max_tokens,
        min_pixels=min_pixels,
        max_wh_ratio=max_wh_ratio,
    )
    assert plan.best_h >= patch and plan.best_w >= patch
    assert plan.best_h % patch == plan.best_w % patch == 0
    assert len(image_span(plan.best_h // patch, plan.best_w // patch, downsample)) == plan.tokens <= max_tokens


def test_plan_with_one_patch_per_token() -> None:
    """Catches the thin side rounded down to no patch at all where a token is a single patch."""
    plan = resize_plan(2, 3, patch=1, downsample=1, max_tokens=5, min_pixels=0)
    assert (plan.best_h, plan.best_w, plan.tokens) == (1, 1, 4)


def test_plan_with_a_width_limit() -> None:
    """Catches the limit applied to heights, or a too wide image padded where it is to be stretched."""
    wide, tall = resize_plan(5000, 100, max_wh_ratio=10), resize_plan(100, 5000, max_wh_ratio=10)
    limited = resize_plan(1000, 100)
    assert (wide.best_h, wide.best_w) == (limited.best_h, limited.best_w)
    assert wide.stretch and not tall.stretch
    assert tall == resize_plan(100, 5000)


def test_plan_refuses_what_cannot_be() -> None:
    """Catches division by zero for an empty image and a budget that is smaller than the smallest span."""
    with pytest.raises(RequestError, match="0 x 5 pixels"):
        resize_plan(0, 5)
    with pytest.raises(ConfigError, match="max_tokens=3"):
        resize_plan(5, 5, max_tokens=3)


# ---------------------------------------------------------------- patches


def test_patches_hold_the_pixels_in_reading_order() -> None:
    """Catches transposed axes inside or between patches, BGR, and another normalisation."""
    image = noise(8, 6)
    plan = resize_plan(8, 6, **TINY)
    patches = image_patches(image, plan, 2)
    assert patches.dtype == torch.float32
    assert patches.shape == (12, 3, 2, 2)
    for y in range(6):
        for x in range(8):
            for channel, value in enumerate(image.getpixel((x, y))):
                got = float(patches[y // 2 * 4 + x // 2, channel, y % 2, x % 2])
                assert got == pytest.approx(value / 127.5 - 1, abs=1e-6)


def whole(patches: Tensor, width: int) -> Tensor:
    """[n, 3, p, p] back to u8 pixels [H, W, 3]."""
    p = patches.shape[-1]
    rows = patches.unflatten(0, (-1, width // p)).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    return ((rows + 1) * 127.5).round().to(torch.uint8)


@pytest.mark.parametrize("size", [(11, 7), (7, 11), (30, 4), (4, 30), (16, 16), (1, 9), (9, 1)], ids=str)
def test_padding_equals_pillows(size: tuple[int, int]) -> None:
    """Catches another filter, an aspect ratio that is not kept, padding at one side only, and black instead of grey."""
    image = noise(*size)
    plan = resize_plan(*size, patch=4, downsample=3, max_tokens=64, min_pixels=400)
    wanted = PIL_ImageOps.pad(
        image, (plan.best_w, plan.best_h), method=PIL_Image.Resampling.BICUBIC, color=(127, 127, 127)
    )
    got = whole(image_patches(image, plan, 4), plan.best_w)
    assert bytes(got.flatten().tolist()) == wanted.tobytes()


def test_too_wide_images_are_stretched() -> None:
    """Catches grey bars around an image that is wider than max_wh_ratio."""
    image = PIL_Image.new("RGB", (80, 4), (250, 10, 10))
    prepared = prepare_image(image, **TINY, max_wh_ratio=3)
    assert torch.equal(prepared.patches.amin((0, 2, 3)), prepared.patches.amax((0, 2, 3)))
    assert prepared.grid_w / prepared.grid_h == pytest.approx(3)


@pytest.mark.parametrize("size", [(1, 4000), (4000, 1), (1, 1), (1, 300_000)], ids=str)
def test_thin_images_keep_their_pixels(size: tuple[int, int]) -> None:
    """Catches a thin side rounded to zero, which leaves an image of nothing but padding."""
    budget = {"patch": 2, "downsample": 3, "max_tokens": 64, "min_pixels": 144}
    prepared = prepare_image(PIL_Image.new("RGB", size, (255, 0, 0)), **budget)
    assert prepared.patches.shape == (prepared.grid_h * prepared.grid_w, 3, 2, 2)
    assert prepared.patches[:, 0].max() == 1.0
    assert prepared.patches[:, 1].min() == -1.0


# ---------------------------------------------------------------- decoding


def near(image: Any, colour: tuple[int, int, int], tolerance: int = 0) -> bool:
    return image.mode == "RGB" and all(
        abs(got - wanted) <= tolerance for got, wanted in zip(image.getpixel((1, 1)), colour, strict=True)
    )


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats(file_format: str) -> None:
    """Catches a format that is announced but refused, and the second frame of an animation instead of the first."""
    first, second = PIL_Image.new("RGB", (6, 4), (250, 3, 2)), PIL_Image.new("RGB", (6, 4), (0, 0, 255))
    several = {"save_all": True, "append_images": [second]} if file_format in ("GIF", "WEBP", "TIFF") else {}
    assert near(decode_image(encode(first, file_format, **several)), (250, 3, 2), tolerance=3)


def test_alpha_is_dropped() -> None:
    """Catches compositing on black or white: the reference shows the colours stored under transparent pixels."""
    assert near(decode_image(encode(PIL_Image.new("RGBA", (4, 4), (200, 100, 50, 0)), "PNG")), (200, 100, 50))


def test_palette_with_transparency() -> None:
    """Catches palette indices taken for grey, and Pillow's warning about dropped transparency in the user's log."""
    image = PIL_Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert near(decode_image(encode(image, "PNG", transparency=b"\xff\x80")), (200, 100, 50))


def test_sixteen_bits_are_scaled() -> None:
    """Catches clipping at 255, which turns every 16-bit picture white."""
    little = PIL_Image.frombytes("I;16", (2, 2), struct.pack("<4H", 0, 0xFFFF, 0x8001, 0x4080))
    for file_format in ("PNG", "TIFF"):
        got = decode_image(encode(little, file_format))
        assert got.tobytes()[::3] == bytes([0, 255, 0x80, 0x40])
    big = PIL_Image.frombytes("I;16B", (2, 2), struct.pack(">4H", 0, 0xFFFF, 0x8001, 0x4080))
    assert decode_image(encode(big, "TIFF")).tobytes()[::3] == bytes([0, 255, 0x80, 0x40])


@pytest.mark.parametrize("mode", ["I", "F"])
def test_samples_without_a_range_are_refused(mode: str) -> None:
    """Catches 32-bit samples clipped to 0..255, which makes a scientific picture black or white."""
    with pytest.raises(RequestError, match=f"mode {mode}"):
        decode_image(encode(PIL_Image.new(mode, (4, 4)), "TIFF"))


def test_cmyk() -> None:
    """Catches inverted CMYK and four channels taken for three."""
    red = PIL_Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert near(decode_image(encode(red, "JPEG")), (255, 0, 0), tolerance=4)
    assert near(decode_image(encode(red, "TIFF")), (255, 0, 0))


def test_exif_orientation_is_applied() -> None:
    """Catches photographs that reach the model lying on their side: orientation 6 is a quarter turn clockwise."""
    image = PIL_Image.new("RGB", (32, 16), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 16, 16))
    exif = PIL_Image.Exif()
    exif[0x0112] = 6
    upright = decode_image(encode(image, "JPEG", exif=exif, quality=95))
    assert upright.size == (16, 32)
    assert near(upright, (255, 0, 0), tolerance=8)
    assert upright.getpixel((1, 30))[2] > 240


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("kept", [0.0, 0.02, 0.5, 0.9])
def test_truncated_files(file_format: str, kept: float) -> None:
    """Catches half a picture (grey below) passed to the model, and decoder exceptions that are no RequestError."""
    data = encode(noise(64, 64), file_format)
    with pytest.raises(RequestError, match=r"cannot be decoded .* send one complete file"):
        decode_image(data[: int(len(data) * kept)])


@pytest.mark.parametrize("data", [b"", b"hello", b"P6 1 1 255 \x01\x02\x03"], ids=["empty", "text", "ppm"])
def test_other_files(data: bytes) -> None:
    """Catches a list of formats that is not enforced: Pillow reads PPM, and hands PostScript to an external program."""
    with pytest.raises(RequestError, match="cannot be decoded"):
        decode_image(data)


@pytest.mark.parametrize("size", [(9000, 8000), (12_000, 10_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)], ids=str)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_decompression_bomb(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a size that is checked only after the pixels were allocated and decoded."""

    def load(self: Any) -> None:
        raise AssertionError("pixels were decoded before the size was checked")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(RequestError, match="pixels") as caught:
        decode_image(png_header(*size))
    assert not isinstance(caught.value.__cause__, AssertionError)


def test_pixel_limit_can_be_lowered() -> None:
    """Catches a limit that is compared with one side, or not used."""
    data = encode(noise(10, 10), "PNG")
    assert decode_image(data, max_pixels=100).size == (10, 10)
    with pytest.raises(RequestError, match="10 x 10 = 100 pixels; at most 99"):
        decode_image(data, max_pixels=99)


def test_missing_pillow_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bare ImportError in a served request."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RequestError, match=r"finback\[images\]"):
        decode_image(b"")


def test_base64() -> None:
    """Catches data URLs decoded with their header, refused line breaks, and garbage that is silently skipped."""
    data = bytes(range(256))
    plain = base64.b64encode(data).decode()
    assert decode_base64(plain) == data
    assert decode_base64(base64.encodebytes(data).decode()) == data
    assert decode_base64("data:image/png;base64," + plain) == data
    with pytest.raises(RequestError, match="only base64"):
        decode_base64("data:image/svg+xml,<svg/>")
    for broken in (plain[:-1], "*" + plain, "https://example.com/cat.png"):
        with pytest.raises(RequestError, match="cannot be read"):
            decode_base64(broken)


# ---------------------------------------------------------------- spans


def test_span() -> None:
    """Catches a grid counted in whole tokens only: 7 x 8 patches in threes are 3 x 3 tokens, the last partly empty."""
    assert image_span(7, 8, 3) == [0, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 2, 3]
    assert image_span(1, 1, 3) == [0, 1, 2, 3]


def prepared(grid_h: int, grid_w: int) -> PreparedImage:
    return PreparedImage(torch.zeros(grid_h * grid_w, 3, 2, 2), grid_h, grid_w, tuple(image_span(grid_h, grid_w, 3)))


def check(images: list[Any], token_ids: list[int]) -> tuple[list[int], list[ImageInput]]:
    return validate_images(images, len(token_ids), patch=2, downsample=3, token_ids=token_ids, image_token_id=IMAGE_ID)


def test_placeholders_become_spans() -> None:
    """Catches starts counted in the unexpanded prompt, images in another order, and spans that touch taken for
    overlapping; the first image is at the very start, the last one at the very end."""
    images = [prepared(4, 2), prepared(3, 3), prepared(1, 6)]
    token_ids, placed = expand_placeholders([IMAGE_ID, IMAGE_ID, 5, 6, IMAGE_ID], images, IMAGE_ID)
    types, checked = check(placed, token_ids)
    assert [image.start for image in placed] == [0, 6, 12]
    assert [(image.grid_h, image.grid_w) for image in checked] == [(4, 2), (3, 3), (1, 6)]
    assert types == [0, 1, 2, 1, 2, 3, 0, 1, 2, 3, -1, -1, 0, 1, 1, 2, 3]
    assert token_ids == [5 if i == 10 else 6 if i == 11 else IMAGE_ID for i in range(17)]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_placeholders_must_match_the_images(count: int) -> None:
    """Catches an image that is dropped, or a placeholder that is left to mean nothing."""
    with pytest.raises(RequestError, match=f"{count} image placeholders .* 2 images"):
        expand_placeholders([7, *[IMAGE_ID] * count], [prepared(3, 3)] * 2, IMAGE_ID)


def test_images_are_ordered_and_integers_are_plain() -> None:
    """Catches an order of images that depends on the caller, and 0-dimensional tensors as positions."""
    token_ids = [1, *[IMAGE_ID] * 4, 2, *[IMAGE_ID] * 4]
    late = (torch.tensor(6), torch.zeros(9, 3, 2, 2), torch.tensor(3), torch.tensor(3))
    early = (1, torch.ones(1, 3, 2, 2), 1, 1)
    types, images = check([late, early], token_ids)
    assert types == [-1, 0, 1, 2, 3, -1, 0, 1, 2, 3]
    assert [image.start for image in images] == [1, 6]
    assert type(images[1].start) is int


GOOD = torch.zeros(9, 3, 2, 2)
PROMPT = [1, *[IMAGE_ID] * 4, 2, *[IMAGE_ID] * 4]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([(1, GOOD, 3, 4)], r"shape \(9, 3, 2, 2\); a grid of 3 x 4 .* \(12, 3, 2, 2\)"),
        ([(1, torch.zeros(9, 3, 4, 4), 3, 3)], r"shape \(9, 3, 4, 4\)"),
        ([(1, GOOD, 0, 3)], "0 x 3; both sides"),
        ([(1, GOOD.to(torch.uint8), 3, 3)], "torch.uint8; pass a floating tensor"),
        ([(1, GOOD.tolist(), 3, 3)], "list; pass a floating tensor"),
        ([(1, GOOD.clone().index_fill_(0, torch.tensor(2), math.nan), 3, 3)], "12 values .* NaN or infinite"),
        ([(7, GOOD, 3, 3)], r"tokens 7\.\.10, but the prompt has the tokens 0\.\.9"),
        ([(-1, GOOD, 3, 3)], r"tokens -1\.\.2"),
        ([(1, GOOD, 3, 3), (1, GOOD, 3, 3)], "image 1 .* token 1 already belongs to another image"),
        ([(2, GOOD, 3, 3)], "token 5 is 2; every id of a span must be the image token 99"),
        ([(1, GOOD, 3)], r"must be \(start, patches, grid_h, grid_w\)"),
        ([(1.5, GOOD, 3, 3)], r"must be \(start, patches, grid_h, grid_w\)"),
    ],
)
def test_images_that_do_not_fit_the_prompt(images: list[Any], message: str) -> None:
    """Catches a grid, a place or values that would give an answer about another picture than the one sent."""
    with pytest.raises(RequestError, match=message):
        check(images, PROMPT)
