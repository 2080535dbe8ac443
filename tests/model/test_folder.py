from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from mmds.config_types import ConnectorSection, EncoderSection, ResolutionSection
from mmds.errors import CheckpointError
from mmds.model.connector import Connector
from mmds.model.decoder import Decoder
from mmds.model.encoder import build_encoder
from mmds.model.folder import (
    Description,
    find_model_folder,
    load_part,
    part_files,
    read_description,
    stored_names,
    write_readme,
    write_weights,
)
from mmds.model.mllm import Mllm
from tests import tiny

LIMIT = 20_000  # bytes a shard


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Mllm]:
    """A network with tied and one with untied embeddings, random weights in fp32."""
    tower = tiny.write_encoder(tmp_path_factory.mktemp("tower"))
    made = {}
    for name, tied in (("tied", True), ("untied", False)):
        torch.manual_seed(0)
        made[name] = Mllm(
            connector=Connector(ConnectorSection(name="mlp2x"), encoder_width=32, decoder_width=48),
            decoder=Decoder(LlamaForCausalLM(tiny.decoder_config(tied=tied))),
            encoder=build_encoder(EncoderSection(name=f"local-dir:{tower}")),
        )
    return made


def written(
    model: Mllm, folder: Path, *, dtype: torch.dtype = torch.float32, shard_bytes: int = LIMIT
) -> Path:
    """The model as a folder; the decoder's config beside its weights, as a run has it."""
    write_weights(folder, model.named_parameters(), dtype=dtype, shard_bytes=shard_bytes)
    model.decoder.llm.config.save_pretrained(folder / "decoder")
    return folder


