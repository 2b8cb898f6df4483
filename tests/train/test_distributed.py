"""Runs of several processes, on gloo: their number may not change what is learned."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from finback.io.load import load_model

SRC = Path(__file__).parents[2] / "src"
JOBS = Path(__file__).with_name("rank_jobs.py")
WORDS = "the fin whale swims fast and far while the sea sings one low note after another in the dark".split()
Ranks = Callable[..., list[Any]]
Write = Callable[..., str]
SHARD, EP, BOTH = ["parallel.ep=1"], ["parallel.shard=false", "parallel.ep=2"], ["parallel.ep=2"]
NEITHER = ["parallel.shard=false", "parallel.tables=false"]


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


@pytest.fixture
def recipe(tmp_path: Path, tiny_config: Callable[..., dict[str, Any]]) -> Write:
    """recipe(family) -> the file of a recipe of six steps of four forwards each."""
    lines = [" ".join(WORDS[(i * 7 + k) % len(WORDS)] for k in range(12 + i)) for i in range(40)]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))

    def write(name: str, **changes: Any) -> str:
        config = tiny_config(name, **changes)
        for place in (config, config.get("text_config", {})):
            for key in ("vocab_size", "engram_num_embeddings", "engram_compressed_vocab_size"):
                place.pop(key, None)
        file = tmp_path / f"{name}.toml"
        file.write_text(f"""
