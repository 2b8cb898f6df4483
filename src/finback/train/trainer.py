"""One training run on one device: data in, checkpoints, metrics and samples out.

RUN/recipe.json       the recipe as it was run
RUN/metrics.jsonl     one object a step, and one a held-out evaluation
RUN/samples.txt       sample texts
RUN/checkpoints/      see state.py; starting again in the same folder goes on from the last one
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finback.base.runtime import CheckpointError, ConfigError, NonFiniteError, logger, seed_everything
from finback.io.text import Tokenizer, compression_map
from finback.models.base import Model, compute_dtype, family
from finback.nn.rows import BatchRows, Chunk, ForwardBatch
from finback.train.data import Stream, held_out_batches
from finback.train.families import family_of, head_weight
from finback.train.init import initialise
from finback.train.loss import token_loss, update_router_bias
from finback.train.objective import Objective, recompute_blocks
from finback.train.optim import Optimiser, schedule
from finback.train.recipe import Recipe
from finback.train.sources import Corpus, cached, texts
from finback.train.state import Checkpoints, load_weights, read_state, save_weights
from finback.train.tokenizer import BOS, EOS, PAD, tokenizer_files, train_tokenizer


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a run and its files; both empty for a run on token ids."""

    tokenizer: Tokenizer | None
    files: dict[str, bytes]


def prepare_vocabulary(recipe: Recipe, folder: Path) -> Vocabulary:
    """The recipe's tokenizer: read, or trained on the sources once and kept in the run's folder."""
    c = recipe.tokenizer
    path = folder / "tokenizer.json" if c.vocab_size else c.path and Path(c.path)
    if not path:
        return Vocabulary(None, {})
    if c.vocab_size and not path.is_file():
        files = tokenizer_files(train_tokenizer(_some_texts(recipe), c.vocab_size))
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in reversed(files.items()):
            (folder / name).write_bytes(content)
    tokenizer = Tokenizer.load(path)
    place = path if path.is_dir() else path.parent
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "token_map.json")
    return Vocabulary(tokenizer, {name: (place / name).read_bytes() for name in names if (place / name).is_file()})


def _some_texts(recipe: Recipe) -> Iterator[str]:
    """Texts of all sources up to the recipe's number of characters, each source by its share."""
    total = sum(s.share for s in recipe.data.sources)
    for source in recipe.data.sources:
        room = recipe.tokenizer.characters * source.share / total
        for text in texts(source):
            if room <= 0:
                break
            yield text
            room -= len(text)


