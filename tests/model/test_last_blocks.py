"""The last blocks of a tower by pattern."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch

from mmds.config_types import EncoderSection
from mmds.errors import ConfigError
from mmds.model.encoder import Encoder, build_encoder, tower_blocks
from mmds.model.last_blocks import last_blocks
from tests import tiny

TIMM = {
    "embed_dim": 16,
    "vision_cfg": {
        "timm_model_name": "vit_tiny_patch16_224",
        "timm_model_pretrained": False,
        "timm_pool": "",
        "timm_proj": "",
        "image_size": 32,
    },
}


@pytest.fixture(scope="module", params=["open_clip", "timm"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = tmp_path_factory.mktemp("tower")
    tiny.write_encoder(folder, model_cfg=tiny.VISION if request.param == "open_clip" else TIMM)
    return build_encoder(EncoderSection(name=f"local-dir:{folder}"))


def test_the_last_blocks_are_those_nearest_to_the_features(encoder: Encoder) -> None:
    names = [f"encoder.{name}" for name, _ in encoder.named_parameters()]
    stack = (
        "encoder.visual.trunk.blocks"
        if hasattr(encoder.visual, "trunk")
        else "encoder.visual.transformer.resblocks"
    )
    count = len({name.split(stack)[1].split(".")[1] for name in names if name.startswith(stack)})
    patterns = last_blocks(encoder, 2)
    assert patterns == [f"{stack}.{count - 2}.*", f"{stack}.{count - 1}.*"]
    assert all(any(fnmatchcase(name, pattern) for name in names) for pattern in patterns)
    assert last_blocks(encoder, None) == []


def test_more_blocks_than_the_tower_has_are_refused_with_their_number(encoder: Encoder) -> None:
    held = len(last_blocks(encoder, 2)) if not hasattr(encoder.visual, "trunk") else 11
    with pytest.raises(ConfigError, match=rf"40 blocks are to train, .* has {held} blocks") as error:
        last_blocks(encoder, 40)
    assert str(error.value).endswith(f"--set mmds.stage.encoder_blocks={held}")
    assert len(last_blocks(encoder, held)) == held


def test_below_the_last_block_that_trains_nothing_has_a_graph(encoder: Encoder) -> None:
    (pattern,) = last_blocks(encoder, 1)
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(fnmatchcase(f"encoder.{name}", pattern))
    graphs: list[bool] = []
    hooks = [
        block.register_forward_hook(lambda _, __, out: graphs.append(out.requires_grad))
        for block in tower_blocks(encoder.visual)
    ]
    size = encoder.spec.image_size
    features = encoder.train()(torch.zeros(1, 3, size, size, dtype=torch.uint8))
    features.sum().backward()
    for hook in hooks:
        hook.remove()
    assert graphs == [False] * (len(hooks) - 1) + [True]
    trained = {name for name, parameter in encoder.named_parameters() if parameter.grad is not None}
    assert trained and all(fnmatchcase(f"encoder.{name}", pattern) for name in trained)
    encoder.requires_grad_(True).zero_grad()
