"""Where drafts come from: the model's own draft layers, or what followed the same tokens before.

The engine calls `observe` after every forward of the model and `propose` before the next one. Anchor: a request's last
known token, which the model has not run yet; slot i is for the i-th position after it.

How many drafts are verified. A drafter with a confidence head proposes as many as pay (budget.py). Under the rules
"standard" and "block" that choice may not look at the very drafts it is about (a slot would be left out because of the
token drawn for it, which shifts the distribution of the text). So there the number over the batch is chosen from the
acceptance measured so far; the confidences, each of which depends on drafts before its slot only, then say which slots.
Under "coupled" the text does not depend on drafts, and the number is chosen from the confidences themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from finback import kernels
from finback.base.runtime import ConfigError
from finback.engine.budget import Acceptance, CostTable, admit, choose_budget
from finback.engine.request import SpeculativeConfig
from finback.engine.sampler import key_tensor, race
from finback.engine.verify import Drafted, Picker
from finback.models.base import Drafter as DraftLayers
from finback.models.base import Proposal
from finback.models.deepseek_v41.dspark import DSpark
from finback.nn.rows import Chunk, ForwardBatch, PagedRows, RowView, page_class

NGRAM_TOKENS = 5  # drafts of an n-gram drafter that was not told how many


@dataclass(frozen=True)
class DraftRequest:
    """A request that drafts are wanted for. tokens: prompt and output, the anchor last; all before it have their rows
    in the store. pages: as in `Chunk`. limit: most drafts that can be of use (tokens still wanted after the next)."""

    picker: Picker
    tokens: Sequence[int]
    pages: Mapping[str, Sequence[int]]
    limit: int


class Drafter(Protocol):
    """max_tokens: most drafts of one request. acceptance: what became of them; the engine records it."""

    max_tokens: int
    acceptance: Acceptance

    def observe(self, result: Any, view: RowView) -> None:
        """Remember what drafting needs of a forward: what the model returned, and the row view it was given."""
        ...

    def propose(self, requests: Sequence[DraftRequest], *, other_tokens: int = 0) -> list[Drafted]:
        """Drafts for each request, at most its `limit`. other_tokens: prompt tokens that the same forward will run."""
        ...


def make_drafter(
    model: Any, store: PagedRows, config: SpeculativeConfig, *, backend: str = "auto"
) -> ModelDrafter | NgramDrafter | None:
    """The drafter that `config` asks for; None for "auto" on a model without draft layers. Raises ConfigError."""
    if config.method == "ngram":
        return NgramDrafter(config)
    layers = draft_layers(model)
    if layers is None:
        if config.method == "auto":
            return None
        raise ConfigError("this model has no draft layers; use method 'ngram', or no speculation")
    return ModelDrafter(model, layers, store, config, backend=backend)


def draft_layers(model: Any) -> DraftLayers | None:
    """The draft layers of a model, None for one without."""
    if isinstance(getattr(model, "mtp", None), DSpark):
        return DSparkLayers(model)
    return model.drafter() if hasattr(model, "drafter") else None


class DSparkLayers:
    """DeepSeek-V4.1's draft stages. See `finback.models.base.Drafter`; targets: what `DeepseekV41.backbone` returns."""

    lookback = 0

    def __init__(self, model: Any):
        self._model, self._mtp = model, model.mtp
        self.block_size: int = model.mtp.block_size

    def block_chunk(self, anchor: int) -> list[int]:
        return self._mtp.block_chunk(anchor)

    def observe(self, batch: ForwardBatch, view: RowView, targets: Any) -> None:
        if targets.main is not None:  # a chunk of a prompt that no wanted position reaches back to
            self._mtp.observe(targets.main, targets.main_view, self._model.window_freqs)

    def propose(
        self, batch: ForwardBatch, view: RowView, choose: Callable[[Tensor, int], Tensor] | None = None
    ) -> Proposal:
        block = self._mtp.run(self._model, batch, view)
        anchors = batch.ids.view(-1, self.block_size)[:, 0]
        return self._mtp.decide(block, anchors, choose)[0]


