"""What the DeepSeek-V4.1 tests share: tiny random models of any config, prompts with images, and feeding in any cut."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from finback.io.images import image_span
from finback.models.base import Model, family
from finback.nn.rows import BatchRows, Chunk, ForwardBatch, PagedRows, RowGroup, page_class
from finback.nn.tape import Tape
from finback.tools.fixtures import preset_config, random_tensor

Schedule = Sequence[Sequence[int]]  # one list a step: how many tokens each prompt is fed


@dataclass
class Prompt:
    """Token ids, and the embedding rows [n, D] of image spans by their first position."""

    ids: list[int]
    spans: dict[int, Tensor] = field(default_factory=dict)

    @property
    def types(self) -> list[int]:
        """Per token, 0 inside an image span and -1 outside."""
        inside = {at + i for at, rows in self.spans.items() for i in range(len(rows))}
        return [0 if i in inside else -1 for i in range(len(self.ids))]

    def chunk(self, start: int, n: int, **more: Any) -> Chunk:
        types = self.types
        context = [-1 if t >= 0 else i for i, t in zip(self.ids[:start], types[:start], strict=True)][-3:]
        return Chunk(self.ids[start : start + n], start, context, types[start : start + n], **more)

    def inserted(self, start: int, n: int) -> dict[int, Tensor]:
        """Image rows of positions start .. start + n - 1, by their place in the chunk."""
        flat = {at + i: row for at, rows in self.spans.items() for i, row in enumerate(rows)}
        return {at - start: row for at, row in flat.items() if start <= at < start + n}


def packed_batch(
    prompts: Sequence[Prompt], parts: Sequence[tuple[int, int]], chunks: Sequence[Chunk], tape: Tape | None
) -> ForwardBatch:
    """One forward of tokens `start .. start + n - 1` of every prompt; parts: (start, n) each."""
    places: list[int] = []
    rows: list[Tensor] = []
    offset = 0
    for prompt, (start, n) in zip(prompts, parts, strict=True):
        for at, row in prompt.inserted(start, n).items():
            places.append(offset + at)
            rows.append(row)
        offset += n
    inserted = (torch.tensor(places), torch.stack(rows)) if rows else None
    return ForwardBatch(chunks, inserted=inserted, tape=tape)


@dataclass
class Fed:
    """What feeding gave. logits: one [n, V] a prompt. seen: name -> one tensor a prompt, a line per token."""

    logits: list[Tensor]
    seen: dict[str, list[Tensor]]
    rows: dict[tuple[str, int, int], Tensor]  # (group, layer, prompt) -> rows that are still readable, oldest first


class Lab:
    """Models are cached and must not be changed; `copy_of` gives one that may be."""

    def __init__(self) -> None:
        self._config = preset_config("tiny-v41-plain")
        self._models: dict[str, Model] = {}

    def config(self, **text: Any) -> dict[str, Any]:
        """config.json of the plain tiny preset, with keys of text_config changed."""
        config = copy.deepcopy(self._config)
        config["text_config"].update(text)
        return config

    def model(self, dtype: str = "float64", **text: Any) -> Model:
        key = json.dumps([dtype, text], sort_keys=True)
        if key not in self._models:
            self._models[key] = self.build(self.config(**text), dtype).requires_grad_(False)
        return self._models[key]

    def copy_of(self, model: Model) -> Model:
        return copy.deepcopy(model)

    def build(self, config: Mapping[str, Any], dtype: str = "float64") -> Model:
        """A trainable model with the fixtures' random values and a token map in which ids share compressed ids."""
        model = family(config).from_config(config, dtype=getattr(torch, dtype), trainable=True)
        with torch.no_grad():
            for spec, out in model.weights():
                out.copy_(random_tensor(spec, 0))
        if (sizes := model.token_map_sizes()) is not None:
            model.set_token_map(torch.arange(sizes[1]) * 5 % sizes[0])
        return model

    def ids(self, n: int, seed: int = 0) -> list[int]:
        """n ids of ordinary text tokens; shorter lists are the beginnings of longer ones."""
        return torch.randint(8, 500, (256,), generator=torch.Generator().manual_seed(seed)).tolist()[:n]

    def picture(self, model: Model, grid_h: int, grid_w: int, seed: int = 0) -> Tensor:
        """Embedding rows of a random image's whole span."""
        patches = torch.randn(grid_h * grid_w, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
        rows = model.image_rows(patches, grid_h, grid_w)
        assert len(rows) == len(image_span(grid_h, grid_w, 3))
        return rows

    def illustrated(self, model: Model, *parts: int | Tensor, seed: int = 0) -> Prompt:
        """A prompt from its parts: a number of text tokens, or the rows of an image."""
        text = iter(self.ids(256, seed))
        prompt = Prompt([])
        for part in parts:
            if isinstance(part, Tensor):
                prompt.spans[len(prompt.ids)] = part
                prompt.ids += [self._config["image_token_id"]] * len(part)
            else:
                prompt.ids += [next(text) for _ in range(part)]
        return prompt

    def score(self, model: Model, prompts: Sequence[Prompt], tape: Tape | None = None) -> Tensor:
        """Logits [T, V] of whole prompts on `BatchRows`, differentiable."""
        parts = [(0, len(p.ids)) for p in prompts]
        batch = packed_batch(prompts, parts, [p.chunk(0, len(p.ids)) for p in prompts], tape)
        return model.logits(model(batch, BatchRows(model.row_groups()).view(batch)))

    @torch.no_grad()
    def feed(
        self,
        model: Model,
        prompts: Sequence[Prompt],
        schedule: Schedule | None = None,
        *,
        exact_from: Sequence[int] | None = None,
        replay: Mapping[str, Sequence[Tensor]] | None = None,
        fill: float = 0.0,
        trace: bool = False,
    ) -> Fed:
        """Feed prompts step by step through pages in shuffled places; a window group has as few pages as it can, so
        that old ones are overwritten. fill: what pages hold at first; page 0 belongs to nobody and stays zero, because
        an index of -1 reads row 0 (with weight 0). Logits are those at or after `exact_from`."""
        schedule = [[len(p.ids) for p in prompts]] if schedule is None else schedule
        assert [sum(column) for column in zip(*schedule, strict=True)] == [len(p.ids) for p in prompts]
        groups = list(model.row_groups())
        pages = _Pages(groups, prompts, max(max(step) for step in schedule))
        store = PagedRows(groups, pages.counts, page_tokens=pages.tokens, dtype=model.dtype)
        for (group, _), table in store.tables.items():
            table[pages.tokens // store.groups[group].stride :] = fill
        wanted = [0] * len(prompts) if exact_from is None else list(exact_from)
        done = [0] * len(prompts)
        logits: list[list[Tensor]] = [[] for _ in prompts]
        seen: dict[str, list[list[Tensor]]] = {}
        for step in schedule:
            parts = list(zip(done, step, strict=True))
            chunks = [
                p.chunk(at, n, pages=own, exact_from=first)
                for p, (at, n), own, first in zip(prompts, parts, pages.lists, wanted, strict=True)
            ]
            fixed = {
                name: torch.cat([line[at : at + n] for line, (at, n) in zip(lines, parts, strict=True)])
                for name, lines in (replay or {}).items()
            }
            tape = Tape(fixed, record=True, trace=trace)
            batch = packed_batch(prompts, parts, chunks, tape)
            view = store.view(batch)
            kept = [max(0, at + n - max(at, first)) for (at, n), first in zip(parts, wanted, strict=True)]
            for lines, out in zip(logits, model.logits(model(batch, view)).split(kept), strict=True):
                lines.append(out)
            if exact_from is None:
                for name, value in tape.seen.items():
                    own_lines = seen.setdefault(name, [[] for _ in prompts])
                    for lines, part in zip(own_lines, _padded(name, value, model).split(step), strict=True):
                        lines.append(part)
            done = [at + n for at, n in parts]
        return Fed(
            [torch.cat(lines) for lines in logits],
            {name: [torch.cat(lines) for lines in per_prompt] for name, per_prompt in seen.items()},
            pages.readable(store),
        )

    @staticmethod
    def choices(fed: Fed, prompt: int = 0) -> dict[str, list[list[int]]]:
        """Every discrete choice that was made for a prompt, in an order of its own."""
        names = [n for n in fed.seen if n.endswith((".selected", ".experts")) or n == "engram_hashes"]
        return {n: fed.seen[n][prompt].flatten(1).sort(dim=1).values.tolist() for n in names}


def _padded(name: str, value: Tensor, model: Model) -> Tensor:
    """Selections of a forward are as wide as its longest sequence asks for: fill them up with -1."""
    if not name.endswith(".selected"):
        return value
    width = min(model.config.text_config.index_topk, 256)
    return torch.nn.functional.pad(value, (0, width - value.shape[1]), value=-1)


class _Pages:
    """Shuffled page numbers of every prompt by class. A window's pages go round in a ring."""

    def __init__(self, groups: Sequence[RowGroup], prompts: Sequence[Prompt], longest_chunk: int):
        self.groups, self.lengths = groups, [len(p.ids) for p in prompts]
        self.tokens = 2 * math.lcm(*(g.stride for g in groups))
        generator = torch.Generator().manual_seed(5)
        self.counts: dict[str, int] = {}
        self.lists: list[dict[str, list[int]]] = [{} for _ in prompts]
        for cls, window in {page_class(g): g.window for g in groups}.items():
            rings = []
            for n in self.lengths:
                whole = -(-n // self.tokens)
                rings.append(
                    whole if window is None else min(whole, -(-(window - 1 + longest_chunk) // self.tokens) + 1)
                )
            self.counts[cls] = sum(rings) + 1
            places = (1 + torch.randperm(self.counts[cls] - 1, generator=generator)).tolist()
            for own, n, ring in zip(self.lists, self.lengths, rings, strict=True):
                mine = [places.pop() for _ in range(ring)]
                own[cls] = [mine[i % ring] for i in range(-(-n // self.tokens))]

    def readable(self, store: PagedRows) -> dict[tuple[str, int, int], Tensor]:
        found = {}
        for g in self.groups:
            per_page = self.tokens // g.stride
            for s, (n, own) in enumerate(zip(self.lengths, self.lists, strict=True)):
                rows = range(0 if g.window is None else max(0, n - g.window), n // g.stride)
                places = [own[page_class(g)][r // per_page] * per_page + r % per_page for r in rows]
                for layer in g.layers:
                    found[g.name, layer, s] = store.tables[g.name, layer][places].clone()
        return found


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()
