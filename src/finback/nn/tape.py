"""Recording and replaying what a forward decided or computed.

A forward makes discrete choices (which rows to attend to, which experts to use). Two implementations that round
differently flip near ties, and everything after a flip differs. A `Tape` records those choices, or feeds given ones
back (replay), so that the rest can be compared. With `trace` it also keeps the tensors that layers note along the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from finback.base.runtime import NonFiniteError


class Tape:
    """replay: name -> choices of this batch's tokens, used instead of computing them. record: keep choices in `.seen`.
    trace: keep noted tensors there too. Names: "layer3.selected", "layer3.experts", "layer3.stream", ...

    For training, terms: kinds of tensors to keep in `.kept` with their gradient, for losses beside the logits'
    ("router_scores", "indexer_kl"). queries: [n] int64, the tokens that indexers are taught on, None = all. once: a
    name is decided once, so that a layer which runs again in the backward pass neither decides again nor differently.
    """

    def __init__(
        self,
        replay: Mapping[str, Tensor] | None = None,
        *,
        record: bool = False,
        trace: bool = False,
        terms: Collection[str] = (),
        queries: Tensor | None = None,
        once: bool = False,
    ):
        self.replay = replay or {}
        self.record = record or trace or once
        self.once = once
        self.trace = trace
        self.terms, self.queries = terms, queries
        self.seen: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}

    def choose(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """The replayed choice of that name if there is one, else what `compute()` returns. A NonFiniteError in it gets
        the name."""
        choice = self.replay.get(name)
        if choice is None and self.once:
            choice = self.seen.get(name)
        if choice is None:
            try:
                choice = compute()
            except NonFiniteError as error:
                raise NonFiniteError(f"{name}: {error}") from None
        if self.record:
            self.seen[name] = choice
        return choice

    def note(self, name: str, value: Tensor) -> None:
        """Keep `value` (detached) under `name` when tracing."""
        if self.trace:
            self.seen[name] = value.detach()

    def keep(self, name: str, compute: Callable[[], Tensor]) -> None:
        """Keep `compute()` under `name` ("layer3.indexer_kl") where such a term is wanted. A layer that is recomputed
        in the backward pass replaces what its forward left here by equal values."""
        if name.rsplit(".", 1)[1] in self.terms:
            self.kept[name] = compute()


class Trace(dict[str, Tensor]):
    """What a forward of one sequence decided and computed: name -> tensor with one line per token.

    "layerI.selected" [n, k] rows of the compressed cache (-1 = none), "layerI.experts" [n, K], "layerI.expert_weights"
    [n, K], "layerI.stream" [n, M, D] residual copies after layer I, "layerI.next_pre" [n, M], "engram_hashes"
    [n, layers, columns]; other families note what they have.
    """
