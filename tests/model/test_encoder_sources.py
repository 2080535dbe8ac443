"""Where encoder weights, activation and normalisation come from, and what is refused instead of guessed (no network anywhere)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmds.config_types import EncoderSection
from mmds.errors import CheckpointError, ConfigError, MmdsError
from mmds.model.encoder import build_encoder
from tests import tiny
from tests.model.families import gap

DECLARED: dict[str, Any] = {"activation": "gelu", "mean": (0.4, 0.4, 0.4), "std": (0.3, 0.3, 0.3)}


def local(folder: Path, **section: Any) -> EncoderSection:
    return EncoderSection(name=f"local-dir:{folder}", **section)


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "open_clip_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_encoder(tmp_path / "tower")


@pytest.mark.parametrize(
    ("name", "tag", "trained_with"),
    [
        ("ViT-B-32", "openai", "quick_gelu"),
        ("ViT-L-14-336", "openai", "quick_gelu"),
        ("RN50", "yfcc15m", "quick_gelu"),
    ],
)
def test_a_tag_trained_with_another_activation_is_refused_before_any_download(
    name: str, tag: str, trained_with: str
) -> None:
    with pytest.raises(ConfigError, match=f"{tag}' were trained with {trained_with}"):
        build_encoder(EncoderSection(name=name, pretrained=tag))


def test_a_built_in_name_without_weights_is_refused_with_its_tags() -> None:
    with pytest.raises(ConfigError, match="ViT-B-32 has no weights named.*openai"):
        build_encoder(EncoderSection(name="ViT-B-32"))


def test_a_misspelt_tag_is_not_taken_for_a_file() -> None:
    with pytest.raises(ConfigError, match="'openia' is neither a file nor one of .*openai"):
        build_encoder(EncoderSection(name="ViT-B-32-quickgelu", pretrained="openia"))


def test_an_unknown_model_is_refused() -> None:
    for pretrained in ("random", "openai"):
        with pytest.raises(ConfigError, match="knows no model 'ViT-X-99'"):
            build_encoder(EncoderSection(name="ViT-X-99", pretrained=pretrained))


@pytest.fixture(scope="module")
def weights_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole CLIP checkpoint of a tiny model that open_clip knows by name, as people keep them on disk."""
    work = tmp_path_factory.mktemp("named")
    text = {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1}
    (work / "Mmds-Tiny.json").write_text(json.dumps({**tiny.VISION, "text_cfg": text}))
    quick = {**tiny.VISION, "text_cfg": text, "quick_gelu": True}
    (work / "Mmds-Tiny-quickgelu.json").write_text(json.dumps(quick))
    open_clip.add_model_config(work)
    torch.manual_seed(0)
    torch.save(open_clip.create_model("Mmds-Tiny").state_dict(), work / "weights.pt")
    return work / "weights.pt"


@pytest.mark.parametrize("missing", ["activation", "mean", "std"])
def test_weights_by_path_need_activation_mean_and_std_declared(weights_file: Path, missing: str) -> None:
    declared = {**DECLARED, missing: None}
    with pytest.raises(ConfigError, match=f"weights by path .* say nothing about {missing};"):
        build_encoder(EncoderSection(name="Mmds-Tiny", pretrained=str(weights_file), **declared))


def test_weights_by_path_are_loaded_whole_with_what_was_declared(weights_file: Path) -> None:
    encoder = build_encoder(EncoderSection(name="Mmds-Tiny", pretrained=str(weights_file), **DECLARED))
    stored = torch.load(weights_file)
    assert all(torch.equal(value, stored[name]) for name, value in encoder.state_dict().items())
    assert encoder.spec.mean == DECLARED["mean"]
    assert encoder.spec.std == DECLARED["std"]


@pytest.mark.parametrize(
    ("name", "activation"), [("Mmds-Tiny", "quick_gelu"), ("Mmds-Tiny-quickgelu", "gelu")]
)
def test_a_declared_activation_that_the_model_does_not_compute_is_refused(
    weights_file: Path, name: str, activation: str
) -> None:
    section = EncoderSection(
        name=name, pretrained=str(weights_file), **{**DECLARED, "activation": activation}
    )
    with pytest.raises(ConfigError, match=f"were trained with {activation}"):
        build_encoder(section)


def test_the_declared_activation_changes_what_is_computed(weights_file: Path) -> None:
    pixels = torch.randint(0, 256, (1, 3, 28, 28), dtype=torch.uint8)
    file = str(weights_file)
    gelu = build_encoder(EncoderSection(name="Mmds-Tiny", pretrained=file, **DECLARED))
    quick = build_encoder(
        EncoderSection(
            name="Mmds-Tiny-quickgelu", pretrained=file, **{**DECLARED, "activation": "quick_gelu"}
        )
    )
    assert gap(quick(pixels), gelu(pixels)) > 1e-5


