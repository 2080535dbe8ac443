"""The quick start's conversions against independent implementations, on tiny models; no package is downloaded."""

from __future__ import annotations

import json
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import timm
import torch
from onnx import helper, numpy_helper
from transformers import Dinov2Config, Dinov2Model, LlamaConfig, LlamaForCausalLM

from mmds.data.conversation import parse_record
from mmds.errors import DataError

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import quickstart_data as data
import quickstart_decoder as decoder
import quickstart_encoder as encoder
import quickstart_parts as parts

WIDTH, LAYERS, GRID = 32, 2, 5


@pytest.fixture(scope="module")
def dino() -> Dinov2Model:
    """Hugging Face's own Dinov2, tiny, with weights that make every bias, scale and norm matter."""
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        mlp_ratio=2,
        image_size=14 * GRID,
        patch_size=14,
    )
    model = Dinov2Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


OLD_NAMES = {  # of attention in the release that exported the graph
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
}


def as_exported(model: Dinov2Model) -> onnx.GraphProto:
    """The parts of an exported graph that hold weights, named and transposed as torch's exporter does."""
    arrays: dict[str, np.ndarray] = {}
    nodes: list[onnx.NodeProto] = []
    for name, value in model.state_dict().items():
        for new, old in OLD_NAMES.items():
            name = name.replace(new, old)
        if name == "embeddings.position_embeddings":
            arrays["onnx::Concat_1957"], arrays["onnx::Reshape_1962"] = (
                value[:, :1].numpy(),
                value[:, 1:].numpy(),
            )
        elif name.startswith("encoder") and value.ndim == 2:
            operand = f"onnx::MatMul_{len(nodes)}"
            arrays[operand] = value.T.numpy()
            layer, module = name.removeprefix("encoder.layer.").removesuffix(".weight").split(".", 1)
            path = f"/backbone/encoder/layer.{layer}/{module.replace('.', '/')}/MatMul"
            nodes.append(helper.make_node("MatMul", ["x", operand], ["y"], name=path))
        else:
            arrays[f"backbone.{name}"] = value.numpy()
    initializers = [numpy_helper.from_array(np.ascontiguousarray(v), n) for n, v in arrays.items()]
    return helper.make_graph(nodes, "dinov2", [], [], initializers)


def timm_features(state: dict[str, torch.Tensor], pixels: torch.Tensor) -> list[torch.Tensor]:
    """Every block's patch features of timm's ViT with these weights."""
    model = timm.models.VisionTransformer(
        img_size=pixels.shape[-1],
        patch_size=14,
        embed_dim=WIDTH,
        depth=LAYERS,
        num_heads=2,
        mlp_ratio=2,
        init_values=1.0,
        num_classes=0,
    )
    model.load_state_dict(state, strict=True)
    features = model.eval().forward_intermediates(
        pixels, indices=list(range(LAYERS)), output_fmt="NLC", intermediates_only=True
    )
    assert isinstance(features, list)
    return features


@pytest.mark.parametrize("grid", [GRID, 3, 8], ids=["trained grid", "smaller", "larger"])
def test_every_block_of_the_converted_encoder_equals_dinov2(dino: Dinov2Model, grid: int) -> None:
    state = encoder.vit_state(as_exported(dino))
    state["pos_embed"] = encoder.resample_positions(state["pos_embed"], grid)
    pixels = torch.randn(2, 3, 14 * grid, 14 * grid)
    with torch.no_grad():
        expected = dino(pixels, output_hidden_states=True).hidden_states[1:]
        found = timm_features(state, pixels)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs[:, 1:], atol=1e-5, rtol=1e-4)


def test_a_graph_without_an_expected_tensor_is_refused_by_name(dino: Dinov2Model) -> None:
    graph = as_exported(dino)
    kept = [t for t in graph.initializer if t.name != "backbone.encoder.layer.1.layer_scale2.lambda1"]
    broken = helper.make_graph(graph.node, "broken", [], [], kept)
    with pytest.raises(DataError, match=r"layer\.1\.layer_scale2\.lambda1"):
        encoder.vit_state(broken)


def test_the_resaved_decoder_computes_the_same_in_bf16(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    model.config.quantization_config = {"quant_method": "gguf"}
    decoder.plain(model).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert "quantization_config" not in saved and saved["dtype"] == "bfloat16"
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value.to(torch.bfloat16).float(), atol=0, rtol=0)


