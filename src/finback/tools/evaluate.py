"""`finback eval mini`: what a small model that was trained on this package's data can do, and how it does it.

Every figure is of test seeds, or of documents that a run with the same `held_out` share did not train on, and comes
with its count. The report is plain data, ready for JSON; `table` makes lines of it.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finback.base.runtime import ConfigError, RequestError
from finback.engine.llm import LLM
from finback.engine.request import SpeculativeConfig
from finback.io.chat import Chat, ImageSizes
from finback.tools.measures import Mean, Rate, Skills, held_out, inside, speed, story_prompts, without_engram
from finback.train.records import SourceConfig, records
from finback.train.sources import Document, cached, documents
from finback.train.synth import Sample
from finback.train.synth import documents as synthetic

KINDS = ("story_questions", "sum", "word_problem", "list", "tool", "json", "recall", "scene")
DISTANCES = ("recall_256", "recall_1k", "recall_4k")
_SEED_FREE = ("recall", "list")  # kinds without combinations that could be withheld
_DRAWN_SOURCE = "stories"


@dataclass(frozen=True)
class Settings:
    """count: samples of each kind (a fifth of it for the longest ones). seed: of the synthetic documents.
    answer_tokens: most tokens of an answer (right ones have up to 150) and of a text that drafts are tried on.
    speed_tokens: generated to take the time.

    files: (name, path) of JSON lines to take held-out nats of. share: of their documents that a run held out, as its
    `data.held_out` (1 = all of them). tokens: scored of each source. length: most tokens of a scored text. field: of
    the lines, the one with the text or the turns.
    """

    count: int = 200
    seed: int = 0
    answer_tokens: int = 256
    speed_tokens: int = 96
    files: tuple[tuple[str, str], ...] = ()
    share: float = 1.0
    tokens: int = 20_000
    length: int = 2048
    field: str = "text"

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("answer_tokens", 1), ("speed_tokens", 2), ("tokens", 1), ("length", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 < self.share <= 1:
            raise ConfigError(f"the held-out share {self.share} must be above 0 and at most 1")


def evaluate(
    load: Callable[..., LLM], settings: Settings, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """The report. load: makes the model, with the keywords of `LLM`; it is called again for the speeds. say: gets a
    section's lines as soon as it is done."""
    report: dict[str, Any] = {"settings": asdict(settings)}

    def add(name: str, section: dict[str, Any]) -> None:
        report[name] = _plain(section)
        say("\n".join(table(name, report[name])))

    # Static blocks: how many drafts are right must not depend on how busy the machine is.
    llm = load(draft=SpeculativeConfig(verify_length="static"), enable_prefix_caching=False)
    if llm.tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer.json, so it cannot be asked anything")
    chat = Chat.of(llm.config, llm.tokenizer)
    skills, sees = Skills(llm, chat, settings.answer_tokens), ImageSizes.of(llm.config) is not None
    add("exact", _exact(skills, settings, sees))
    add("recall", _distances(skills, settings))
    sources = _sources(llm, settings)
    add("held_out", _held_out(llm, sources, settings))
    add("inside", asdict(inside(llm, _texts(sources, settings))))
    if drafts := _drafts(skills, sources, settings):
        add("drafts", drafts)
    prompt = story_prompts(chat, _samples("story_chat", settings, 1))[0]
    add("speed", _speeds(load, llm, prompt, settings.speed_tokens))
    return report


def _samples(kind: str, settings: Settings, count: int, split: str = "test") -> Iterator[Sample]:
    return synthetic(kind, settings.seed, split, count)


