from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmds.config_types import ConnectorSection
from mmds.data.rows import IGNORE, Row, build_row, filler_row
from mmds.geometry import Geometry
from mmds.model.connector import Connector
from mmds.model.decoder import Decoder
from mmds.model.loss import sample_weights, targets, token_nll, weighted_sum
from mmds.model.mllm import Mllm
from tests import tiny
from tests.model.families import VOCABULARY, stock_model

GEOMETRY = Geometry(mode="fixed", image_size=28, patch_size=14)


def logits_with_nll(nll: list[float]) -> Tensor:
    """Logits [K, 2] that give token 0 the probabilities exp(-nll)."""
    return torch.tensor([[-x, math.log(-math.expm1(-x))] for x in nll])


def test_one_token_at_nll_4_and_nine_at_nll_2_cost_22_together_and_2_2_each() -> None:
    """Not 3.0, the mean of the two samples' means, and the same however the tokens fall into segments."""
    for bounds in ([0, 2, 12], [0, 12]):
        labels = torch.full((12,), IGNORE)
        labels[1], labels[3:12] = 0, 0
        keep, target = targets(labels, torch.tensor(bounds, dtype=torch.int32))
        total = token_nll(logits_with_nll([4.0] + [2.0] * 9), target).sum()
        assert len(keep) == 10
        assert float(total) == pytest.approx(22.0, rel=1e-6)
        assert float(total) / len(keep) == pytest.approx(2.2, rel=1e-6)


@pytest.mark.parametrize(("weighting", "loss"), [("token", 2.2), ("sample", 3.0), ("sqrt", 2.5)])
@pytest.mark.parametrize("rows", [[[1, 0, 9]], [[9], [1, 0]], [[0], [1], [9]]])
def test_weightings_of_one_token_at_4_nats_and_nine_at_2_in_any_packing(
    weighting: str, loss: float, rows: list[list[int]]
) -> None:
    """Samples without a supervised token weigh nothing, in or beside a row."""
    total, weight = 0.0, 0.0
    for lengths in rows:
        counts = torch.tensor(lengths)
        nll = torch.tensor([{1: 4.0, 9: 2.0}[n] for n in lengths for _ in range(n)])
        total += float(weighted_sum(nll, counts, weighting))
        weight += float(sample_weights(counts, weighting).sum())
    assert total / weight == pytest.approx(loss, rel=1e-6)


def test_an_unknown_weighting_is_refused() -> None:
    with pytest.raises(ValueError, match="token, sample or sqrt, got 'mean'"):
        sample_weights(torch.tensor([1]), "mean")


def test_no_supervised_token_gives_exactly_zero_with_a_graph() -> None:
    keep, target = targets(torch.full((5,), IGNORE), torch.tensor([0, 5], dtype=torch.int32))
    hidden = torch.randn(5, 4, requires_grad=True)
    total = weighted_sum(token_nll(hidden[keep], target), torch.tensor([0]), "sqrt")
    assert total.item() == 0.0
    total.backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_the_filler_row_costs_exactly_zero_and_moves_nothing() -> None:
    model = Mllm(
        connector=Connector(ConnectorSection(name="linear"), encoder_width=4, decoder_width=32),
        decoder=Decoder(stock_model("llama")),
        encoder=None,
    )
    total, _ = model(filler_row(GEOMETRY), torch.randn(4, 4))
    total.backward()
    assert total.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_last_token_of_a_sample_never_predicts_the_first_of_the_next() -> None:
    """Samples of 3 and 4 supervised tokens have 2 + 3 = 5 targets, never 6."""
    labels = torch.tensor([10, 11, 12, 20, 21, 22, 23])
    keep, target = targets(labels, torch.tensor([0, 3, 7], dtype=torch.int32))
    assert keep.tolist() == [0, 1, 3, 4, 5]
    assert target.tolist() == [11, 12, 21, 22, 23]


def test_targets_are_read_only_and_equal_a_walk_through_the_samples() -> None:
    dice = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(1, 6, (4,), generator=dice).tolist()
        labels = torch.randint(0, 9, (sum(lengths),), generator=dice)
        labels[torch.rand(len(labels), generator=dice) < 0.5] = IGNORE
        kept = labels.clone()
        bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        expected, start = [], 0
        for length in lengths:
            sample = labels[start : start + length].tolist()
            expected += [(start + t - 1, sample[t]) for t in range(1, length) if sample[t] != IGNORE]
            start += length
        keep, target = targets(labels, bounds)
        assert list(zip(keep.tolist(), target.tolist(), strict=True)) == expected
        assert torch.equal(labels, kept)


