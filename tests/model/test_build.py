from __future__ import annotations

import contextlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, FalconConfig

from mmds.config_types import ConnectorSection, DecoderSection, EncoderSection, LoraSection, ModelSection
from mmds.engine.assemble import _refuse_scalars, surplus_tensors, verify_decoder
from mmds.errors import CheckpointError, ConfigError
from mmds.model.build import (
    Source,
    build_decoder,
    build_geometry,
    build_light,
    describe_light,
    find_source,
    is_random,
)
from mmds.model.connector import CONNECTORS, Connector
from mmds.model.encoder import describe_pruned, encoder_from_spec
from mmds.model.lora import Placed, place_adapters, plainly, stored_adapters
from mmds.model.mllm import Mllm
from tests import tiny


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder folder, a tower folder and a model folder; nobody changes them."""
    work = tmp_path_factory.mktemp("parts")
    tiny.write_decoder(work / "decoder")
    tiny.write_encoder(work / "encoder")
    tiny.write_model_folder(work / "model", connector="merge_mlp")
    return work


def section(parts: Path, **changes: Any) -> ModelSection:
    encoder = EncoderSection(name=f"local-dir:{parts / 'encoder'}")
    decoder = DecoderSection(name=str(parts / "decoder"))
    return replace(
        ModelSection(encoder=encoder, connector=ConnectorSection(name="mlp2x"), decoder=decoder), **changes
    )


def equal(a: nn.Module, b: nn.Module) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return set(mine) == set(other) and all(torch.equal(mine[key], other[key]) for key in mine)


def test_neither_a_model_nor_init_from_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mmds\.model: name the encoder.*init_from"):
        find_source(None, None)


def test_the_source_is_the_sections_or_the_folder(parts: Path) -> None:
    from_config = find_source(None, section(parts))
    assert (from_config.folder, from_config.decoder_name) == (None, str(parts / "decoder"))
    from_folder = find_source(str(parts / "model"), None)
    assert (from_folder.folder, from_folder.section) == (parts / "model", None)
    assert from_folder.decoder_name == str(parts / "model" / "decoder")


def matching(parts: Path) -> ModelSection:
    """The section that describes the model folder."""
    name = json.loads((parts / "model" / "mmds.json").read_text())["encoder"]["name"]
    return section(parts, encoder=EncoderSection(name=name), connector=ConnectorSection(name="merge_mlp"))


def test_a_model_that_agrees_with_the_folder_may_be_repeated(parts: Path) -> None:
    assert find_source(str(parts / "model"), matching(parts)).folder == parts / "model"


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("connector", ConnectorSection(name="mlp2x")),
        ("encoder.name", "ViT-B-32"),
        ("encoder.layer", 0),
        ("encoder.norm", True),
        ("encoder.rope", True),
        ("positions", "mrope"),
    ],
)
def test_a_model_that_contradicts_the_folder_is_refused_by_key_with_both_values(
    parts: Path, key: str, given: Any
) -> None:
    model = matching(parts)
    if key.startswith("encoder."):
        model = replace(model, encoder=replace(model.encoder, **{key.removeprefix("encoder."): given}))
    else:
        model = replace(model, **{key: given})
    with pytest.raises(
        ConfigError, match=f"mmds.model.{key} is {re.escape(repr(given))}, but init_from .* holds"
    ):
        find_source(str(parts / "model"), model)


def test_fresh_parts_are_equal_for_equal_seeds_and_differ_for_others(parts: Path) -> None:
    source = find_source(None, section(parts))
    (encoder, first), (_, same), (_, other) = (build_light(source, seed=seed) for seed in (7, 7, 8))
    torch.rand(5)
    assert equal(first, same)
    assert not equal(first, other)
    stored = load_file(parts / "encoder" / "open_clip_model.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in encoder.state_dict().items())


def test_parts_of_a_model_folder_are_its_weights_bit_for_bit_whatever_the_seed(parts: Path) -> None:
    source = find_source(str(parts / "model"), None)
    encoder, connector = build_light(source, seed=1)
    for module, part in ((encoder, "encoder"), (connector, "connector")):
        stored = load_file(parts / "model" / part / "model.safetensors")
        state = module.state_dict()
        assert set(stored) == set(state)
        assert all(torch.equal(state[name], stored[name]) for name in stored)
    assert connector.section.name == "merge_mlp"


def test_the_decoder_is_its_files_bit_for_bit_in_the_asked_dtype(parts: Path) -> None:
    stored = load_file(parts / "decoder" / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        decoder = build_decoder(find_source(None, section(parts)), dtype=dtype, seed=0)
        state = decoder.llm.state_dict()
        assert all(torch.equal(state[name], stored[name].to(dtype)) for name in stored)
        assert {p.dtype for p in decoder.parameters()} == {dtype}


def test_a_random_decoder_depends_on_the_seed_alone(parts: Path) -> None:
    source = find_source(
        None, section(parts, decoder=DecoderSection(name=str(parts / "decoder"), random=True))
    )
    first, same, other = (build_decoder(source, dtype=torch.float32, seed=seed) for seed in (3, 3, 4))
    assert equal(first, same)
    assert not equal(first, other)
    assert is_random(source)
    assert not is_random(find_source(None, section(parts)))
    assert not is_random(find_source(str(parts / "model"), None))


def test_describing_reads_configs_but_no_weights(parts: Path, tmp_path: Path) -> None:
    tiny.write_model_folder(tmp_path / "model")
    tiny.write_decoder(tmp_path / "decoder")
    tiny.write_encoder(tmp_path / "encoder")
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    for source, whole in (
        (find_source(None, section(tmp_path)), find_source(None, section(parts))),
        (
            find_source(str(tmp_path / "model"), None),
            Source(folder=tiny.write_model_folder(tmp_path / "b"), section=None),
        ),
    ):
        described, built = describe_light(source), build_light(whole, seed=0)
        for a, b in zip(described, built, strict=True):
            assert {n: p.shape for n, p in a.named_parameters()} == {
                n: p.shape for n, p in b.named_parameters()
            }
        with pytest.raises(CheckpointError):
            build_light(source, seed=0)


def test_a_family_that_cannot_be_packed_is_refused_before_any_weight_is_read(
    parts: Path, tmp_path: Path
) -> None:
    FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128).save_pretrained(
        tmp_path
    )
    model = section(parts, decoder=DecoderSection(name=str(tmp_path)))
    missing = EncoderSection(name=f"local-dir:{tmp_path / 'no-encoder-here'}")
    with pytest.raises(ConfigError, match="'falcon'"):
        build_light(find_source(None, replace(model, encoder=missing)), seed=0)


def test_the_geometry_is_that_of_the_encoder_and_the_connector_under_the_cap(parts: Path) -> None:
    encoder, _ = describe_light(find_source(None, section(parts)))
    assert (
        build_geometry(encoder.spec, ConnectorSection(name="mlp2x"), max_pixels=28 * 28)
        .plan(5, 5)
        .visual_tokens
        == 4
    )
    assert (
        build_geometry(encoder.spec, ConnectorSection(name="merge_mlp"), max_pixels=None)
        .plan(5, 5)
        .visual_tokens
        == 1
    )
    with pytest.raises(ConfigError, match="max_pixels is 783"):
        build_geometry(encoder.spec, ConnectorSection(name="mlp2x"), max_pixels=783)


def test_no_part_has_a_parameter_without_dimensions_though_its_source_has(
    parts: Path, tmp_path: Path
) -> None:
    """TRAPS A7: DeepSpeed cannot partition one, and CLIP's files hold one, `logit_scale`."""
    tiny.write_encoder(tmp_path / "encoder")
    file = tmp_path / "encoder" / "open_clip_model.safetensors"
    save_file({**load_file(file), "logit_scale": torch.tensor(4.6)}, file)
    source = find_source(
        None, section(parts, encoder=EncoderSection(name=f"local-dir:{tmp_path / 'encoder'}"))
    )
    encoder, _ = build_light(source, seed=0)
    decoder = build_decoder(source, dtype=torch.float32, seed=0)
    for name in CONNECTORS:
        model = Mllm(
            connector=Connector(ConnectorSection(name=name), encoder_width=32, decoder_width=48),
            decoder=decoder,
            encoder=encoder,
        )
        assert min(parameter.dim() for parameter in model.parameters()) == 1
        assert _refuse_scalars(model) is None


