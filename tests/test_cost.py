"""Formulas against published sizes and published formulas; torch's own counter holds them in tests/model/test_shapes.py."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from mmds.architecture import MeasuredTower, ModelShape
from mmds.config_types import RecomputeSection
from mmds.cost import (
    WHOLE,
    CostModel,
    Sums,
    Terms,
    Training,
    cost_model,
    decoder_matrices,
    encoder_matrices,
    row_sums,
    whole_parts,
)
from mmds.worked_example import CONNECTOR as MLP2X
from mmds.worked_example import DECODER as LLAMA_7B
from mmds.worked_example import VIT_L

SHAPE = ModelShape(encoder=VIT_L, connector=MLP2X, decoder=LLAMA_7B)
FROZEN = whole_parts(encoder=False, connector=True, decoder=True)
TRAINED = whole_parts(encoder=True, connector=True, decoder=True)
ALIGN = whole_parts(encoder=False, connector=True, decoder=False)


def test_the_worked_example() -> None:
    """DESIGN section 8: an encoder that is run forward, 304e6 parameters, 24 layers, width 1024."""
    small = row_sums(patches=[576] * 4, segments=[3504], supervised=0)
    large = row_sums(patches=[6144] * 2, segments=[3672], supervised=0)
    real = cost_model(SHAPE, FROZEN)
    by_size = CostModel(
        encoder=Terms(patches=2 * 304e6, patch_squares=4 * 24 * 1024), connector=Terms(), decoder=Terms()
    )
    for model in (real, by_size):
        assert f"{float(model.flops(small).encoder):.2e}" == "1.53e+12"
        assert f"{float(model.flops(large).encoder):.2e}" == "1.49e+13"
    assert float(real.flops(large).decoder / real.flops(small).decoder) == pytest.approx(1.05, abs=0.01)


def test_matrices_of_published_models() -> None:
    """Published parameter counts, less what is no matrix of a block: 6,738,415,616 of Llama-2-7B, 303,179,776 of CLIP's ViT-L/14."""
    embedding, norms = 32000 * 4096, 65 * 4096
    blocks = sum(decoder_matrices(LLAMA_7B, layer) for layer in range(32))
    assert blocks + 2 * embedding + norms == 6_738_415_616
    outside = 3 * 14 * 14 * 1024 + 1024 + 257 * 1024 + 2 * 2 * 1024
    biases_and_norms = 24 * (3 * 1024 + 1024 + 4096 + 1024 + 2 * 2 * 1024)
    assert 24 * encoder_matrices(VIT_L) + biases_and_norms + outside == 303_179_776


def test_training_costs_what_palm_says() -> None:
    """6 N + 12 L H Q T FLOPs per token of a sequence of T tokens (appendix B), N without the embedding table."""
    tokens = 2048
    n = 6_738_415_616 - 32000 * 4096 - 65 * 4096
    flops = cost_model(SHAPE, FROZEN).flops(row_sums(patches=[], segments=[tokens], supervised=tokens))
    assert float(flops.decoder) == tokens * (6 * n + 12 * 32 * 32 * 128 * tokens)
    assert float(flops.vision) == 0.0


def parts(training: Training, sums: Sums, **options: object) -> np.ndarray:
    flops = cost_model(SHAPE, training, **options).flops(sums)  # type: ignore[arg-type]
    return np.array([flops.encoder, flops.connector, flops.decoder])


def only(**given: float) -> Sums:
    """Sums of which all but these are 0."""
    zero = {field.name: np.asarray(0.0) for field in fields(Sums)}
    return Sums(**{**zero, **{name: np.asarray(value) for name, value in given.items()}})


def test_passes_of_the_stages() -> None:
    """The table of docs/cost.md, as multiples of one forward pass."""
    encoder, tokens, squares = only(patch_squares=1.0), only(tokens=1.0), only(squares=1.0)
    head, patches = only(supervised=1.0), only(patches=1.0)
    rows = {}
    for name, training in {"align": ALIGN, "instruct": FROZEN, "pretrain": TRAINED}.items():
        rows[name] = [
            parts(training, encoder)[0] / parts(Training(), encoder)[0],
            parts(training, tokens)[2] / parts(Training(), tokens)[2],
            parts(training, squares)[2] / parts(Training(), squares)[2],
            parts(training, head)[2] / parts(Training(), head)[2],
        ]
    assert rows == {"align": [1, 2, 3, 2], "instruct": [1, 3, 3, 3], "pretrain": [3, 3, 3, 3]}
    first, second = 2 * 1024 * 4096, 2 * 4096 * 4096
    assert parts(ALIGN, patches)[1] == 2 * first + 3 * second
    assert parts(TRAINED, patches)[1] == 3 * first + 3 * second
    assert parts(Training(encoder=WHOLE), patches)[1] == 2 * first + 2 * second
    convolution = 2 * 3 * 14 * 14 * 1024
    whole, blocks = (parts(Training(encoder=n), patches)[0] for n in (WHOLE, 24))
    assert whole - blocks == convolution


