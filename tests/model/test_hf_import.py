"""Published LLaVA models in: against transformers' own class, processor and generate."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPImageProcessor, CLIPVisionConfig, LlavaImageProcessor, SiglipVisionConfig

from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.errors import CheckpointError
from mmds.generate import load_assistant
from mmds.model.encoder import encoder_from_spec
from mmds.model.folder import read_description
from mmds.model.hf_import import import_llava
from mmds.model.llava_names import canonical
from mmds.model.llava_template import imported_template, processor_template, render
from mmds.model.llava_towers import open_clip_config
from mmds.model.published import source_folder
from scripts import import_hf
from tests.chat_fixtures import TEMPLATES
from tests.model import published
from tests.model.published import (
    CHATML_PARTS,
    MEAN,
    MISTRAL_PARTS,
    SIDE,
    STD,
    VICUNA_PARTS,
    ask_mmds,
    ask_transformers,
    assert_same,
    clip,
    pictures,
    siglip,
    tokenizer_of,
    write_llava,
)

CASES: dict[str, dict[str, Any]] = {
    "clip-quickgelu-llama": {},
    "clip-gelu-last-block-no-template": {"vision": clip(hidden_act="gelu"), "layer": -1, "template": None},
    "clip-positive-layer-eps": {"vision": clip(layer_norm_eps=1e-3), "layer": 1},
    "clip-mistral": {"family": "mistral", "template": MISTRAL_PARTS},
    "siglip-qwen2-tied": {"vision": siglip(), "family": "qwen2", "tied": True, "template": CHATML_PARTS},
    "siglip-gelu-last-block": {"vision": siglip(hidden_act="gelu"), "layer": -1},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_text_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = write_llava(tmp_path / "llava", **CASES[case])
    import_llava(tmp_path / "llava", tmp_path / "model")
    assistant = load_assistant(tmp_path / "model")
    for images in (pictures(1), pictures(2, seed=3), pictures(1, width=57)):
        ours, theirs = ask_mmds(assistant, images), ask_transformers(tmp_path / "llava", images)
        assert_same(ours, theirs, image_token=model.config.image_token_index)


TILES = [[28, 56], [56, 28], [56, 56], [84, 28]]


@pytest.mark.parametrize(
    "case",
    [
        {"family": "mistral", "template": MISTRAL_PARTS},
        {"vision": siglip(), "family": "qwen2", "template": CHATML_PARTS, "tied": True},
    ],
    ids=["clip-mistral", "siglip-qwen2-tied"],
)
def test_tiles_rows_and_separator_are_those_of_llava_next(case: dict[str, Any], tmp_path: Path) -> None:
    model = write_llava(tmp_path / "llava", tiles=TILES, **case)
    import_llava(tmp_path / "llava", tmp_path / "model")
    description = read_description(tmp_path / "model")
    assert description.resolution.grids == ("1x2", "2x1", "2x2", "3x1")
    stored = load_file(tmp_path / "model" / "connector" / "model.safetensors")
    assert torch.equal(stored["separator"], model.model.image_newline)
    assistant = load_assistant(tmp_path / "model")
    wide, tall = pictures(1, width=90, height=31), pictures(1, width=40, height=130, seed=2)
    for images in (pictures(1), wide, tall, wide + tall):
        ours, theirs = ask_mmds(assistant, images), ask_transformers(tmp_path / "llava", images)
        assert_same(ours, theirs, image_token=model.config.image_token_index)


def test_tiles_off_the_towers_size_are_refused(tmp_path: Path) -> None:
    write_llava(tmp_path / "llava", tiles=[[28, 56], [40, 28]])
    with pytest.raises(CheckpointError, match=r"image_grid_pinpoints: \[\[40, 28\]\]"):
        import_llava(tmp_path / "llava", tmp_path / "model")


def test_padding_and_plain_resizing_of_the_processor_are_kept(tmp_path: Path) -> None:
    square = {"height": SIDE, "width": SIDE}
    common = {
        "size": square,
        "crop_size": square,
        "do_center_crop": False,
        "image_mean": MEAN,
        "image_std": STD,
    }
    padding = LlavaImageProcessor(**common, do_pad=True)
    for name, processor, fit in (("pad", padding, "pad"), ("plain", CLIPImageProcessor(**common), "resize")):
        model = write_llava(tmp_path / name, processor=processor)
        import_llava(tmp_path / name, tmp_path / f"{name}.model")
        assert read_description(tmp_path / f"{name}.model").resolution.fit == fit
        images = pictures(1, width=90, height=31)
        ours = ask_mmds(load_assistant(tmp_path / f"{name}.model"), images)
        assert_same(
            ours, ask_transformers(tmp_path / name, images), image_token=model.config.image_token_index
        )


def test_a_processor_that_crops_becomes_padding_and_the_report_says_so(llava: Path, tmp_path: Path) -> None:
    report = import_llava(llava, tmp_path / "model").lines()
    assert read_description(tmp_path / "model").resolution.fit == "pad"
    assert any("the source's processor crops them" in line for line in report)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved LLaVA; nobody changes it."""
    folder = tmp_path_factory.mktemp("llava") / "llava"
    write_llava(folder)
    return folder