class ModelDrafter:
    """Drives a model's draft layers on the engine's row store.

    Greedy requests get the likeliest drafts, sampled ones drafts drawn at their temperature. With fewer drafts than
    the layers' block holds, its first ones are used. costs: as measured elsewhere; without (and before `measure`),
    and for layers without a confidence, every draft is verified. Raises ConfigError for more drafts than the block has.
    """

    def __init__(
        self,
        model: Any,
        layers: DraftLayers,
        store: PagedRows,
        config: SpeculativeConfig,
        *,
        backend: str = "auto",
        costs: CostTable | None = None,
    ):
        asked, block = config.num_speculative_tokens, layers.block_size
        if asked is not None and asked > block:
            raise ConfigError(
                f"num_speculative_tokens is {asked}, but this model drafts blocks of {block}; use 1..{block}"
            )
        assert layers.lookback == 0, "a draft block is given no earlier ids"
        self.max_tokens = asked or block
        self.acceptance = Acceptance()
        self._model, self._layers, self._store, self._config = model, layers, store, config
        self._backend, self._costs = backend, costs

    @torch.inference_mode()
    def observe(self, result: Any, view: RowView) -> None:
        """result: `DeepseekV41.backbone`'s return value, or the hidden states [T, D] of other families."""
        with kernels.backend(self._backend):
            self._layers.observe(view.batch, view, result)

    def propose(self, requests: Sequence[DraftRequest], *, other_tokens: int = 0) -> list[Drafted]:
        """See `Drafter`. One pass over the draft layers for all requests."""
        asking = [r for r in requests if r.limit > 0]
        if not asking:
            return [Drafted([]) for _ in requests]
        draws = _Draws([r.picker for r in asking], self.max_tokens)
        chunks = [Chunk(self._layers.block_chunk(r.tokens[-1]), len(r.tokens) - 1, pages=r.pages) for r in asking]
        proposal = self._run(chunks, draws)
        tokens = proposal.tokens[:, : self.max_tokens].tolist()
        confidence = None
        if proposal.confidence is not None:
            confidence = proposal.confidence[:, : self.max_tokens].tolist()
        limits = [min(r.limit, self.max_tokens) for r in asking]
        lengths = self._lengths(limits, confidence, len(requests), other_tokens)
        drafted = iter(
            Drafted(tokens[i][:n], draws.probs(i, n), confidence[i][:n] if confidence is not None else None)
            for i, n in enumerate(lengths)
        )
        return [next(drafted) if r.limit > 0 else Drafted([]) for r in requests]

    @torch.inference_mode()
    def _run(self, chunks: Sequence[Chunk], choose: Callable[[Tensor, int], Tensor] | None) -> Proposal:
        batch = ForwardBatch(chunks, device=next(self._model.parameters()).device)
        with kernels.backend(self._backend):
            return self._layers.propose(batch, self._store.view(batch), choose)

    def _lengths(
        self, limits: list[int], confidence: list[list[float]] | None, requests: int, prompt_tokens: int
    ) -> list[int]:
        """Drafts to verify of each request that asks for some; `requests` are decoded in all."""
        if confidence is None or self._costs is None or self._config.verify_length == "static":
            return limits
        survivals = [survival(line[:n]) for line, n in zip(confidence, limits, strict=True)]
        plan = survivals
        if self._config.rule != "coupled":
            plan = [self.acceptance.survival(n) for n in limits]
        chances = [chance for line in plan for chance in line]
        budget = choose_budget(requests, chances, requests + prompt_tokens, self._costs)
        return admit(survivals, budget)

    def measure(self, most_requests: int) -> CostTable:
        """Time the model and its draft layers on this machine for up to `most_requests` requests, and use the result
        from now on. Writes into the store's first pages: call it before the first request."""
        room = _page_count(self._store) * self._store.page_tokens
        most_tokens = min(room, most_requests * (1 + self.max_tokens))
        pages = {c: range(_page_count(self._store)) for c in _page_classes(self._store)}

        def verify(tokens: int) -> None:
            with kernels.backend(self._backend), torch.inference_mode():
                batch = ForwardBatch([Chunk([0] * tokens, pages=pages)], device=device)
                self._model.logits(self._model(batch, self._store.view(batch)))
            _wait(device)

        def draft(requests: int) -> None:
            self._run([Chunk(self._layers.block_chunk(0), 1, pages=pages)] * requests, None)
            _wait(device)

        device = next(self._model.parameters()).device
        self._costs = CostTable.measure(verify, draft, most_tokens=most_tokens, most_requests=most_requests)
        return self._costs


