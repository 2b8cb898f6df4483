"""Drawn scenes: up to four coloured shapes on a grid of 3 x 3 places, and questions about them.

168 x 168 pixels are 12 x 12 patches of 14, so that a 3 x 3 merge leaves 4 x 4 image tokens.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from finback.io.conversation import ChatOptions, Image, Message
from finback.train.synth import words as w
from finback.train.synth.sample import Draw, Sample, answered, said

SIZE = 168
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "bar", "ring")
COLORS = {
    "red": (210, 35, 35),
    "blue": (35, 70, 205),
    "green": (40, 150, 60),
    "yellow": (240, 210, 45),
    "purple": (135, 50, 170),
    "orange": (245, 135, 25),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
_ROWS, _COLUMNS = ("top", "middle", "bottom"), ("left", "center", "right")


@dataclass(frozen=True)
class Item:
    """A shape. cell: (row, column). radius: in pixels. dx, dy: off the middle of its cell, in pixels."""

    shape: str
    color: str
    cell: tuple[int, int]
    radius: int
    dx: int = 0
    dy: int = 0

    @property
    def words(self) -> str:
        return w.a(f"{'large' if self.radius > 16 else 'small'} {self.color} {self.shape}")

    @property
    def place(self) -> str:
        row, column = _ROWS[self.cell[0]], _COLUMNS[self.cell[1]]
        return "center" if (row, column) == ("middle", "center") else f"{row} {column}"


@dataclass(frozen=True)
class Scene:
    """items: in reading order."""

    background: str
    items: tuple[Item, ...]

    @property
    def caption(self) -> str:
        parts = [f"{i.words} at the {i.place}" for i in self.items]
        listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
        return f"On {self.background} there is {listed}."


def plan(draw: Draw) -> Scene:
    """A scene whose pairs of shape and colour are all on the draw's side of the split."""
    background = draw.one(tuple(COLORS))
    cells = sorted(draw.some([(r, c) for r in range(3) for c in range(3)], draw.one((1, 2, 2, 3, 3, 4))))
    colors = [c for c in COLORS if c != background]
    items = []
    for cell in cells:
        shape, color = draw.allowed(lambda: (draw.one(SHAPES), draw.one(colors)), lambda p: p[0], lambda p: p[1])
        radius = draw.number(21, 25) if draw.chance(0.5) else draw.number(10, 13)
        items.append(Item(shape, color, cell, radius, draw.number(-3, 3), draw.number(-3, 3)))
    return Scene(background, tuple(items))


def draw_scene(scene: Scene) -> npt.NDArray[np.uint8]:
    """[168, 168, 3] pixels."""
    pixels = np.empty((SIZE, SIZE, 3), np.uint8)
    pixels[:] = COLORS[scene.background]
    side = SIZE // 3
    for item in scene.items:
        top, left = item.cell[0] * side, item.cell[1] * side
        y, x = np.ogrid[:side, :side]
        mask = _mask(item.shape, y - side // 2 - item.dy, x - side // 2 - item.dx, item.radius)
        pixels[top : top + side, left : left + side][mask] = COLORS[item.color]
    return pixels


def _mask(shape: str, y: npt.NDArray[np.int64], x: npt.NDArray[np.int64], r: int) -> npt.NDArray[np.bool_]:
    """Where a shape of radius r around (0, 0) is, y growing downwards."""
    up, across = abs(y), abs(x)
    thin = r / 3
    if shape == "circle":
        return y * y + x * x <= r * r
    if shape == "ring":
        return (y * y + x * x <= r * r) & (y * y + x * x >= r * r / 3)
    if shape == "square":
        return (up <= 0.85 * r) & (across <= 0.85 * r)
    if shape == "triangle":
        return (y <= 0.8 * r) & (across * 1.8 <= y + r)
    if shape == "diamond":
        return up + across <= 1.2 * r
    if shape == "bar":
        return (up <= thin) & (across <= r)
    return ((up <= thin) & (across <= r)) | ((across <= thin) & (up <= r))


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Pixels [h, w, 3] as a PNG file."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line after a byte that says "not filtered"
    lines[:, 1:] = pixels.reshape(height, -1)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _questions(scene: Scene) -> list[tuple[str, str]]:
    """(question, answer): each with exactly one right answer."""
    items = scene.items
    count = len(items)
    found = [
        ("What color is the background?", f"The background is {scene.background}."),
        ("How many shapes are there?", f"There {'is' if count == 1 else 'are'} {w.NUMBERS[count]}."),
    ]
    for item in items:
        found.append((f"What is at the {item.place}?", f"{item.words.capitalize()}."))
        if sum(i.shape == item.shape for i in items) == 1:
            found.append((f"What color is the {item.shape}?", f"The {item.shape} is {item.color}."))
            found.append((f"Where is the {item.shape}?", f"The {item.shape} is at the {item.place}."))
        if sum(i.color == item.color for i in items) == 1:
            found.append((f"Which shape is {item.color}?", f"The {item.shape} is {item.color}."))
    shape = items[0].shape
    same = sum(i.shape == shape for i in items)
    plural = "crosses" if shape == "cross" else shape + "s"
    found.append((f"How many {plural} are there?", f"There {'is' if same == 1 else 'are'} {w.NUMBERS[same]}."))
    return found


def scene(draw: Draw) -> Sample:
    """A picture to describe, or one question about it; in training, several."""
    planned = plan(draw)
    asked = [(draw.one(("Describe the image.", "What do you see?", "What is in the picture?")), planned.caption)]
    questions = _questions(planned)
    if draw.split == "train":
        asked += draw.some(questions, min(len(questions), 4))
        draw.random.shuffle(asked)
    elif draw.chance(0.75):
        asked = [draw.one(questions)]
    turns: list[Message] = []
    for i, (question, answer) in enumerate(asked):
        picture = (Image(png(draw_scene(planned))),) if i == 0 else ()
        turns += [said("user", *picture, question), answered(answer)]
    return Sample("scene", messages=tuple(turns), options=ChatOptions(thinking=draw.chance(0.5)))