def build_config(recipe: Recipe, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """config.json of the run: the recipe's [model] with what follows from the tokenizer."""
    config = json.loads(json.dumps(recipe.model))
    family_of(config["model_type"]).complete(config, tokenizer)
    config["dtype"] = recipe.run.dtype
    for name, token in (("bos_token_id", BOS), ("eos_token_id", EOS), ("pad_token_id", PAD)):
        if tokenizer is not None and (found := tokenizer.token_to_id(token)) is not None:
            config.setdefault(name, found)
    return config


class Trainer:
    """Everything of one run. `run()` trains until the recipe's last step and returns the folder of the weights."""

    def __init__(self, recipe: Recipe, folder: str | Path):
        self.recipe, self.folder = recipe, Path(folder).expanduser()
        self.folder.mkdir(parents=True, exist_ok=True)
        run = recipe.run
        if run.threads:
            torch.set_num_threads(run.threads)
        seed_everything(run.seed)
        self.vocabulary = prepare_vocabulary(recipe, self.folder)
        self.config = build_config(recipe, self.vocabulary.tokenizer)
        self.model: Any = self._model()
        self.corpora = self._corpora()
        d = recipe.data
        named = [(s.name, c, s.share) for s, c in zip(d.sources, self.corpora, strict=True)]
        self.stream = Stream(named, tokens=d.batch_tokens, length=d.length, seed=run.seed, held_out=d.held_out)
        self.optimiser = Optimiser(self.model, recipe.optim)
        self.objective = Objective(self.model, recipe.loss)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", run.keep)
        self.step = 0
        self._stop = False
        self._resume()
        if run.recompute:
            recompute_blocks(self.model)

    def _model(self) -> Model:
        device = torch.device(self.recipe.run.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"run.device {self.recipe.run.device!r}: torch finds no CUDA GPU here; use 'cpu'")
        dtype = compute_dtype(self.recipe.run.dtype)
        with torch.device("meta"):
            model = family(self.config).from_config(self.config, dtype=dtype, trainable=True)
        model.to_empty(device=device)
        initialise(model, self.recipe.run.seed)
        tokenizer, sizes = self.vocabulary.tokenizer, model.token_map_sizes()
        if sizes is not None:
            vocab = sizes[1]
            model.set_token_map(compression_map(tokenizer) if tokenizer else torch.arange(vocab) % sizes[0])
        return model.train()

    def _corpora(self) -> list[Corpus]:
        d = self.recipe.data
        cache = Path(d.cache).expanduser() if d.cache else self.folder / "cache"
        vocabulary = self.vocabulary.files.get("tokenizer.json", b"")
        found = [cached(s, self.vocabulary.tokenizer, vocabulary, cache) for s in d.sources]
        for source, corpus in zip(d.sources, found, strict=True):
            if (top := int(corpus.ids.max())) >= self.model.vocab_size:
                raise ConfigError(
                    f"source {source.name}: token id {top}, but the model's vocabulary is {self.model.vocab_size}"
                )
        return found

    # -- resuming ------------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        last = self.checkpoints.latest()
        start = last or (Path(self.recipe.init_from) if self.recipe.init_from else None)
        if start is not None:
            load_weights(self.model, start, self.optimiser)
        if last is not None:
            state = read_state(last)
            self.step = state["step"]
            self.stream.set_shares(self.recipe.shares(self.recipe.stage_at(self.step - 1)))
            self.optimiser.load_state_dict(state["optimiser"])
            self.stream.load_state_dict(state["stream"])
            torch.set_rng_state(state["random"])
            if state.get("cuda_random") is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda_random"])
            logger.info("resuming from %s", last)
        self._trim_metrics()
        recipe = json.dumps(dataclasses.asdict(self.recipe), indent=2, ensure_ascii=False)
        (self.folder / "recipe.json").write_text(recipe + "\n", encoding="utf-8")

    def _trim_metrics(self) -> None:
        """Forget what an interrupted run wrote after its last checkpoint: those steps come again."""
        file = self.folder / "metrics.jsonl"
        if file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step]
            file.write_text("".join(kept), encoding="utf-8")

    def save(self) -> Path:
        """Write a checkpoint of the present step."""
        state = {
            "stream": self.stream.state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state() if self.objective.device.type == "cuda" else None,
        }
        return self.checkpoints.save(self.step, self.model, self.config, self.optimiser, state, self.vocabulary.files)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> Path:
        """Train. SIGTERM ends the run after the present step, with a checkpoint; the same call goes on later."""
        run, progress = self.recipe.run, Progress(self.recipe, self.step)
        with self._stopping():
            while self.step < run.steps:
                metrics = self.advance()
                progress.show(metrics)
                self._write(metrics)
                if _due(self.step, run.eval_every, run.steps):
                    progress.note(self._write({"step": self.step, "held_out": self.evaluate()}))
                if _due(self.step, run.sample_every, run.steps):
                    progress.note(self.sample())
                saved = _due(self.step, run.save_every, run.steps)
                if saved or self._stop:
                    self.save()
                if self._stop and self.step < run.steps:
                    progress.note(f"stopped after step {self.step}; the same command goes on from there")
                    return self.checkpoints.latest() or self.folder
        return self._finish()

    def advance(self) -> dict[str, Any]:
        """One optimiser step; returns its metrics."""
        recipe = self.recipe
        stage = recipe.stage_at(self.step)
        self.stream.set_shares(recipe.shares(stage))
        started = time.perf_counter()
        batches = [self.stream.next(stage.length) for _ in range(recipe.data.accumulate)]
        targets = sum(b.targets() for b in batches)
        nats, terms, counts = 0.0, {}, {}
        for i, batch in enumerate(batches):
            seed = (recipe.run.seed, self.step, i)
            result = self.objective(batch, stage, targets, len(batches), seed)
            result.total.backward()
            self.optimiser.collect()
            nats += float(result.nats)
            _sum(terms, {k: float(v) / len(batches) for k, v in result.terms.items()})
            _sum(counts, result.counts)
        norm = self.optimiser.step(self.step, recipe.run.steps)
        if not math.isfinite(norm):
            loss = nats / max(targets, 1)
            raise NonFiniteError(
                f"step {self.step}: the gradient is not finite (loss {loss:.3f}), and nothing was changed. Lower "
                f"the rates in [optim] or warm up longer. The last checkpoint: {self.checkpoints.latest()}"
            )
        for name, router in self.objective.routers.items():
            update_router_bias(router, counts[name], stage.bias_rate)
        self.step += 1
        tokens = sum(len(b) for b in batches)
        return {
            "step": self.step,
            "loss": nats / max(targets, 1),
            **terms,
            "gradient_norm": norm,
            "rate": schedule(recipe.optim, self.step - 1, recipe.run.steps),
            "load": _load(counts),
            "tokens": tokens,
            "seconds": time.perf_counter() - started,
        }

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean held-out nats a token, by source; sources without held-out documents are left out."""
        recipe, out = self.recipe, {}
        d, weight = recipe.data, head_weight(self.model)
        with _evaluating(self.model):
            for source, corpus in zip(d.sources, self.corpora, strict=True):
                batches = held_out_batches(
                    corpus, d.held_out, tokens=d.batch_tokens, length=d.length, limit=recipe.run.eval_tokens
                )
                nats, targets = 0.0, 0
                for batch in batches:
                    packed = batch.forward_batch(self.objective.device)
                    hidden = self.model(packed, self.objective.rows.view(packed))
                    found = token_loss(hidden, weight, batch.labels.to(hidden.device))
                    nats, targets = nats + float(found.nats), targets + found.targets
                if targets:
                    out[source.name] = nats / targets
        return out

    def sample(self) -> str:
        """Continuations of the recipe's prompts, as text; also appended to samples.txt."""
        tokenizer, run = self.vocabulary.tokenizer, self.recipe.run
        if tokenizer is None or not run.prompts:
            return ""
        with _evaluating(self.model):
            found = []
            for i, prompt in enumerate(run.prompts):
                ids = tokenizer.encode(prompt, add_bos=tokenizer.bos_id is not None)
                generator = torch.Generator().manual_seed(run.seed + i)
                out = continue_ids(self.model, ids, run.sample_tokens, 0.7, generator, stop=tokenizer.eos_ids)
                found.append(tokenizer.decode(out, skip_special=True))
        text = "\n".join(f"step {self.step}: {line!r}" for line in found)
        with (self.folder / "samples.txt").open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        return text

    def _finish(self) -> Path:
        target = self.folder / "model"
        save_weights(target, self.model, self.config, self.optimiser.masters(), self.vocabulary.files)
        if (averages := self.optimiser.averages()) is not None:
            save_weights(self.folder / "model-ema", self.model, self.config, averages, self.vocabulary.files)
        return target

    def _write(self, metrics: Mapping[str, Any]) -> str:
        line = json.dumps(metrics)
        try:
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            last = self.checkpoints.latest()
            raise CheckpointError(
                f"{self.folder}: metrics cannot be written ({error.strerror}); resume from {last}"
            ) from error
        return line

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


