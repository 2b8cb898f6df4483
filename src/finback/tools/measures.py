"""What `finback eval mini` measures: one function or method a question, every result with its count."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from finback import kernels
from finback.engine.llm import LLM
from finback.engine.request import SamplingParams
from finback.io.chat import Chat
from finback.io.conversation import Answer, ChatOptions
from finback.models.deepseek_v41.attention import compressed_group
from finback.models.deepseek_v41.model import DeepseekV41
from finback.nn.rows import BatchRows, Chunk, ForwardBatch
from finback.nn.tape import Tape
from finback.train.families import routers
from finback.train.rendering import render
from finback.train.sources import Document
from finback.train.synth import Sample

_WATCHED = 64  # tokens of a text in which attention is looked at
_PYTHON = {"string": str, "integer": int, "boolean": bool, "array": list}


@dataclass(frozen=True)
class Rate:
    """right of count; skipped: samples that are longer than the model has positions, not in count."""

    right: int
    count: int
    skipped: int = 0

    @property
    def share(self) -> float | None:
        return self.right / self.count if self.count else None


@dataclass(frozen=True)
class Mean:
    """A mean over `count` things; None of nothing."""

    value: float | None
    count: int


@dataclass(frozen=True)
class Run:
    """Answers of one kind. tokens in seconds: generated. accepted: drafts accepted a verified block."""

    rate: Rate
    tokens: int
    seconds: float
    accepted: Mean


class Skills:
    """Questions with known answers, put to a model.

    llm: without prefix cache, so that no sample is helped by another. most: tokens of an answer.
    """

    def __init__(self, llm: LLM, chat: Chat, most: int):
        self.llm, self.chat, self.most = llm, chat, most

    def exact(self, samples: Iterable[Sample]) -> Run:
        """How many answers are exactly right. Greedy, in batches."""
        samples = list(samples)
        before, started = self._drafts(), time.perf_counter()
        found = self.answers(samples)
        seconds = time.perf_counter() - started
        given = [(s, a) for s, (a, _) in zip(samples, found, strict=True) if a is not None]
        right = sum(s.accepts(a) for s, a in given)
        rate = Rate(right, len(given), len(samples) - len(given))
        return Run(rate, sum(n for _, n in found), seconds, self._accepted(before))

    def answers(self, samples: Sequence[Sample]) -> list[tuple[Answer | None, int]]:
        """Answer and its tokens of each sample; None for one that does not fit the model."""
        prompts = [self.chat.render(s.prompt, s.tools, s.options).as_prompt() for s in samples]
        most = self.llm.engine.max_model_len
        fits = [len(p["prompt_token_ids"]) + self.most <= most for p in prompts]
        asked = [p for p, ok in zip(prompts, fits, strict=True) if ok]
        outputs = iter(self.llm.generate(asked, SamplingParams(max_tokens=self.most)) if asked else [])
        found: list[tuple[Answer | None, int]] = []
        for sample, ok in zip(samples, fits, strict=True):
            if not ok:
                found.append((None, 0))
                continue
            output = next(outputs)
            parser = self.chat.parser(sample.prompt, sample.tools, sample.options)
            answer = Answer().plus(parser.feed(output.token_ids, output.text))
            answer = answer.plus(parser.finish(truncated=output.finish_reason == "length"))
            found.append((answer, len(output.token_ids)))
        return found

    def constrained(self, samples: Iterable[Sample]) -> Rate:
        """How many answers follow their sample's JSON schema when the engine sees to it. Needs llguidance."""
        right = count = skipped = 0
        for sample in samples:
            plain = replace(sample, options=replace(sample.options, thinking=False))
            prompt = self.chat.render(plain.prompt, plain.tools, plain.options).as_prompt()
            if len(prompt["prompt_token_ids"]) + self.most > self.llm.engine.max_model_len:
                skipped += 1
                continue
            schema = plain.options.response_schema
            output = self.llm.generate(prompt, SamplingParams(max_tokens=self.most, json_schema=schema))[0]
            count += 1
            right += output.finish_reason == "stop" and _follows(output.text, schema)
        return Rate(right, count, skipped)

    def forced(self, samples: Iterable[Sample], *, compressed: bool) -> Rate:
        """How many answers would be exactly right, told from one forward over question and right answer: greedy
        decoding gives them if, and only if, each of their tokens is the likeliest after the ones before it.

        compressed: False replays a selection of no rows in every layer, which leaves the sliding window alone.
        """
        right = count = skipped = 0
        for sample in samples:
            ids = render(self.chat, sample.messages, sample.tools, sample.options).ids
            start = len(self.chat.render(sample.prompt, sample.tools, sample.options).token_ids)
            if len(ids) > self.llm.model.max_positions:
                skipped += 1
                continue
            logits = self.llm.score(ids, replay=None if compressed else _no_rows(self.llm.model, len(ids)))
            right += logits[start - 1 : -1].argmax(dim=1).tolist() == ids[start:]
            count += 1
        return Rate(right, count, skipped)

    def written(self, prompts: Sequence[Any], tokens: int) -> Mean:
        """Drafts accepted a block while each prompt (as `LLM.generate` takes it) is continued by `tokens`."""
        before = self._drafts()
        if prompts:
            self.llm.generate(list(prompts), SamplingParams(max_tokens=tokens))
        return self._accepted(before)

    def _drafts(self) -> tuple[int, int]:
        """(drafts accepted, blocks verified) so far."""
        stats = self.llm.stats
        return sum(stats.accepted), next(iter(stats.drafted), 0)

    def _accepted(self, before: tuple[int, int]) -> Mean:
        accepted, blocks = (now - then for now, then in zip(self._drafts(), before, strict=True))
        return Mean(accepted / blocks if blocks else None, blocks)


