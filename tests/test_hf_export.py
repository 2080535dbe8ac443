"""Model folders out: what transformers' own class and processor make of them is what chat.py makes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    PhiConfig,
)

from mmds.config_types import FIXED, ConnectorSection, EncoderSection, ResolutionSection
from mmds.errors import CheckpointError
from mmds.generate import load_assistant
from mmds.hf_export import export_hf, grown
from mmds.hf_target import exports_to
from mmds.model.connector import Connector
from mmds.model.decoder import load_config
from mmds.model.encoder import EncoderSpec, build_encoder
from mmds.model.folder import Description, read_description
from mmds.model.hf_import import import_llava
from mmds.model.llava_towers import TIMM_BASE
from scripts import export_hf as script
from tests import tiny
from tests.chat_fixtures import TEMPLATES
from tests.model.families import excite
from tests.model.published import (
    VICUNA_PARTS,
    ask_mmds,
    ask_transformers,
    assert_same,
    pictures,
    text,
    tokenizer_of,
    write_llava,
)

CLIP = {**tiny.VISION, "quick_gelu": True}
SIGLIP = {
    "embed_dim": 32,
    "vision_cfg": {
        "image_size": 28, "timm_model_name": TIMM_BASE, "timm_model_pretrained": False, "timm_pool": "map", "timm_proj": "none",
        "timm_args": {"img_size": 28, "patch_size": 14, "embed_dim": 32, "depth": 3, "num_heads": 2, "act_layer": "gelu_tanh"},
    },
}  # fmt: skip


def write_folder(
    folder: Path,
    *,
    tower: dict[str, Any] = CLIP,
    family: str = "llama",
    tied: bool = False,
    spare_rows: int = 0,
    image: bool = False,
    layer: int = -2,
    resolution: ResolutionSection = FIXED,
) -> Path:
    """A model folder with random weights. spare_rows: of the embedding, beyond the tokenizer; image: the tokenizer has `<image>`."""
    source = tiny.write_encoder(folder.with_name(folder.name + ".tower"), model_cfg=tower)
    encoder = build_encoder(EncoderSection(name=f"local-dir:{source}", layer=layer))
    tokenizer = tokenizer_of(family, image=image)
    llm = tiny.AutoModelForCausalLM.from_config(text(family, rows=len(tokenizer) + spare_rows, tied=tied))
    mlp2x = ConnectorSection(name="mlp2x")
    connector = Connector(mlp2x, encoder_width=32, decoder_width=48, separator=resolution.name == "anyres")
    torch.manual_seed(4)
    for module in (encoder, connector, llm):
        excite(module)
    broken = [i for i in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([i])]
    llm.get_output_embeddings().weight.data[broken] = 0.0  # parts of characters
    llm.save_pretrained(folder / "decoder")
    tokenizer.save_pretrained(folder / "decoder")
    for part, module in (("encoder", encoder), ("connector", connector)):
        (folder / part).mkdir()
        state = {name: value.contiguous() for name, value in module.state_dict().items()}
        save_file(state, folder / part / "model.safetensors")
    description = Description(encoder=encoder.spec, connector=mlp2x, decoder_width=48, resolution=resolution)
    description.write(folder)
    return folder


CASES: dict[str, dict[str, Any]] = {
    "clip-llama": {},
    "clip-gelu-first-block-mistral": {"tower": tiny.VISION, "layer": 0, "family": "mistral"},
    "clip-last-block-tied": {"layer": -1, "tied": True},
    "siglip-qwen2-spare-rows": {"tower": SIGLIP, "family": "qwen2", "tied": True, "spare_rows": 5},
    "siglip-image-token-in-place": {"tower": SIGLIP, "layer": -1, "image": True},
}


@pytest.mark.parametrize("case", CASES)
def test_the_reloaded_model_says_what_chat_says(case: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", **CASES[case])
    done = export_hf(folder, tmp_path / "hf")
    assert done.notes == ()
    assistant = load_assistant(folder)
    for images in (pictures(1), pictures(2, seed=3), pictures(0)):
        ours, theirs = ask_mmds(assistant, images), ask_transformers(tmp_path / "hf", images)
        assert_same(ours, theirs, image_token=done.image_token)


def test_kept_adapters_are_merged_into_what_goes_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    plain = ask_mmds(load_assistant(folder), pictures(1))
    llm = AutoModelForCausalLM.from_pretrained(folder / "decoder")
    tuned = get_peft_model(llm, LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "up_proj"]))
    excite(tuned.base_model.model.model.layers)  # B is zero at first
    kept = folder / "decoder" / "adapter"
    tuned.save_pretrained(kept)
    tuned.unload().save_pretrained(folder / "decoder")
    assistant = load_assistant(folder)
    done = export_hf(folder, tmp_path / "hf")
    ours, theirs = ask_mmds(assistant, pictures(1)), ask_transformers(tmp_path / "hf", pictures(1))
    assert_same(ours, theirs, image_token=done.image_token)
    assert not torch.allclose(ours.logits, plain.logits)


@pytest.mark.parametrize("shape", [(28, 28), (90, 41), (40, 130)])
@pytest.mark.parametrize(
    ("resolution", "name"),
    [
        ({"name": "fixed"}, "LlavaForConditionalGeneration"),
        ({"name": "fixed", "fit": "pad"}, "LlavaForConditionalGeneration"),
        ({"name": "anyres"}, "LlavaNextForConditionalGeneration"),
        ({"name": "anyres", "grids": ("1x2", "2x1", "3x1")}, "LlavaNextForConditionalGeneration"),
    ],
)
def test_pictures_of_any_shape_are_cut_and_seen_alike(
    shape: tuple[int, int], resolution: dict[str, Any], name: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model", resolution=ResolutionSection(**resolution))
    done = export_hf(folder, tmp_path / "hf")
    assert done.name == name
    images = pictures(1, width=shape[0], height=shape[1])
    ours, theirs = ask_mmds(load_assistant(folder), images), ask_transformers(tmp_path / "hf", images)
    assert_same(ours, theirs, image_token=done.image_token)


@pytest.mark.parametrize(
    ("tied", "spare", "image"), [(True, 0, False), (False, 0, False), (True, 7, False), (False, 0, True)]
)
def test_old_rows_are_bit_equal_the_tie_is_kept_and_the_image_token_has_a_row(
    tied: bool, spare: int, image: bool, tmp_path: Path
) -> None:
    """TRAPS A9."""
    folder = write_folder(tmp_path / "model", tied=tied, spare_rows=spare, image=image)
    done = export_hf(folder, tmp_path / "hf")
    before = load_file(folder / "decoder" / "model.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert ("language_model.lm_head.weight" in after) == (not tied) == ("lm_head.weight" in before)
    for name, value in before.items():
        new = after["language_model." + name]
        table = name in ("model.embed_tokens.weight", "lm_head.weight")
        assert torch.equal(new[: len(value)] if table else new, value)
        assert not table or done.rows == (len(value), len(new))
    assert done.image_token < done.rows[1]
    assert (done.rows[1] == done.rows[0]) == (spare > 0 or image)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.convert_tokens_to_ids("<image>") == done.image_token
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == done.rows[1]
    assert config["text_config"]["tie_word_embeddings"] == config["tie_word_embeddings"] == tied


def test_a_new_row_is_never_the_largest_logit() -> None:
    table = torch.randn(50, 8)
    new = grown(table, 64)
    logits = torch.randn(1000, 8) @ new.T
    assert torch.equal(new[:50], table)
    assert int(logits.argmax(1).max()) < 50


def test_a_model_goes_out_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    write_llava(tmp_path / "llava")
    import_llava(tmp_path / "llava", tmp_path / "model")
    export_hf(tmp_path / "model", tmp_path / "hf")
    import_llava(tmp_path / "hf", tmp_path / "again")
    for part in ("encoder", "connector", "decoder"):
        first, second = (load_file(tmp_path / f / part / "model.safetensors") for f in ("model", "again"))
        assert set(first) == set(second)
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert (
        ask_mmds(load_assistant(tmp_path / "model"), pictures(1)).said
        == ask_transformers(tmp_path / "hf", pictures(1)).said
    )


def test_weights_are_sharded_under_the_published_names(tmp_path: Path) -> None:
    export_hf(write_folder(tmp_path / "model"), tmp_path / "hf", shard_bytes=40_000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    for name in (
        "language_model.model.embed_tokens.weight",
        "language_model.lm_head.weight",
        "multi_modal_projector.linear_1.weight",
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
        "vision_tower.vision_model.post_layernorm.weight",
    ):
        assert name in index
    assert ask_transformers(tmp_path / "hf", pictures(1)).said


def test_a_folder_whose_weights_do_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    file = folder / "connector" / "model.safetensors"
    tensors = load_file(file)
    tensors["net.gate"] = tensors.pop("net.up.bias")
    save_file(tensors, file)
    with pytest.raises(
        CheckpointError,
        match=r"missing: connector\.net\.up\.bias; without a name in LLaVA: connector\.net\.gate",
    ):
        export_hf(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> tuple[Description, Any]:
    folder = write_folder(tmp_path_factory.mktemp("described") / "model")
    return read_description(folder), load_config(str(folder / "decoder"))


def named_spec(name: str, *, layer: int, width: int, norm: bool = False, **vision: Any) -> EncoderSpec:
    """The spec of a built-in tower, as `build_encoder` would make it without its weights."""
    known = open_clip.get_model_config(name)
    assert known is not None
    config = {
        "embed_dim": known["embed_dim"],
        "vision_cfg": {**known["vision_cfg"], **vision},
        "quick_gelu": bool(known.get("quick_gelu")),
    }
    size = known["vision_cfg"].get("image_size", 224)
    return EncoderSpec(
        name=name, model_cfg=config, layer=layer, norm=norm, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic",
        image_size=size, patch_size=14 if "14" in name else 16, width=width,
    )  # fmt: skip


TOWERS = [
    (named_spec("ViT-L-14-336-quickgelu", layer=22, width=1024), ""),
    (named_spec("ViT-SO400M-14-SigLIP-384", layer=25, width=1152), ""),
    (named_spec("ViT-B-16-SigLIP2-256", layer=10, width=768), ""),
    (named_spec("ViT-L-14-336-quickgelu", layer=22, width=1024, norm=True), "final norm"),
    (named_spec("ViT-B-16", layer=10, width=768, no_ln_pre=True), "CLIP of transformers cannot"),
    (named_spec("ViT-B-16", layer=10, width=768, ls_init_value=0.1), "CLIP of transformers cannot"),
    (named_spec("EVA02-B-16", layer=10, width=768), "neither a CLIP ViT nor a SigLIP ViT"),
    (named_spec("RN50", layer=3, width=1024), "neither a CLIP ViT nor a SigLIP ViT"),
]


@pytest.mark.parametrize(("spec", "reason"), TOWERS, ids=[f"{spec.name}-{reason}" for spec, reason in TOWERS])
def test_a_tower_exports_or_says_why_not(
    described: tuple[Description, Any], spec: EncoderSpec, reason: str
) -> None:
    description, decoder = described
    name, found = exports_to(replace(description, encoder=spec), decoder)
    assert (name is None) == bool(reason)
    assert reason in found


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=64), "caps or scales its logits"),
        (CohereConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, logit_scale=0.1), "caps or scales its logits"),
        (PhiConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64), "no plain head"),
        (GPT2Config(n_embd=32, n_layer=2, n_head=2), "no plain head"),
    ],
)  # fmt: skip
def test_a_decoder_that_llava_would_compute_differently_is_refused(
    described: tuple[Description, Any], config: Any, reason: str
) -> None:
    name, found = exports_to(described[0], config)
    assert name is None
    assert reason in found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"connector": ConnectorSection(name="linear")}, "'linear'"),
        ({"connector": ConnectorSection(name="merge_mlp")}, "'merge_mlp'"),
        ({"connector": ConnectorSection(name="resampler")}, "'resampler'"),
        ({"positions": "mrope"}, "'mrope'"),
        ({"resolution": ResolutionSection(name="native")}, "'native'"),
        ({"resolution": ResolutionSection(name="fixed", size=56)}, "resolution.size is 56"),
    ],
)
def test_modes_without_a_counterpart_say_so(
    described: tuple[Description, Any], change: dict[str, Any], reason: str
) -> None:
    name, found = exports_to(replace(described[0], **change), described[1])
    assert name is None
    assert reason in found


def test_rotated_encoders_have_no_counterpart_and_the_towers_own_size_has_one(
    described: tuple[Description, Any],
) -> None:
    description, decoder = described
    rope = replace(description, encoder=replace(description.encoder, rope=True))
    assert "encoder.rope" in exports_to(rope, decoder)[1]
    own = replace(description, resolution=ResolutionSection(name="fixed", size=28))
    assert exports_to(own, decoder)[0] == "LlavaForConditionalGeneration"


def test_only_the_grids_below_the_trained_pixel_cap_are_written(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", resolution=ResolutionSection(name="anyres"))
    replace(read_description(folder), max_pixels=3 * 28 * 28).write(folder)
    export_hf(folder, tmp_path / "hf")
    for file in ("config.json", "preprocessor_config.json"):
        assert json.loads((tmp_path / "hf" / file).read_text())["image_grid_pinpoints"] == [
            [28, 56],
            [56, 28],
        ]


def test_the_script_says_why_a_model_has_no_counterpart_and_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.write_model_folder(tmp_path / "model", connector="merge_mlp")
    monkeypatch.setattr("sys.argv", ["export_hf.py", str(folder), str(tmp_path / "hf")])
    with pytest.raises(CheckpointError, match=r"no counterpart.*'merge_mlp'.*use the model folder"):
        script.main()
    assert not (tmp_path / "hf").exists()
    load_assistant(folder)


def test_a_template_whose_generation_prompt_is_not_trainings_is_told(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    template = TEMPLATES["vicuna"].replace("'ASSISTANT:'", "'ASSISTANT: Sure,'")
    assert template != TEMPLATES["vicuna"]
    (folder / "decoder" / "chat_template.jinja").write_text(template)
    assert "generation prompt" in export_hf(folder, tmp_path / "hf").notes[0]


def test_string_contents_and_parts_give_one_prompt(tmp_path: Path) -> None:
    export_hf(write_folder(tmp_path / "model"), tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")

    def prompt(content: Any, template: str | None = None) -> str:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": content}], chat_template=template, tokenize=False, add_generation_prompt=True))  # fmt: skip

    image, said = {"type": "image"}, {"type": "text", "text": "What?"}
    wanted = prompt([image, said], VICUNA_PARTS)
    assert prompt([image, said]) == prompt("<image>\nWhat?") == wanted
    assert prompt([image, {"type": "text", "text": "\nWhat?"}]) == wanted
    assert (
        prompt([image, image, said])
        == prompt("<image>\n<image>\nWhat?")
        == prompt([image, image, said], VICUNA_PARTS)
    )
    assert prompt([said, image]) == prompt("What?<image>")
