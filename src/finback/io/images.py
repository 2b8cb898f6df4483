"""Images for DeepSeek-V4.1: decode, resize plan, patches, and the span of tokens an image takes in the prompt.

The way of an image: `decode_image` (bytes -> RGB), `prepare_image` (RGB -> `PreparedImage`: patches and span),
`expand_placeholders` (one placeholder id per image -> its span), `validate_images` (every image checked against the
prompt before the model runs).

Two grids must not be confused. The *patch grid* counts patches, the rows of the vision tower. The *token grid* counts
IMAGE tokens, the rows of the aligner: the patch grid divided by `downsample`, rounded up.

Pillow is needed to decode and resize only; it comes with the extra `images`.
"""

from __future__ import annotations

import base64
import binascii
import math
import operator
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from finback.base.runtime import ConfigError, RequestError
from finback.models.deepseek_v41.vision import END, IMAGE, NEWLINE, START, TEXT

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

# 64 Mi pixels: 192 MiB as RGB, far above the 1.8 million that the largest released plan keeps.
MAX_PIXELS = 1 << 26

# Formats people send. The rest of what Pillow opens is left out: some of it runs external programs on untrusted bytes.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_PAD_COLOUR = (127, 127, 127)


@dataclass(frozen=True, slots=True)
class ResizePlan:
    """The size an image is brought to, and what it then costs in the prompt."""

    grid_h: int  # rows of IMAGE tokens
    grid_w: int  # IMAGE tokens per row
    best_h: int  # pixels, a multiple of the patch size
    best_w: int  # pixels, a multiple of the patch size
    tokens: int  # length of the whole span: START, grid_h x (grid_w IMAGE + NEWLINE), END
    stretch: bool = False  # resize without keeping the aspect ratio (wider than max_wh_ratio allows)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """An image ready for a prompt, not yet placed in one."""

    patches: Tensor  # [grid_h * grid_w, 3, p, p] float32
    grid_h: int  # rows of patches
    grid_w: int  # patches per row
    token_types: tuple[int, ...]  # of its span, see `image_span`


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """An image inside a prompt.

    start: position of its START token in the prompt's ids.
    patches: [grid_h * grid_w, 3, p, p] floating, pixels normalised to [-1, 1], in reading order.
    grid_h, grid_w: the patch grid (rows, patches per row), not the token grid.
    """

    start: int
    patches: Tensor
    grid_h: int
    grid_w: int


def _pillow() -> tuple[Any, Any]:
    """Pillow's `Image` and `ImageOps` modules, imported at first use."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise RequestError(
            "this request contains an image, and images need Pillow, which is not installed; "
            "install the extra `images`: pip install 'finback[images]'"
        ) from error
    return Image, ImageOps


# ---------------------------------------------------------------- decoding


def decode_base64(text: str) -> bytes:
    """Bytes of a base64 string or of a data URL ("data:image/png;base64,...."). Line breaks inside are allowed.

    Raises:
        RequestError: a data URL that is not base64, or characters that are not base64.
    """
    payload = text
    if text.startswith("data:"):
        header, comma, payload = text.partition(",")
        if not comma or not header.endswith(";base64"):
            raise RequestError(
                f"the data URL starts with {text[:40]!r}; only base64 is read: data:image/png;base64,<characters>"
            )
    try:
        return base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(
            f"the image's base64 text of {len(payload)} characters cannot be read ({error}); "
            f"send standard base64 with its = padding"
        ) from error


@contextmanager
def _decode_errors(n_bytes: int, max_pixels: int) -> Generator[None]:
    """Turn whatever a decoder raises on bad bytes into a RequestError."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:  # decoders of hostile bytes raise OSError, SyntaxError, ValueError, struct.error, ...
        raise RequestError(
            f"the image data of {n_bytes} bytes cannot be decoded ({_reason(error)}); "
            f"send one complete file of at most {max_pixels} pixels in one of the formats {', '.join(_FORMATS)}"
        ) from error