def stock_state(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What transformers alone loads from the decoder's folder; nothing may be missing."""
    llm, info = AutoModelForCausalLM.from_pretrained(
        folder / "decoder", dtype=dtype, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return llm.state_dict()


@pytest.mark.parametrize("shard_bytes", [LIMIT, 2**30])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_transformers_itself_loads_the_decoder_bit_for_bit(
    models: dict[str, Mllm], name: str, shard_bytes: int, tmp_path: Path
) -> None:
    model = models[name]
    folder = written(model, tmp_path, shard_bytes=shard_bytes)
    state = stock_state(folder)
    expected = model.decoder.llm.state_dict()
    assert set(state) == set(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert (folder / "decoder" / "model.safetensors.index.json").exists() == (shard_bytes == LIMIT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_files_are_plain_safetensors_of_one_dtype(
    models: dict[str, Mllm], dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = written(models["untied"], tmp_path, dtype=dtype)
    files = [file for part in ("encoder", "connector", "decoder") for file in part_files(folder / part)]
    tensors = [(file, value) for file in files for value in load_file(file).values()]
    assert len(tensors) == len(list(models["untied"].named_parameters()))
    assert {value.dtype for _, value in tensors} == {dtype}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    if dtype is torch.bfloat16:
        expected = models["untied"].decoder.llm.lm_head.weight.bfloat16()
        assert torch.equal(stock_state(folder, dtype)["lm_head.weight"], expected)


def test_shards_keep_to_the_limit_and_the_index_names_every_tensor_once(
    models: dict[str, Mllm], tmp_path: Path
) -> None:
    folder = written(models["untied"], tmp_path) / "decoder"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sizes = {}
    for file in sorted(folder.glob("*.safetensors")):
        state = load_file(file)
        sizes[file.name] = sum(value.nbytes for value in state.values())
        assert sizes[file.name] <= LIMIT or len(state) == 1
        assert {key for key, name in index["weight_map"].items() if name == file.name} == set(state)
    assert len(sizes) > 3
    assert sorted(sizes)[0] == f"model-00001-of-{len(sizes):05d}.safetensors"
    assert set(index["weight_map"]) == set(models["untied"].decoder.llm.state_dict())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_tied_weight_is_stored_once(models: dict[str, Mllm], tmp_path: Path) -> None:
    names = stored_names(written(models["tied"], tmp_path))
    assert "decoder.llm.model.embed_tokens.weight" in names
    assert "decoder.llm.lm_head.weight" not in names
    assert len(names) == len(set(names))


def test_stored_names_are_those_of_the_model(models: dict[str, Mllm], tmp_path: Path) -> None:
    assert set(stored_names(written(models["untied"], tmp_path))) == set(models["untied"].state_dict())


def test_a_view_is_stored_by_itself_and_integers_keep_their_type(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = [
        ("encoder.visual.view", base.t()),
        ("encoder.visual.count", torch.tensor(7)),
        ("connector.net.x", base[1:]),
    ]
    write_weights(tmp_path, iter(tensors), dtype=torch.bfloat16)
    encoder, connector = (load_file(tmp_path / p / "model.safetensors") for p in ("encoder", "connector"))
    assert torch.equal(encoder["visual.view"], base.t().bfloat16())
    assert encoder["visual.count"].item() == 7
    assert encoder["visual.count"].dtype is torch.int64
    assert (tmp_path / "connector" / "model.safetensors").stat().st_size < 200
    assert torch.equal(connector["net.x"], base[1:].bfloat16())


def test_a_full_shard_is_on_disk_before_the_next_tensor_is_taken(tmp_path: Path) -> None:
    seen: list[int] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for i in range(4):
            seen.append(len(list(tmp_path.rglob("*.tmp"))))
            yield f"decoder.llm.w{i}", torch.zeros(100)

    write_weights(tmp_path, tensors(), dtype=torch.float32, shard_bytes=500)
    assert seen == [0, 0, 1, 2]


@pytest.mark.parametrize(
    "name", ["vision.x", "decoder.lm_head.weight", "encoderx.y", "optimizer.connector.x"]
)
def test_a_foreign_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"tensor {name} belongs to no part"):
        write_weights(tmp_path, [(name, torch.zeros(1))], dtype=torch.float32)


def test_a_missing_shard_is_named(models: dict[str, Mllm], tmp_path: Path) -> None:
    folder = written(models["untied"], tmp_path)
    gone = part_files(folder / "decoder")[2]
    gone.unlink()
    for use in (lambda: part_files(folder / "decoder"), lambda: stored_names(folder)):
        with pytest.raises(CheckpointError, match=gone.name):
            use()


@pytest.mark.parametrize("part", ["encoder", "connector", "decoder"])
def test_a_missing_part_is_named(models: dict[str, Mllm], part: str, tmp_path: Path) -> None:
    folder = written(models["untied"], tmp_path, shard_bytes=2**30)
    (folder / part / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"{part}: no safetensors weights"):
        stored_names(folder)


def test_a_part_loads_bit_for_bit_also_from_shards(models: dict[str, Mllm], tmp_path: Path) -> None:
    folder = written(models["untied"], tmp_path)
    connector = Connector(ConnectorSection(name="mlp2x"), encoder_width=32, decoder_width=48)
    load_part(connector, folder / "connector")
    expected = models["untied"].connector.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in connector.state_dict().items())
    module = nn.Linear(200, 100)
    write_weights(
        tmp_path / "b",
        ((f"encoder.{k}", v) for k, v in module.named_parameters()),
        dtype=torch.float32,
        shard_bytes=1000,
    )
    again = nn.Linear(200, 100)
    load_part(again, tmp_path / "b" / "encoder")
    assert len(part_files(tmp_path / "b" / "encoder")) == 2
    assert torch.equal(again.weight, module.weight)
    assert torch.equal(again.bias, module.bias)


@pytest.mark.parametrize("fault", ["missing", "foreign", "shape"])
def test_a_part_with_other_names_or_shapes_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    module = Connector(ConnectorSection(name="mlp2x"), encoder_width=4, decoder_width=6)
    state = dict(module.state_dict())
    if fault == "missing":
        del state["net.up.bias"]
    elif fault == "foreign":
        state["net.up.bias2"] = torch.zeros(1)
    else:
        state["net.up.bias"] = torch.zeros(5)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"net\.up\.bias"):
        load_part(module, tmp_path)


def test_the_description_survives_the_disk(models: dict[str, Mllm], tmp_path: Path) -> None:
    encoder = models["tied"].encoder
    assert encoder is not None
    description = Description(
        encoder=encoder.spec,
        connector=ConnectorSection(name="resampler", queries=9),
        resolution=ResolutionSection(name="native", min_pixels=784),
        positions="1d",
        max_pixels=50000,
        decoder_width=48,
        stage="align",
        dtype="bfloat16",
    )
    description.write(tmp_path)
    assert read_description(tmp_path) == description


def test_a_run_folder_stands_for_its_finished_model(tmp_path: Path) -> None:
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (model / "mmds.json").write_text("{}")
    assert find_model_folder(str(tmp_path / "run")) == model
    assert find_model_folder(str(model)) == model


def test_an_unfinished_run_is_answered_with_how_to_make_a_model_of_it(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no finished model.*consolidate.py"):
        find_model_folder(str(tmp_path / "run"))


def test_a_folder_that_is_none_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path} is neither a model folder nor a run"):
        find_model_folder(str(tmp_path))
    with pytest.raises(CheckpointError, match="it has no mmds.json"):
        read_description(tmp_path)


def test_the_readme_says_what_was_asked_of_it_and_how_to_go_on(tmp_path: Path) -> None:
    name = tmp_path / "model"
    write_readme(tmp_path, {"stage": "align"}, name=name)
    text = (tmp_path / "README.md").read_text()
    assert "- stage: align" in text
    assert f'"init_from": "{name}"' in text and f"chat.py {name} " in text
