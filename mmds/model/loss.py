"""Next-token targets of a packed row, their negative log-likelihood, and how samples weigh in the loss.

The training loss of a step is the weighted sum of token NLL over all ranks and micro-steps, divided by the sum of the samples'
weights; the division happens in the engine, once the step's global weight is known. Here: only sums. Shapes: T tokens of a row,
S segments, K supervised positions, V vocabulary.
"""

from __future__ import annotations

import torch
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


def token_nll(logits: Tensor, target: Tensor) -> Tensor:
    """NLL of each target in fp32, [K]: logits [K, V], target int64 [K]."""
    return F.cross_entropy(logits.float(), target, reduction="none")


def sample_weights(counts: Tensor, weighting: str) -> Tensor:
    """Weight of each sample in the loss, fp32 [S]: n for "token", 1 for "sample", sqrt(n) for "sqrt" (0 where n is 0).

    counts int64 [S]: supervised tokens n of each sample. A sample's weight is shared by its tokens equally, so "token" is the mean
    over tokens, "sample" the mean of the samples' means, and "sqrt" lies between (InternVL 2.5's square averaging, arXiv:2412.05271).
    """
    n = counts.float()
    if weighting == "token":
        return n
    if weighting == "sample":
        return n.clamp(max=1.0)
    if weighting == "sqrt":
        return n.sqrt()
    raise ValueError(f"weighting must be token, sample or sqrt, got {weighting!r}")


def weighted_sum(nll: Tensor, counts: Tensor, weighting: str) -> Tensor:
    """Sum over samples of weight x mean NLL, 0-dim: nll [K] in row order, counts int64 [S]. Exactly 0, with a graph, when K is 0."""
    if weighting == "token":
        return nll.sum()
    share = sample_weights(counts, weighting) / counts.clamp(min=1)
    return (nll * torch.repeat_interleave(share, counts)).sum()