def _reason(error: Exception) -> str:
    """What a decoder says, without the Python objects that it names."""
    text = re.sub(r"\s*<[^<>]*>", "", str(error)).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def decode_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> PILImage:
    """Decode a JPEG, PNG, WebP, GIF, BMP or TIFF file (the first frame of several) to an RGB image.

    The header's size is checked before a pixel is decoded, so a small file cannot claim gigabytes. Colours are
    converted by `to_rgb`.

    DIFF: the EXIF orientation is applied, as every viewer does; the released reference leaves such photographs lying on
    their side.

    Args:
        data: the file.
        max_pixels: largest width x height. Pillow's own limit, 2 x `PIL.Image.MAX_IMAGE_PIXELS`, holds as well.

    Raises:
        RequestError: not an image of these formats, truncated, damaged or too large; or Pillow is missing.
    """
    pil_image, pil_ops = _pillow()
    with _decode_errors(len(data), max_pixels), pil_image.open(BytesIO(data), formats=_FORMATS) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise RequestError(
                f"the image is {width} x {height} = {width * height} pixels; at most {max_pixels} are decoded; "
                f"shrink it first"
            )
        image.load()
        pil_ops.exif_transpose(image, in_place=True)
        return to_rgb(image)


def to_rgb(image: PILImage) -> PILImage:
    """Any Pillow image as RGB with 8 bits a channel. An RGB image is returned as it is.

    * Alpha and palette transparency are dropped, not composited, as in the released reference: the colours stored under
      transparent pixels appear.
    * CMYK is converted without a colour profile.
    * 16-bit grey keeps its high byte, so that full scale stays white. DIFF: the reference's plain conversion clips
      every value above 255 to white.

    Raises:
        RequestError: 32-bit integer or float samples, whose range the file does not tell.
    """
    if image.mode == "RGB":
        return image
    if image.mode in ("I", "F"):
        raise RequestError(
            f"the image has 32-bit samples (mode {image.mode}), whose black and white points are unknown; "
            f"convert it to 8 or 16 bits per channel first"
        )
    if image.mode.startswith("I;16"):
        big_endian = image.mode == "I;16B"
        pil_image, _ = _pillow()
        image = pil_image.frombytes("L", image.size, image.tobytes()[0 if big_endian else 1 :: 2])
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # else Pillow warns that the palette's transparency is dropped
    return image.convert("RGB")


# ---------------------------------------------------------------- size


def _span_tokens(grid_h: int, grid_w: int) -> int:
    return grid_h * (grid_w + 1) + 2


