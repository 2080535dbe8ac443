from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmds.config_types import ConnectorSection, EncoderSection, ResolutionSection
from mmds.errors import ConfigError
from mmds.geometry import Grid
from mmds.model.build import build_geometry
from mmds.model.connector import QUERIES, Connector
from mmds.model.decoder import Decoder, load_llm
from mmds.model.encoder import build_encoder
from mmds.model.mllm import Mllm
from mmds.model.recompute import non_reentrant
from mmds.model.resampler import CrossLayer, Resampler, sines_2d
from tests import tiny
from tests.model.families import BY_DEEPSPEED, excite, gap, gradients, worst

GRIDS: list[Grid] = [(4, 4), (1, 1), (2, 7), (5, 3), (4, 4)]
C, D, Q = 10, 16, 5


def resampler(*, d: int = D) -> Resampler:
    torch.manual_seed(0)
    made = Resampler(C, d, Q)
    excite(made)
    return made


def features(grids: Sequence[Grid], *, seed: int = 0) -> Tensor:
    return torch.randn(
        sum(r * c for r, c in grids), C, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


def plain_layer(layer: CrossLayer, tokens: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One layer for one image, its attention by torch's own nn.MultiheadAttention's functional form."""
    d = tokens.shape[1]
    read, _ = F.multi_head_attention_forward(
        layer.norm_q(tokens)[:, None],
        keys[:, None],
        values[:, None],
        embed_dim_to_check=d,
        num_heads=d // layer.head,
        in_proj_weight=None,
        in_proj_bias=torch.cat([layer.q.bias, layer.k.bias, layer.v.bias]),
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=layer.proj.weight,
        out_proj_bias=layer.proj.bias,
        use_separate_proj_weight=True,
        q_proj_weight=layer.q.weight,
        k_proj_weight=layer.k.weight,
        v_proj_weight=layer.v.weight,
        need_weights=True,
    )
    tokens = tokens + read[:, 0]
    hidden = F.gelu(F.linear(layer.norm_mlp(tokens), layer.up.weight, layer.up.bias))
    return tokens + F.linear(hidden, layer.down.weight, layer.down.bias)


def plain(module: Resampler, image: Tensor, grid: Grid) -> Tensor:
    """One image [P, c] -> [Q, d], token by token as the papers have it."""
    content = module.norm(module.project(image))
    keys = content + plain_places(grid, content.shape[1])
    tokens = module.queries
    for layer in module.layers:
        assert isinstance(layer, CrossLayer)
        tokens = plain_layer(layer, tokens, keys, content)
    out: Tensor = module.out(module.norm_out(tokens))
    return out


def plain_places(grid: Grid, width: int) -> Tensor:
    """The 2D sines of MAE and Qwen-VL, number by number: rows in the first half, columns in the second."""
    rows, columns = grid
    quarter = width // 4
    table = torch.zeros(rows * columns, width)
    for place in range(rows * columns):
        for axis, position in enumerate(divmod(place, columns)):
            for i in range(quarter):
                angle = position / 10000 ** (i / quarter)
                table[place, axis * width // 2 + i] = math.sin(angle)
                table[place, axis * width // 2 + quarter + i] = math.cos(angle)
    return table


@pytest.mark.parametrize("d", [16, 24, 128])
def test_a_packed_call_equals_a_plain_resampler_for_each_image_alone(d: int) -> None:
    """Outputs and the gradients of every parameter and of the features."""
    module, given = resampler(d=d), features(GRIDS)
    ours = module(given, GRIDS)
    images = given.split([rows * columns for rows, columns in GRIDS])
    theirs = torch.cat([plain(module, image, grid) for image, grid in zip(images, GRIDS, strict=True)])
    assert ours.shape == (len(GRIDS) * Q, d)
    assert gap(ours, theirs) < 1e-5
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    results = []
    for out in (ours, theirs):
        module.zero_grad()
        given.grad = None
        (out * weights).sum().backward(retain_graph=True)
        assert given.grad is not None
        results.append({**gradients(module), "features": given.grad.clone()})
    assert worst(results[0], results[1]) == []
    assert all(bool(g.any()) for name, g in results[0].items() if not name.endswith(".k.bias"))


def test_places_are_the_papers_sines_row_first() -> None:
    for grid in ((3, 5), (1, 1), (5, 3)):
        assert gap(sines_2d(grid, 24), plain_places(grid, 24)) < 1e-5
    assert not torch.equal(sines_2d((2, 8), 16), sines_2d((8, 2), 16))


def test_an_image_has_the_same_tokens_alone_and_whatever_the_others_are() -> None:
    module = resampler()
    lengths = [rows * columns for rows, columns in GRIDS]
    given, other = features(GRIDS), features(GRIDS, seed=5)
    mixed = torch.cat([(given if i == 2 else other).split(lengths)[i] for i in range(len(GRIDS))])
    with torch.no_grad():
        packed = module(given, GRIDS).split(Q)
        for image, grid, tokens in zip(given.split(lengths), GRIDS, packed, strict=True):
            assert gap(tokens, module(image, [grid])) < 1e-5
        assert torch.equal(module(mixed, GRIDS).split(Q)[2], packed[2])


def test_where_a_patch_stands_matters() -> None:
    module, given = resampler(), features([(2, 8)])
    with torch.no_grad():
        assert gap(module(given, [(2, 8)]), module(given, [(8, 2)])) > 1e-3
        assert gap(module(given.flip(0), [(2, 8)]), module(given, [(2, 8)])) > 1e-3


@pytest.mark.parametrize("width", [18, 21, 30])
def test_a_width_that_is_no_multiple_of_four_is_refused(width: int) -> None:
    module = Resampler(C, width, Q)
    with pytest.raises(ConfigError, match=f"multiple of 4, not {width}"):
        module(features([(2, 2)]), [(2, 2)])


@pytest.mark.parametrize("d", [16, 128, 896, 48, 20])
def test_heads_divide_the_width(d: int) -> None:
    assert d % CrossLayer(d).head == 0
    assert CrossLayer(d).head == {16: 16, 128: 128, 896: 128, 48: 16, 20: 4}[d]


@pytest.mark.parametrize("inputs_train", [True, False])
def test_gradients_are_equal_with_recomputation(inputs_train: bool) -> None:
    results = []
    for every, checkpoint in ((0, non_reentrant), (1, non_reentrant), (1, BY_DEEPSPEED)):
        torch.manual_seed(0)
        section = ConnectorSection(name="resampler", queries=Q)
        connector = Connector(section, encoder_width=C, decoder_width=D)
        excite(connector)
        connector.set_recompute(every, checkpoint)
        connector.net(features(GRIDS).detach().requires_grad_(inputs_train), GRIDS).sin().sum().backward()
        results.append(gradients(connector))
    assert all(bool(g.any()) for name, g in results[0].items() if not name.endswith(".k.bias"))
    assert worst(results[1], results[0]) == worst(results[2], results[0]) == []


def network(folder: Path, **section: Any) -> tuple[Mllm, Any]:
    """A model with a resampler in resolution native, and its geometry."""
    encoder = build_encoder(EncoderSection(name=f"local-dir:{tiny.write_encoder(folder / 'encoder')}"))
    parts = ConnectorSection(name="resampler", **section)
    geometry = build_geometry(
        encoder.spec, parts, max_pixels=None, resolution=ResolutionSection(name="native")
    )
    llm = load_llm(str(tiny.write_decoder(folder / "decoder")), dtype=torch.float32)
    connector = Connector(parts, encoder_width=encoder.spec.width, decoder_width=48)
    return Mllm(connector=connector, decoder=Decoder(llm), encoder=encoder), geometry


@pytest.mark.parametrize(("section", "count"), [({}, QUERIES), ({"queries": 7}, 7)])
def test_every_image_becomes_the_same_number_of_tokens(
    section: dict[str, int], count: int, tmp_path: Path
) -> None:
    model, geometry = network(tmp_path, **section)
    row, _ = tiny.random_row(3, geometry, (2, 0, 3))
    assert len({plan.grid for plan in row.plans}) > 1
    assert row.slot_counts.tolist() == [count] * 5
    assert model.embed(row).shape == (row.input_ids.numel(), 48)


def test_a_row_without_images_reaches_the_queries_with_a_gradient_of_zero(tmp_path: Path) -> None:
    model, geometry = network(tmp_path, queries=3)
    row, _ = tiny.random_row(3, geometry, (0, 0))
    model(row)[0].backward()
    net: Any = model.connector.net
    for name, parameter in model.connector.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
    assert net.queries.grad is not None
    full, _ = tiny.random_row(3, geometry, (1, 0))
    model(full)[0].backward()
    assert bool(net.queries.grad.any())


def test_all_modules_of_a_resampler_take_part() -> None:
    used: list[str] = []
    module = resampler()
    for name, part in module.named_modules():
        if not list(part.children()) and isinstance(part, (nn.Linear, nn.LayerNorm, nn.GELU)):
            part.register_forward_hook(lambda *_, name=name: used.append(name))
    module(features(GRIDS), GRIDS)
    expected = [n for n, p in module.named_modules() if not list(p.children()) and n]
    assert sorted(used) == sorted(expected)
