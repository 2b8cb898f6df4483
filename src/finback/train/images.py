"""Images of training documents: from a file or an array to patches, kept small, and into the model's own vision tower.

An image is brought to size once, when its source is read. What is kept are the pixels as they are then, 8 bits each and
compressed without loss (a drawn scene takes a hundredth); a batch unpacks them to the patches that serving would make.
Its span of tokens (start, rows of image tokens with a newline each, end) is never cut and never learned.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from finback.base.runtime import ConfigError, RequestError
from finback.io.chat import ImageSizes
from finback.io.images import decode_image, image_patches, resize_plan, to_rgb
from finback.kernels import FUSED_ATTENTION

_WORTH_THREADS = 32  # images
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Picture:
    """An image and its place.

    start: of its span, in the document or the batch that holds it. grid_h, grid_w: rows of patches, and patches a row.
    tokens: length of the span. packed: zlib of the patches [grid_h * grid_w, 3, p, p] uint8 in reading order.
    """

    start: int
    grid_h: int
    grid_w: int
    tokens: int
    packed: bytes

    @property
    def end(self) -> int:
        return self.start + self.tokens

    def moved(self, places: int) -> Picture:
        return replace(self, start=self.start + places)

    def pixels(self) -> Tensor:
        """[grid_h * grid_w, 3, p, p] uint8."""
        values = torch.frombuffer(bytearray(zlib.decompress(self.packed)), dtype=torch.uint8)
        count = self.grid_h * self.grid_w
        side = round((len(values) / (3 * count)) ** 0.5)
        return values.view(count, 3, side, side)

    def patches(self) -> Tensor:
        """[grid_h * grid_w, 3, p, p] float32 in [-1, 1], as `io.images.image_patches` makes them."""
        return normalised(self.pixels())


def normalised(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.5) / 0.5


def picture(image: Any, sizes: ImageSizes, folder: Path) -> Picture:
    """An image at place 0, brought to the size that the model reads it in.

    image: [H, W, 3] uint8 array, a Pillow image, the bytes of an image file, its path (relative to `folder`), or a
    mapping with "bytes" or "path" as data sets of Hugging Face hold them. An array that already has the right size
    needs no Pillow. Raises ConfigError for what is none of these or cannot be read.
    """
    try:
        pixels = _pixels(image, folder)
        height, width, _ = pixels.shape
        plan = resize_plan(
            width, height, patch=sizes.patch, downsample=sizes.downsample, max_tokens=sizes.max_tokens,
            min_pixels=sizes.min_pixels, max_wh_ratio=sizes.max_wh_ratio,
        )  # fmt: skip
        if (plan.best_h, plan.best_w) == (height, width):
            p = sizes.patch
            cells = pixels.reshape(height // p, p, width // p, p, 3).transpose(0, 2, 4, 1, 3)
        else:
            wide = image_patches(_pillow().fromarray(pixels), plan, sizes.patch)
            cells = ((wide * 0.5 + 0.5) * 255).round().to(torch.uint8).numpy()  # whole numbers before: nothing is lost
    except RequestError as error:
        raise ConfigError(f"an image of the training data: {error}") from None
    packed = zlib.compress(np.ascontiguousarray(cells).tobytes(), 1)
    return Picture(0, plan.best_h // sizes.patch, plan.best_w // sizes.patch, plan.tokens, packed)


def _pixels(image: Any, folder: Path) -> Pixels:
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str | Path):
        path = folder / Path(image).expanduser()
        try:
            image = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"image {path} cannot be read: {error.strerror}") from None
    if isinstance(image, bytes):
        image = decode_image(image)
    if hasattr(image, "convert"):
        image = np.asarray(to_rgb(image))
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        kind = f"an array {image.shape} {image.dtype}" if isinstance(image, np.ndarray) else type(image).__name__
        raise ConfigError(f"an image of the training data is {kind}; give a [H, W, 3] uint8 array, a file or its path")
    return image


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("images that have to be resized need Pillow: pip install 'finback[images]'") from None
    return Image


def expand(ids: Sequence[int], pictures: Sequence[Picture], image_token_id: int) -> tuple[list[int], list[Picture]]:
    """Replace the j-th `image_token_id` by the span of `pictures[j]`, every id of which is that id again. Raises
    ConfigError where there is not one of them for each picture."""
    found = sum(token == image_token_id for token in ids)
    if found != len(pictures):
        raise ConfigError(f"a document has {found} places for images and {len(pictures)} images; give each its own")
    out: list[int] = []
    placed: list[Picture] = []
    for token in ids:
        if token == image_token_id:
            placed.append(pictures[len(placed)].moved(len(out)))
        out += [token] * (placed[-1].tokens if token == image_token_id else 1)
    return out, placed


def _unpacked(members: Sequence[Picture]) -> list[Tensor]:
    """The pixels of each; of many images by several threads, as unpacking lets others run."""
    if len(members) < _WORTH_THREADS:
        return [one.pixels() for one in members]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(Picture.pixels, members))


def inserted(model: Any, pictures: Iterable[Picture], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(places [m] int64, rows [m, D]): what `ForwardBatch.inserted` takes, with the gradient of the vision tower, the
    aligner and the vectors around an image. Images of one size go through the tower together on a GPU."""
    by_size: dict[tuple[int, int], list[Picture]] = {}
    for one in pictures:
        by_size.setdefault((one.grid_h, one.grid_w), []).append(one)
    places, rows = [], []
    for (grid_h, grid_w), members in by_size.items():
        patches = normalised(torch.stack(_unpacked(members)).to(device))

        def encode(one: Tensor, grid_h: int = grid_h, grid_w: int = grid_w) -> Tensor:
            return model.image_rows(one, grid_h, grid_w)

        if patches.is_cuda:
            with sdpa_kernel(FUSED_ATTENTION):
                rows.append(torch.vmap(encode)(patches).flatten(0, 1))
        else:  # vmap has no rule for attention on a CPU, where one image keeps the cores busy anyway
            rows.append(torch.cat([*map(encode, patches)]))
        places += [place for one in members for place in range(one.start, one.end)]
    return torch.tensor(places, dtype=torch.int64, device=device), torch.cat(rows)
