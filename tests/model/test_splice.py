from __future__ import annotations

import pytest
import torch

from mmds.errors import SpliceError
from mmds.model.splice import check_counts, splice

NAMES = ("sample a image 0 (a.png)", "sample b image 0 (b.png)", "sample b image 1 (c.png)")


def test_visual_tokens_replace_exactly_their_slots_in_order() -> None:
    embeddings = torch.randn(6, 2)
    visual = torch.arange(6.0).reshape(3, 2)
    row = splice(embeddings, visual, torch.tensor([1, 4, 5]))
    expected = torch.stack([embeddings[0], visual[0], embeddings[2], embeddings[3], visual[1], visual[2]])
    assert torch.equal(row, expected)


def test_the_embeddings_handed_in_are_left_alone() -> None:
    embeddings = torch.zeros(3, 2)
    splice(embeddings, torch.ones(1, 2), torch.tensor([1]))
    assert not embeddings.any()


def test_gradients_flow_to_visual_tokens_and_to_every_position_but_the_slots() -> None:
    embeddings = torch.randn(4, 2, requires_grad=True)
    visual = torch.randn(2, 2, requires_grad=True)
    weights = torch.randn(4, 2)
    (splice(embeddings, visual, torch.tensor([2, 0])) * weights).sum().backward()
    assert embeddings.grad is not None
    assert visual.grad is not None
    assert torch.equal(visual.grad, weights[[2, 0]])
    assert torch.equal(embeddings.grad, weights * torch.tensor([[0.0], [1], [0], [1]]))


def test_without_any_slot_the_visual_part_stays_in_the_graph_with_gradient_zero() -> None:
    parameter = torch.randn(2, requires_grad=True)
    dummy = (torch.randn(4, 2) * parameter)[:0]
    row = splice(torch.randn(3, 2), dummy, torch.zeros(0, dtype=torch.int64))
    row.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0, 0.0]


def test_visual_tokens_take_the_decoders_dtype() -> None:
    row = splice(torch.zeros(2, 2, dtype=torch.bfloat16), torch.ones(1, 2), torch.tensor([0]))
    assert row.dtype is torch.bfloat16


@pytest.mark.parametrize("given", [1, 3, 0])
def test_a_surplus_or_a_lack_of_visual_tokens_is_raised_never_cut_or_repeated(given: int) -> None:
    with pytest.raises(SpliceError, match=f"2 slots .* {given} visual tokens"):
        splice(torch.zeros(5, 2), torch.ones(given, 2), torch.tensor([1, 2]))


def test_the_image_that_disagrees_is_named_with_both_counts_also_when_the_totals_agree() -> None:
    check_counts([4, 4, 4], [4, 4, 4], NAMES)
    with pytest.raises(SpliceError) as error:
        check_counts([4, 3, 5], [4, 4, 4], NAMES)
    message = str(error.value)
    assert "sample b image 0 (b.png)" in message
    assert "3 slots" in message
    assert "4 visual tokens" in message
    assert "a.png" not in message


@pytest.mark.parametrize("encoded", [[4, 4], [4, 4, 4, 4], []])
def test_a_surplus_or_a_lack_of_encoded_images_is_raised_with_both_numbers(encoded: list[int]) -> None:
    with pytest.raises(SpliceError, match=f"3 images .* {len(encoded)} were encoded.*sample a image 0"):
        check_counts([4, 4, 4], encoded, NAMES)