def copy_of(source: Path, target: Path, **config: Any) -> Path:
    """The source with other values at keys of its config, `a.b` for inner ones."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    data = json.loads((target / "config.json").read_text())
    for key, value in config.items():
        *outer, last = key.split("__")
        inner = data
        for name in outer:
            inner = inner[name]
        inner[last] = value
    (target / "config.json").write_text(json.dumps(data))
    return target


def relabelled(source: Path, target: Path, rename: Any, *, file: str = "model.safetensors") -> Path:
    """The source with its tensors under other names, or without those that `rename` makes None; as .bin or .safetensors."""
    copy_of(source, target)
    tensors = load_file(source / "model.safetensors")
    renamed = {rename(name): value for name, value in tensors.items() if rename(name) is not None}
    (target / "model.safetensors").unlink()
    if file.endswith(".bin"):
        torch.save(renamed, target / file)
    else:
        save_file(renamed, target / file)
    return target


def published_layout(name: str) -> str:
    """Names as the hub's files have them."""
    return re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name)


def module_layout(name: str) -> str:
    """Names as the modules of transformers 5 have them."""
    name = re.sub(r"^language_model\.lm_head", "lm_head", name)
    name = re.sub(r"^language_model\.model", "model.language_model", name)
    return re.sub(r"^(vision_tower|multi_modal_projector)", r"model.\1", name)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {f"{p.parent.name}/{n}": v for p in folder.rglob("*.safetensors") for n, v in load_file(p).items()}


@pytest.mark.parametrize(
    ("rename", "file"),
    [
        (published_layout, "model.safetensors"),
        (module_layout, "model.safetensors"),
        (published_layout, "pytorch_model-00001-of-00001.bin"),
    ],
)
def test_every_layout_and_file_type_gives_the_same_tensors(
    llava: Path, tmp_path: Path, rename: Any, file: str
) -> None:
    import_llava(llava, tmp_path / "plain")
    import_llava(relabelled(llava, tmp_path / "other", rename, file=file), tmp_path / "model")
    plain, other = weights(tmp_path / "plain"), weights(tmp_path / "model")
    assert set(plain) == set(other)
    assert all(torch.equal(plain[name], other[name]) for name in plain)