def _follows(text: str, schema: Any) -> bool:
    """Whether a text is a JSON object with the keys of a schema, no others, and values of their types."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    fields = schema["properties"]
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= set(value) <= set(fields)
        and all(type(value[key]) is _PYTHON[fields[key]["type"]] for key in value)
    )


def _no_rows(model: Any, length: int) -> dict[str, Tensor]:
    names = [name for name in model.choice_names() if name.endswith(".selected")]
    return {name: torch.full((length, 1), -1) for name in names}


def speed(llm: LLM, prompt: Any, tokens: int) -> Mean:
    """Tokens a second of one greedy request after the first token, prompt left out; the count is tokens."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for _ in llm.stream(prompt, replace(sampling, max_tokens=8)):  # what is made or measured once is not counted
        pass
    started, made = 0.0, 0
    for delta in llm.stream(prompt, sampling):
        if not started:
            started = time.perf_counter()
            continue
        made += len(delta.token_ids)
    seconds = time.perf_counter() - started
    return Mean(made / seconds if made else None, made)


def held_out(llm: LLM, documents: Iterable[Document], *, tokens: int, length: int) -> Mean:
    """Nats a learned token of documents without images, each cut at `length`, until `tokens` are scored."""
    total, count, scored = 0.0, 0, 0
    for document in documents:
        if scored >= tokens:
            break
        if document.pictures or len(document.ids) < 2:
            continue
        ids = document.ids[: min(length, llm.model.max_positions)].tolist()
        scored += len(ids)
        logits = llm.score(ids)[:-1]
        chosen = logits.log_softmax(dim=1).gather(1, torch.tensor(ids[1:], device=logits.device)[:, None])[:, 0]
        if document.learn is not None:
            chosen = chosen[torch.from_numpy(document.learn[1 : len(ids)]).to(chosen.device)]
        total -= float(chosen.double().sum())
        count += len(chosen)
    return Mean(total / count if count else None, count)


@contextmanager
def without_engram(model: Any) -> Generator[None]:
    """The model with its n-gram memories adding nothing."""
    memories = list(getattr(model, "engrams", {}).values())
    for memory in memories:
        memory.forward = lambda streams, *_: streams
    try:
        yield
    finally:
        for memory in memories:
            del memory.forward


