"""Reading, checking and writing checkpoints."""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors
import safetensors.torch
import torch

from finback.base import formats
from finback.base.runtime import CheckpointError
from finback.io import checkpoint as checkpoint_module
from finback.io.checkpoint import Checkpoint, load_weight
from finback.io.checkpoint_write import Stored, save_checkpoint
from finback.io.completeness import verify
from finback.models.base import TensorSpec

CONFIG = {"model_type": "tiny", "layers": 1}


def write_raw(file: Path, header: dict | bytes, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file with exactly this header and data, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty checkpoint folder with a config."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None = None) -> None:
    """Shards written by the safetensors package, and an index of them (or the one given)."""
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    for file, tensors in shards.items():
        safetensors.torch.save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index or weight_map}))


def message(folder: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


def spec(name: str, shape: tuple[int, ...], *fmts: formats.Format, **rest) -> TensorSpec:
    return TensorSpec(name, shape, fmts or (formats.BF16,), "attention", **rest)


# --- opening -------------------------------------------------------------------------------------------------------


def test_reads_every_dtype_of_the_safetensors_package(folder: Path) -> None:
    """A dtype mapped to a wrong torch dtype or a wrong offset would change values."""
    torch.manual_seed(0)
    values = torch.randn(6, 8)
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = {str(dtype): values.to(dtype) for dtype in dtypes}
    tensors |= {str(dtype): (values * 9).to(dtype) for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)}
    tensors |= {"flags": values > 0, "scalar": torch.tensor(3.5)}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"who": "test"})
    ckpt = Checkpoint.open(folder)
    assert ckpt.config == CONFIG and ckpt.metadata == {"who": "test"}
    assert ckpt.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = ckpt.read(name)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape, name
        assert read.view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8)), name


def test_rows_are_read_in_place(folder: Path) -> None:
    """A tensor-parallel slice at a wrong byte offset, or one that copies the whole tensor, would go unnoticed."""
    tensor = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)
    save_checkpoint(folder, CONFIG, [("pad", torch.zeros(3)), ("w", tensor)])
    ckpt = Checkpoint.open(folder)
    for rows in (slice(0, 3), slice(2, 5), slice(5, 99), slice(-2, None), slice(4, 4), slice(None)):
        assert ckpt.read("w", rows).equal(tensor[rows])
    part, whole = ckpt.read("w", slice(2, 5)), ckpt.mapped("w")
    assert part.data_ptr() == whole.data_ptr() + 2 * 5 * 4
    assert ckpt.read("w").data_ptr() == whole.data_ptr()


def test_odd_offsets_are_copied_and_cannot_be_mapped(folder: Path) -> None:
    """A float32 view at an odd address is undefined behaviour at best; the values must still be right."""
    data = torch.tensor([1.5, -2.0, 3.25])
    header = {"a": entry("U8", [1], 0, 1), "w": entry("F32", [3], 1, 13)}
    write_raw(folder / "model.safetensors", header, b"\7" + data.numpy().tobytes())
    ckpt = Checkpoint.open(folder)
    assert ckpt.read("w").equal(data) and ckpt.read("w", slice(1, 3)).equal(data[1:])
    with pytest.raises(CheckpointError, match=r"w starts at byte \d+ .* cannot be used in place"):
        ckpt.mapped("w")


def test_zero_size_tensors(folder: Path) -> None:
    """An empty tensor at the very end of the file has an offset equal to its size, which a careless check refuses."""
    tensors = {"w": torch.ones(2), "none": torch.empty(0, 4), "empty": torch.empty(3, 0, dtype=torch.bfloat16)}
    save_checkpoint(folder, CONFIG, tensors.items())
    ckpt = Checkpoint.open(folder)
    for name, tensor in tensors.items():
        assert ckpt.read(name).equal(tensor) and ckpt.mapped(name).shape == tensor.shape
        ckpt.release(name)
        assert ckpt.read(name, slice(0, 2)).shape == tensor[:2].shape
    save_checkpoint(folder, CONFIG, [])
    assert Checkpoint.open(folder).tensors == {}