def as_published(source: Path, target: Path) -> Path:
    """The source as `llava-hf/llava-1.5-7b-hf` lies on the hub: its keys of config.json, its files, its names of tensors."""
    relabelled(source, target, published_layout)
    ours = json.loads((target / "config.json").read_text())
    text, tower = ours["text_config"], ours["vision_config"]
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "model_type")
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": ours["image_token_index"],
        "model_type": "llava",
        "pad_token_id": 1,
        "projector_hidden_act": "gelu",
        "text_config": {
            **{key: text[key] for key in (*kept, "vocab_size", "num_key_value_heads")},
            "_name_or_path": "lmsys/vicuna-7b-v1.5",
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "torch_dtype": "float32",
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.36.0.dev0",
        "vision_config": {
            **{key: tower[key] for key in (*kept, "image_size", "patch_size", "projection_dim")},
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": text["vocab_size"],
    }
    (target / "config.json").write_text(json.dumps(config))
    template = target / "chat_template.jinja"
    (target / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    processor = json.loads((target / "processor_config.json").read_text())
    images = {**processor.pop("image_processor"), "processor_class": "LlavaProcessor"}
    (target / "preprocessor_config.json").write_text(json.dumps(images))
    (target / "processor_config.json").write_text(json.dumps(processor))
    return target


def test_a_folder_as_published_is_taken_and_gives_the_same_answers(llava: Path, tmp_path: Path) -> None:
    published_folder = as_published(llava, tmp_path / "hub")
    import_llava(published_folder, tmp_path / "model")
    ours = ask_mmds(load_assistant(tmp_path / "model"), pictures(1))
    theirs = ask_transformers(published_folder, pictures(1))
    assert_same(ours, theirs, image_token=tokenizer_of("llama").convert_tokens_to_ids("<image>"))


def test_names_of_the_modules_are_the_canonical_ones_of_the_files(llava: Path) -> None:
    stored = set(load_file(llava / "model.safetensors"))
    model = published.LlavaForConditionalGeneration.from_pretrained(llava)
    assert {canonical(name) for name in model.state_dict()} == {canonical(name) for name in stored} == stored


def test_the_report_accounts_for_every_tensor_of_the_source(
    llava: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["import_hf.py", str(llava), str(tmp_path / "model")])
    import_hf.main()
    printed = capsys.readouterr().out
    stored = load_file(llava / "model.safetensors")
    lines = printed.splitlines()
    for name in stored:
        assert sum(bool(re.search(rf"(^|\s){re.escape(name)}(\s|$)", line)) for line in lines) == 1
    assert f"{len(stored)} tensors: " in printed
    assert "16 dropped: block above the feature layer 1" in printed
    assert "2 dropped: final norm of the tower" in printed
    taken = {
        f"{part}.{n}"
        for part in ("encoder", "connector")
        for n in load_file(tmp_path / "model" / part / "model.safetensors")
    }
    assert all(any(line.endswith(f"-> {name}") for line in lines) for name in taken)


def test_rows_beyond_the_vocabulary_and_the_type_of_the_weights_are_kept(llava: Path, tmp_path: Path) -> None:
    copy_of(llava, tmp_path / "half")
    half = {n: v.half() for n, v in load_file(llava / "model.safetensors").items()}
    save_file(half, tmp_path / "half" / "model.safetensors")
    import_llava(tmp_path / "half", tmp_path / "model")
    decoder = load_file(tmp_path / "model" / "decoder" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(decoder[name], half[f"language_model.{name}"])
        assert len(decoder[name]) > len(tokenizer_of("llama"))
    assert read_description(tmp_path / "model").dtype == "float16"


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (lambda n: n + ".extra" if n.endswith("linear_1.bias") else n, r"missing: .*linear_1\.bias"),
        (
            lambda n: None if n.endswith("k_proj.weight") and "layers.1" in n and "vision" in n else n,
            "k_proj",
        ),
        (lambda n: "surplus.gate" if n.endswith("post_layernorm.bias") else n, r"no place .*surplus\.gate"),
    ],
)
def test_a_missing_or_a_strange_tensor_ends_the_import_with_its_name(
    llava: Path, tmp_path: Path, rename: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_llava(relabelled(llava, tmp_path / "bad", rename), tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config__intermediate_size": 64}, r"fc1\.weight has the shape \(128, 32\)"),
        ({"vision_config__hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer is .*several layers"),
        ({"vision_feature_layer": 0}, "vision_feature_layer is 0"),
        ({"vision_feature_layer": -4}, "vision_feature_layer is -4"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act is 'relu'"),
        ({"multimodal_projector_bias": False}, "multimodal_projector_bias"),
        ({"vision_config__image_size": 42}, "makes images of 28 pixels"),
        ({"model_type": "llama"}, "no LLaVA folder"),
    ],
)
def test_what_cannot_be_computed_here_is_refused_by_key(
    llava: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_llava(copy_of(llava, tmp_path / "bad", **change), tmp_path / "model")


def test_a_head_of_its_own_stays_though_the_config_says_tied(llava: Path, tmp_path: Path) -> None:
    import_llava(copy_of(llava, tmp_path / "said", tie_word_embeddings=True), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "decoder" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


def test_published_towers_are_open_clips_own() -> None:
    """The tower of llava-1.5, and Google's so400m, parameter by parameter."""
    large = CLIPVisionConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, image_size=336, patch_size=14, projection_dim=768,
    )  # fmt: skip
    assert open_clip_config(large)[0] == "ViT-L-14-336-quickgelu"
    so400m = SiglipVisionConfig(
        hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, image_size=384, patch_size=14,
    )  # fmt: skip
    name, config = open_clip_config(so400m)
    with torch.device("meta"):
        ours = published_tower(config)
        theirs = published_tower(dict(open_clip.get_model_config("ViT-SO400M-14-SigLIP-384")))
    assert {n: v.shape for n, v in ours.items()} == {n: v.shape for n, v in theirs.items()}
    assert name


def published_tower(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    from mmds.model.encoder_sources import build_tower

    return build_tower({"quick_gelu": False, **config}).state_dict()


@pytest.mark.parametrize(
    ("family", "source", "kept"),
    [
        ("llama", VICUNA_PARTS, False),
        ("llama", None, False),
        ("mistral", MISTRAL_PARTS, True),
        ("mistral", None, False),
        ("qwen2", CHATML_PARTS, True),
        ("qwen2", TEMPLATES["chatml"], True),
    ],
)
def test_a_template_takes_strings_ends_turns_and_gives_the_sources_prompt(
    family: str, source: str | None, kept: bool
) -> None:
    tokenizer = tokenizer_of(family)
    template, origin = imported_template(tokenizer, source, family)
    assert (origin == "the source's own") == kept
    ChatTokenizer(tokenizer, template=template)
    if source is None or "content['text']" not in source:
        return
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    theirs = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], chat_template=source, tokenize=False, add_generation_prompt=True
    )
    ours = render(tokenizer, template, [("user", "<image>\nWhat is it?")], prompt=True)
    assert ours.removeprefix("<s>") == theirs
    again = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}],
        chat_template=processor_template(template),
        tokenize=False,
        add_generation_prompt=True,
    )
    assert again == ours


