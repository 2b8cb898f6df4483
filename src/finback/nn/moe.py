"""Mixture of experts: the router, the routed experts in one stack, one shared SwiGLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from finback import kernels
from finback.nn.linear import ActRound, Prepared, Weight
from finback.nn.tape import Tape


class Router(Prepared):
    """Picks K of E experts per token and weighs them.

    scores = f(logits); experts = top K of scores + bias; weights = scores of those, normalised to sum 1 if `normalise`,
    times `scale`. The bias decides the choice only. Image tokens use `bias_vl` where the model has one.

    groups > 1: experts come in that many runs of equal length, and only those of the best `kept_groups` can be picked.
    A group is worth the sum of its two best biased scores, or its best score in a router without bias.
    """

    def __init__(
        self,
        dim: int,
        n_experts: int,
        k: int,
        *,
        score: str,
        scale: float,
        normalise: bool,
        bias: bool,
        image_bias: bool = False,
        groups: int = 1,
        kept_groups: int = 1,
    ):
        super().__init__()
        acc = kernels.accumulator(torch.get_default_dtype())
        self.k, self.score, self.scale, self.normalise = k, score, scale, normalise
        self.groups, self.kept_groups = groups, kept_groups
        self.weight = nn.Parameter(torch.empty(n_experts, dim))
        self.bias = nn.Parameter(torch.empty(n_experts, dtype=acc), requires_grad=False) if bias else None
        self.bias_vl = nn.Parameter(torch.empty(n_experts, dtype=acc), requires_grad=False) if image_bias else None

    def prepare(self) -> None:
        """Scores are computed in the accumulation type: hold the weight in it."""
        self.weight.data = self.weight.data.to(kernels.accumulator(self.weight.dtype))

    def forward(self, x: Tensor, is_image: Tensor | None, tape: Tape, name: str) -> tuple[Tensor, Tensor]:
        """x [T, D], is_image [T] bool or None -> weights [T, K] float32/64, experts [T, K] int64 (best first)."""
        scores = kernels.router_scores(kernels.linear(x, self.weight, dtype=kernels.accumulator(x.dtype)), self.score)
        tape.keep(f"{name}.router_scores", lambda: scores)
        experts = tape.choose(f"{name}.experts", lambda: self.pick(scores.detach(), is_image))
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        weights = weights * self.scale if self.scale != 1 else weights
        tape.note(f"{name}.expert_weights", weights)
        return weights, experts

    def pick(self, scores: Tensor, is_image: Tensor | None) -> Tensor:
        """[T, E] scores -> [T, K] experts by score plus bias."""
        if self.bias is not None:
            bias = self.bias
            if is_image is not None and self.bias_vl is not None:
                bias = torch.where(is_image.unsqueeze(1), self.bias_vl, bias)
            scores = scores + bias
        if self.kept_groups < self.groups:
            scores = self._keep_groups(scores)
        return kernels.top_experts(scores, self.k)

    def _keep_groups(self, scores: Tensor) -> Tensor:
        """[T, E] scores with -inf outside each token's best groups (ties to the lowest group)."""
        grouped = scores.unflatten(1, (self.groups, -1))
        worth = grouped.amax(2) if self.bias is None else grouped.topk(2, dim=2).values.sum(2)
        dropped = torch.ones_like(worth, dtype=torch.bool)
        dropped.scatter_(1, kernels.top_experts(worth, self.kept_groups), False)
        return grouped.masked_fill(dropped.unsqueeze(2), float("-inf")).flatten(1)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x). w1 and w3 are one weight `w13` [2I, D], gate rows first. limit > 0 clamps as V4.1 does."""

    def __init__(self, dim: int, inter: int, *, limit: float = 0.0, rounds: ActRound | None = None):
        super().__init__()
        self.limit, self.rounds = limit, rounds
        self.w13 = Weight(2 * inter, dim)
        self.w2 = Weight(dim, inter)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, D], already rounded where `rounds` is set. Returns [n, D] in x's dtype."""
        hidden = kernels.weighed_swiglu(self.w13.multiply(x), None, self.limit)
        return self.w2.multiply(hidden if self.rounds is None else self.rounds(hidden))


