"""One training run, on one device or on several processes: data in, checkpoints, metrics and samples out.

RUN/recipe.json       the recipe as it was run
RUN/metrics.jsonl     one object a step, and one a held-out evaluation
RUN/samples.txt       sample texts
RUN/checkpoints/      see state.py; starting again in the same folder goes on from the last one
RUN/model             the weights at the end; model-ema their average; model-quantised, where the recipe has [quant]
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import time
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finback.base.runtime import ConfigError, NonFiniteError, seed_everything
from finback.io.chat import ImageSizes
from finback.io.checkpoint import Checkpoint
from finback.io.text import compression_map
from finback.models.base import Model, compute_dtype, family
from finback.parallel.world import leave
from finback.train.data import Batch, Stream, held_out_batches
from finback.train.distributed import Mute, make_saver, meet
from finback.train.draft_run import PREFIX, DraftObjective, Frozen, check_backbone
from finback.train.estimate import Meter
from finback.train.families import head_weight
from finback.train.init import initialise
from finback.train.journal import Journal, trim_metrics
from finback.train.loss import token_loss, update_router_bias
from finback.train.objective import Objective, recompute_blocks
from finback.train.optim import Optimiser, schedule
from finback.train.progress import due
from finback.train.quantise import Quantiser
from finback.train.recipe import Recipe
from finback.train.sampling import continue_ids, evaluating
from finback.train.saving import Saver
from finback.train.shards import load_shards
from finback.train.sources import Corpus, cached
from finback.train.state import (
    SHARDS_FILE,
    Checkpoints,
    check_start,
    load_weights,
    read_state,
    save_weights,
    weight_tensors,
)
from finback.train.vocabulary import build_config, prepare_vocabulary
from finback.train.writers import check_writers


class Trainer:
    """Everything of one run. `run()` trains until the recipe's last step and returns the folder of the weights."""

    def __init__(self, recipe: Recipe, folder: str | Path):
        self.recipe, self.folder = recipe, Path(folder).expanduser()
        check_start(recipe, self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        run = recipe.run
        check_writers(recipe)
        if run.threads:
            torch.set_num_threads(run.threads)
        if run.dtype == "bfloat16":  # what stays float32 beside it may be multiplied on tensor cores
            torch.backends.cuda.matmul.allow_tf32 = True
        seed_everything(run.seed)
        self.world = meet(recipe)
        with self.world.first_goes_first():
            self.vocabulary = prepare_vocabulary(recipe, self.folder)
        self.config = build_config(recipe, self.vocabulary.tokenizer)
        if recipe.quant is not None:
            recipe.quant.served(self.config)  # sizes that cannot be quantised are told now, not after the training
        self.model: Any = self._model()
        self.whole: Any = self.model if self.world.size == 1 else self._blank()  # names and shapes of all of the model
        with self.world.first_goes_first():
            self.corpora = self._corpora()
        d = recipe.data
        named = [(s.name, c, s.share) for s, c in zip(d.sources, self.corpora, strict=True)]
        self.stream = Stream(named, tokens=d.batch_tokens, length=d.length, seed=run.seed, held_out=d.held_out)
        self.optimiser = Optimiser(self.model, recipe.optim)
        self.objective = (
            Objective(self.model, recipe.loss) if recipe.draft is None else DraftObjective(self.model, recipe.draft)
        )
        self.checkpoints = Checkpoints(self.folder / "checkpoints", run.keep)
        if self.world.first:
            self.checkpoints.sweep()
        self.step = 0
        self._stop = False
        self._resume()
        self.saver = make_saver(self.checkpoints, self.model, self.optimiser, self.world)
        quant = recipe.quant
        self.quantiser = None if quant is None else Quantiser(self.whole, self.config, quant, self.optimiser)
        self.frozen = None if recipe.draft is None else Frozen(self.model, self.optimiser)
        if run.recompute:
            recompute_blocks(self.model)

    def _model(self) -> Model:
        device = torch.device(self.recipe.run.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"run.device {self.recipe.run.device!r}: torch finds no CUDA GPU here; use 'cpu'")
        model = self._blank()
        model.to_empty(device=device)
        initialise(model, self.recipe.run.seed)
        tokenizer, sizes = self.vocabulary.tokenizer, model.token_map_sizes()
        if sizes is not None:
            vocab = sizes[1]
            found = torch.as_tensor(compression_map(tokenizer)) if tokenizer else torch.arange(vocab) % sizes[0]
            model.set_token_map(found)
        return model.train()

    def _blank(self) -> Model:
        """The model without values."""
        with torch.device("meta"):
            dtype = compute_dtype(self.recipe.run.dtype)
            return family(self.config).from_config(self.config, dtype=dtype, trainable=True)

    def _corpora(self) -> list[Corpus]:
        d = self.recipe.data
        cache = Path(d.cache).expanduser() if d.cache else self.folder / "cache"
        vocabulary = self.vocabulary.files.get("tokenizer.json", b"")
        sizes = None if self.model.image_facts() is None else ImageSizes.of(self.config)
        with ThreadPoolExecutor() as pool:  # tokenizers let other threads run
            read = partial(cached, tokenizer=self.vocabulary.tokenizer, vocabulary=vocabulary, cache=cache, sizes=sizes)
            found = list(pool.map(read, d.sources))
        for source, corpus in zip(d.sources, found, strict=True):
            if (top := int(corpus.ids.max())) >= self.model.vocab_size:
                raise ConfigError(
                    f"source {source.name}: token id {top}, but the model's vocabulary is {self.model.vocab_size}"
                )
        return found

    # -- resuming ------------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        last = self.world.from_first(self.checkpoints.latest())
        shards = last is not None and (last / SHARDS_FILE).is_file()
        start = last or (Path(self.recipe.init_from) if self.recipe.init_from else None)
        if start is not None and not shards:
            if self.recipe.draft is not None:
                check_backbone(Checkpoint.open(start).config, self.config, start)
            load_weights(self.model, start, self.optimiser, fresh=None if self.recipe.draft is None else PREFIX)
        if last is not None:
            state = read_state(last)
            self.step = state["step"]
            self.stream.set_shares(self.recipe.shares(self.recipe.stage_at(self.step - 1)))
            self.optimiser.load_state_dict(state.get("optimiser", {}))
            self.stream.load_state_dict(state["stream"])
            torch.set_rng_state(state["random"])
            if state.get("cuda_random") is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda_random"])
        if self.world.size > 1:
            from finback.train.dividing import distribute

            distribute(self.model, self.optimiser, self.world, self.recipe.parallel)
        if last is not None and shards:
            load_shards(last, self.model, self.optimiser)
        if not self.world.first:
            return
        trim_metrics(self.folder, self.step)
        recipe = json.dumps(dataclasses.asdict(self.recipe), indent=2, ensure_ascii=False)
        (self.folder / "recipe.json").write_text(recipe + "\n", encoding="utf-8")

    def save(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of the present step; wait False: in the background, once it is copied. Returns its folder.
        Raises the CheckpointError of the write before, and with `wait` of this one."""
        state = {
            "stream": self.stream.state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state() if self.objective.device.type == "cuda" else None,
        }
        if isinstance(self.saver, Saver):
            tensors = weight_tensors(self.model, self.optimiser.masters())
            if self.frozen is not None:
                self.frozen.check(tensors)
            moments = self.optimiser.state_dict()
            place = self.saver.save(self.step, tensors, moments, self.config, state, self.vocabulary.files)
        else:
            place = self.saver.save(self.step, self.config, state, self.vocabulary.files)
        if wait:
            self.saver.wait()
        return place

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> Path:
        """Train. SIGTERM ends the run after the present step, with a checkpoint; the same call goes on later."""
        run, meter = self.recipe.run, Meter(self.whole, self.recipe.run.device, compute_dtype(self.recipe.run.dtype))
        last_save = time.monotonic()
        make_journal = Journal if self.world.first else Mute
        with self._stopping(), make_journal(self.recipe, self.folder, self.step) as journal:
            if self.step:
                end = "and is done" if self.step >= run.steps else f"of {run.steps}; going on from there"
                journal.note(f"{self.folder} is at step {self.step} {end}")
            while self.step < run.steps:
                length = self.recipe.stage_at(self.step).length or self.recipe.data.length
                m = self.advance()
                if self.frozen is None:  # else the larger part of the work is a forward without its backward
                    seconds = m["seconds"] * self.world.size  # of all devices
                    m["mfu"] = meter.utilisation(m["tokens"], m.get("patches", 0), length, seconds)
                journal.step(m)
                self.saver.check()
                if due(self.step, run.eval_every, run.steps):
                    journal.held_out({"step": self.step, **self._held_out()})
                if due(self.step, run.sample_every, run.steps):
                    journal.sample(self.step, self.sample())
                timely = run.save_minutes > 0 and time.monotonic() - last_save >= 60 * run.save_minutes
                too_slow = journal.too_slow(self.step)
                timely, stop, slow = self.world.any(timely, self._stop, too_slow is not None)
                if due(self.step, run.save_every, run.steps) or timely or stop or slow:
                    self.save(wait=False)
                    last_save = time.monotonic()
                if slow or (stop and self.step < run.steps):
                    self.saver.wait()
                    if too_slow:
                        raise too_slow
                    journal.note(f"stopped after step {self.step}; the same command goes on from there")
                    leave(self.world)
                    return self.checkpoints.latest() or self.folder
            self.saver.wait()
        return self._finish()

    def advance(self) -> dict[str, Any]:
        """One optimiser step; returns its metrics."""
        recipe = self.recipe
        stage = recipe.stage_at(self.step)
        self.stream.set_shares(recipe.shares(stage))
        if self.quantiser is not None:
            self.quantiser.start_at(self.step, recipe.run.steps)
        started = time.perf_counter()
        forwards, batches = recipe.data.accumulate, self._batches(stage.length)
        facts = {"tokens": sum(len(b) for b in batches.values()), "patches": sum(b.patches() for b in batches.values())}
        facts["targets"] = sum(self.objective.targets(b) for b in batches.values())
        facts = {name: round(value) for name, value in self.world.totals(facts).items()}
        nats, terms, counts = 0.0, {}, {}
        for i, batch in batches.items():
            seed = (recipe.run.seed, self.step, i)
            result = self.objective(batch, stage, facts["targets"], forwards, seed)
            result.total.backward()
            self.optimiser.collect()
            nats += float(result.nats)
            _sum(terms, {k: float(v) / forwards for k, v in result.terms.items()})
            _sum(counts, result.counts)
        terms = self.world.totals({**terms, "loss": nats / max(facts["targets"], 1)})
        counts = {name: self.world.total(count) for name, count in counts.items()}
        loss = terms.pop("loss")
        norm = self.optimiser.step(self.step, recipe.run.steps)
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"step {self.step}: the gradient is not finite (loss {loss:.3f}), and nothing was changed. Lower "
                f"the rates in [optim] or warm up longer. The last checkpoint: {self.checkpoints.latest()}"
            )
        if self.quantiser is not None:
            self.quantiser.refresh()
        for name, count in counts.items():
            update_router_bias(self.objective.routers[name], count, stage.bias_rate)
        self.step += 1
        return {
            "step": self.step,
            "loss": loss,
            **terms,
            "gradient_norm": norm,
            "rate": schedule(recipe.optim, self.step - 1, recipe.run.steps),
            "load": _load(counts),
            "tokens": facts["tokens"],
            **({"patches": facts["patches"]} if facts["patches"] else {}),
            "seconds": time.perf_counter() - started,
        }

    def _batches(self, length: int | None) -> dict[int, Batch]:
        """The forwards of a step that this process makes, by number. All processes have the same stream, so the data of
        a step do not depend on how many they are."""
        found = {}
        for i in range(self.recipe.data.accumulate):
            if i % self.world.size == self.world.rank:
                found[i] = self.stream.next(length)
            else:
                self.stream.skip(length)
        return found

    def _held_out(self) -> dict[str, dict[str, float]]:
        """`evaluate`, and once more without rounding where weights are rounded: the gap is what rounding costs. Of a
        draft run, `DraftObjective.held_out`."""
        if isinstance(self.objective, DraftObjective):
            return self.objective.held_out(self._held_out_batches())
        found = {"held_out": self.evaluate()}
        if self.quantiser is not None and self.quantiser.on:
            with self.quantiser.lifted():
                found["held_out_unrounded"] = self.evaluate()
        return found

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean held-out nats a token, by source; sources without held-out documents are left out."""
        out = {}
        with evaluating(self.model):
            for source, batches in self._held_out_batches():
                nats, targets = 0.0, 0
                for batch, counts in self.world.share(batches):
                    packed = batch.forward_batch(self.objective.device, model=self.model)
                    hidden = self.model(packed, self.objective.rows.view(packed))
                    found = token_loss(hidden, head_weight(self.model), batch.labels.to(hidden.device))
                    if counts:
                        nats, targets = nats + float(found.nats), targets + found.targets
                sums = self.world.totals({"nats": nats, "targets": targets})
                if sums["targets"]:
                    out[source] = sums["nats"] / sums["targets"]
        return out

    def _held_out_batches(self) -> Iterator[tuple[str, Iterator[Batch]]]:
        """Name and held-out batches of every source."""
        d, limit = self.recipe.data, self.recipe.run.eval_tokens
        for source, corpus in zip(d.sources, self.corpora, strict=True):
            yield source.name, held_out_batches(corpus, d.held_out, tokens=d.batch_tokens, length=d.length, limit=limit)

    def sample(self) -> str:
        """Continuations of the recipe's prompts, as text; "" without prompts."""
        tokenizer, run = self.vocabulary.tokenizer, self.recipe.run
        if tokenizer is None or not run.prompts:
            return ""
        with evaluating(self.model):
            found = []
            for i, prompt in enumerate(run.prompts):
                ids = tokenizer.encode(prompt, add_bos=tokenizer.bos_id is not None)
                generator = torch.Generator().manual_seed(run.seed + i)
                out = continue_ids(self.model, ids, run.sample_tokens, 0.7, generator, stop=tokenizer.eos_ids)
                found.append(tokenizer.decode(out, skip_special=True))
        return "\n".join(f"step {self.step}: {line!r}" for line in found)

    def _finish(self) -> Path:
        if self.frozen is not None:
            self.frozen.check(weight_tensors(self.model, self.optimiser.masters()))
        found = {"model": self.optimiser.masters(), "model-ema": self.optimiser.averages()}
        if self.world.size > 1:
            from finback.train.dividing import gathered

            found = {name: gathered(self.whole, self.model, self.optimiser, values) for name, values in found.items()}
        for name, values in found.items():
            if values is not None and self.world.first:
                save_weights(self.folder / name, self.whole, self.config, values, self.vocabulary.files)
                if self.quantiser is not None:
                    self.quantiser.save(self.folder / f"{name}-quantised", values, self.vocabulary.files)
        self.world.wait()
        leave(self.world)
        return self.folder / "model"

    @contextmanager
    def _stopping(self) -> Generator[None]:
        """SIGTERM asks for a checkpoint and an end, in the main thread."""

        def stop(number: int, frame: Any) -> None:
            self._stop = True

        try:
            previous = signal.signal(signal.SIGTERM, stop)
        except ValueError:  # not the main thread: whoever runs it there has other means
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)


def _sum(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        total[name] = total[name] + value if name in total else value


def _load(counts: Mapping[str, Tensor]) -> float | None:
    """The busiest expert's picks against the mean, the worst of all routers; None without routers."""
    sums = [c.sum(dim=0).double() for c in counts.values()]
    return max((float(s.max() / s.mean()) for s in sums), default=None)