class _Draws:
    """Chooses drafts for a batch of requests, slot by slot, and keeps what they were drawn from where that matters."""

    def __init__(self, pickers: Sequence[Picker], count: int):
        self._pickers, self._count = pickers, count
        self._sampled = [i for i, p in enumerate(pickers) if not p.greedy]
        self._keys = [pickers[i].draft_keys(count) for i in self._sampled]
        self._temperatures = torch.tensor([pickers[i].params.temperature for i in self._sampled], dtype=torch.float64)
        self._kept: list[Tensor] = []

    def __call__(self, logits: Tensor, slot: int) -> Tensor:
        """logits [n, V] of slot `slot` -> [n] int64."""
        tokens = logits.argmax(dim=1)
        if not self._sampled or slot >= self._count:
            return tokens
        rows = torch.tensor(self._sampled, device=logits.device)
        lines = logits[rows].double() / self._temperatures.to(logits.device).unsqueeze(1)
        probs = torch.softmax(lines, dim=1)
        tokens[rows] = race(probs, key_tensor([keys[slot] for keys in self._keys]))
        if not all(self._pickers[i].coupled for i in self._sampled):
            self._kept.append(probs)
        return tokens

    def probs(self, request: int, count: int) -> Tensor | None:
        """[count, V] float64: what the request's drafts were drawn from. None where its rule compares tokens."""
        if self._pickers[request].coupled:
            return None
        row = self._sampled.index(request)
        return torch.stack([probs[row] for probs in self._kept[:count]]) if count else None


class NgramDrafter:
    """Looks up the last few tokens in what came before and proposes what followed, as if it went on in the same way.

    Of several places the longest match wins, then the latest. Works for any model and remembers nothing of forwards.
    """

    def __init__(self, config: SpeculativeConfig):
        self.max_tokens = config.num_speculative_tokens or NGRAM_TOKENS
        self.acceptance = Acceptance()
        self._low, self._high = config.prompt_lookup_min, config.prompt_lookup_max
        self._indices: WeakKeyDictionary[Picker, NgramIndex] = WeakKeyDictionary()

    def observe(self, result: Any, view: RowView) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest], *, other_tokens: int = 0) -> list[Drafted]:
        drafted = []
        for r in requests:
            index = self._indices.setdefault(r.picker, NgramIndex(self._low, self._high))
            drafted.append(Drafted(index.continuation(r.tokens, max(0, min(r.limit, self.max_tokens)))))
        return drafted


class NgramIndex:
    """Where each n-gram of one growing token list last ended, for n = low ... high."""

    def __init__(self, low: int, high: int):
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(high, low - 1, -1)}
        self._done = 0

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens that followed the longest earlier match of the list's end, or none. The list may have grown
        since the last call, nothing else."""
        for end in range(self._done + 1, len(tokens)):  # an n-gram at the very end is what we look for
            for n, ends in self._ends.items():
                if n <= end:
                    ends[tuple(tokens[end - n : end])] = end
        self._done = max(self._done, len(tokens) - 1)
        matches = (ends.get(tuple(tokens[-n:])) for n, ends in self._ends.items())
        start = next((end for end in matches if end is not None), None)
        if start is None:
            return []
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(count)]


def survival(confidence: Sequence[float]) -> list[float]:
    """Chance that each draft is accepted together with all before it."""
    chances, product = [], 1.0
    for c in confidence:
        product *= c
        chances.append(product)
    return chances


def _page_classes(store: PagedRows) -> list[str]:
    return sorted({page_class(group) for group in store.groups.values()})


def _page_count(store: PagedRows) -> int:
    """Pages that every class of the store has."""
    rows = [len(table) // (store.page_tokens // store.groups[name].stride) for (name, _), table in store.tables.items()]
    return min(rows)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
