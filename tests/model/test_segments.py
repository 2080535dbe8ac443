from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmds.model.rotary import rotary_angles, rotate_by
from mmds.model.segments import Segments, segment_attention
from tests.model.families import gap

LENGTHS = (3, 1, 12, 5)


def heads(tokens: int, *, seed: int = 0, size: int = 8) -> Tensor:
    return torch.randn(1, 2, tokens, size, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def dense(queries: tuple[int, ...], keys: tuple[int, ...]) -> Tensor:
    """bool [Tq, Tk], True inside segments: the mask that is never made."""
    a, b = (torch.arange(len(x)).repeat_interleave(torch.tensor(x)) for x in (queries, keys))
    return a[:, None] == b[None]


def both(
    ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(7))
    grads = [torch.autograd.grad((out * weights).sum(), inputs) for out in (ours, theirs)]
    return grads[0], grads[1]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("lengths", [LENGTHS, (21,), (1,) * 21])
def test_attention_under_segments_equals_a_dense_block_diagonal_mask(
    lengths: tuple[int, ...], scale: float | None
) -> None:
    q, k, v = (heads(21, seed=i) for i in range(3))
    mask: Any = Segments(lengths=lengths)
    ours = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=dense(lengths, lengths), scale=scale)
    assert gap(ours, theirs) < 1e-5
    for a, b in zip(*both(ours, theirs, (q, k, v)), strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * max(float(b.abs().max()), 1.0)


def test_queries_and_keys_may_have_other_lengths() -> None:
    queries, keys = (2, 2, 2, 2), LENGTHS
    q, k, v = heads(8), heads(21, seed=1), heads(21, seed=2)
    ours = segment_attention(q, k, v, queries, keys)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=dense(queries, keys))
    assert gap(ours, theirs) < 1e-5
    for a, b in zip(*both(ours, theirs, (q, k, v)), strict=True):
        assert gap(a, b) < 1e-5


def test_a_segment_is_untouched_by_the_others() -> None:
    q, k, v = (heads(21, seed=i) for i in range(3))
    mask: Any = Segments(lengths=LENGTHS)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    out[:, :, 4:16].square().sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        touched = x.grad.abs().sum((0, 1, 3)) > 0
        assert touched.tolist() == [4 <= t < 16 for t in range(21)]


def test_rotation_turns_queries_and_keys_and_not_values() -> None:
    q, k, v = (heads(21, seed=i) for i in range(3))
    angles = rotary_angles((3, 7), 8)
    mask: Any = Segments(lengths=LENGTHS, rotate=lambda x: rotate_by(angles, x))
    ours = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    turned = [rotate_by(angles, x) for x in (q, k)]
    theirs = F.scaled_dot_product_attention(*turned, v, attn_mask=dense(LENGTHS, LENGTHS))
    assert gap(ours, theirs) < 1e-5
    for a, b in zip(*both(ours, theirs, (q, k, v)), strict=True):
        assert gap(a, b) < 1e-5


def test_bf16_on_the_cpu_is_computed_in_fp32_and_handed_back_in_bf16() -> None:
    q, k, v = (heads(21, seed=i).detach().bfloat16() for i in range(3))
    ours = segment_attention(q, k, v, LENGTHS, LENGTHS)
    exact = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=dense(LENGTHS, LENGTHS))
    assert ours.dtype is torch.bfloat16
    assert torch.equal(ours, exact.bfloat16()) or gap(ours, exact) < 0.005


def test_segments_survive_a_cast_of_masks() -> None:
    mask = Segments(lengths=LENGTHS)
    assert mask.to(torch.bfloat16) is mask


@pytest.mark.parametrize(
    ("queries", "keys"), [((3, 1), LENGTHS), (LENGTHS, (20,)), ((21, 1), (21, 1)), (LENGTHS, (22,))]
)
def test_lengths_that_do_not_cover_the_tokens_are_refused(
    queries: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    q, k, v = (heads(21, seed=i) for i in range(3))
    with pytest.raises(ValueError, match="do not cover"):
        segment_attention(q, k, v, queries, keys)


def test_unequal_numbers_of_segments_are_refused() -> None:
    q, k, v = (heads(21, seed=i) for i in range(3))
    with pytest.raises(ValueError, match="zip"):
        segment_attention(q, k, v, LENGTHS, (10, 11))


def test_more_than_one_sequence_is_refused() -> None:
    x = torch.randn(2, 2, 21, 8)
    with pytest.raises(ValueError, match="do not cover"):
        segment_attention(x, x, x, LENGTHS, LENGTHS)


@pytest.mark.parametrize("argument", [{"is_causal": True}, {"dropout_p": 0.1}, {"enable_gqa": True}])
def test_what_packed_images_cannot_have_is_refused_and_not_swallowed(argument: dict[str, Any]) -> None:
    q, k, v = (heads(21, seed=i) for i in range(3))
    mask: Any = Segments(lengths=LENGTHS)
    with pytest.raises(ValueError, match="not supported in an encoder"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **argument)


MASK: Any = Segments(lengths=(4,))
OTHER_WAYS = {
    "added to scores": lambda x: x + MASK,
    "subtracted": lambda x: x - MASK,
    "a torch function": lambda x: torch.add(x, MASK),
    "where": lambda x: torch.where(MASK, x, x),
    "masked_fill": lambda x: x.masked_fill(MASK, 0.0),
    "torch's own attention module": lambda x: torch.nn.MultiheadAttention(4, 1, batch_first=True)(
        x[None], x[None], x[None], attn_mask=MASK
    ),
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_any_other_use_as_a_mask_raises_and_never_leaks(way: str) -> None:
    with pytest.raises((TypeError, AttributeError)):
        OTHER_WAYS[way](torch.randn(4, 4))
