"""What teaches an indexer: its picks are integers without a gradient, so its scores learn from the attention itself."""

from __future__ import annotations

import torch
from torch import Tensor


def selection_kl(scores: Tensor, mass: Tensor, index: Tensor) -> Tensor:
    """Mean over tokens of KL(teacher || softmax(scores)) over each token's rows: a scalar.

    scores: [T, C] index scores, with gradient. mass: [T, C] attention that the rows get, summed over heads; each line
    is normalised once, here, to give the teacher. index: [T, C], negative where there is no row. Tokens without a row,
    or whose rows get no attention at all, are left out; 0 where none remains.
    """
    absent = index < 0
    target = mass.detach().masked_fill(absent, 0)
    total = target.sum(dim=1)
    taught = total > 0
    target = target / torch.where(taught, total, 1).unsqueeze(1)
    # A finite floor: -inf in all of a line would give NaN, in its gradient too, however it is masked afterwards.
    student = scores.masked_fill(absent, torch.finfo(scores.dtype).min).log_softmax(dim=1).masked_fill(absent, 0)
    divergence = (torch.xlogy(target, target) - target * student).sum(dim=1)
    return (divergence * taught).sum() / taught.sum().clamp(min=1)
