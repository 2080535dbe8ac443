from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.transforms.functional import normalize

from mmds.config_types import EncoderSection
from mmds.errors import ConfigError
from mmds.geometry import Geometry
from mmds.model.encoder import (
    Encoder,
    EncoderSpec,
    build_encoder,
    encoder_from_spec,
    tower_blocks,
    unused_parameters,
)
from mmds.model.encoder_sources import build_tower
from mmds.model.recompute import non_reentrant
from tests import tiny
from tests.model.families import BY_DEEPSPEED, gap, gradients, worst


def timm_cfg(name: str, *, pool: str = "", proj: str = "linear", image_size: int = 160) -> dict[str, Any]:
    """open_clip's description of a timm tower."""
    vision = {"timm_model_name": name, "timm_pool": pool, "timm_proj": proj, "image_size": image_size}
    return {"embed_dim": 16, "vision_cfg": vision}


RESNET = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16},
}
# tower: its description, layers to take, and the pixels of a cell at each
TOWERS: dict[str, tuple[dict[str, Any], dict[int, int]]] = {
    "native ViT": (tiny.VISION, {-1: 14, -2: 14, 0: 14}),
    "native ViT, QuickGELU": ({**tiny.VISION, "quick_gelu": True}, {-2: 14}),
    "timm ViT, class token": (timm_cfg("test_vit"), {-1: 16, -2: 16, 0: 16}),
    "timm ViT, register, average pool": (timm_cfg("test_vit2", pool="avg"), {-2: 16}),
    "timm ViT, register, attention pool": (timm_cfg("test_vit3", pool="map", proj="none"), {-1: 16, -2: 16}),
    "timm ViT at another size": (
        timm_cfg("test_vit3", pool="map", proj="none", image_size=96),
        {-2: 16},
    ),
    "timm ConvNeXt": (timm_cfg("test_convnext"), {-1: 32, 1: 8}),
    "ResNet": (RESNET, {0: 4, 1: 4, 3: 16, 4: 32}),
}
CASES = [(name, layer) for name, (_, layers) in TOWERS.items() for layer in layers]
NORMED = [(name, layer) for name, layer in CASES if "ViT" in name and "average pool" not in name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with weights for a tower, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tiny.write_encoder(tmp_path_factory.mktemp("tower"), model_cfg=TOWERS[name][0])
        return made[name]

    return make


def build(path: Path, **section: Any) -> Encoder:
    return build_encoder(EncoderSection(name=f"local-dir:{path}", **section))


def whole_tower(path: Path, cfg: dict[str, Any]) -> nn.Module:
    """The tower as open_clip makes it, nothing cut off, with the folder's weights, in eval mode."""
    tower = build_tower({"quick_gelu": False, **cfg})
    state = load_file(path / "open_clip_model.safetensors")
    tower.load_state_dict({name.removeprefix("visual."): value for name, value in state.items()})
    return tower.eval()


def block_and_norm(tower: Any, layer: int) -> tuple[nn.Module, nn.Module | None, int]:
    """The module whose output is the feature, the tower's final norm, and the number of prefix tokens; None for feature maps."""
    if hasattr(tower, "transformer"):
        return tower.transformer.resblocks[layer], tower.ln_post, 1
    if hasattr(tower, "trunk") and hasattr(tower.trunk, "blocks"):
        return tower.trunk.blocks[layer], tower.trunk.norm, tower.trunk.num_prefix_tokens
    if hasattr(tower, "trunk"):
        return tower.trunk.stages[layer], None, 0
    return (tower.avgpool, tower.layer1, tower.layer2, tower.layer3, tower.layer4)[layer], None, 0


def hooked_features(tower: nn.Module, pixels: Tensor, layer: int, *, norm: bool) -> Tensor:
    """Features [P, c] caught by a hook in the tower's own forward pass on normalised pixels."""
    caught: list[Tensor] = []
    block, final, prefix = block_and_norm(tower, layer)
    handle = block.register_forward_hook(
        lambda module, inputs, output: caught.append(output.detach().clone())
    )
    with torch.no_grad():
        tower(normalize(pixels.float().div(255), tiny.PREPROCESS["mean"], tiny.PREPROCESS["std"]))
        handle.remove()
        features = caught[0]
        if features.dim() == 4:
            return torch.cat([image.reshape(image.shape[0], -1).t() for image in features])
        whole = final(features) if norm and final is not None else features
        return torch.cat([image[prefix:] for image in whole])


def random_pixels(encoder: Encoder, images: int = 2) -> Tensor:
    size = encoder.spec.image_size
    return torch.randint(
        0, 256, (images, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_features_equal_the_towers_own_forward_pass_at_that_block(
    name: str, layer: int, folder: Callable[[str], Path]
) -> None:
    encoder = build(folder(name), layer=layer).eval()
    pixels = random_pixels(encoder)
    expected = hooked_features(whole_tower(folder(name), TOWERS[name][0]), pixels, layer, norm=False)
    with torch.no_grad():
        assert gap(encoder(pixels), expected) < 1e-5


@pytest.mark.parametrize(("name", "layer"), NORMED)
def test_the_final_norm_is_applied_only_when_declared(
    name: str, layer: int, folder: Callable[[str], Path]
) -> None:
    encoder = build(folder(name), layer=layer, norm=True).eval()
    pixels = random_pixels(encoder)
    tower = whole_tower(folder(name), TOWERS[name][0])
    with torch.no_grad():
        assert gap(encoder(pixels), hooked_features(tower, pixels, layer, norm=True)) < 1e-5
        assert gap(encoder(pixels), hooked_features(tower, pixels, layer, norm=False)) > 1e-2


@pytest.mark.parametrize(("name", "layer"), [case for case in CASES if case not in NORMED])
def test_a_norm_that_the_tower_does_not_have_is_refused(
    name: str, layer: int, folder: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=r"encoder\.norm: this tower has no final norm"):
        build(folder(name), layer=layer, norm=True)


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_only_the_planned_patches_leave_the_tower(
    name: str, layer: int, folder: Callable[[str], Path]
) -> None:
    """No class and no register token: as many features as the geometry plans patches."""
    encoder = build(folder(name), layer=layer)
    spec, cell = encoder.spec, TOWERS[name][1][layer]
    plan = Geometry(mode="fixed", image_size=spec.image_size, patch_size=spec.patch_size).plan(640, 480)
    assert spec.patch_size == cell
    assert plan.patches == (spec.image_size // cell) ** 2
    assert encoder(random_pixels(encoder, 3)).shape == (3 * plan.patches, spec.width)


@pytest.mark.parametrize(
    ("name", "layer", "norm"), [(*case, False) for case in CASES] + [(*case, True) for case in NORMED]
)
def test_every_parameter_that_is_left_gets_a_gradient(
    name: str, layer: int, norm: bool, folder: Callable[[str], Path]
) -> None:
    encoder = build(folder(name), layer=layer, norm=norm)
    encoder(random_pixels(encoder)).square().sum().backward()
    assert [n for n, p in encoder.named_parameters() if p.grad is None] == []
    assert all(p.dim() > 0 for p in encoder.parameters())
    assert unused_parameters(encoder) == []


def test_a_parameter_that_does_nothing_is_found(folder: Callable[[str], Path]) -> None:
    encoder = build(folder("native ViT"))
    encoder.visual.spare = nn.Linear(2, 2)
    assert unused_parameters(encoder) == ["visual.spare.weight", "visual.spare.bias"]


def test_layer_minus_two_of_three_blocks_is_block_one_and_the_last_block_is_gone(
    folder: Callable[[str], Path],
) -> None:
    encoder = build(folder("native ViT"), layer=-2)
    assert encoder.spec.layer == 1
    assert len(encoder.visual.transformer.resblocks) == 2
    assert not any("proj" in n.split(".")[1:2] or "ln_post" in n for n, _ in encoder.named_parameters())


@pytest.mark.parametrize(
    ("name", "layer"), [("native ViT", 3), ("native ViT", -4), ("ResNet", 5), ("ResNet", -1), ("ResNet", -2)]
)
def test_a_layer_that_is_not_there_is_refused(name: str, layer: int, folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"encoder\.layer"):
        build(folder(name), layer=layer)


@pytest.mark.parametrize(
    "cfg",
    [
        {"embed_dim": 16, "vision_cfg": {**tiny.VISION["vision_cfg"], "image_size": 30}},
        timm_cfg("test_vit", image_size=100),
        timm_cfg("test_vit3", pool="map", proj="none", image_size=100),
    ],
)
def test_a_size_off_the_patch_grid_is_refused_because_border_pixels_would_be_lost(
    cfg: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"off the patch grid|takes no images of 100 px"):
        build(tiny.write_encoder(tmp_path, model_cfg=cfg))


@pytest.mark.parametrize(
    ("name", "layer"), [("native ViT", -2), ("timm ViT, class token", -2), ("ResNet", 4)]
)
def test_an_image_has_the_same_features_alone_and_among_others_also_while_training(
    name: str, layer: int, folder: Callable[[str], Path]
) -> None:
    encoder = build(folder(name), layer=layer).train()
    pixels = random_pixels(encoder, 3)
    before = {n: b.clone() for n, b in encoder.named_buffers()}
    with torch.no_grad():
        alone = torch.cat([encoder(image[None]) for image in pixels])
        assert gap(encoder(pixels), alone) < 1e-5
    assert all(torch.equal(b, before[n]) for n, b in encoder.named_buffers())


@pytest.mark.parametrize("trained", ["", "visual.transformer.resblocks.1", "visual.trunk.blocks.4"])
def test_gradients_are_equal_with_recomputation_also_of_the_last_block_alone(
    trained: str, folder: Callable[[str], Path]
) -> None:
    name = "timm ViT, class token" if "trunk" in trained else "native ViT"
    results, passes = [], []
    for every, checkpoint in ((0, non_reentrant), (1, non_reentrant), (1, BY_DEEPSPEED)):
        encoder = build(folder(name)).train()
        for parameter_name, parameter in encoder.named_parameters():
            parameter.requires_grad_(parameter_name.startswith(trained))
        encoder.set_recompute(every, checkpoint)
        count: list[int] = []
        block = block_and_norm(encoder.visual, encoder.spec.layer)[0]
        inner = next(module for module in block.modules() if isinstance(module, nn.LayerNorm))
        inner.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        encoder(random_pixels(encoder)).square().sum().backward()
        results.append(gradients(encoder))
        passes.append(len(count))
    assert passes == [1, 2, 2]
    assert sum(bool(g.any()) for g in results[0].values()) >= 4
    assert worst(results[1], results[0]) == worst(results[2], results[0]) == []


@pytest.mark.parametrize("name", ["native ViT", "timm ViT, class token", "ResNet"])
def test_every_second_block_recomputes_counted_from_the_first(
    name: str, folder: Callable[[str], Path]
) -> None:
    encoder = build(folder(name), layer=4 if name == "ResNet" else -1).train()
    blocks = tower_blocks(encoder.visual)
    runs = [0] * len(blocks)
    for index, block in enumerate(blocks):
        inner = next(module for module in block.modules() if not list(module.children()))
        inner.register_forward_pre_hook(lambda *_, i=index: runs.__setitem__(i, runs[i] + 1))
    encoder.set_recompute(2, non_reentrant)
    encoder(random_pixels(encoder)).square().sum().backward()
    assert len(runs) >= 2
    assert runs == [2 if index % 2 == 0 else 1 for index in range(len(runs))]


def test_a_tower_of_unknown_make_is_refused_rather_than_ignored(folder: Callable[[str], Path]) -> None:
    encoder = build(folder("native ViT"))
    encoder.visual = nn.Sequential(nn.Flatten(), nn.Linear(3, 4))
    encoder.set_recompute(0, non_reentrant)
    with pytest.raises(
        ConfigError, match=r"cannot recompute; override with\n    --set mmds.recompute.encoder=0"
    ):
        encoder.set_recompute(1, non_reentrant)


@pytest.mark.parametrize("name", ["native ViT", "timm ViT, register, attention pool", "ResNet"])
def test_one_dtype_after_the_move_to_bf16_and_features_in_it(
    name: str, folder: Callable[[str], Path]
) -> None:
    encoder = build(folder(name), layer=1).to(torch.bfloat16)
    assert {p.dtype for p in encoder.parameters()} == {torch.bfloat16}
    features = encoder(random_pixels(encoder))
    assert features.dtype is torch.bfloat16
    exact = build(folder(name), layer=1)(random_pixels(encoder))
    assert gap(features, exact) < 0.05


@pytest.mark.parametrize(("name", "layer"), CASES)
def test_a_spec_survives_json_and_builds_the_same_encoder_again(
    name: str, layer: int, folder: Callable[[str], Path]
) -> None:
    encoder = build(folder(name), layer=layer).eval()
    spec = EncoderSpec.from_json(json.loads(json.dumps(encoder.spec.to_json())))
    again = encoder_from_spec(spec).eval()
    again.load_state_dict(encoder.state_dict(), strict=True)
    pixels = random_pixels(encoder)
    assert spec == encoder.spec
    with torch.no_grad():
        assert torch.equal(again(pixels), encoder(pixels))