def test_packed_bytes(folder: Path) -> None:
    """Block scales and FP4 must come back as bytes; "F4" shapes count values, not bytes."""
    header = {
        "scale": entry("F8_E8M0", [2], 0, 2),
        "packed": entry("I8", [2, 1], 2, 4),
        "f4": entry("F4", [2, 4], 4, 8),
    }
    write_raw(folder / "model.safetensors", header, bytes([127, 255, 0x21, 0x80, 1, 2, 3, 254]))
    ckpt = Checkpoint.open(folder)
    assert ckpt.read("scale").tolist() == [127, 255] and ckpt.read("packed").tolist() == [[0x21], [0x80]]
    assert ckpt.read("f4").tolist() == [[1, 2], [3, 254]] and ckpt.read("f4", slice(1, 2)).tolist() == [[3, 254]]
    assert {ckpt.read(name).dtype for name in header} == {torch.uint8}


def test_unknown_name_gets_a_hint(folder: Path) -> None:
    """A KeyError without a hint costs the user a search through thousands of names."""
    save_checkpoint(folder, CONFIG, [("layers.0.attn_norm.weight", torch.ones(2))])
    with pytest.raises(CheckpointError, match=r"no tensor 'layers.0.attn_nrom.weight'.*layers.0.attn_norm.weight"):
        Checkpoint.open(folder).read("layers.0.attn_nrom.weight")