def test_a_partly_trained_encoder_runs_forward_below() -> None:
    sums = only(patch_squares=1.0)
    forward = parts(Training(), sums)[0]
    assert parts(Training(encoder=6), sums)[0] == pytest.approx((18 + 3 * 6) / 24 * forward)
    assert parts(Training(encoder=6), sums, recompute=RecomputeSection(encoder=4))[0] == pytest.approx(
        (18 + 3 * 6 + 1) / 24 * forward
    ), "of blocks 0, 4, ... 20 only block 20 goes backward"


def test_recomputation_is_one_more_forward_less_a_last_product() -> None:
    sums = only(tokens=1.0)
    once, three = parts(Training(), sums)[2], parts(FROZEN, sums)[2]
    every = RecomputeSection()
    assert parts(FROZEN, sums, recompute=every, stops_early=False)[2] == three + once
    assert (
        parts(FROZEN, sums, recompute=every)[2] == three + once - 32 * 2 * 11008 * 4096
    )  # without the 32 products
    half = parts(FROZEN, sums, recompute=RecomputeSection(decoder=2), stops_early=False)[2]
    assert half == three + once / 2
    assert parts(Training(), sums, recompute=every)[2] == once


def test_a_causal_half_concerns_the_decoders_attention_alone() -> None:
    row = row_sums(patches=[576, 576], segments=[2000, 100], supervised=500)
    full, half = parts(TRAINED, row), parts(TRAINED, row, causal_half=True)
    assert full[0] == half[0]
    assert full[1] == half[1]
    assert full[2] - half[2] == 0.5 * 12 * 32 * 4096 * (2000**2 + 100**2)


def test_a_row_costs_what_its_samples_cost_computed_all_at_once() -> None:
    """A thousand samples of up to three images, as arrays, against one call for each and one for all in a row."""
    dice = np.random.default_rng(0)
    samples = [
        (dice.integers(100, 5000, dice.integers(0, 4)).tolist(), int(dice.integers(20, 8000)))
        for _ in range(1000)
    ]
    each = [row_sums(patches=p, segments=[t], supervised=t // 3) for p, t in samples]
    arrays = Sums(**{field.name: np.array([getattr(s, field.name) for s in each]) for field in fields(Sums)})
    model = cost_model(SHAPE, TRAINED, recompute=RecomputeSection())
    together = model.flops(arrays)
    assert together.encoder.dtype == np.float64
    assert together.decoder.shape == (1000,)
    np.testing.assert_allclose(together.total, [float(model.flops(s).total) for s in each], rtol=1e-12)
    row = row_sums(
        patches=[n for p, _ in samples for n in p],
        segments=[t for _, t in samples],
        supervised=sum(t // 3 for _, t in samples),
    )
    assert float(model.flops(row).vision) == pytest.approx(float(together.vision.sum()), rel=1e-12)
    assert float(model.flops(row).decoder) == pytest.approx(float(together.decoder.sum()), rel=1e-12)


def test_grouped_heads_and_experts_change_matrices_not_attention() -> None:
    grouped = replace(LLAMA_7B, kv_heads=8)
    assert decoder_matrices(LLAMA_7B, 0) - decoder_matrices(grouped, 0) == 2 * 4096 * 24 * 128
    mixed = replace(
        LLAMA_7B,
        moe_layers=(1,),
        experts=64,
        active=4,
        expert_width=1000,
        shared_width=500,
        shared_gate=True,
    )
    attention = 4 * 4096 * 4096
    assert decoder_matrices(mixed, 0) == decoder_matrices(LLAMA_7B, 0)
    assert decoder_matrices(mixed, 1) == attention + 4096 * (3 * (4 * 1000 + 500) + 64 + 1)


def test_a_row_without_images_costs_its_dummy() -> None:
    text = row_sums(patches=[], segments=[50], supervised=10, dummy_patches=576)
    one = row_sums(patches=[576], segments=[50], supervised=10, dummy_patches=4)
    assert (parts(TRAINED, text) == parts(TRAINED, one)).all()


def test_a_measured_tower_is_counted_by_its_cells() -> None:
    shape = replace(SHAPE, encoder=MeasuredTower(forward=10.0, backward=19.0, kept=3.0))
    row = row_sums(patches=[49, 49], segments=[200], supervised=10)
    costs = [float(cost_model(shape, training).flops(row).encoder) for training in (FROZEN, TRAINED)]
    assert costs == [980.0, 98 * 29.0]
