"""Projector files of original LLaVA, as torch saves them, and connectors of model folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmds.config_types import ConnectorSection, DecoderSection, EncoderSection, ModelSection
from mmds.errors import CheckpointError, ConfigError
from mmds.geometry import ImagePlan
from mmds.model.build import build_light, find_source
from mmds.model.connector import Connector
from mmds.model.connector_weights import load_connector
from tests import tiny

C, D = 32, 48


def fresh(name: str = "mlp2x", *, separator: bool = False) -> Connector:
    torch.manual_seed(9)
    section = ConnectorSection(name=name)  # type: ignore[arg-type]
    return Connector(section, encoder_width=C, decoder_width=D, separator=separator)


def original(kind: str) -> nn.Module:
    """LLaVA's own projector: its module, whose state dict is what its files hold."""
    torch.manual_seed(1)
    if kind == "linear":
        return nn.Linear(C, D)
    return nn.Sequential(nn.Linear(C, D), nn.GELU(), nn.Linear(D, D))


def saved(path: Path, module: nn.Module, prefix: str, **more: Tensor) -> str:
    tensors = {f"{prefix}mm_projector.{name}": value for name, value in module.state_dict().items()} | more
    if path.suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    return str(path)


@pytest.mark.parametrize("kind", ["linear", "mlp2x"])
@pytest.mark.parametrize(
    ("prefix", "file"),
    [
        ("model.", "mm_projector.bin"),
        ("", "mm_projector.bin"),
        ("base_model.model.model.", "non_lora_trainables.bin"),
        ("model.", "projector.safetensors"),
    ],
)
def test_the_connector_computes_what_the_projector_does(
    kind: str, prefix: str, file: str, tmp_path: Path
) -> None:
    theirs, ours = original(kind), fresh(kind)
    load_connector(ours, saved(tmp_path / file, theirs, prefix))
    features = torch.randn(4, C)
    plan = ImagePlan(height=28, width=28, patches=4, visual_tokens=4, grid=(2, 2), tokens=(2, 2))
    assert torch.equal(ours(features, [plan]), theirs(features))


def test_the_separator_of_tiles_is_taken_left_out_or_begun(tmp_path: Path) -> None:
    newline = torch.randn(D)
    next_file = saved(tmp_path / "next.bin", original("mlp2x"), "model.", **{"model.image_newline": newline})
    plain_file = saved(tmp_path / "plain.bin", original("mlp2x"), "model.")
    with_tiles, without, begun = fresh(separator=True), fresh(), fresh(separator=True)
    load_connector(with_tiles, next_file)
    load_connector(without, next_file)
    load_connector(begun, plain_file)
    assert with_tiles.separator is not None and torch.equal(with_tiles.separator, newline)
    assert without.separator is None
    expected = fresh(separator=True).separator
    assert begun.separator is not None and expected is not None and torch.equal(begun.separator, expected)
    assert torch.equal(begun.net.up.weight, without.net.up.weight)


def test_a_run_begins_with_the_projector_of_a_file_or_a_model_folder(tmp_path: Path) -> None:
    tiny.write_decoder(tmp_path / "decoder")
    tiny.write_encoder(tmp_path / "encoder")
    folder = tiny.write_model_folder(tmp_path / "model")
    theirs = original("mlp2x")
    file = saved(tmp_path / "mm_projector.bin", theirs, "model.")

    def section(weights: str) -> ModelSection:
        return ModelSection(
            encoder=EncoderSection(name=f"local-dir:{tmp_path / 'encoder'}"),
            connector=ConnectorSection(name="mlp2x"),
            connector_weights=weights,
            decoder=DecoderSection(name=str(tmp_path / "decoder")),
        )

    _, from_file = build_light(find_source(None, section(file)), seed=0)
    assert torch.equal(from_file.net.down.weight, theirs.state_dict()["2.weight"])
    stored = load_file(folder / "connector" / "model.safetensors")
    for named in (folder, folder / "connector"):
        _, from_folder = build_light(find_source(None, section(str(named))), seed=0)
        assert all(torch.equal(value, stored[name]) for name, value in from_folder.state_dict().items())
    with pytest.raises(ConfigError, match=r"(?s)connector_weights: with init_from .*connector_weights=null"):
        find_source(str(folder), section(file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.mm_projector.2.bias"), r"Missing key.*net\.down\.bias"),
        (lambda t: t.update({"model.vision_tower.x": torch.zeros(1)}), r"no place .*model\.vision_tower\.x"),
        (lambda t: t.update({"model.mm_projector.4.weight": torch.zeros(1)}), r"mm_projector\.4\.weight"),
        (
            lambda t: t.update({"model.mm_projector.0.bias": torch.zeros(7)}),
            r"size mismatch for net\.up\.bias",
        ),
        (lambda t: t.update({"model.mm_projector.0.bias": "no tensor"}), "not a dict of names and tensors"),
    ],
)
def test_a_projector_that_does_not_fit_is_refused_with_its_file_and_tensor(
    change: Any, message: str, tmp_path: Path
) -> None:
    tensors = {f"model.mm_projector.{n}": v for n, v in original("mlp2x").state_dict().items()}
    change(tensors)
    file = tmp_path / "mm_projector.bin"
    torch.save(tensors, file)
    with pytest.raises(CheckpointError, match=message) as error:
        load_connector(fresh(), str(file))
    assert str(file) in str(error.value)


def test_what_a_pickle_wants_to_run_is_not_run(tmp_path: Path) -> None:
    """TRAPS E6."""

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"model.mm_projector.0.weight": Trap()}, tmp_path / "mm_projector.bin")
    with pytest.raises(CheckpointError, match="not a file of plain tensors"):
        load_connector(fresh(), str(tmp_path / "mm_projector.bin"))
    assert not (tmp_path / "ran").exists()


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"connector_weights: .*nowhere\.bin does not exist"):
        load_connector(fresh(), str(tmp_path / "nowhere.bin"))
