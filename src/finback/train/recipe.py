"""Recipes: TOML files that say everything about a training run.

Sections: [model] (the keys of config.json; what follows from the tokenizer may be left out), [tokenizer], [data] with
[[data.sources]], [optim], [loss], [[stages]], [quant], [draft], [parallel], [run]. Every key is checked;
`override("a.b=c")` changes one.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finback.base.runtime import ConfigError, nearest
from finback.models.base import family, read_fields
from finback.parallel.world import ParallelConfig
from finback.train.draft import DraftConfig
from finback.train.optim import OptimConfig
from finback.train.quantise import QuantConfig
from finback.train.records import SourceConfig

LOGS = ("tensorboard", "wandb")


@dataclass(frozen=True)
class TokenizerConfig:
    """path: a tokenizer.json, or a folder that holds one. vocab_size: train one of that size on the sources instead,
    from at most `characters` characters of them. Neither: sources of token ids only."""

    path: str | None = None
    vocab_size: int | None = None
    characters: int = 20_000_000


@dataclass(frozen=True)
class DataConfig:
    """batch_tokens: of one forward. accumulate: forwards a step. length: most tokens of a sequence (stages may differ).
    held_out: share of the documents of every source that is kept for evaluation. cache: folder of tokenised sources,
    None = inside the run's folder."""

    sources: tuple[SourceConfig, ...]
    batch_tokens: int = 8192
    accumulate: int = 1
    length: int = 1024
    held_out: float = 0.005
    cache: str | None = None


@dataclass(frozen=True)
class LossConfig:
    """Weights of the terms beside the cross entropy. balance: sequence-wise router balance. mtp: multi-token heads.
    indexer: KL of indexers in stages with `indexer`, looked at in `indexer_queries` tokens a forward (0 = all)."""

    z: float = 1e-4
    balance: float = 1e-4
    mtp: float = 0.3
    indexer: float = 1.0
    indexer_queries: int = 1024


@dataclass(frozen=True)
class Stage:
    """A part of the run. until: the share of the steps at which it ends. length: most tokens of a sequence, None =
    data.length. select: attend to the indexers' picks; off = to every visible row. indexer: train indexers by the KL.
    bias_rate: step of the router biases (0 = frozen). shares: of the sources, by name; a name left out keeps its
    own."""

    until: float = 1.0
    length: int | None = None
    select: bool = True
    indexer: bool = True
    bias_rate: float = 1e-3
    shares: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunConfig:
    """steps, seed, device ("cpu", "cuda"), dtype of the arithmetic ("bfloat16" keeps float32 masters). recompute: redo
    each block in the backward pass instead of keeping its activations. threads: of the CPU, 0 = as torch decides. Every
    so many steps: save a checkpoint (the last `keep` are kept), evaluate on `eval_tokens` held-out tokens a source,
    print a sample of `sample_tokens` for each of `prompts`; 0 = never. save_minutes: save also after so many minutes,
    0 = never. log_every: steps between lines where no terminal shows a moving one. log: further places for the numbers
    of metrics.jsonl, of "tensorboard" and "wandb". min_tokens_per_second: a run that is slower, once under way, is
    saved and ended, 0 = none is."""

    steps: int
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    recompute: bool = False
    threads: int = 0
    save_every: int = 200
    keep: int = 2
    eval_every: int = 200
    eval_tokens: int = 20_000
    sample_every: int = 0
    sample_tokens: int = 48
    prompts: tuple[str, ...] = ()
    log_every: int = 10
    log: tuple[str, ...] = ()
    save_minutes: float = 0.0
    min_tokens_per_second: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """A whole run. model: keys of config.json. quant: train for, and write, a quantised checkpoint. init_from:
    checkpoint folder to start from instead of fresh weights. draft: train nothing but the draft stages, for the model
    in `init_from`, whose tokenizer is used; [loss] has no part in it, and of a stage `length`, `bias_rate` (of the
    drafts' routers) and `shares` have."""

    name: str
    data: DataConfig
    run: RunConfig
    model: dict[str, Any] = field(default_factory=dict)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    stages: tuple[Stage, ...] = (Stage(),)
    quant: QuantConfig | None = None
    draft: DraftConfig | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    init_from: str | None = None

    def stage_at(self, step: int) -> Stage:
        return next(s for s in self.stages if step < s.until * self.run.steps or s is self.stages[-1])

    def shares(self, stage: Stage) -> list[float]:
        """Share of every source in `stage`."""
        changed = dict(entry.split("=", 1) for entry in stage.shares)
        return [float(changed.get(s.name, s.share)) for s in self.data.sources]


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, with `overrides` ("run.steps=10") applied. Paths of sources and of the tokenizer are
    relative to the file. Raises ConfigError for anything unknown, missing or of the wrong type."""
    file = Path(path).expanduser()
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"recipe {file}: {error.strerror}; give a TOML file such as recipes/v41-1m.toml") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {file} is no TOML: {error}") from None
    for entry in overrides:
        override(given, entry)
    model = given.pop("model", None)
    recipe = read_fields(Recipe, given, f"recipe {file.name}")
    if not isinstance(model, dict):
        raise ConfigError(f"recipe {file.name}: missing section [model], with the keys of config.json")
    return _checked(_resolved(dataclasses.replace(recipe, model=model), file.parent))


def override(given: dict[str, Any], entry: str) -> None:
    """Apply "a.b=c" to a parsed recipe. c is TOML, or else plain text. The key must be one that a recipe has; inside
    [model] the family's config checks it. List entries go by number or, for sources, by name."""
    key, sign, text = entry.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {entry!r} is not of the form section.key=value, such as run.steps=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    parts = key.strip().split(".")
    _check_known(parts, entry)
    place: Any = given
    for part in parts[:-1]:
        place = _enter(place, part, entry)
    place[parts[-1]] = value