@dataclass(frozen=True)
class Inside:
    """load: of each router, picks of the busiest expert against the mean, over `tokens` tokens. recall: of each indexer
    by its layer, the share of its layer's attention to all visible compressed rows that its picks get, the mean over
    tokens that see more rows than it may pick."""

    tokens: int
    load: dict[str, float]
    recall: dict[str, Mean]


def inside(llm: LLM, texts: Iterable[Sequence[int]]) -> Inside:
    """Expert load, and for DeepSeek-V4.1 the indexers' recall, over token ids."""
    counts: dict[str, Counter[int]] = {}
    masses: dict[str, list[float]] = {}
    model: Any = llm.model
    total = 0
    for ids in texts:
        total += len(ids)
        tape = Tape(record=True, terms=("indexer_kl",))
        batch = ForwardBatch([Chunk(list(ids))], device=next(model.parameters()).device, tape=tape)
        view = BatchRows(model.row_groups()).view(batch)
        with kernels.backend(llm.backend), torch.inference_mode(), _watched(model, masses):
            model(batch, view)
        for name, picked in tape.seen.items():
            if name.endswith(".experts"):
                counts.setdefault(name, Counter()).update(picked.flatten().tolist())
    load = {}
    for name, router in routers(model).items():
        if found := counts.get(f"{name}.experts"):
            load[name] = max(found.values()) / (sum(found.values()) / router.weight.shape[0])
    recall = {name: Mean(sum(m) / len(m) if m else None, len(m)) for name, m in masses.items()}
    return Inside(total, load, recall)


@contextmanager
def _watched(model: Any, masses: dict[str, list[float]]) -> Generator[None]:
    """While it lasts, what would teach an indexer only looks at how much attention its picks get."""
    blocks: list[Any] = list(model.layers) if isinstance(model, DeepseekV41) else []
    sources = [block.attn for block in blocks if block.attn.indexer is not None]

    def watch(attention: Any) -> Any:
        found = masses.setdefault(f"layer{attention.layer}", [])

        def look(x: Tensor, q: Tensor, qr: Tensor, scopes: list[Any], step: Any, share: Any) -> Tensor:
            found.extend(_shares(attention, q, scopes, step, share))
            return q.new_zeros(())

        return look

    for attention in sources:
        attention.indexer_kl = watch(attention)
    try:
        yield
    finally:
        for attention in sources:
            del attention.indexer_kl


def _shares(attention: Any, q: Tensor, scopes: list[tuple[Tensor, Tensor]], step: Any, share: Any) -> Iterator[float]:
    """Picked attention mass of all, of some tokens that see more rows than may be picked."""
    batch, ratio = step.batch, attention.ratio
    visible = torch.div(batch.positions + 1, ratio, rounding_mode="floor")
    binding = (visible > attention.c.index_topk).nonzero().flatten()
    if not len(binding):
        return
    chosen = binding[torch.linspace(0, len(binding) - 1, min(_WATCHED, len(binding))).long()]
    rows = torch.arange(int(visible.max()), device=q.device).expand(len(chosen), -1)
    rows = torch.where(rows < visible[chosen].unsqueeze(1), rows, -1)
    index = step.view.locate(compressed_group(ratio), batch.seq[chosen].unsqueeze(1), rows)
    everything = [(scopes[0][0], scopes[0][1][chosen]), (share.compressed, index)]
    mass = kernels.attention_mass(q[chosen], everything, attention.attn_sink, attention.c.head_dim**-0.5)[1]
    picks = share.rows[chosen]
    picked = mass.gather(1, picks.clamp(min=0)).masked_fill(picks < 0, 0).sum(dim=1)
    yield from (picked / mass.sum(dim=1).clamp(min=1e-30)).tolist()


def story_prompts(chat: Chat, samples: Iterable[Sample]) -> list[Any]:
    """Requests for stories as prompts, without thinking."""
    return [chat.render(s.prompt, options=ChatOptions(thinking=False)).as_prompt() for s in samples]