HEADERS = {
    "huge header length": (b"{}", b"", 1 << 60, "not a safetensors file: its first 8 bytes"),
    "cut inside the header": (b"{}", b"", 5000, "truncated inside its header"),
    "no json": (b"\xff\xfe{", b"", None, "not a safetensors file: its header is not JSON"),
    "deep json": (b"[" * 200000, b"", None, "not a safetensors file: its header is not JSON"),
    "a list": (b"[1]", b"", None, "not a safetensors file: its header is a list"),
    "entry no map": ({"w": 3}, b"", None, "w: header entry is not a map"),
    "unknown dtype": ({"w": entry("Q7", [1], 0, 1)}, b"\0", None, "w: unknown dtype 'Q7'"),
    "negative size": ({"w": entry("U8", [-1], 0, 1)}, b"\0", None, r"w: shape \[-1\]"),
    "bool size": ({"w": entry("U8", [True], 0, 1)}, b"\0", None, r"w: shape \[True\]"),
    "one offset": ({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, b"\0", None, "w: data_offsets"),
    "backwards": ({"w": entry("U8", [1], 1, 0)}, b"\0", None, "w: U8 .* needs 1 bytes, .* hold -1"),
    "size mismatch": ({"w": entry("F32", [2], 0, 4)}, b"\0" * 4, None, r"w: F32 \[2\] needs 8 bytes, .* hold 4"),
    "odd F4": ({"w": entry("F4", [2, 3], 0, 3)}, b"\0" * 3, None, "w: F4 .* must be even"),
    "overlap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [2], 1, 3)}, b"\0" * 4, None, "b: overlaps a"),
    "hidden overlap": (
        {"a": entry("U8", [9], 0, 9), "b": entry("U8", [1], 1, 2), "c": entry("U8", [1], 5, 6)},
        b"\0" * 9,
        None,
        "c: overlaps a",
    ),
    "past the end": ({"w": entry("U8", [4], 4, 8)}, b"\0" * 4, None, "truncated: .* incomplete: w"),
    "same name twice": (
        b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b"\0\0",
        None,
        "w: given twice",
    ),
    "metadata": ({"__metadata__": {"a": 1}}, b"", None, "__metadata__"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_bad_headers_name_file_and_tensor(folder: Path, case: str) -> None:
    """Garbage must end in one CheckpointError, not in a MemoryError or in values from a neighbour's bytes."""
    header, data, length, expected = HEADERS[case]
    write_raw(folder / "model.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=f"model.safetensors: {expected}"):
        Checkpoint.open(folder)


def test_truncated_and_short_shards(folder: Path) -> None:
    """An unfinished download is named with its incomplete tensors, and other shards are not blamed for it."""
    sharded(
        folder, {"a.safetensors": {"x": torch.ones(4), "y": torch.ones(400)}, "b.safetensors": {"z": torch.ones(4)}}
    )
    whole = (folder / "a.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(whole[:-1])
    assert "a.safetensors: truncated" in message(folder) and "incomplete: y" in message(folder)
    assert "z" not in message(folder).replace(str(folder), "")
    for size in (0, 5, 40):
        (folder / "a.safetensors").write_bytes(whole[:size])
        assert "a.safetensors: " in message(folder) and "b.safetensors" not in message(folder)


def test_file_cut_after_opening(folder: Path) -> None:
    """Reading past the end of a mapped file kills the process with SIGBUS; it must be an error instead."""
    save_checkpoint(folder, CONFIG, [("w", torch.ones(4096))])
    ckpt = Checkpoint.open(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(500)
    with pytest.raises(CheckpointError, match="became shorter"):
        ckpt.read("w")


def test_shards_that_contradict_the_index(folder: Path) -> None:
    """A missing shard, a tensor stored twice, absent or elsewhere would load wrong values; all are reported at once."""
    one, two = {"x": torch.ones(1), "y": torch.ones(2)}, {"z": torch.ones(3)}
    sharded(folder, {"a.safetensors": one, "b.safetensors": two})
    assert set(Checkpoint.open(folder).tensors) == {"x", "y", "z"}
    sharded(
        folder,
        {"a.safetensors": one, "b.safetensors": two},
        {"x": "a.safetensors", "z": "c.safetensors", "q": "d.safetensors"},
    )
    assert (
        "c.safetensors: missing" in message(folder)
        and "d.safetensors: missing" in message(folder)
        and "first q" in message(folder)
    )
    sharded(folder, {"a.safetensors": one, "b.safetensors": {**two, "x": torch.zeros(1)}})
    assert "x: stored twice, in a.safetensors and in b.safetensors" in message(folder)
    sharded(
        folder,
        {"a.safetensors": one, "b.safetensors": two},
        {"x": "b.safetensors", "y": "a.safetensors", "w": "b.safetensors"},
    )
    assert "x: model.safetensors.index.json places it in b.safetensors, but it lies in a.safetensors" in message(folder)
    assert "w: model.safetensors.index.json places it in b.safetensors, which does not hold it" in message(folder)
    sharded(folder, {"a.safetensors": one}, {"x": "../a.safetensors"})
    assert "only files of the same folder" in message(folder)


def test_ambiguous_or_absent_files(tmp_path: Path, folder: Path) -> None:
    """The text must say what was looked for: the commonest mistake is a path one folder off."""
    assert "neither model.safetensors nor model.safetensors.index.json; found no safetensors" in message(folder)
    safetensors.torch.save_file({"w": torch.ones(1)}, folder / "model0-mp1.safetensors")
    assert "found instead: model0-mp1.safetensors" in message(folder)
    assert "is a file" in message(folder / "config.json")
    sharded(folder, {"a.safetensors": {"w": torch.ones(1)}})
    safetensors.torch.save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
    assert "remove one" in message(folder)
    (folder / "config.json").write_text("[]")
    assert "config.json holds a list" in message(folder)
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in message(folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in message(folder)
    assert "there is no folder" in message(tmp_path / "nowhere")


def test_hub_ids(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id needs the optional package: present it is used, absent or failing the error says what to do."""
    monkeypatch.chdir(tmp_path)
    save_checkpoint(folder, CONFIG, [("w", torch.ones(1))])
    asked = []

    def fetch(repo: str, allow_patterns: list[str]) -> str:
        asked.append(repo)
        if repo == "org/absent":
            raise OSError("404")
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fetch))
    assert Checkpoint.open("org/name").path == folder
    assert "as a hub id it could not be fetched: 404" in message("org/absent")
    message("./some/deeper/path")
    message(tmp_path / "org" / "name")
    assert asked == ["org/name", "org/absent"], "a path must never be asked of the hub"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert 'pip install "finback[hub]"' in message("org/name")


# --- completeness --------------------------------------------------------------------------------------------------

QUANT = spec("q.weight", (64, 96), formats.BF16, formats.E4M3_B32)
EXPERT = spec("e.weight", (8, 64), formats.E2M1_R32)
NORM = spec("norm.weight", (96,), formats.BF16, formats.F32)
SPECS = [QUANT, EXPERT, NORM, spec("extra.bias", (3,), formats.F32, optional=True)]


def quant_tensors() -> dict[str, torch.Tensor | Stored]:
    """A tiny checkpoint of the released layout: an FP8 matrix in 32 x 32 blocks, an FP4 one in rows of 32, a norm."""
    generator = torch.Generator().manual_seed(1)
    return {
        "q.weight": torch.randn(64, 96, generator=generator).to(torch.float8_e4m3fn),
        "q.scale": Stored(torch.randint(120, 130, (2, 3), generator=generator, dtype=torch.uint8), "F8_E8M0"),
        "e.weight": Stored(torch.randint(0, 256, (8, 32), generator=generator, dtype=torch.uint8), "I8"),
        "e.scale": Stored(torch.randint(120, 130, (8, 2), generator=generator, dtype=torch.uint8), "F8_E8M0"),
        "norm.weight": torch.randn(96, generator=generator).bfloat16(),
    }


def changed(folder: Path, **changes: torch.Tensor | Stored | None) -> Checkpoint:
    """The tiny checkpoint with some tensors replaced (None: dropped); "__" in a name stands for "."."""
    tensors = quant_tensors() | {name.replace("__", "."): value for name, value in changes.items()}
    save_checkpoint(folder, CONFIG, [(name, value) for name, value in tensors.items() if value is not None])
    return Checkpoint.open(folder)


def test_complete_checkpoint_and_its_formats(folder: Path) -> None:
    """The format must follow from data and scale: the same weight in bf16 is not FP8, and no scale is unused."""
    report = verify(changed(folder), SPECS)
    assert report.ok and report.lines() == []
    report.raise_if_bad()
    expected = {"q.weight": formats.E4M3_B32, "e.weight": formats.E2M1_R32, "norm.weight": formats.BF16}
    assert report.formats == expected
    plain = changed(folder, q__weight=torch.ones(64, 96).bfloat16(), q__scale=None)
    assert verify(plain, SPECS).formats["q.weight"] == formats.BF16
    leftover = verify(changed(folder, q__weight=torch.ones(64, 96).bfloat16()), SPECS)
    assert [(problem.kind, problem.name) for problem in leftover.problems] == [("unused", "q.scale")]


@pytest.mark.parametrize(
    ("changes", "kind", "name", "text"),
    [
        ({"norm__weight": None}, "missing", "norm.weight", r"missing \(attention, \[96\]\)"),
        ({"stray": torch.ones(2)}, "unused", "stray", r"in model.safetensors but not of this model \(F32 \[2\]\)"),
        ({"norm__weight": torch.ones(97)}, "shape", "norm.weight", r"stored \[97\], expected \[96\]"),
        (
            {"norm__weight": torch.ones(96, dtype=torch.float16)},
            "dtype",
            "norm.weight",
            "stored as F16, expected BF16 .* F32",
        ),
        (
            {"q__scale": None},
            "missing scale",
            "q.weight",
            "stored as F8_E4M3 but its scale q.scale is missing: F8_E8M0 .*e4m3_b32",
        ),
        ({"q__scale": torch.ones(2, 3)}, "scale", "q.scale", r"stored F32 \[2, 3\], expected F8_E8M0.* \[2, 3\]"),
        (
            {"q__scale": Stored(torch.ones(1, 1, dtype=torch.uint8), "F8_E8M0")},
            "scale",
            "q.scale",
            r"stored F8_E8M0 \[1, 1\], expected F8_E8M0.* \[2, 3\]",
        ),
        (
            {"e__weight": Stored(torch.ones(8, 64, dtype=torch.uint8), "I8")},
            "shape",
            "e.weight",
            r"stored \[8, 64\], expected \[8, 32\] \(\[8, 64\] packed\)",
        ),
        (
            {"e__weight": torch.ones(8, 64).bfloat16(), "e__scale": None},
            "dtype",
            "e.weight",
            "stored as BF16, expected I8",
        ),
    ],
)
def test_each_problem_is_named(folder: Path, changes: dict, kind: str, name: str, text: str) -> None:
    """Each way in which a file differs from the model must be one line on the right tensor, not a wrong weight."""
    report = verify(changed(folder, **changes), SPECS)
    assert [(problem.kind, problem.name) for problem in report.problems] == [(kind, name)]
    assert name not in report.formats
    with pytest.raises(CheckpointError, match=rf"1 {kind}\):\n  {name}: {text}"):
        report.raise_if_bad()


def test_renamed_tensor_and_ignored_names(folder: Path) -> None:
    """A renamed tensor must be shown as a pair; names that the caller ignores are not unused."""
    ckpt = changed(folder, norm__weight=None, norm_weight=torch.ones(96), **{"other": torch.ones(1)})
    lines = verify(ckpt, SPECS, ignore=lambda name: name == "other").lines()
    assert lines[0].endswith("the file has an unused norm_weight, was it renamed?")
    assert [line.split(":")[0] for line in lines] == ["norm.weight", "norm_weight"]


def test_config_of_another_model_is_quick_and_bounded(folder: Path) -> None:
    """With everything missing and unused, the hints are quadratic and the text endless unless bounded."""
    names = [f"model.layers.{i}.mlp.experts.0.weight" for i in range(3000)]
    save_checkpoint(folder, CONFIG, [(name, torch.ones(1)) for name in names])
    specs = [spec(f"layers.{i}.ffn.experts.0.weight", (1,), formats.F32) for i in range(3000)]
    report = verify(Checkpoint.open(folder), specs)
    assert len(report.problems) == 6000
    assert report.lines()[7].endswith("an unused model.layers.7.mlp.experts.0.weight, was it renamed?")
    with pytest.raises(CheckpointError, match=r"3000 missing, 3000 unused(?s:.*)and 5800 more"):
        report.raise_if_bad()


# --- loading -------------------------------------------------------------------------------------------------------


def decode_by_hand(ckpt: Checkpoint) -> dict[str, torch.Tensor]:
    """The tiny checkpoint's weights in float64 from the formats' definitions."""
    scale = torch.exp2(ckpt.read("q.scale").double() - 127)
    q = ckpt.read("q.weight").double() * scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    packed = ckpt.read("e.weight")
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    e = table[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    e = e * torch.exp2(ckpt.read("e.scale").double() - 127).repeat_interleave(32, 1)
    return {"q.weight": q, "e.weight": e, "norm.weight": ckpt.read("norm.weight").double()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_load_weight_decodes_every_format(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int
) -> None:
    """Chunks that do not start on a block border, or the scale rows of another chunk, would shift the scales."""
    monkeypatch.setattr(checkpoint_module, "CHUNK_VALUES", chunk)
    ckpt = changed(folder)
    fmts = verify(ckpt, SPECS).formats
    for name, expected in decode_by_hand(ckpt).items():
        out = torch.full(expected.shape, -1.0, dtype=dtype)
        load_weight(ckpt, next(s for s in SPECS if s.name == name), fmts[name], out)
        assert out.equal(expected.to(dtype)), name


def test_load_into_a_strided_view(folder: Path) -> None:
    """Experts are views of one stacked parameter; a decode that needs contiguous memory would fill a copy."""
    ckpt = changed(folder)
    stacked = torch.zeros(64, 2, 96)
    load_weight(ckpt, QUANT, formats.E4M3_B32, stacked[:, 1])
    assert stacked[:, 1].equal(decode_by_hand(ckpt)["q.weight"].float()) and not stacked[:, 0].any()


def test_non_finite_weights_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One NaN weight makes every logit NaN; it must be named with its place, also in a later chunk."""
    monkeypatch.setattr(checkpoint_module, "CHUNK_VALUES", 96)
    bad = torch.ones(64, 96)
    bad[33, 5] = float("nan")
    ckpt = changed(folder, q__weight=bad.bfloat16(), norm__weight=torch.tensor([*[1.0] * 95, -float("inf")]))
    with pytest.raises(CheckpointError, match=r"q.weight .* holds nan at \[33, 5\]"):
        load_weight(ckpt, QUANT, formats.BF16, torch.empty(64, 96))
    with pytest.raises(CheckpointError, match=r"norm.weight .* holds -inf at \[95\]"):
        load_weight(ckpt, NORM, formats.F32, torch.empty(96))
    scalar = spec("s", (), formats.F32)
    save_checkpoint(folder, CONFIG, [("s", torch.tensor(float("nan")))])
    with pytest.raises(CheckpointError, match=r"s .* holds nan"):
        load_weight(Checkpoint.open(folder), scalar, formats.F32, torch.empty(()))
    byte = torch.ones(64, 96).to(torch.float8_e4m3fn)
    byte.view(torch.uint8)[40, 70] = 0x7F
    with pytest.raises(CheckpointError, match=r"q.weight .* holds nan at \[40, 70\]"):
        load_weight(changed(folder, q__weight=byte), QUANT, formats.E4M3_B32, torch.empty(64, 96))


def test_scale_byte_255_is_refused(folder: Path) -> None:
    """255 is e8m0's NaN. Read as 2^128 it would turn zeros into zeros and the rest into infinity."""
    scale = torch.full((2, 3), 127, dtype=torch.uint8)
    scale[1, 2] = 255
    ckpt = changed(folder, q__weight=torch.zeros(64, 96).to(torch.float8_e4m3fn), q__scale=Stored(scale, "F8_E8M0"))
    with pytest.raises(CheckpointError, match=r"q\.(weight|scale)"):
        load_weight(ckpt, QUANT, formats.E4M3_B32, torch.empty(64, 96))


MEMORY = """
import re, sys, torch
from finback.base import formats
from finback.io.checkpoint import Checkpoint, load_weight
from finback.models.base import TensorSpec
torch.set_num_threads(1)
def memory(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) >> 10
spec = TensorSpec("w.weight", (8192, 4096), (formats.BF16,), "attention")
ckpt = Checkpoint.open(sys.argv[1])
out = torch.ones(spec.shape, dtype=torch.bfloat16)
torch.aminmax(out)
before = memory("VmRSS")
load_weight(ckpt, spec, formats.BF16, out)
peak, after = memory("VmHWM"), memory("VmRSS")
ckpt.read("w.weight").view(torch.uint8).sum()
touched = memory("VmRSS")
ckpt.release("w.weight")
print(peak - before, after - before, touched - memory("VmRSS"), ckpt.read("w.weight")[-1, -1].item())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_keeps_memory_near_the_resident_weights(folder: Path) -> None:
    """Mapped pages count as resident: without releasing them a load of 64 MiB peaks 64 MiB above the weights."""
    save_checkpoint(folder, CONFIG, [("w.weight", torch.full((8192, 4096), 2.5, dtype=torch.bfloat16))])
    run = subprocess.run([sys.executable, "-c", MEMORY, str(folder)], capture_output=True, text=True, check=True)
    peak, kept, released, value = map(float, run.stdout.split())
    assert peak < 24 and kept < 16, "MiB beside the weights"
    assert released > 56 and value == 2.5, "MiB given back, and still readable"


# --- saving --------------------------------------------------------------------------------------------------------


def stored(ckpt: Checkpoint) -> list[tuple[str, Stored]]:
    return [(name, Stored(ckpt.read(name), info.dtype)) for name, info in ckpt.tensors.items()]


def test_round_trip_is_byte_equal(folder: Path, tmp_path: Path) -> None:
    """Reading and writing again must change no byte, in one file or in shards, FP4, scales and odd offsets included."""
    f4 = Stored(torch.tensor([[1, 2], [3, 255]], dtype=torch.uint8), "F4")
    native = torch.tensor([126, 127], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    tensors = quant_tensors() | {
        "odd": torch.ones(1, dtype=torch.bool),
        "after": torch.ones(2),
        "f4": f4,
        "native": native,
    }
    save_checkpoint(folder, CONFIG, tensors.items(), metadata={"step": "3"}, extra_files={"tokenizer.json": b"{}"})
    ckpt = Checkpoint.open(folder)
    assert ckpt.metadata == {"format": "pt", "step": "3"} and (folder / "tokenizer.json").read_bytes() == b"{}"
    assert ckpt.tensors["f4"].shape == (2, 4) and ckpt.tensors["native"].dtype == "F8_E8M0"
    again = tmp_path / "again"
    save_checkpoint(again, ckpt.config, stored(ckpt), metadata=ckpt.metadata, extra_files={"tokenizer.json": b"{}"})
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        file.name: file.read_bytes() for file in again.iterdir()
    }
    save_checkpoint(again, ckpt.config, stored(ckpt), shard_bytes=3000)
    assert not (again / "tokenizer.json").exists() and not (again / "model.safetensors").exists()
    split = Checkpoint.open(again)
    assert list(split.tensors) == list(ckpt.tensors)
    for name, info in ckpt.tensors.items():
        assert split.read(name).equal(ckpt.read(name)) and split.tensors[name].dtype == info.dtype, name


def test_shards_and_index_follow_the_hub(folder: Path) -> None:
    """Other loaders find shards by these names and the index; a tensor larger than a shard must not be split."""
    tensors = {"a": torch.ones(4), "b": torch.ones(4) * 2, "big": torch.ones(100), "c": torch.ones(2)}
    save_checkpoint(folder, CONFIG, tensors.items(), shard_bytes=32)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", *names, "model.safetensors.index.json"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 110
    assert index["weight_map"] == {"a": names[0], "b": names[0], "big": names[1], "c": names[2]}
    assert json.loads((folder / "config.json").read_text()) == CONFIG


def test_the_safetensors_package_reads_our_files(folder: Path) -> None:
    """Its reader is strict about header padding, order and gaps; files that only we can read are worthless."""
    tensors = {
        "f": torch.randn(3, 5),
        "t": torch.randn(4, 6).bfloat16().t(),
        "i": torch.arange(3, dtype=torch.int8),
        "s": torch.tensor(2),
    }
    save_checkpoint(folder, CONFIG, [*tensors.items(), *quant_tensors().items()])
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            assert file.get_tensor(name).equal(tensor), name
        assert file.get_slice("q.scale").get_shape() == [2, 3]


def test_refused_tensors_and_folders(folder: Path, tmp_path: Path) -> None:
    """Replacing deletes the old folder: anything but a checkpoint must be refused, before a byte is written."""
    ones = torch.ones(1)
    save_checkpoint(folder, CONFIG, [("w", ones)])
    cases = [
        ([("w", ones), ("w", ones)], {}, "w: given twice"),
        ([("__metadata__", ones)], {}, "reserved"),
        ([("w", torch.ones(1, dtype=torch.complex64))], {}, "w: torch.complex64"),
        ([("w", Stored(ones, "F8_E8M0"))], {}, "w: torch.float32 cannot be stored as 'F8_E8M0'"),
        ([("w", Stored(ones, "X"))], {}, "'X'"),
        ([], {"extra_files": {"../evil": b""}}, "plain file name"),
        ([], {"extra_files": {"config.json": b""}}, "plain file name"),
    ]
    for tensors, rest, expected in cases:
        with pytest.raises(CheckpointError, match=expected):
            save_checkpoint(folder, CONFIG, tensors, **rest)
    foreign = tmp_path / "home"
    (foreign / "documents").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds something other than a checkpoint"):
        save_checkpoint(foreign, CONFIG, [("w", ones)])
    with pytest.raises(CheckpointError, match="is a file"):
        save_checkpoint(folder / "config.json", CONFIG, [("w", ones)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "model"]
    assert Checkpoint.open(folder).read("w").equal(ones)


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
@pytest.mark.parametrize("existing", [True, False])
def test_a_full_disk_leaves_the_old_folder(folder: Path, tmp_path: Path, existing: bool) -> None:
    """A save that fails midway must not destroy the last good checkpoint, nor leave rubbish beside it."""
    target = folder if existing else tmp_path / "new"
    if existing:
        save_checkpoint(folder, CONFIG, [("w", torch.ones(3))])
    before = {file.name: file.read_bytes() for file in target.iterdir()} if existing else None
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # larger writes fail as on a full disk
        with pytest.raises(CheckpointError, match="could not be written: File too large"):
            save_checkpoint(target, CONFIG, [(str(i), torch.ones(10_000)) for i in range(4)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (target.exists() and {file.name: file.read_bytes() for file in target.iterdir()}) == (before or False)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("moment", ["stream", "rename"])
def test_an_interruption_leaves_the_old_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Ctrl-C while tensors are streamed, or a failure between the two renames, must restore what was there."""
    save_checkpoint(folder, CONFIG, [("w", torch.ones(3))])
    rename = Path.rename

    def tensors():
        yield "w", torch.zeros(3)
        if moment == "stream":
            raise KeyboardInterrupt

    def interrupted(self: Path, target: Path) -> Path:
        if self.suffix == ".tmp":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(folder, CONFIG, tensors())
    assert Checkpoint.open(folder).read("w").equal(torch.ones(3))
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_saving_streams(folder: Path) -> None:
    """A writer that collects the tensors first needs the whole model in memory; earlier ones must be on the disk."""
    seen = []

    def tensors():
        for i in range(3):
            seen.append(
                sum(file.stat().st_size for path in folder.parent.glob(".model.*.tmp") for file in path.iterdir())
            )
            yield str(i), torch.ones(50_000)

    save_checkpoint(folder, CONFIG, tensors(), shard_bytes=1)
    assert seen[1] >= 190_000 and seen[2] >= 390_000
    assert dataclasses.astuple(Checkpoint.open(folder).tensors["2"])[2:4] == ("F32", (50_000,))