def _exact(skills: Skills, settings: Settings, sees: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS if sees else KINDS[:-1]:
        for split in ("test",) if kind in _SEED_FREE else ("test", "withheld"):
            name = kind if split == "test" else f"{kind} (withheld)"
            found[name] = skills.exact(_samples(kind, settings, settings.count, split))
    if importlib.util.find_spec("llguidance") is not None:
        count = max(1, settings.count // 5)
        found["json (valid, constrained)"] = skills.constrained(_samples("json", settings, count))
    return found


def _distances(skills: Skills, settings: Settings) -> dict[str, Any]:
    found = {}
    for kind in DISTANCES:
        count = max(1, settings.count // (5 if kind == DISTANCES[-1] else 1))
        samples = list(_samples(kind, settings, count))
        found[kind] = {
            "sparse": skills.forced(samples, compressed=True),
            "window alone": skills.forced(samples, compressed=False),
        }
    return found


def _sources(llm: LLM, settings: Settings) -> dict[str, list[Document]]:
    """Held-out documents by source, enough of them: stories of test seeds, and the files."""
    assert llm.tokenizer is not None
    tokenizer, sizes = llm.tokenizer, ImageSizes.of(llm.config)
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    with tempfile.TemporaryDirectory() as scratch:
        found = {_DRAWN_SOURCE: _taken(_stories(llm, settings, bos), settings)}
        for name, path in settings.files:
            source = SourceConfig(name, path, "jsonl", field=settings.field)
            if (first := next(records(source), None)) is None:
                raise ConfigError(f"{path} holds no documents")
            if isinstance(first.content, list):
                source = SourceConfig(name, path, "chat", field=settings.field)
            if settings.share == 1:
                found[name] = _taken(documents(source, tokenizer, sizes), settings)
                continue
            corpus = cached(source, tokenizer, b"", Path(scratch), sizes)
            found[name] = _taken(map(corpus.document, corpus.held_out(settings.share).nonzero()[0].tolist()), settings)
    return found


def _stories(llm: LLM, settings: Settings, bos: list[int]) -> Iterator[Document]:
    assert llm.tokenizer is not None
    for sample in synthetic("story", settings.seed, "test"):
        yield Document(np.asarray([*bos, *llm.tokenizer.encode(sample.text), *llm.tokenizer.eos_ids[:1]]))


def _taken(found: Iterable[Document], settings: Settings) -> list[Document]:
    kept, tokens = [], 0
    for document in found:
        kept.append(document)
        tokens += min(len(document.ids), settings.length)
        if tokens >= settings.tokens:
            break
    return kept


def _held_out(llm: LLM, sources: dict[str, list[Document]], settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model: Any = llm.model
    for name, kept in sources.items():
        nats = held_out(llm, kept, tokens=settings.tokens, length=settings.length)
        found[name] = {"nats": nats}
        if len(getattr(model, "engrams", ())):
            with without_engram(model):
                found[name]["without engram"] = held_out(llm, kept, tokens=settings.tokens, length=settings.length)
    return found


def _texts(sources: dict[str, list[Document]], settings: Settings) -> Iterator[Sequence[int]]:
    """One long text of each source: documents without images one after the other."""
    for kept in sources.values():
        ids = [i for document in kept if not document.pictures for i in document.ids.tolist()]
        if ids:
            yield ids[: settings.length]


def _drafts(skills: Skills, sources: dict[str, list[Document]], settings: Settings) -> dict[str, Mean]:
    """Accepted drafts a block in free text; {} for a model without drafts."""
    few = min(8, settings.count)
    found = {"story_chat": skills.written(story_prompts(skills.chat, _samples("story_chat", settings, few)),
                                          settings.answer_tokens)}  # fmt: skip
    if not found["story_chat"].count:
        return {}
    for name, kept in sources.items():
        starts = [d.ids[:64].tolist() for d in kept if d.learn is None][:few]
        if starts:
            found[f"{name} (continued)"] = skills.written(starts, settings.answer_tokens)
    return found


def _speeds(load: Callable[..., LLM], llm: LLM, prompt: Any, tokens: int) -> dict[str, Mean]:
    """Tokens a second at batch 1, without drafts and with them as they are served."""
    found = {"without drafts": speed(load(draft=None, enable_prefix_caching=False), prompt, tokens)}
    if llm.stats.drafted:
        found["with drafts"] = speed(load(enable_prefix_caching=False), prompt, tokens)
    return found


def _plain(value: Any) -> Any:
    """Dataclasses as dicts; a `Rate` with its share."""
    if isinstance(value, Rate):
        return {**asdict(value), "share": value.share}
    if is_dataclass(value):
        return {name: _plain(part) for name, part in vars(value).items()}
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value


# -- lines -------------------------------------------------------------------------------------------------------------


def table(name: str, section: dict[str, Any]) -> list[str]:
    """A section of the report as lines for people."""
    lines = [name.replace("_", " ")]
    for row, value in section.items():
        if name == "inside":
            lines += [f"  {row}: {value}"] if row == "tokens" else [_line(f"{row} {k}", v) for k, v in value.items()]
        else:
            lines.append(_line(row, value))
    return lines


def _line(row: str, value: Any) -> str:
    return f"  {row:28} {_shown(value)}"


def _shown(value: Any) -> str:
    if not isinstance(value, dict):
        return f"{value:.2f}"
    if "share" in value:
        skipped = f", {value['skipped']} too long" if value["skipped"] else ""
        return "-" + skipped if value["share"] is None else _rate(value) + skipped
    if set(value) == {"value", "count"}:
        return "-" if value["value"] is None else f"{value['value']:.3f} (of {value['count']})"
    if "rate" in value:
        pace = value["tokens"] / value["seconds"] if value["seconds"] else math.nan
        drafts = "" if value["accepted"]["value"] is None else f"  accepted {_shown(value['accepted'])}"
        return f"{_shown(value['rate'])}  {pace:.0f} tok/s{drafts}"
    return "  ".join(f"{name}: {_shown(part)}" for name, part in value.items())


def _rate(value: dict[str, Any]) -> str:
    return f"{100 * value['share']:5.1f}% ({value['right']} of {value['count']})"
