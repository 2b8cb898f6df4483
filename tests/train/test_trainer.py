"""Whole runs, a second or two each: what they leave behind, and what interruptions may not change."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from finback.base.runtime import CheckpointError, ConfigError, NonFiniteError
from finback.engine.llm import LLM
from finback.engine.request import SamplingParams
from finback.io import checkpoint_write
from finback.io.checkpoint import Checkpoint
from finback.train import journal
from finback.train.recipe import read_recipe
from finback.train.trainer import Trainer

SRC = Path(__file__).parents[2] / "src"
WORDS = "the fin whale swims fast and far while the sea sings one low note after another in the dark".split()


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


@pytest.fixture
def recipe(tmp_path: Path, tiny_config) -> Path:
    """A recipe of eight steps of two forwards each, in two stages, on two sources."""
    for name, shift in (("one", 0), ("two", 5)):
        lines = [" ".join(WORDS[(i * 7 + k * (shift + 1)) % len(WORDS)] for k in range(12 + i)) for i in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    config = tiny_config("v41")
    for key in ("vocab_size", "engram_num_embeddings", "engram_compressed_vocab_size"):
        del config["text_config"][key]
    file = tmp_path / "tiny.toml"
    text = f"""
name = "tiny"
model = {toml(config)}
tokenizer = {{ vocab_size = 352 }}
optim = {{ warmup = 2, ema = 0.5 }}
loss = {{ indexer_queries = 16 }}
[[stages]]
until = 0.5
select = false
[[stages]]
shares = ["two=3"]
length = 24
[data]
batch_tokens = 48
accumulate = 2
length = 32
held_out = 0.2
sources = [{{name = "one", path = "one.jsonl", kind = "jsonl"}}, {{name = "two", path = "two.jsonl", kind = "jsonl"}}]
[run]
steps = 8
threads = 1
save_every = 3
eval_every = 4
eval_tokens = 200
sample_every = 8
sample_tokens = 3
prompts = ["the"]
log_every = 4
"""
    file.write_text(text)
    return file


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "mfu")} for line in lines]


def command(recipe: Path, out: Path, *sets: str) -> list[str]:
    changes = [word for change in sets for word in ("--set", change)]
    return [sys.executable, "-m", "finback", "train", str(recipe), "--out", str(out), *changes]


def start(recipe: Path, out: Path, *sets: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    return subprocess.Popen(command(recipe, out, *sets), env=env, text=True, stdout=-1, stderr=-1)


def wait_for(condition, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)


def test_a_run_leaves_a_model_that_serves(recipe: Path, tmp_path: Path):
    """The folder of the weights, and every training checkpoint, load as they are, tokenizer and token map included; the
    loss went down; old checkpoints are gone; samples, held-out losses and the average are there."""
    folder = Trainer(read_recipe(recipe, ["run.steps=12", "run.save_every=5"]), tmp_path / "run").run()
    run = tmp_path / "run"
    assert folder == run / "model"
    steps = [m for m in metrics(run) if "loss" in m]
    assert [m["step"] for m in steps] == list(range(1, 13)) and all(m["tokens"] == 96 for m in steps)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-0000010", "step-0000012"]
    held = [m["held_out"] for m in metrics(run) if "held_out" in m]
    assert len(held) == 3 and set(held[0]) == {"one", "two"} and held[-1]["one"] < held[0]["one"]
    assert "step 12: 'the" in (run / "samples.txt").read_text()
    for place in (folder, run / "checkpoints" / "step-0000010", run / "model-ema"):
        assert LLM(place).generate("the fin", SamplingParams(max_tokens=2))[0].token_ids
    assert weights(folder) == weights(run / "checkpoints" / "step-0000012") != weights(run / "model-ema")


def test_resume_after_a_kill_equals_the_straight_run(recipe: Path, tmp_path: Path):
    """To the byte, weights and metrics: whatever is not saved (moments, order of the data, the mix, averages, router
    biases, random generators) shows up here. The kill falls between a checkpoint and the next step's end."""
    straight = tmp_path / "straight"
    Trainer(read_recipe(recipe), straight).run()
    broken = tmp_path / "broken"
    process = start(recipe, broken)
    wait_for(lambda: (broken / "checkpoints" / "step-0000003").exists(), process)
    process.kill()
    process.communicate()
    assert not (broken / "model").exists(), "the run ended before it was killed: give it more steps"
    Trainer(read_recipe(recipe), broken).run()
    assert weights(broken / "model") == weights(straight / "model")
    assert weights(broken / "model-ema") == weights(straight / "model-ema")
    assert metrics(broken) == metrics(straight)
    saved = [torch.load(d / "checkpoints" / "step-0000008" / "training.pt")["optimiser"] for d in (straight, broken)]
    assert saved[0].keys() == saved[1].keys() and all(torch.equal(v, saved[1][k]) for k, v in saved[0].items())


