"""From logits to one token: temperature, top-k, top-p, min-p, and a draw that depends on the request alone."""

from __future__ import annotations

import torch
from torch import Tensor

from finback.engine.request import SamplingParams, TokenLogprobs


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """[..., V] logits -> float64 probabilities after temperature, top-k, top-p and min-p, in that order.

    A token is kept by top-p while the likelier ones hold less than `top_p`; ties at a border are all kept.
    temperature 0 gives the one-hot distribution of the likeliest token (ties: the lowest id).
    """
    logits = logits.double()
    if params.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    probs = torch.softmax(logits / max(params.temperature, 1e-5), dim=-1)
    if 0 < params.top_k < probs.shape[-1]:
        border = probs.topk(params.top_k, dim=-1).values[..., -1:]
        probs = probs.masked_fill(probs < border, 0)
    if params.top_p < 1:
        ordered = probs.sort(dim=-1, descending=True).values
        ordered = ordered / ordered.sum(-1, keepdim=True)
        kept = ordered.cumsum(-1) - ordered < params.top_p
        border = probs.sort(dim=-1, descending=True).values.masked_fill(~kept, float("inf")).amin(-1, keepdim=True)
        probs = probs.masked_fill(probs < border, 0)
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), 0)
    return probs / probs.sum(-1, keepdim=True)


def draw(probs: Tensor, generator: torch.Generator) -> int:
    """One index of the float64 distribution [V], by inverting its cumulative sum at one uniform number."""
    edges = probs.cumsum(-1)
    u = torch.rand((), generator=generator, dtype=torch.float64) * edges[-1].cpu()
    picked = int(torch.searchsorted(edges, u.to(edges.device), right=True))
    return min(picked, int(probs.nonzero()[-1]))  # u may round up to the last edge


def pick(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """The next token id from logits [V]."""
    if params.temperature == 0:
        return int(logits.argmax())
    return draw(distribution(logits, params), generator)


def logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """The log probability of `token` and of the `count` likeliest ones, from logits [V] before any sampling setting."""
    lines = torch.log_softmax(logits.double(), dim=-1)
    values, ids = lines.topk(min(count, len(lines)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(lines[token]), top)