@pytest.mark.parametrize("seed", range(3))
def test_the_rows_own_count_is_the_number_of_targets(seed: int) -> None:
    row, _ = tiny.random_row(seed, GEOMETRY, (1, 0, 2, 0))
    assert row.supervised == len(targets(row.labels, row.cu_seqlens)[0]) > 0
    starts = row.cu_seqlens[:-1].tolist()
    alone = [
        int((row.labels[a + 1 : b] != IGNORE).sum())
        for a, b in zip(starts, row.cu_seqlens[1:].tolist(), strict=True)
    ]
    assert row.supervised_counts.tolist() == alone


def test_the_packed_sum_equals_the_sum_of_the_samples_alone() -> None:
    row, samples = tiny.random_row(7, GEOMETRY, (1, 0, 2, 0))
    row = with_small_ids(row)
    model = Mllm(
        connector=Connector(ConnectorSection(name="linear"), encoder_width=4, decoder_width=32),
        decoder=Decoder(stock_model("llama")),
        encoder=None,
    )
    features = torch.randn(12, 4)
    images = [features[:4], features[:4], features[4:], features[:4]]
    alone = [
        model(with_small_ids(build_row([sample], GEOMETRY)), image)[0]
        for sample, image in zip(samples, images, strict=True)
    ]
    assert model(row, features)[0].item() == pytest.approx(sum(x.item() for x in alone), rel=1e-6)


def with_small_ids(row: Row) -> Row:
    """The row with ids and labels inside the families' vocabulary."""
    from dataclasses import replace

    labels = torch.where(row.labels == IGNORE, IGNORE, row.labels % VOCABULARY)
    return replace(row, input_ids=row.input_ids % VOCABULARY, labels=labels)


def test_nll_is_summed_in_fp32_also_from_bf16_logits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(300, 50).mul(4).bfloat16()
    target = torch.randint(0, 50, (300,))
    exact = F.cross_entropy(logits.double(), target, reduction="sum")
    total = token_nll(logits, target).sum()
    assert total.dtype is torch.float32
    assert float(total) == pytest.approx(float(exact), rel=1e-6)


def test_a_random_decoder_scores_about_the_log_of_its_vocabulary() -> None:
    llm = stock_model("llama")
    with torch.no_grad():
        for parameter in llm.parameters():
            parameter.mul_(0.02 if parameter.dim() > 1 else 1.0)
    row, _ = tiny.random_row(1, GEOMETRY, (0, 0, 0, 0, 0, 0))
    row = with_small_ids(row)
    model = Mllm(
        connector=Connector(ConnectorSection(name="linear"), encoder_width=4, decoder_width=32),
        decoder=Decoder(llm),
        encoder=None,
    )
    assert model(row, torch.zeros(4, 4))[0].item() / row.supervised == pytest.approx(
        math.log(VOCABULARY), rel=0.02
    )


class _Echo(nn.Module):
    """A decoder whose logits at t are a token's one-hot: the token at t (`ahead` 0: a copy), or the one at t + 1 (1: an oracle)."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.ahead = ahead

    def embed(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, tiny.VOCABULARY).float()

    def forward(
        self, *, inputs_embeds: Tensor, position_ids: Tensor, cu_seqlens: Tensor, keep: Tensor
    ) -> Tensor:
        return 50 * inputs_embeds.roll(-self.ahead, 0)[keep]


@pytest.mark.parametrize(("ahead", "low", "high"), [(0, 30.0, 60.0), (1, 0.0, 1e-6)])
def test_copying_the_present_token_scores_badly_and_knowing_the_next_one_well(
    ahead: int, low: float, high: float
) -> None:
    row, _ = tiny.random_row(2, GEOMETRY, (0, 0, 0))
    model = Mllm(
        connector=Connector(ConnectorSection(name="linear"), encoder_width=4, decoder_width=tiny.VOCABULARY),
        decoder=_Echo(ahead),  # type: ignore[arg-type]
        encoder=None,
    )
    assert low <= model(row, torch.zeros(4, 4))[0].item() / row.supervised <= high