name = "tiny"
model = {toml(config)}
tokenizer = {{ vocab_size = 352 }}
optim = {{ warmup = 2, ema = 0.5 }}
loss = {{ indexer_queries = 16 }}
[data]
batch_tokens = 48
accumulate = 4
length = 32
held_out = 0.2
sources = [{{name = "one", path = "one.jsonl", kind = "jsonl"}}]
[run]
steps = 6
threads = 1
save_every = 3
eval_every = 3
eval_tokens = 200
sample_every = 6
sample_tokens = 3
prompts = ["the"]
log_every = 1
""")
        return str(file)

    return write


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "mfu")} for line in lines]


def assert_alike(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """The same numbers to 1e-5, line by line."""
    assert [list(line) for line in found] == [list(line) for line in wanted]
    for one, other in zip(found, wanted, strict=True):
        for key, value in other.items():
            assert one[key] == pytest.approx(value, abs=1e-5, rel=1e-5), (key, other["step"])


def assert_goes_on(
    ranks: Ranks, size: int, file: str, sets: list[str], run: Path, again: Path, wanted: list[dict[str, Any]]
) -> None:
    """From the checkpoint after step 3 of a finished run, the next steps are as they were."""
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "step-0000006")
    ends = [line for line in wanted if line["step"] > 3 and "loss" in line]
    for result in ranks(JOBS, size, "train", file, sets, str(again), 3):
        assert_alike([{key: line[key] for key in ends[0]} for line in result["metrics"]], ends)


def same_gradients(ranks: Ranks, file: str, size: int, configs: list[list[str]], tmp_path: Path,
                   sets: Sequence[str] = ()) -> list[list[Any]]:  # fmt: skip
    """Compares runs of `size` processes with one of one process; returns what all processes gave, by configuration."""
    one = ranks(JOBS, 1, "gradients", file, [[*sets]], str(tmp_path / "one"))[0][0]
    several = ranks(JOBS, size, "gradients", file, [[*sets, *c] for c in configs], str(tmp_path / "several"))
    for config, results in zip(configs, zip(*several, strict=True), strict=True):
        for found in results:
            for key in ("loss", "tokens", "load", *(k for k in ("indexer", "balance", "mtp", "aux") if k in one)):
                assert found["metrics"][key] == pytest.approx(one["metrics"][key], abs=1e-5), (config, key)
            assert found["held_out"] == pytest.approx(one["held_out"], abs=1e-5), config
            assert list(found["gradients"]) == list(one["gradients"]), config
            for name, gradient in one["gradients"].items():
                assert (found["gradients"][name] - gradient).norm() <= 1e-5 * gradient.norm(), (config, name)
    return [list(results) for results in zip(*several, strict=True)]


def test_two_processes_have_the_gradients_of_one(ranks: Ranks, recipe: Write, tmp_path: Path):
    """Would catch: gradients that are averaged where they have to be summed, a loss divided by one process's targets,
    experts or table rows that miss the tokens of the other process, data that depend on the number of processes, and
    a setting that divides nothing."""
    both, ep, shard, neither = same_gradients(ranks, recipe("v41"), 2, [BOTH, EP, SHARD, NEITHER], tmp_path)
    w13, table, dense = "layers.0.ffn.experts.w13", "engrams.1.embed.weight", "layers.0.attn.wkv.weight"
    whole = neither[0]["held"]
    for name, divided in ((w13, (both, ep, shard)), (table, (both, ep, shard)), (dense, (both, shard))):
        for results in divided:
            parts = [found["held"][name] for found in results]
            assert sum(parts) == whole[name] and max(parts) < 0.6 * whole[name], name
    assert ep[0]["held"][dense] == whole[dense]


def test_two_processes_have_the_gradients_of_one_spikewhale(ranks: Ranks, recipe: Write, tmp_path: Path):
    """Would catch: a forward beside `forward` that is not gathered for, a tied head, and experts that got no token in
    one process only."""
    same_gradients(ranks, recipe("spikewhale"), 2, [SHARD], tmp_path)


def test_two_processes_have_the_gradients_of_one_v32(ranks: Ranks, recipe: Write, tmp_path: Path):
    """Would catch: outputs weighed before they travel, and dense layers beside those with experts."""
    same_gradients(ranks, recipe("v32"), 2, [BOTH], tmp_path)


def test_two_processes_have_the_gradients_of_one_with_images(ranks: Ranks, recipe: Write, tmp_path: Path):
    """Would catch: a process without images that reduces other gradients than one with them, or waits for it."""
    lines = []
    for i in range(6):
        Image.new("RGB", (8, 8), (40 * i, 0, 200)).save(tmp_path / f"{i}.png")
        turns = [{"role": "user", "content": [{"type": "image"}, "the sea"]}, {"role": "assistant", "content": "dark"}]
        lines.append(json.dumps({"text": turns, "images": [f"{i}.png"]}))
    (tmp_path / "seen.jsonl").write_text("\n".join(lines))
    vision = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16,
              "patch_size": 4, "downsample_ratio": 2, "min_pixels": 0}  # fmt: skip
    shares = (("one", "jsonl", 9), ("seen", "chat", 1))
    sources = [{"name": name, "path": name + ".jsonl", "kind": kind, "share": share} for name, kind, share in shares]
    sets = [f"model.vision_config={toml(vision)}", f"data.sources=[{', '.join(map(toml, sources))}]"]
    ((_, other),) = same_gradients(ranks, recipe("v41"), 2, [BOTH], tmp_path, sets)
    assert any(name.startswith("vision") for name in other["gradients"]) and 0 < other["metrics"]["patches"] < 16


@pytest.mark.slow
def test_four_processes_have_the_gradients_of_one(ranks: Ranks, recipe: Write, tmp_path: Path):
    """Would catch what two processes cannot show: a grid with two lines and two columns."""
    four = ["parallel.ep=4"]
    same_gradients(ranks, recipe("v41"), 4, [BOTH, EP, four, SHARD], tmp_path)


def test_a_run_and_its_checkpoints_do_not_depend_on_the_number_of_processes(
    ranks: Ranks, recipe: Write, tmp_path: Path
):
    """Would catch: Muon on pieces of matrices, a norm of one process's part, router biases moved by one process's
    counts, two processes that write one metrics file, a checkpoint that only as many processes can read as wrote it,
    or that the next step overwrites while it is written."""
    file, two = recipe("v41"), tmp_path / "two"
    assert ranks(JOBS, 1, "train", file, [], str(tmp_path / "one"))[0]["done"] == "model"
    assert ranks(JOBS, 2, "train", file, BOTH, str(two))[0]["done"] == "model"
    wanted = metrics(tmp_path / "one")
    assert_alike(metrics(two), wanted)
    assert (two / "samples.txt").read_text() == (tmp_path / "one" / "samples.txt").read_text()
    assert [p.name for p in sorted((two / "checkpoints").iterdir())] == ["step-0000003", "step-0000006"]
    for name in ("model", "model-ema"):
        one, other = (load_model(folder / name).state_dict() for folder in (tmp_path / "one", two))
        for key, value in one.items():  # AdamW enlarges what rounding does to gradients of about nothing
            assert float((other[key] - value).norm()) <= 1e-3 * float(value.norm()) + 2e-3, key

    assert_goes_on(ranks, 1, file, [], two, tmp_path / "again", wanted)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_more_processes(ranks: Ranks, recipe: Write, tmp_path: Path):
    """Would catch: parts that are cut anew at the wrong rows, moments of one process that several do not find."""
    file, one, two = recipe("v41"), tmp_path / "one", tmp_path / "two"
    ranks(JOBS, 1, "train", file, [], str(one))
    ranks(JOBS, 2, "train", file, BOTH, str(two))
    assert_goes_on(ranks, 2, file, SHARD, one, tmp_path / "one-two", metrics(one))
    assert_goes_on(ranks, 4, file, BOTH, two, tmp_path / "two-four", metrics(two))


def test_a_full_disk_ends_all_processes(ranks: Ranks, recipe: Write, tmp_path: Path):
    """Would catch: a process that goes on alone and waits for ever, and half a checkpoint under its final name."""
    folder = tmp_path / "run"
    for error in ranks(JOBS, 2, "full_disk", recipe("v41"), [], str(folder)):
        assert "step-0000006 could not be written" in error and "last good checkpoint is" in error, error
        assert "step-0000003; the same command" in error
    assert [p.name for p in (folder / "checkpoints").iterdir() if not p.name.startswith(".")] == ["step-0000003"]


@pytest.mark.parametrize(
    ("size", "sets", "text"),
    [
        (1, ["parallel.ep=2"], "parallel.ep 2 does not divide"),
        (2, ["data.accumulate=3"], "data.accumulate 3"),
        (2, ["quant={start=0.5}"], "quant.start = 1"),
        (2, ["parallel.ep=2", "model.text_config.n_routed_experts=5"], "5 routed experts"),
    ],
)
def test_what_does_not_fit_is_told(ranks: Ranks, recipe: Write, tmp_path: Path, size: int, sets: list[str], text: str):
    """Would catch: settings that are ignored, or fail in the middle of a step."""
    for error in ranks(JOBS, size, "refused", recipe("v41"), sets, str(tmp_path / "run")):
        assert text in error


def test_a_run_of_one_process_loads_nothing_of_this(recipe: Write, tmp_path: Path):
    """Would catch: FSDP and its compiler loaded, and waited for, by everybody."""
    code = (
        "import sys; from finback.train.recipe import read_recipe; from finback.train.trainer import Trainer;"
        f"Trainer(read_recipe({recipe('v32')!r}), {str(tmp_path / 'run')!r}).advance();"
        "import torch; assert not torch.distributed.is_initialized();"
        "print([m for m in sys.modules if 'fsdp' in m or m == 'finback.train.dividing'])"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.slow
def test_torchrun(recipe: Write, tmp_path: Path):
    """The command that everybody types: rank 0 alone prints, SIGTERM saves, and the same command goes on."""
    file, out = recipe("v41"), tmp_path / "run"
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "finback", "train", file]
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    more = ["--out", str(out), "--set", "parallel.ep=2", "--set", "run.save_every=0"]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*words, *more, "--set", "run.steps=500"], env=env, text=True, stdout=pipe, stderr=pipe)
    end = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert errors.count("goes on from there") == 1, errors
    (saved,) = (p for p in (out / "checkpoints").iterdir())
    step = int(saved.name.removeprefix("step-"))
    last = ["--set", f"run.steps={step + 2}"]
    done = subprocess.run([*words, *more, *last], env=env, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(out / "model")]
    assert [line["step"] for line in metrics(out) if "loss" in line] == list(range(1, step + 3))
    assert load_model(out / "model").vocab_size == 352