def _check_known(parts: list[str], entry: str) -> None:
    """ConfigError unless a recipe has a key with this path. Inside [model] anything goes."""
    cls: Any = Recipe
    remaining = iter(parts)
    for part in remaining:
        if not dataclasses.is_dataclass(cls):
            raise ConfigError(f"--set {entry!r}: {part!r} stands below a plain value")
        hints = typing.get_type_hints(cls)
        if part not in hints:
            raise ConfigError(f"--set {entry!r}: unknown key {part!r}{nearest(part, hints)}; known: {', '.join(hints)}")
        cls = hints[part]
        if typing.get_origin(cls) is dict:
            return
        section = next((t for t in typing.get_args(cls) if dataclasses.is_dataclass(t)), None)
        if section is not None:  # of a list of them, or one that may be left out
            if typing.get_origin(cls) is tuple:
                next(remaining, None)  # which entry of the list
            cls = section


def _enter(place: Any, part: str, entry: str) -> Any:
    """The part of a parsed recipe that is called `part`; entries of lists go by name or number."""
    if isinstance(place, dict):
        return place.setdefault(part, {})
    for i, item in enumerate(place):
        if part == str(i) or item.get("name") == part:
            return item
    names = [str(item.get("name", i)) for i, item in enumerate(place)]
    raise ConfigError(f"--set {entry!r}: there is no {part!r}{nearest(part, names)}; there are {', '.join(names)}")


def _resolved(recipe: Recipe, base: Path) -> Recipe:
    """Relative paths taken from the recipe's folder."""

    def absolute(path: str) -> str:
        return str((base / Path(path).expanduser()).resolve())

    sources = tuple(dataclasses.replace(s, path=absolute(s.path)) for s in recipe.data.sources)
    tokenizer = recipe.tokenizer
    if tokenizer.path is not None:
        tokenizer = dataclasses.replace(tokenizer, path=absolute(tokenizer.path))
    data = dataclasses.replace(recipe.data, sources=sources)
    start = None if recipe.init_from is None else absolute(recipe.init_from)
    if recipe.draft and start and not tokenizer.vocab_size and not tokenizer.path:
        found = Path(start) / "tokenizer.json"
        tokenizer = dataclasses.replace(tokenizer, path=start if found.is_file() else None)
    return dataclasses.replace(recipe, data=data, tokenizer=tokenizer, init_from=start)


def _checked(recipe: Recipe) -> Recipe:
    """`recipe` if its parts fit together, else ConfigError."""
    family(recipe.model)
    if recipe.model.get("quantization_config"):
        raise ConfigError("[model] has a quantization_config, but weights are trained plain; use the section [quant]")
    if recipe.run.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"run.dtype {recipe.run.dtype!r}; train in 'float32' or 'bfloat16'")
    if recipe.run.steps < 1:
        raise ConfigError(f"run.steps {recipe.run.steps} must be at least 1")
    for name in recipe.run.log:
        if name not in LOGS:
            raise ConfigError(f"run.log {name!r}{nearest(name, LOGS)}; known: {', '.join(LOGS)}")
    if recipe.tokenizer.path and recipe.tokenizer.vocab_size:
        raise ConfigError("tokenizer.path and tokenizer.vocab_size are both set; give one of them")
    if recipe.draft is not None:
        _check_draft(recipe)
    names = [s.name for s in recipe.data.sources]
    if len(set(names)) < len(names):
        raise ConfigError(f"data.sources: two sources have the same name ({', '.join(names)})")
    ends = [s.until for s in recipe.stages]
    if not recipe.stages or ends != sorted(ends) or ends[-1] < 1:
        raise ConfigError(f"stages must have ascending `until`, the last one 1; got {ends}")
    for entry in (e for s in recipe.stages for e in s.shares):
        name, _, share = entry.partition("=")
        if name not in names or not share.replace(".", "", 1).isdigit():
            raise ConfigError(f"stages.shares entry {entry!r}{nearest(name, names)}; write 'source=number'")
    return recipe


def _check_draft(recipe: Recipe) -> None:
    """ConfigError unless the recipe's other parts fit its [draft]."""
    text = recipe.model.get("text_config", {})
    if not (text.get("num_nextn_predict_layers") and text.get("dspark_block_size")):
        raise ConfigError(
            "[draft] trains draft stages, and [model] has none; a deepseek_v41 has num_nextn_predict_layers of them, "
            "described by the keys dspark_..."
        )
    if recipe.init_from is None:
        raise ConfigError("[draft] needs init_from: the checkpoint folder of the model that drafts are trained for")
    if recipe.tokenizer.vocab_size:
        raise ConfigError("tokenizer.vocab_size trains a new tokenizer, but with [draft] that of init_from is used")
    if not all(s.select for s in recipe.stages):
        raise ConfigError("stages.select = false has no use with [draft]: drafts are made for the model as it serves")
    if recipe.quant is not None and recipe.quant.start > 0:
        raise ConfigError(f"quant.start is {recipe.quant.start}; with [draft] the model is quantised from the start: 0")