def test_a_resaved_decoder_that_says_something_else_is_refused() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    decoder.check_equal(([5], logits), ([5], logits + 0.01))
    with pytest.raises(DataError, match="same ids False"):
        decoder.check_equal(([5], logits), ([6], logits))
    with pytest.raises(DataError, match="most likely tokens False"):
        decoder.check_equal(([5], logits), ([5], logits.flip(-1)))


QUESTIONS = {
    0: [
        ("what is the blue shape?", "rectangle"),
        ("is there a red shape?", "no"),
        ("is no blue shape present?", "no"),
    ],
    1: [("does the image not contain a teal shape?", "no"), ("is there a circle?", "yes")],
    2: [("is there a circle?", "no"), ("does the image contain a triangle?", "no")],
    3: [("is there not a gray shape?", "yes")],
}


def test_what_answers_tell_about_a_picture() -> None:
    known = [data.truth(questions) for questions in QUESTIONS.values()]
    assert known == [("blue", "rectangle"), ("teal", "circle"), (None, "rectangle"), (None, None)]
    with pytest.raises(DataError, match="contradicting"):
        data.truth([("what color is the shape?", "red"), ("is there a red shape?", "no")])


def made_records() -> Iterator[dict[str, object]]:
    dice = random.Random(0)
    yield from data.captions(QUESTIONS)
    yield from data.conversations(QUESTIONS, dice)
    yield from data.heldout(QUESTIONS, dice)


def test_every_record_is_a_conversation_that_shows_its_picture_first() -> None:
    records = list(made_records())
    for number, record in enumerate(records):
        conversation = parse_record(record, where=f"test:{number}")
        assert len(conversation.images) == 1
        assert not isinstance(conversation.turns[0].parts[0], str)
    assert len({str(r["id"]) for r in records}) == len(records)
    assert sum("type" in r for r in records) == sum(map(len, QUESTIONS.values()))


def test_no_answer_of_a_conversation_can_be_read_off_an_earlier_turn() -> None:
    asked = [
        ("what color is the circle?", "red"),
        ("what color is the shape?", "red"),
        ("what shape is present?", "circle"),
        ("what is the red shape?", "circle"),
        ("is there a red shape?", "yes"),
    ]
    for seed in range(40):
        chosen = data.pick(asked, random.Random(seed), yes_no=seed % 2 == 0)
        openly = [qa for qa in chosen if qa[1] in ("red", "circle")]
        assert 1 <= len(openly) <= 2
        for turn, (_, answer) in enumerate(openly):
            assert not any(answer in text for earlier in openly[:turn] for text in earlier)
        assert [qa for qa in chosen if qa[1] == "yes"] == (chosen[-1:] if seed % 2 == 0 else [])
    pairs = [data.pick(asked, random.Random(seed), yes_no=False) for seed in range(40)]
    assert {len(pair) for pair in pairs} == {1, 2}


def small_wheel(folder: Path) -> parts.Wheel:
    path = folder / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr("small/words.txt", "one two")
    return parts.Wheel(
        requirement="small==1", file=path.name, sha256=parts.sha256(path), licence="Apache-2.0"
    )


def test_a_package_with_other_bytes_is_refused(tmp_path: Path) -> None:
    wheel = small_wheel(tmp_path)
    assert parts.fetch(wheel, tmp_path) == tmp_path / wheel.file
    with (tmp_path / wheel.file).open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(DataError, match=f"expected {wheel.sha256}"):
        parts.fetch(wheel, tmp_path)


def write_a(folder: Path) -> None:
    (folder / "a.txt").write_text("a")


def test_a_part_is_kept_until_its_recipe_or_its_files_change(tmp_path: Path) -> None:
    folder = tmp_path / "part"
    parts.make(folder, "first", write_a)
    assert parts.is_made(folder, "first")
    assert not parts.is_made(folder, "second")
    (folder / "a.txt").write_text("b")
    assert not parts.is_made(folder, "first")


def test_a_part_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "part"
    parts.make(folder, "first", write_a)

    def fail(path: Path) -> None:
        (path / "a.txt").write_text("half")
        raise DataError("no space")

    with pytest.raises(DataError):
        parts.make(folder, "second", fail)
    assert parts.is_made(folder, "first")
    assert [path.name for path in tmp_path.iterdir()] == ["part"]
