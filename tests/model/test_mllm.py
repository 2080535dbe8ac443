from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mmds.config_types import ConnectorSection, EncoderSection, RecomputeSection, ResolutionSection
from mmds.data.rows import IMAGE_MARKER, LoadedSample, build_row, filler_row
from mmds.engine.assemble import set_recompute
from mmds.errors import DataError, SpliceError
from mmds.geometry import Geometry, Grid
from mmds.model.build import build_geometry
from mmds.model.connector import CONNECTORS, Connector
from mmds.model.decoder import Decoder, load_llm
from mmds.model.encoder import Encoder, EncoderSpec, build_encoder
from mmds.model.mllm import FrozenEncoder, Mllm
from mmds.model.recompute import non_reentrant
from tests import tiny
from tests.engine.reference import compare
from tests.model.families import gap, gradients
from tests.model.llava import llava_step, same_mllm, stock_llava

GEOMETRY = Geometry(mode="fixed", image_size=28, patch_size=14)
CPU = torch.device("cpu")
MODES = [
    (resolution, connector)
    for resolution in ("fixed", "anyres", "native")
    for connector in CONNECTORS
    if (resolution, connector) != ("anyres", "resampler")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("parts")
    tiny.write_encoder(work / "encoder")
    tiny.write_decoder(work / "decoder")
    return work


def make_encoder(folder: Path) -> Encoder:
    return build_encoder(EncoderSection(name=f"local-dir:{folder / 'encoder'}"))


def make_geometry(folder: Path, connector: str, resolution: str = "fixed") -> Geometry:
    section = ResolutionSection(name=resolution)
    spec = make_encoder(folder).spec
    return build_geometry(spec, ConnectorSection(name=connector), max_pixels=None, resolution=section)


def make_model(
    folder: Path, *, connector: str = "mlp2x", trained_encoder: bool = True, separator: bool = False
) -> Mllm:
    section = ConnectorSection(name=connector)
    torch.manual_seed(4)
    return Mllm(
        connector=Connector(section, encoder_width=32, decoder_width=48, separator=separator),
        decoder=Decoder(load_llm(str(folder / "decoder"), dtype=torch.float32)),
        encoder=make_encoder(folder) if trained_encoder else None,
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pictures", [(1,), (0, 3, 1, 0, 2)])
def test_a_packed_row_equals_transformers_own_llava_sample_by_sample(
    pictures: tuple[int, ...], recompute: bool, tmp_path: Path
) -> None:
    """Logits, loss and the gradient of every parameter of every part, in fp32."""
    theirs = stock_llava()
    ours = same_mllm(theirs, tmp_path).train()
    if recompute:
        set_recompute(ours, RecomputeSection(), non_reentrant)
    row, samples = tiny.random_row(11, GEOMETRY, pictures)
    logits, loss, grads = llava_step(theirs, samples)
    own = ours(row)[0] / row.supervised
    own.backward()
    assert own.item() == pytest.approx(loss.item(), rel=1e-5)
    everywhere = ours.eval().logits(row, torch.arange(row.input_ids.numel()))
    assert gap(everywhere, logits) < 1e-5
    assert set(grads) == set(gradients(ours))
    assert all(bool(g.any()) for name, g in grads.items() if not name.endswith("k_proj.bias"))
    assert compare(gradients(ours), grads) == []


class _TagEncoder:
    """Stands in for an encoder: an image whose pixels are all k becomes patches that are all k."""

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels[:, :1, 0, 0].float().repeat_interleave(4, 0).expand(-1, 48)


class _Pass(nn.Module):
    def forward(self, features: Tensor, grids: Sequence[Grid]) -> Tensor:
        return features


@pytest.mark.parametrize("seed", range(5))
def test_image_k_lands_in_the_slots_of_image_k_under_any_packing(seed: int, folder: Path) -> None:
    """Tag test: 13 images in 6 samples, packed in a shuffled order; the row is rebuilt token by token by hand."""
    rng = np.random.default_rng(seed)
    tag, samples = 1, []
    for i, pictures in enumerate((2, 0, 5, 1, 3, 2)):
        sample = tiny.random_sample(rng, GEOMETRY, key=f"s{i}", images=pictures, length=14)
        tags = range(tag, tag + pictures)
        images = tuple(np.full((1, 3, 28, 28), 10 * t, np.uint8) for t in tags)
        samples.append((replace(sample, images=images), list(tags)))
        tag += pictures
    order = rng.permutation(len(samples))
    shuffled = [samples[i] for i in order]
    model = make_model(folder, connector="linear", trained_encoder=False)
    model.connector.net = _Pass()
    row = build_row([sample for sample, _ in shuffled], GEOMETRY)
    table = model.decoder.llm.get_input_embeddings().weight
    expected = []
    for sample, tags in shuffled:
        left = iter(tags)
        for token in sample.ids.tolist():
            if token == IMAGE_MARKER:
                expected += [torch.full((48,), 10.0 * next(left))] * 4
            else:
                expected.append(table[token])
    got = model.embed(row, _TagEncoder()(row.pixels))
    assert torch.equal(got, torch.stack(expected))


def broken(folder: Path, change: Callable[[Tensor], Tensor], connector: str = "mlp2x", **fields: Any) -> str:
    """What the splice says when the features (or fields of the row) are changed."""
    row, _ = tiny.random_row(0, make_geometry(folder, connector), (1, 0, 2))
    model = make_model(folder, connector=connector, trained_encoder=False)
    features = torch.randn(4 * row.pixels.shape[0], 32)
    model.embed(row, features)
    with pytest.raises(SpliceError) as error:
        model.embed(replace(row, **fields), change(features))
    return str(error.value)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_missing_and_surplus_features_are_raised_with_both_counts(connector: str, folder: Path) -> None:
    """Whatever the connector makes of them: merging could leave surplus features out, and the resampler makes as many of any."""
    counts = "patch features were given for 3 images whose plans have 12 patches"
    for change, given in (
        (lambda f: f[:-4], 8),
        (lambda f: f[:-1], 11),
        (lambda f: torch.cat([f, f[:1]]), 13),
        (lambda f: torch.cat([f, f[:4]]), 16),
    ):
        assert f"{given} {counts}" in broken(folder, change, connector)


def test_slots_that_are_not_those_of_their_image_are_raised_with_the_image_named(folder: Path) -> None:
    """Also where the totals agree."""
    shifted = broken(folder, lambda f: f, slot_counts=torch.tensor([4, 3, 5]))
    assert "sample r0s2 image 0 (r0s2-0.png): 3 slots" in shifted
    assert "4 visual tokens" in shifted
    fewer = broken(folder, lambda f: f, slot_counts=torch.tensor([4, 4]))
    assert "2 images have slots in this row, but 3 were encoded" in fewer


@pytest.mark.parametrize("pictures", [(0, 0), (1,), (0, 2, 1)])
def test_every_part_runs_exactly_once_for_any_row(pictures: tuple[int, ...], folder: Path) -> None:
    model = make_model(folder)
    calls: list[str] = []
    for name in ("encoder", "connector", "decoder"):
        getattr(model, name).register_forward_hook(lambda *_, name=name: calls.append(name))
    model(tiny.random_row(1, GEOMETRY, pictures)[0])[0].backward()
    assert calls == ["encoder", "connector", "decoder"]
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(("resolution", "connector"), MODES)
def test_a_row_without_images_gives_exactly_zero_gradients_before_the_decoder(
    resolution: str, connector: str, folder: Path
) -> None:
    tiles = resolution == "anyres"
    model = make_model(folder, connector=connector, separator=tiles)
    row, _ = tiny.random_row(1, make_geometry(folder, connector, resolution), (0, 0, 0))
    loss, _ = model(row)
    loss.backward()
    assert all(
        p.grad is not None for p in model.parameters()
    )  # every rank back-propagates through every part
    for name, grad in gradients(model).items():
        assert name.startswith("decoder.") or not grad.any(), name
    text = make_model(folder, connector=connector, trained_encoder=False, separator=tiles)
    assert loss.item() == text(row, torch.randn(row.dummy.patches, 32))[0].item()


def test_features_of_the_dummy_image_cannot_make_the_gradient_not_a_number(folder: Path) -> None:
    """0 x infinity is NaN: a black image may overflow an encoder that was trained in fp16."""
    row, _ = tiny.random_row(1, GEOMETRY, (0, 0))
    for value in (torch.inf, torch.nan):
        model = make_model(folder, trained_encoder=False)
        model(row, torch.full((4, 32), value))[0].backward()
        assert all(bool(g.isfinite().all()) for g in gradients(model).values())


def test_the_filler_row_runs_through_the_whole_model_and_costs_nothing(folder: Path) -> None:
    model = make_model(folder)
    loss, _ = model(filler_row(GEOMETRY))
    loss.backward()
    assert loss.item() == 0.0
    assert not any(bool(g.any()) for g in gradients(model).values())


def test_features_are_given_exactly_when_the_encoder_is_outside(folder: Path) -> None:
    row, _ = tiny.random_row(1, GEOMETRY, (1,))
    with pytest.raises(ValueError, match="exactly when"):
        make_model(folder)(row, torch.randn(4, 32))
    with pytest.raises(ValueError, match="exactly when"):
        make_model(folder, trained_encoder=False)(row)


def test_a_frozen_encoder_gives_the_loss_and_decoder_gradients_of_the_same_encoder_inside(
    folder: Path,
) -> None:
    row, _ = tiny.random_row(2, GEOMETRY, (2, 0, 1))
    inside, outside = make_model(folder), make_model(folder, trained_encoder=False)
    frozen = FrozenEncoder(make_encoder(folder), device=CPU, dtype=torch.float32)
    losses = [inside(row)[0], outside(row, frozen(row))[0]]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    expected = {n: g for n, g in gradients(inside).items() if not n.startswith("encoder.")}
    assert compare(gradients(outside), expected) == []


def test_a_frozen_encoder_stays_in_eval_without_gradient_whatever_the_model_does(folder: Path) -> None:
    frozen = FrozenEncoder(make_encoder(folder), device=CPU, dtype=torch.bfloat16)
    model = make_model(folder, trained_encoder=False)
    model.train().requires_grad_(True)
    row, _ = tiny.random_row(2, GEOMETRY, (1,))
    features = frozen(row)
    assert not any(module.training for module in frozen.encoder.modules())
    assert not any(parameter.requires_grad for parameter in frozen.encoder.parameters())
    assert not features.requires_grad
    assert features.dtype is torch.bfloat16
    assert not any(name.startswith("encoder") for name, _ in model.named_parameters())


class _Overflowing(nn.Module):
    """An encoder whose features are infinite for an image that starts with a white pixel, as fp16 ones become on some."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, pixels: Tensor, grids: Sequence[Grid] | None = None) -> Tensor:
        features = torch.ones(pixels.shape[0], 4, 32)
        features[pixels[:, 0, 0, 0] == 255, 2, 7] = torch.inf
        return features.flatten(0, 1)


def white_corner(sample: LoadedSample, image: int) -> LoadedSample:
    images = [array.copy() for array in sample.images]
    for k, array in enumerate(images):
        array[..., 0, 0] = 255 if k == image else 0
    return replace(sample, images=tuple(images))


def test_non_finite_features_are_named_by_sample_and_image_before_the_decoder(folder: Path) -> None:
    stub: Any = _Overflowing(make_encoder(folder).spec)
    frozen = FrozenEncoder(stub, device=CPU, dtype=torch.float32)
    _, (first, second) = tiny.random_row(5, GEOMETRY, (1, 2))
    with pytest.raises(DataError) as error:
        frozen(build_row([white_corner(first, 9), white_corner(second, 1)], GEOMETRY))
    assert "sample r5s1 image 1 (r5s1-1.png)" in str(error.value)
    assert "r5s0" not in str(error.value)
    assert "r5s1-0.png" not in str(error.value)
    frozen(build_row([white_corner(first, 9), white_corner(second, 9)], GEOMETRY))


@pytest.mark.parametrize(("resolution", "connector"), MODES)
def test_planned_patches_and_visual_tokens_are_those_that_the_network_makes(
    resolution: str, connector: str, folder: Path
) -> None:
    """TRAPS B34: counted at the encoder's and the connector's doors, for pictures of many sizes."""
    geometry = make_geometry(folder, connector, resolution)
    model = make_model(folder, connector=connector, separator=resolution == "anyres")
    row, samples = tiny.random_row(3, geometry, (1, 2, 0, 3))
    planned = [geometry.plan(*size) for sample in samples for size in sample.image_sizes]
    seen: dict[str, Any] = {}
    model.encoder.register_forward_hook(lambda _, inputs, output: seen.update(given=inputs[0], made=output))
    model.connector.register_forward_hook(lambda _, inputs, output: seen.update(tokens=output))
    assert model.embed(row).shape == (row.input_ids.numel(), 48)
    assert seen["given"].numel() == sum(plan.patches for plan in planned) * 3 * 14 * 14
    assert seen["made"].shape == (sum(plan.patches for plan in planned), 32)
    assert seen["tokens"].shape == (sum(plan.visual_tokens for plan in planned), 48)
    assert row.slot_counts.tolist() == [plan.visual_tokens for plan in planned]
    if resolution != "fixed":
        assert len({plan.patches for plan in planned}) > 1