SLOW_DISK = """
import sys, time
from pathlib import Path
from finback.io import checkpoint_write
from finback.train import journal
from finback.train.recipe import read_recipe
from finback.train.trainer import Trainer

recipe, out = sys.argv[1:]
splice = checkpoint_write._splice

def slow(shard, metadata):
    if "step-0000006" in str(shard.payload):
        Path(out, "writing").touch()
        time.sleep(120)
    splice(shard, metadata)

checkpoint_write._splice = slow
Trainer(read_recipe(recipe, ["run.steps=9", "run.eval_every=0"]), out).run()
"""


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(recipe: Path, tmp_path: Path):
    """Training goes on while the disk is slow, so the kill comes late; half a checkpoint must never be taken for one,
    nor stay on the disk."""
    out = tmp_path / "run"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    arguments = [sys.executable, "-c", SLOW_DISK, str(recipe), str(out)]
    process = subprocess.Popen(arguments, env=env, text=True, stdout=-1, stderr=-1)
    wait_for(lambda: (out / "writing").exists() and metrics(out)[-1]["step"] > 6, process)
    process.kill()
    process.communicate()
    names = {p.name for p in (out / "checkpoints").iterdir()}
    assert "step-0000003" in names and "step-0000006" not in names and len(names) == 2
    again = Trainer(read_recipe(recipe), out)
    assert again.step == 3 and [p.name for p in (out / "checkpoints").iterdir()] == ["step-0000003"]
    assert metrics(out)[-1]["step"] == 3


def test_a_disk_that_fills_up_during_a_run_ends_it(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The write fails in the background: the run must hear of it at a next step, or at the end at the latest, and not
    report success."""
    splice = checkpoint_write._splice
    for step in ("0000006", "0000008"):

        def full(shard: Any, metadata: Any, step: str = step) -> None:
            if f"step-{step}" in str(shard.payload):
                raise OSError(28, "No space left on device")
            splice(shard, metadata)

        out = tmp_path / step
        monkeypatch.setattr(checkpoint_write, "_splice", full)
        trainer = Trainer(read_recipe(recipe, ["run.eval_every=0"]), out)
        with pytest.raises(CheckpointError, match=r"No space left.*last good checkpoint is .*step-000000[36]"):
            trainer.run()
        assert not (out / "model").exists() and trainer.checkpoints.latest() is not None


def test_saving_by_time(recipe: Path, tmp_path: Path):
    """Where nobody knows how long a step takes, losing at most so many minutes is what counts."""
    sets = ["run.steps=3", "run.save_every=0", "run.eval_every=0", "run.keep=9"]
    Trainer(read_recipe(recipe, [*sets, "run.save_minutes=1e-6"]), tmp_path / "often").run()
    assert len(list((tmp_path / "often" / "checkpoints").iterdir())) == 3
    Trainer(read_recipe(recipe, [*sets, "run.save_minutes=60"]), tmp_path / "never").run()
    assert not (tmp_path / "never" / "checkpoints").exists()


def test_a_run_that_is_too_slow_is_saved_and_ends(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ending without a checkpoint would throw away what was paid for."""
    monkeypatch.setattr(journal, "_WARM", 2)
    trainer = Trainer(read_recipe(recipe, ["run.min_tokens_per_second=1e9", "run.save_every=0"]), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"step 2: .* fewer than run\.min_tokens_per_second 1,000,000,000"):
        trainer.run()
    assert Trainer(read_recipe(recipe), tmp_path / "run").step == 2


def test_a_run_with_images(recipe: Path, tmp_path: Path):
    """From a chat with image files to a model that serves them: the tower and the image biases of the routers move, the
    patches are counted, and a resumed run gives the same weights to the bit."""
    lines = []
    for i in range(12):
        Image.new("RGB", (8, 8), (20 * i, 0, 200)).save(tmp_path / f"{i}.png")
        turns = [{"role": "user", "content": [{"type": "image"}, "the sea"]}, {"role": "assistant", "content": "dark"}]
        lines.append(json.dumps({"text": turns, "images": [f"{i}.png"]}))
    (tmp_path / "seen.jsonl").write_text("\n".join(lines))
    vision = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16,
              "patch_size": 4, "downsample_ratio": 2, "min_pixels": 0}  # fmt: skip
    sources = [
        {"name": name, "path": name + ".jsonl", "kind": kind} for name, kind in (("one", "jsonl"), ("seen", "chat"))
    ]
    sets = [f"model.vision_config={toml(vision)}", f"data.sources=[{', '.join(map(toml, sources))}]"]
    sets += ["stages=[{}]", "run.steps=4", "run.save_every=2", "run.sample_every=0"]
    straight = Trainer(read_recipe(recipe, sets), tmp_path / "a")
    before = {n: p.clone() for n, p in straight.model.named_parameters() if "vision" in n or "bias_vl" in n}
    folder = straight.run()
    assert all(m["patches"] > 0 for m in metrics(tmp_path / "a") if "loss" in m)
    still = [n for n, p in straight.model.named_parameters() if n in before and torch.equal(before[n], p)]
    assert before and not still
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-0000004")
    again = Trainer(read_recipe(recipe, sets), tmp_path / "b")
    assert again.step == 2
    assert weights(again.run()) == weights(folder)
    assert LLM(folder).generate("the sea", SamplingParams(max_tokens=2))[0].token_ids