@torch.no_grad()
def continue_ids(
    model: Any, ids: list[int], count: int, temperature: float, generator: torch.Generator, stop: tuple[int, ...] = ()
) -> list[int]:
    """ids and up to `count` sampled tokens, by whole forwards: for a glance while training, not for serving."""
    rows, device = BatchRows(model.row_groups()), next(model.parameters()).device
    ids = list(ids)
    for _ in range(min(count, model.max_positions - len(ids))):
        batch = ForwardBatch([Chunk(ids)], device=device)
        logits = model.logits(model(batch, rows.view(batch))[-1:])[0].float().cpu()
        token = int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
        if token in stop:
            break
        ids.append(token)
    return ids


@contextmanager
def _evaluating(model: Any) -> Generator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def _due(step: int, every: int, steps: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens after `step`."""
    return every > 0 and (step % every == 0 or step == steps)


def _sum(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        total[name] = total[name] + value if name in total else value


def _load(counts: Mapping[str, Tensor]) -> float | None:
    """The busiest expert's picks against the mean, the worst of all routers; None without routers."""
    sums = [c.sum(dim=0).double() for c in counts.values()]
    return max((float(s.max() / s.mean()) for s in sums), default=None)


class Progress:
    """A line on stderr: a moving one on a terminal, else one every `log_every` steps."""

    def __init__(self, recipe: Recipe, step: int):
        self.recipe = recipe
        self.moving = sys.stderr.isatty()
        self.pace: float | None = None

    def show(self, metrics: Mapping[str, Any]) -> None:
        run, step = self.recipe.run, metrics["step"]
        speed = metrics["tokens"] / metrics["seconds"]
        self.pace = speed if self.pace is None else 0.9 * self.pace + 0.1 * speed
        left = (run.steps - step) * metrics["tokens"] / self.pace
        line = f"step {step}/{run.steps}  loss {metrics['loss']:.3f}"
        for name in ("indexer", "balance", "mtp"):
            line += f"  {name} {metrics[name]:.3f}" if name in metrics else ""
        line += f"  norm {metrics['gradient_norm']:.2f}  rate {metrics['rate']:.2f}  {self.pace:,.0f} tok/s"
        line += f"  {_duration(left)} left"
        if self.moving:
            print(f"\r\x1b[K{line}", end="\n" if step == run.steps else "", file=sys.stderr, flush=True)
        elif _due(step, run.log_every, run.steps):
            print(line, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        if text:
            print(("\r\x1b[K" if self.moving else "") + text, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
