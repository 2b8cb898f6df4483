"""Sample texts of a model in training, by whole forwards: for a glance, not for serving."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from finback.nn.rows import BatchRows, Chunk, ForwardBatch


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
def evaluating(model: Any) -> Generator[None]:
    """The model in evaluation mode."""
    model.eval()
    try:
        yield
    finally:
        model.train()
