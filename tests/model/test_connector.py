from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchMerger

from mmds.config_types import ConnectorSection
from mmds.errors import ConfigError
from mmds.model.connector import CONNECTORS, Connector, connector_merge, merge_neighbours
from mmds.model.recompute import non_reentrant
from tests.model.families import BY_DEEPSPEED, excite, gap, gradients, worst


def test_mlp2x_equals_llavas_projector() -> None:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(hidden_size=12),
        text_config=LlamaConfig(hidden_size=20, num_attention_heads=2),
    )
    theirs = LlavaMultiModalProjector(config)
    excite(theirs)
    ours = Connector(ConnectorSection(name="mlp2x"), encoder_width=12, decoder_width=20)
    state = {
        "net.up.weight": theirs.linear_1.weight,
        "net.up.bias": theirs.linear_1.bias,
        "net.down.weight": theirs.linear_2.weight,
        "net.down.bias": theirs.linear_2.bias,
    }
    ours.load_state_dict(state)
    features = torch.randn(3, 9, 12)
    assert gap(ours(features), theirs(features)) < 1e-6


def qwen_pair(c: int, d: int) -> tuple[Connector, PatchMerger]:
    """Our merge_mlp and Qwen2-VL's merger with the same weights."""
    theirs = PatchMerger(dim=d, context_dim=c)
    excite(theirs)
    ours = Connector(ConnectorSection(name="merge_mlp"), encoder_width=c, decoder_width=d)
    names = {"net.norm": "ln_q", "net.up": "mlp.0", "net.down": "mlp.2"}
    given = theirs.state_dict()
    ours.load_state_dict(
        {f"{a}.{kind}": given[f"{b}.{kind}"] for a, b in names.items() for kind in ("weight", "bias")}
    )
    return ours, theirs


def test_merge_mlp_equals_qwen2_vls_patch_merger() -> None:
    """Qwen2-VL orders patches block by block, each 2 x 2 block in reading order; ours come in reading order of the image."""
    c, d, grid = 10, 14, 6
    ours, theirs = qwen_pair(c, d)
    image = torch.randn(grid, grid, c)
    blocks = [
        image[y + dy, x + dx]
        for y in range(0, grid, 2)
        for x in range(0, grid, 2)
        for dy in (0, 1)
        for dx in (0, 1)
    ]
    expected = theirs(torch.stack(blocks))
    got = ours(image.reshape(1, grid * grid, c))
    assert got.shape == (1, 9, d)
    assert gap(got[0], expected) < 1e-6


def test_merging_joins_neighbours_and_keeps_images_apart() -> None:
    grid = torch.arange(2 * 16.0).reshape(2, 16, 1)
    merged = merge_neighbours(grid, 2)
    assert merged[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert torch.equal(merged[1], merged[0] + 16)


@pytest.mark.parametrize("name", CONNECTORS)
def test_visual_tokens_are_patches_over_the_merge_factor_squared(name: str) -> None:
    connector = Connector(ConnectorSection(name=name), encoder_width=8, decoder_width=12)
    out = connector(torch.randn(5, 16, 8))
    assert out.shape == (5, 16 // connector_merge(name) ** 2, 12)
    assert connector.merge == connector_merge(name) == {"linear": 1, "mlp2x": 1, "merge_mlp": 2}[name]


@pytest.mark.parametrize("name", CONNECTORS)
def test_an_image_is_projected_alike_alone_and_among_others(name: str) -> None:
    connector = Connector(ConnectorSection(name=name), encoder_width=8, decoder_width=12)
    features = torch.randn(4, 16, 8)
    assert gap(torch.cat([connector(f[None]) for f in features]), connector(features)) < 1e-6


@pytest.mark.parametrize("inputs_train", [True, False])
@pytest.mark.parametrize("name", CONNECTORS)
def test_gradients_are_equal_with_recomputation_also_of_frozen_inputs(name: str, inputs_train: bool) -> None:
    torch.manual_seed(0)
    connector = Connector(ConnectorSection(name=name), encoder_width=8, decoder_width=12)
    excite(connector)
    results, passes = [], []
    count: list[int] = []
    next(m for m in connector.net.modules() if isinstance(m, nn.Linear)).register_forward_pre_hook(
        lambda *_: count.append(1)
    )
    plain = connector.net.forward
    for every, checkpoint in ((0, non_reentrant), (1, non_reentrant), (1, BY_DEEPSPEED)):
        connector.net.forward = plain
        connector.set_recompute(every, checkpoint)
        connector.zero_grad()
        count.clear()
        features = torch.ones(2, 16, 8).mul(0.3).requires_grad_(inputs_train)
        connector(features).sin().sum().backward()
        results.append(gradients(connector))
        passes.append(len(count))
    assert all(g.any() for g in results[0].values())
    assert worst(results[1], results[0]) == worst(results[2], results[0]) == []
    assert passes == [1, 2, 2]


def test_an_unknown_connector_is_refused_with_the_known_ones_named() -> None:
    with pytest.raises(ConfigError, match="'qformer' is none of linear, mlp2x, merge_mlp"):
        Connector(ConnectorSection(name="qformer"), encoder_width=8, decoder_width=12)
    with pytest.raises(ConfigError, match="'qformer'"):
        connector_merge("qformer")