def test_sigterm_saves_and_ends(recipe: Path, tmp_path: Path):
    """A cluster gives a job seconds before it is killed."""
    out = tmp_path / "run"
    process = start(recipe, out, "run.steps=500", "run.save_every=0")
    wait_for(lambda: (out / "metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "goes on from there" in errors, errors
    (saved,) = (out / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) == metrics(out)[-1]["step"] and str(saved) in output


def test_a_full_disk_keeps_the_last_good_checkpoint(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The new checkpoint is whole or not there, the error names the old one, and the run goes on from it."""
    trainer = Trainer(read_recipe(recipe), tmp_path / "run")
    for _ in range(2):
        trainer.advance()
    good = trainer.save()
    trainer.advance()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("finback.io.checkpoint_write._splice", full)
        with pytest.raises(CheckpointError, match=f"No space left.*last good checkpoint is {good}"):
            trainer.save()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == [good.name]
    assert Trainer(read_recipe(recipe), tmp_path / "run").step == 2


def test_a_loss_that_is_not_finite_stops_the_run(recipe: Path, tmp_path: Path):
    """Going on would overwrite good checkpoints with NaN."""
    trainer = Trainer(read_recipe(recipe), tmp_path / "run")
    with torch.no_grad():
        trainer.model.head.weight.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match=r"step 0.*not finite"):
        trainer.advance()


def test_accumulating_forwards_equals_one_forward(recipe: Path, tmp_path: Path):
    """Dividing each forward by its own targets weighs a forward with few of them too much."""
    sets = ["loss.balance=0", "loss.indexer=0", "optim.muon=false"]
    one = Trainer(read_recipe(recipe, [*sets, "data.accumulate=1", "data.batch_tokens=96"]), tmp_path / "a")
    two = Trainer(read_recipe(recipe, sets), tmp_path / "b")
    batches = [two.stream.next() for _ in range(2)]
    whole = type(batches[0])([c for b in batches for c in b.chunks], torch.cat([b.labels for b in batches]), {})
    stage, targets = two.recipe.stages[0], whole.targets()
    for batch in batches:
        two.objective(batch, stage, targets, 2).total.backward()
        two.optimiser.collect()
    one.objective(whole, stage, targets).total.backward()
    one.optimiser.collect()
    for a, b in zip(one.optimiser.parts, two.optimiser.parts, strict=True):
        if a.grad is not None:
            assert torch.allclose(a.grad, b.grad, atol=1e-5), a.name


def test_bfloat16_run_keeps_float32_masters_in_its_checkpoints(recipe: Path, tmp_path: Path):
    """Saving the bfloat16 copies would round the run at every restart."""
    trainer = Trainer(read_recipe(recipe, ["run.dtype=bfloat16", "run.recompute=true"]), tmp_path / "run")
    first = trainer.advance()["loss"]
    for _ in range(3):
        last = trainer.advance()["loss"]
    assert last < first
    stored = Checkpoint.open(trainer.save())
    again = Trainer(trainer.recipe, tmp_path / "run")
    for one, two in zip(trainer.optimiser.parts, again.optimiser.parts, strict=True):
        assert torch.equal(one.master, two.master), one.name
    assert stored.config["dtype"] == "bfloat16" and stored.tensors["embed.weight"].dtype == "F32"


def test_a_start_that_does_not_exist_is_named(tmp_path: Path, recipe: Path):
    """A draft recipe before its backbone was trained complained about a tokenizer."""
    with pytest.raises(ConfigError, match=r"there is no checkpoint at .*nowhere"):
        Trainer(read_recipe(recipe, ["init_from=nowhere"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_model_is_left_alone(tmp_path: Path, recipe: Path):
    """Going on in it ended in a list of all tensors whose shape differs."""
    Trainer(read_recipe(recipe), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"holds a run of another"):
        Trainer(read_recipe(recipe, ["model.text_config.hc_sinkhorn_iters=7"]), tmp_path / "run")