def test_a_parameter_without_dimensions_is_refused_by_name() -> None:
    model = nn.Module()
    model.gate = nn.Parameter(torch.tensor(1.0))
    model.inner = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="0-dimensional .*: gate$"):
        _refuse_scalars(model)


def test_a_decoder_that_is_not_the_one_in_its_files_is_refused_by_tensor(parts: Path) -> None:
    """TRAPS A8: whatever has loaded, or not loaded, it: what is in memory is compared with the files."""
    source = find_source(None, section(parts))
    encoder, connector = build_light(source, seed=0)
    decoder = build_decoder(source, dtype=torch.bfloat16, seed=0)
    ranks = SimpleNamespace(first=True, together=lambda what: contextlib.nullcontext())
    engine: Any = SimpleNamespace(
        model=Mllm(connector=connector, decoder=decoder, encoder=encoder), ranks=ranks
    )
    verify_decoder(engine, source.decoder_name, Placed())
    with torch.no_grad():
        decoder.llm.model.layers[1].mlp.up_proj.weight[3, 4] += 0.5
    with pytest.raises(CheckpointError, match=r"1 tensors .*model\.layers\.1\.mlp\.up_proj\.weight"):
        verify_decoder(engine, source.decoder_name, Placed())


@pytest.mark.parametrize(
    "asked", [LoraSection(rank=2, alpha=4, targets=("up_proj",)), None], ids=["train on", "merged"]
)
def test_a_decoder_with_kept_adapters_is_compared_with_both_of_its_files(
    parts: Path, tmp_path: Path, asked: LoraSection | None
) -> None:
    shutil.copytree(parts / "decoder", tmp_path / "decoder")
    llm = AutoModelForCausalLM.from_pretrained(tmp_path / "decoder", dtype=torch.float32)
    adapted = get_peft_model(
        llm, LoraConfig(r=2, lora_alpha=4, target_modules=["up_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "decoder" / "adapter")
    model = replace(section(parts), decoder=DecoderSection(name=str(tmp_path / "decoder")))
    source = find_source(None, model)
    encoder, connector = build_light(source, seed=0)
    decoder = build_decoder(source, dtype=torch.bfloat16, seed=0, kept=False)
    placed = place_adapters(decoder.llm, asked, stored_adapters(source.decoder_name), seed=0, whole=plainly)
    ranks = SimpleNamespace(first=True, together=lambda what: contextlib.nullcontext())
    engine: Any = SimpleNamespace(
        model=Mllm(connector=connector, decoder=decoder, encoder=encoder), ranks=ranks
    )
    verify_decoder(engine, source.decoder_name, placed)
    up = decoder.llm.model.layers[1].mlp.up_proj
    with torch.no_grad():
        (up.weight if asked is None else up.lora_B["default"].weight)[1, 1] += 0.5
    with pytest.raises(CheckpointError, match=r"1 tensors .*model\.layers\.1\.mlp\.up_proj\."):
        verify_decoder(engine, source.decoder_name, placed)


@pytest.mark.parametrize("layer", [0, -2])
def test_what_is_pruned_is_named_and_counted_from_files_and_from_a_description_alike(
    parts: Path, layer: int
) -> None:
    whole = load_file(parts / "encoder" / "open_clip_model.safetensors")
    model = section(parts, encoder=EncoderSection(name=f"local-dir:{parts / 'encoder'}", layer=layer))
    encoder, _ = build_light(find_source(None, model), seed=0)
    left = sum(parameter.numel() for parameter in encoder.parameters())
    count = sum(value.numel() for value in whole.values()) - left
    assert sum(encoder.pruned.values()) == count > 0
    blocks = "1-2" if layer == 0 else "2"
    words = f"proj, transformer.resblocks.{blocks}, ln_post: {count:,} parameters that the features never use"
    assert describe_pruned(encoder.pruned) == words
    assert encoder_from_spec(encoder.spec).pruned == encoder.pruned
    assert describe_pruned({}) == "nothing"


def test_tensors_of_the_files_that_the_model_has_no_place_for_are_found(parts: Path) -> None:
    """TRAPS A27: compared by mmds, since under ZeRO-3 transformers' own list is always empty."""
    decoder = build_decoder(find_source(None, section(parts)), dtype=torch.float32, seed=0)
    held = load_file(parts / "decoder" / "model.safetensors")
    assert surplus_tensors(held, decoder.llm) == []
    extra = [
        "lm_head.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ]  # tied; written by old versions
    assert surplus_tensors([*held, *extra], decoder.llm) == []
    third = "model.layers.2.mlp.up_proj.weight"
    assert surplus_tensors([*held, third], decoder.llm) == [third]