def test_a_template_that_ends_no_turn_in_an_unknown_family_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"ends no assistant turn.*chat_template\.jinja"):
        imported_template(tokenizer_of("qwen2"), VICUNA_PARTS, "qwen2")


def test_init_from_a_llava_folder_is_imported_once_and_again_when_its_files_change(
    llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMDS_CACHE", str(tmp_path / "cache"))
    copy_of(llava, tmp_path / "mine")
    first = source_folder(str(tmp_path / "mine"))
    assert first.parent == tmp_path / "cache" / "imported"
    assert first.name.startswith("mine-")
    stamp = (first / "mmds.json").stat().st_mtime_ns
    assert source_folder(str(tmp_path / "mine")) == first
    assert (first / "mmds.json").stat().st_mtime_ns == stamp
    (tmp_path / "mine" / "generation_config.json").write_text("{}")
    assert source_folder(str(tmp_path / "mine")) != first
    assert source_folder(str(first)) == first


def test_a_hub_name_that_cannot_be_fetched_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMDS_CACHE", str(tmp_path))
    monkeypatch.setattr("mmds.model.published.snapshot_download", no_hub)
    with pytest.raises(
        CheckpointError, match=r"llava-hf/llava-1\.5-7b-hf cannot be fetched.*name the folder"
    ):
        source_folder("llava-hf/llava-1.5-7b-hf")


def test_a_hub_name_is_fetched_and_imported(
    llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMDS_CACHE", str(tmp_path))
    asked = []

    def hub(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, "*.safetensors" in allow_patterns))
        return str(llava)

    monkeypatch.setattr("mmds.model.published.snapshot_download", hub)
    folder = source_folder("llava-hf/tiny")
    assert asked == [("llava-hf/tiny", True)]
    assert folder.name.startswith("tiny-")
    encoder_from_spec(read_description(folder).encoder)


def no_hub(*_: Any, **__: Any) -> str:
    raise OSError("no network")