class Experts(Prepared):
    """E routed SwiGLU experts in one stack: w13 [E, 2I, D], w2 [E, D, I].

    weigh_output: multiply an expert's output by its routing weight, not its hidden values. The sum is the same but for
    rounding: V3.2 weighs outputs, V4.1 hidden values.
    """

    def __init__(
        self,
        n: int,
        dim: int,
        inter: int,
        *,
        limit: float = 0.0,
        rounds: ActRound | None = None,
        weigh_output: bool = False,
    ):
        super().__init__()
        self.limit, self.rounds, self.weigh_output = limit, rounds, weigh_output
        self.w13: nn.Parameter | None = nn.Parameter(torch.empty(n, 2 * inter, dim))
        self.w2: nn.Parameter | None = nn.Parameter(torch.empty(n, dim, inter))
        self.packed: dict[str, list[kernels.PackedWeight]] = {}

    def prepare(self) -> None:
        for name in ("w13", "w2"):  # one stack after the other: never more than one of them is held twice
            stack = getattr(self, name)
            if stack is None:
                continue
            packed = [kernels.pack_linear(weight) for weight in stack]
            if all(packed):
                self.packed[name] = [weight for weight in packed if weight is not None]
                setattr(self, name, None)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, out: Tensor) -> Tensor:
        """out [T, D] plus each token's experts: x [T, D] rounded where `rounds` is set; weights, experts [T, K]."""
        if self.w13 is None or self.w2 is None or kernels.is_deterministic() or not torch.is_grad_enabled():
            return kernels.for_each_expert(x, weights, experts, self._run, out)
        groups = kernels.group_rows(experts, self.w13)
        weights = kernels.spread_weights(weights, groups)
        hidden = kernels.grouped_linear(kernels.spread_rows(x, groups), self.w13, groups)
        hidden = self._activate(hidden, weights)
        y = kernels.grouped_linear(hidden if self.rounds is None else self.rounds(hidden), self.w2, groups)
        y = kernels.cast(y, weights.dtype) * weights if self.weigh_output else y
        return kernels.collect_rows(y, groups, out)

    def _activate(self, gate_up: Tensor, weights: Tensor) -> Tensor:
        """[n, 2I] products with w13 -> [n, I] hidden values, weighed unless outputs are."""
        return kernels.weighed_swiglu(gate_up, None if self.weigh_output else weights, self.limit)

    def _run(self, expert: int, x: Tensor, weights: Tensor) -> Tensor:
        hidden = self._activate(self._multiply(x, expert, "w13"), weights)
        y = self._multiply(hidden if self.rounds is None else self.rounds(hidden), expert, "w2")
        return kernels.cast(y, weights.dtype) * weights if self.weigh_output else y

    def _multiply(self, x: Tensor, expert: int, name: str) -> Tensor:
        if name in self.packed:
            return kernels.packed_linear(x, self.packed[name][expert])
        weight: Tensor = getattr(self, name)
        return kernels.linear(x, weight[expert])


class MoE(nn.Module):
    """Routed experts plus one shared expert that every token goes through; sums in float32, rounded once."""

    def __init__(
        self,
        gate: Router,
        dim: int,
        inter: int,
        shared_inter: int,
        *,
        limit: float = 0.0,
        rounds: ActRound | None = None,
        weigh_output: bool = False,
    ):
        super().__init__()
        self.gate, self.rounds = gate, rounds
        self.experts = Experts(gate.weight.shape[0], dim, inter, limit=limit, rounds=rounds, weigh_output=weigh_output)
        self.shared_experts = SwiGLU(dim, shared_inter, limit=limit, rounds=rounds)

    def forward(self, x: Tensor, is_image: Tensor | None, tape: Tape, name: str) -> Tensor:
        """x [T, D] -> [T, D]. is_image: [T] bool or None. Choices go to `tape` under `name`."""
        weights, experts = self.gate(x, is_image, tape, name)
        x = x if self.rounds is None else self.rounds(x)
        shared = kernels.cast(self.shared_experts(x), weights.dtype)
        return kernels.cast(self.experts(x, weights, experts, shared), x.dtype)