def _shrunk(width: int, height: int, max_tokens: int, patch: int, cell: int) -> tuple[int, int]:
    """Width and height, multiples of `patch`, whose span has at most `max_tokens`, close to width : height."""
    aspect = height / width
    # The positive root of aspect * c * (c + 1) = max_tokens - 2: token columns and rows if they could be fractions.
    columns = math.sqrt((max_tokens - 2) / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:
        return cell, (max_tokens - 2) // 2 * cell
    if rows < 1:
        return (max_tokens - 3) * cell, cell
    scale = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    # With one patch per token (downsample 1) the thin side can round down to nothing.
    best_w, best_h = (max(1, math.floor(side * scale / patch)) * patch for side in (width, height))
    return best_w, best_h


def resize_plan(
    width: int,
    height: int,
    *,
    patch: int = 14,
    downsample: int = 3,
    max_tokens: int = 1024,
    min_pixels: int = 544 * 544,
    max_wh_ratio: int | None = None,
) -> ResizePlan:
    """The size that DeepSeek-V4.1 brings an image of width x height pixels to.

    Small images grow to about `min_pixels`; sides round up to whole patches; what would then take more than
    `max_tokens` shrinks to fit. No side is ever zero.

    Args:
        width: of the original image, in pixels.
        height: of the original image, in pixels.
        patch: side of a patch in pixels.
        downsample: patches per token along each axis.
        max_tokens: longest span, START, NEWLINE and END tokens included.
        min_pixels: smaller areas are enlarged. 0 enlarges nothing.
        max_wh_ratio: images wider than this many heights are planned as if they were just so wide. None: no limit.

    Raises:
        RequestError: a side below 1.
        ConfigError: sizes that allow no image at all.
    """
    if width < 1 or height < 1:
        raise RequestError(f"the image is {width} x {height} pixels; both sides must be at least 1")
    if patch < 1 or downsample < 1 or max_tokens < 4:
        raise ConfigError(
            f"vision sizes patch={patch}, downsample={downsample}, max_tokens={max_tokens} allow no image: patch and "
            f"downsample must be at least 1 and max_tokens at least 4 (START, IMAGE, NEWLINE, END)"
        )
    stretch = max_wh_ratio is not None and width >= max_wh_ratio * height
    if max_wh_ratio is not None:
        width = min(width, height * max_wh_ratio)
    if width * height < min_pixels:
        growth = math.sqrt(min_pixels / (width * height))
        width, height = int(width * growth), int(height * growth)

    cell = patch * downsample
    best_w, best_h = (math.ceil(side / patch) * patch for side in (width, height))
    if _span_tokens(math.ceil(best_h / cell), math.ceil(best_w / cell)) > max_tokens:
        best_w, best_h = _shrunk(width, height, max_tokens, patch, cell)
    grid_h, grid_w = math.ceil(best_h / cell), math.ceil(best_w / cell)
    tokens = _span_tokens(grid_h, grid_w)
    assert tokens <= max_tokens, (width, height, tokens)
    return ResizePlan(grid_h, grid_w, best_h, best_w, tokens, stretch)


# ---------------------------------------------------------------- pixels


def _fit(image: PILImage, width: int, height: int) -> PILImage:
    """`image` scaled bicubically into width x height, aspect kept, centred on grey.

    Equal to Pillow's `ImageOps.pad`, except that the thin side of an extreme image becomes 1 pixel where that function
    rounds it to 0 and fails or leaves nothing but grey, according to its version.
    """
    pil_image, _ = _pillow()
    aspect, inner_w, inner_h = image.width / image.height, width, height
    if aspect > width / height:
        inner_h = max(1, round(image.height / image.width * width))
    elif aspect < width / height:
        inner_w = max(1, round(image.width / image.height * height))
    resized = image.resize((inner_w, inner_h), pil_image.Resampling.BICUBIC)
    if (inner_w, inner_h) == (width, height):
        return resized
    canvas: PILImage = pil_image.new("RGB", (width, height), _PAD_COLOUR)
    canvas.paste(resized, (round((width - inner_w) * 0.5), round((height - inner_h) * 0.5)))
    return canvas


def image_patches(image: PILImage, plan: ResizePlan, patch: int = 14) -> Tensor:
    """Patches [n, 3, patch, patch] float32 of `image` brought to the plan's size, n = best_h/patch * best_w/patch.

    Pixels u8 become (u8 / 255 - 0.5) / 0.5, patches are in reading order. The released reference then rounds them to
    bfloat16, which the vision tower does here when its weights are bfloat16.

    Raises:
        RequestError: samples that `to_rgb` cannot convert, or Pillow is missing.
    """
    assert plan.best_h % patch == 0 and plan.best_w % patch == 0, "the plan was made for another patch size"
    pil_image, _ = _pillow()
    image = to_rgb(image)
    if plan.stretch:
        image = image.resize((plan.best_w, plan.best_h), pil_image.Resampling.BICUBIC)
    else:
        image = _fit(image, plan.best_w, plan.best_h)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(plan.best_h, plan.best_w, 3)
    pixels = (pixels.float() / 255 - 0.5) / 0.5
    cells = pixels.view(plan.best_h // patch, patch, plan.best_w // patch, patch, 3)
    return cells.permute(0, 2, 4, 1, 3).flatten(0, 1).contiguous()


def prepare_image(
    image: PILImage,
    *,
    patch: int = 14,
    downsample: int = 3,
    max_tokens: int = 1024,
    min_pixels: int = 544 * 544,
    max_wh_ratio: int | None = None,
) -> PreparedImage:
    """Plan, patches and span of one image. Arguments and errors as in `resize_plan` and `image_patches`."""
    plan = resize_plan(
        image.width,
        image.height,
        patch=patch,
        downsample=downsample,
        max_tokens=max_tokens,
        min_pixels=min_pixels,
        max_wh_ratio=max_wh_ratio,
    )
    grid_h, grid_w = plan.best_h // patch, plan.best_w // patch
    types = tuple(image_span(grid_h, grid_w, downsample))
    return PreparedImage(image_patches(image, plan, patch), grid_h, grid_w, types)


# ---------------------------------------------------------------- tokens


def image_span(grid_h: int, grid_w: int, downsample: int) -> list[int]:
    """Token types of an image's span: START, then IMAGE x columns + NEWLINE for every row of tokens, then END.

    `grid_h` and `grid_w` are the patch grid.
    """
    rows, columns = math.ceil(grid_h / downsample), math.ceil(grid_w / downsample)
    return [START, *([*([IMAGE] * columns), NEWLINE] * rows), END]


def expand_placeholders(
    token_ids: Sequence[int], images: Sequence[PreparedImage], image_token_id: int
) -> tuple[list[int], list[ImageInput]]:
    """Replace the j-th `image_token_id` by the span of `images[j]`, every id of which is `image_token_id` again.

    Returns:
        The longer list of ids, and the images with their start positions in it.

    Raises:
        RequestError: not exactly one placeholder per image.
    """
    found = sum(token == image_token_id for token in token_ids)
    if found != len(images):
        raise RequestError(
            f"the prompt has {found} image placeholders (token id {image_token_id}) for {len(images)} images; "
            f"each image needs exactly one: add the missing ones or remove the image token from the text"
        )
    expanded: list[int] = []
    placed: list[ImageInput] = []
    remaining = iter(images)
    for token in token_ids:
        if token != image_token_id:
            expanded.append(token)
            continue
        image = next(remaining)
        placed.append(ImageInput(len(expanded), image.patches, image.grid_h, image.grid_w))
        expanded.extend([image_token_id] * len(image.token_types))
    return expanded, placed


def _as_input(image: ImageInput | Sequence[Any], number: int) -> ImageInput:
    """`image` as an ImageInput with plain integers, its four parts of the right kind."""
    try:
        start, patches, grid_h, grid_w = (
            (image.start, image.patches, image.grid_h, image.grid_w) if isinstance(image, ImageInput) else image
        )
        start, grid_h, grid_w = (operator.index(value) for value in (start, grid_h, grid_w))
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"image {number} must be (start, patches, grid_h, grid_w) with integers and a tensor ({error})"
        ) from error
    if not isinstance(patches, Tensor) or not patches.is_floating_point():
        kind = patches.dtype if isinstance(patches, Tensor) else type(patches).__name__
        raise RequestError(
            f"image {number}: patches are {kind}; pass a floating tensor of pixels normalised to [-1, 1]"
        )
    return ImageInput(start, patches, grid_h, grid_w)


def _check_patches(image: ImageInput, number: int, patch: int) -> None:
    shape, grid_h, grid_w = tuple(image.patches.shape), image.grid_h, image.grid_w
    if grid_h < 1 or grid_w < 1:
        raise RequestError(f"image {number}: the patch grid is {grid_h} x {grid_w}; both sides must be at least 1")
    if shape != (grid_h * grid_w, 3, patch, patch):
        raise RequestError(
            f"image {number}: patches have shape {shape}; a grid of {grid_h} x {grid_w} patches of this model needs "
            f"{(grid_h * grid_w, 3, patch, patch)}"
        )
    if not torch.isfinite(image.patches).all():
        bad = int((~torch.isfinite(image.patches)).sum())
        raise RequestError(f"image {number}: {bad} values of its patches are NaN or infinite; check how it was decoded")


def validate_images(
    images: Sequence[ImageInput | tuple[SupportsIndex, Tensor, SupportsIndex, SupportsIndex]],
    n_tokens: int,
    *,
    patch: int,
    downsample: int,
    token_ids: Sequence[int],
    image_token_id: int,
) -> tuple[list[int], list[ImageInput]]:
    """Check the images of one prompt against its ids.

    Args:
        images: in any order; a tuple is (start, patches, grid_h, grid_w).
        n_tokens: length of the prompt.
        patch: side of the model's patches.
        downsample: patches per token along each axis.
        token_ids: the prompt's [n_tokens] ids, spans expanded.
        image_token_id: the id that every token of a span must have.

    Returns:
        Token types [n_tokens] (-1 text, 0 start, 1 image, 2 newline, 3 end) and the images ordered by start.

    Raises:
        RequestError: patches that do not fit the grid or are not finite, a span that leaves the prompt, meets another
            span or covers other ids. The number in the text is the image's place in `images`.
    """
    assert len(token_ids) == n_tokens, (len(token_ids), n_tokens)
    types = [TEXT] * n_tokens
    checked = [_as_input(image, number) for number, image in enumerate(images)]
    for number, image in enumerate(checked):
        _check_patches(image, number, patch)
        span = image_span(image.grid_h, image.grid_w, downsample)
        start, end = image.start, image.start + len(span)
        where = f"image {number} with {image.grid_h} x {image.grid_w} patches takes the tokens {start}..{end - 1}"
        if start < 0 or end > n_tokens:
            raise RequestError(
                f"{where}, but the prompt has the tokens 0..{n_tokens - 1}; correct its start or its grid"
            )
        for position in range(start, end):
            if types[position] != TEXT:
                raise RequestError(
                    f"{where}, but token {position} already belongs to another image; correct the starts"
                )
            if token_ids[position] != image_token_id:
                raise RequestError(
                    f"{where}, but token {position} is {token_ids[position]}; every id of a span must be the image "
                    f"token {image_token_id}"
                )
        types[start:end] = span
    return types, sorted(checked, key=lambda image: image.start)
