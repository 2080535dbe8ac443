"""Next-token targets of a packed row, and their negative log-likelihood.

The training loss is the sum of token NLL over all ranks and micro-steps, divided by the number of supervised tokens of the step; the
division happens in the engine, once the step's global count is known. Here: only sums.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mmds.data.rows import IGNORE


def targets(labels: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Positions whose logits predict a supervised token, and that token: int64 [K] and int64 [K].

    labels int64 [T] (IGNORE where not supervised); cu_seqlens int32 [S + 1]. The first token of a segment is predicted by
    nothing: the last token of one sample never predicts the first of the next.
    """
    supervised = labels != IGNORE  # a new tensor
    supervised[cu_seqlens[:-1].long()] = False
    positions = supervised.nonzero().squeeze(1)
    return positions - 1, labels[positions]


def nll_sum(logits: Tensor, target: Tensor) -> Tensor:
    """Sum of token NLL in fp32: logits [K, V], target int64 [K]. Exactly 0, with a graph, when K is 0."""
    return F.cross_entropy(logits.float(), target, reduction="sum")