@pytest.mark.parametrize("fault", ["missing key", "wrong shape", "unknown key"])
def test_a_weights_file_that_does_not_fit_is_fatal(weights_file: Path, tmp_path: Path, fault: str) -> None:
    state = torch.load(weights_file)
    name = "visual.transformer.resblocks.0.mlp.c_fc.weight"
    if fault == "missing key":
        del state[name]
    elif fault == "wrong shape":
        state[name] = torch.zeros(3, 3)
    else:
        state["visual.invented"] = torch.zeros(1)
    torch.save(state, tmp_path / "w.pt")
    section = EncoderSection(name="Mmds-Tiny", pretrained=str(tmp_path / "w.pt"), **DECLARED)
    with pytest.raises(CheckpointError, match="invented" if fault == "unknown key" else "c_fc"):
        build_encoder(section)


def test_a_folders_weights_and_normalisation_are_taken_bit_for_bit(folder: Path) -> None:
    encoder = build_encoder(local(folder))
    stored = load_file(folder / "open_clip_model.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in encoder.state_dict().items())
    assert list(encoder.spec.mean) == tiny.PREPROCESS["mean"]
    assert list(encoder.spec.std) == tiny.PREPROCESS["std"]


def test_the_configs_mean_and_std_go_before_the_folders(folder: Path) -> None:
    spec = build_encoder(local(folder, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))).spec
    assert (spec.mean, spec.std) == ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))


def test_a_folder_with_torch_weights_equals_the_same_folder_with_safetensors(folder: Path) -> None:
    expected = build_encoder(local(folder)).state_dict()
    file = folder / "open_clip_model.safetensors"
    torch.save(load_file(file), folder / "open_clip_pytorch_model.bin")
    file.unlink()
    got = build_encoder(local(folder)).state_dict()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_folder_without_weights_is_fatal_unless_random_is_said(folder: Path) -> None:
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="expected one weights file, found"):
        build_encoder(local(folder))
    build_encoder(local(folder, pretrained="random"))


def test_two_weight_files_are_not_chosen_between(folder: Path) -> None:
    save_file({"visual.x": torch.zeros(1)}, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match="open_clip_model.safetensors.*other.safetensors"):
        build_encoder(local(folder))


def test_a_folder_that_is_none_is_fatal(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="open_clip_config.json does not exist"):
        build_encoder(local(tmp_path / "gone"))


@pytest.mark.parametrize("kept", [{}, {"mean": [0.4] * 3}, {"std": [0.3] * 3}])
def test_a_folder_without_mean_or_std_is_fatal(folder: Path, kept: dict[str, Any]) -> None:
    change_config(folder, preprocess_cfg=kept)
    with pytest.raises(ConfigError, match="does not say its pixel mean and std"):
        build_encoder(local(folder))
    build_encoder(local(folder, mean=(0.4,) * 3, std=(0.3,) * 3))


@pytest.mark.parametrize("fault", ["missing", "shape", "foreign"])
def test_folder_weights_that_do_not_fit_are_fatal_and_named(folder: Path, fault: str) -> None:
    file = folder / "open_clip_model.safetensors"
    state = load_file(file)
    name = "visual.transformer.resblocks.1.attn.in_proj_weight"
    if fault == "missing":
        del state[name]
    elif fault == "shape":
        state[name] = torch.zeros(5, 5)
    else:
        state["visual.transformer.resblocks.1.attn.in_proj_weight_2"] = torch.zeros(1)
    save_file(state, file)
    with pytest.raises(CheckpointError, match=r"resblocks\.1\.attn\.in_proj_weight"):
        build_encoder(local(folder))


def test_the_text_side_of_a_folders_weights_is_left_out(folder: Path) -> None:
    file = folder / "open_clip_model.safetensors"
    save_file({**load_file(file), "logit_scale": torch.tensor(4.6), "transformer.x": torch.zeros(1)}, file)
    names = [name for name, _ in build_encoder(local(folder)).named_parameters()]
    assert names
    assert all(name.startswith("visual.") for name in names)


def test_an_activation_that_contradicts_the_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="activation is 'quick_gelu'"):
        build_encoder(local(folder, activation="quick_gelu"))
    build_encoder(local(folder, activation="gelu"))


def test_a_non_square_input_is_refused(tmp_path: Path) -> None:
    cfg = {"embed_dim": 16, "vision_cfg": {**tiny.VISION["vision_cfg"], "image_size": [28, 42]}}
    with pytest.raises(MmdsError, match=r"28, 42.*not square"):
        build_encoder(local(tiny.write_encoder(tmp_path, model_cfg=cfg)))
