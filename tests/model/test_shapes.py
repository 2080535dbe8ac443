"""FLOPs from architecture numbers against torch's own counter, on real packed rows through the real network, under math SDPA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from mmds.config_types import (
    ConnectorSection,
    EncoderSection,
    LoraSection,
    RecomputeSection,
    ResolutionSection,
)
from mmds.cost import WHOLE, Sums, Training, cost_model, row_sums, whole_parts
from mmds.data.rows import filler_row
from mmds.engine.assemble import set_recompute
from mmds.errors import ConfigError
from mmds.model.build import build_geometry
from mmds.model.connector import CONNECTORS, Connector
from mmds.model.decoder import Decoder
from mmds.model.encoder import Encoder, build_encoder, tower_blocks
from mmds.model.lora import add_adapters, is_adapter
from mmds.model.mllm import Mllm, encode
from mmds.model.recompute import non_reentrant
from mmds.model.shapes import decoder_layers, decoder_shape, encoder_shape, model_shape, training_of
from tests import tiny
from tests.model.families import BY_DEEPSPEED, FAMILIES

EXACT, RECOMPUTED = 1e-4, 1e-3  # ten times tighter than promised: in a tiny tower a class token is as little
PICTURES = (1, 0, 2)
FIXED = ResolutionSection(name="fixed")
MODES = {
    "fixed": FIXED,
    "anyres": ResolutionSection(name="anyres", max_tiles=3),
    "native": ResolutionSection(name="native", min_pixels=784),
}


def timm(name: str, image_size: int) -> dict[str, Any]:
    vision = {
        "timm_model_name": name,
        "timm_pool": "",
        "timm_proj": "linear",
        "image_size": image_size,
    }
    return {"embed_dim": 16, "vision_cfg": vision}


TOWERS: dict[str, dict[str, Any]] = {
    "open_clip ViT": {**tiny.VISION, "vision_cfg": {**tiny.VISION["vision_cfg"], "image_size": 56}},
    "timm ViT": timm("test_vit", 64),
    "timm ViT, registers": timm("test_vit3", 64),
    "timm EVA": timm("eva02_tiny_patch14_224", 56),
    "timm ConvNeXt": timm("test_convnext", 64),
    "ResNet": {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16},
    },
}


def qwen2(*, kv_heads: int = 2, tied: bool = False) -> Any:
    return transformers.Qwen2Config(
        hidden_size=64,
        intermediate_size=144,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        vocab_size=tiny.VOCABULARY,
        tie_word_embeddings=tied,
    )


def experts(family: str, **extra: Any) -> Any:
    return getattr(transformers, f"{family}Config")(
        hidden_size=64,
        intermediate_size=144,
        moe_intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        vocab_size=tiny.VOCABULARY,
        tie_word_embeddings=False,
        experts_implementation="eager",
        **extra,
    )


@pytest.fixture(autouse=True)
def own_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3, once it has run in a process, leaves a linear function of its own behind, which keeps and recomputes more."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    work = tmp_path_factory.mktemp("towers")
    return {
        name: tiny.write_encoder(work / str(number), model_cfg=cfg)
        for number, (name, cfg) in enumerate(TOWERS.items())
    }


def make_encoder(towers: dict[str, Path], name: str) -> Encoder:
    layer = 3 if name == "ResNet" else 1
    return build_encoder(EncoderSection(name=f"local-dir:{towers[name]}", layer=layer))


class Net:
    """A whole network of which some trains, one row of it, and its sums as a planner would state them."""

    def __init__(
        self,
        encoder: Encoder,
        config: Any,
        training: Training,
        *,
        connector: str = "mlp2x",
        resolution: ResolutionSection = FIXED,
        pictures: Sequence[int] = PICTURES,
    ) -> None:
        torch.manual_seed(0)
        section = ConnectorSection(name=connector, queries=3 if connector == "resampler" else None)
        self.geometry = build_geometry(encoder.spec, section, max_pixels=28224, resolution=resolution)
        self.encoder = encoder
        self.connector = Connector(
            section,
            encoder_width=encoder.spec.width,
            decoder_width=config.hidden_size,
            separator=resolution.name == "anyres",
        )
        self.llm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.shape = model_shape(self.encoder, self.connector, self.llm)
        self.training = training
        self._freeze()
        inside = encoder if training.encoder else None
        self.mllm = Mllm(connector=self.connector, decoder=Decoder(self.llm), encoder=inside).train()
        self.row = tiny.random_row(7, self.geometry, pictures)[0] if pictures else filler_row(self.geometry)

    def _freeze(self) -> None:
        training = self.training
        self.connector.requires_grad_(training.connector)
        parts = (
            (self.encoder, tower_blocks(self.encoder.visual), training.encoder),
            (self.llm, decoder_layers(self.llm), training.decoder),
        )
        for part, blocks, count in parts:
            part.requires_grad_(count >= WHOLE)
            for block in blocks[max(0, len(blocks) - count) :]:
                block.requires_grad_(True)
        self.llm.get_output_embeddings().requires_grad_(training.head)

    @property
    def sums(self) -> Sums:
        row = self.row
        return row_sums(
            patches=[plan.patches // plan.pieces for plan in row.plans for _ in range(plan.pieces)],
            segments=row.cu_seqlens.diff().tolist(),
            supervised=row.supervised,
            dummy_patches=row.dummy.patches,
        )

    def step(self) -> None:
        """Forward and backward of the row, as a run's micro-step does."""
        features = None
        if not self.training.encoder:
            with torch.no_grad():
                features = encode(self.encoder.eval(), self.row)
        self.mllm(self.row, features)[0].backward()

    def counted(self) -> int:
        """FLOPs by torch's counter. torch's fused inference path of multi-head attention, which it cannot count, is off."""
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                self.step()
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        return int(counter.get_total_flops())

    def expected(self, **options: Any) -> float:
        return float(cost_model(self.shape, self.training, **options).flops(self.sums).total)


FROZEN = whole_parts(encoder=False, connector=True, decoder=True)
TRAINED = whole_parts(encoder=True, connector=True, decoder=True)
ALIGN = whole_parts(encoder=False, connector=True, decoder=False)
TRAININGS = {"frozen": FROZEN, "trained": TRAINED, "align": ALIGN}


@pytest.mark.parametrize("stage", TRAININGS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kv_heads", [4, 1], ids=["MHA", "GQA"])
@pytest.mark.parametrize("tower", ["open_clip ViT", "timm ViT"])
def test_flops_equal_the_counted(
    tower: str, kv_heads: int, tied: bool, stage: str, towers: dict[str, Path]
) -> None:
    net = Net(make_encoder(towers, tower), qwen2(kv_heads=kv_heads, tied=tied), TRAININGS[stage])
    assert 0 < net.row.supervised < net.row.input_ids.numel()
    assert net.shape.decoder.tied == tied
    assert net.expected() == pytest.approx(net.counted(), rel=EXACT)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj")])
def test_adapters_beside_a_frozen_decoder(
    targets: tuple[str, ...] | None, recompute: bool, towers: dict[str, Path]
) -> None:
    """peft's own adapters; the connector trains, so gradients pass the whole decoder."""
    net = Net(make_encoder(towers, "open_clip ViT"), qwen2(), ALIGN)
    add_adapters(net.llm, LoraSection(rank=4, targets=targets), seed=1)
    adapters = sum(p.numel() for name, p in net.llm.named_parameters() if is_adapter(name))
    assert adapters and all(p.requires_grad == is_adapter(name) for name, p in net.llm.named_parameters())
    net.training = replace(ALIGN, adapters=adapters)
    every = RecomputeSection(encoder=0, connector=0, decoder=1)
    if recompute:
        set_recompute(net.mllm, every, non_reentrant)
    expected = net.expected(recompute=every if recompute else None)
    assert expected > net.expected() or not recompute
    # recomputed, the very last product is the second one of an adapter, a rank's worth: left in
    assert expected == pytest.approx(net.counted(), rel=2e-3 if recompute else EXACT)


# The resampler's tokens have no rows to lay tiles side by side: refused with anyres.
WAYS = [(m, c) for m in MODES for c in CONNECTORS if (m, c) != ("anyres", "resampler")]


@pytest.mark.parametrize("stage", TRAININGS)
@pytest.mark.parametrize(("mode", "connector"), WAYS)
def test_every_mode_and_connector(mode: str, connector: str, stage: str, towers: dict[str, Path]) -> None:
    encoder = make_encoder(towers, "open_clip ViT")
    net = Net(encoder, qwen2(), TRAININGS[stage], connector=connector, resolution=MODES[mode])
    assert net.expected() == pytest.approx(net.counted(), rel=EXACT)


@pytest.mark.parametrize("connector", ["merge_mlp", "resampler"])
@pytest.mark.parametrize("tower", ["timm ViT", "timm ViT, registers", "timm EVA"])
def test_packed_towers(tower: str, connector: str, towers: dict[str, Path]) -> None:
    net = Net(make_encoder(towers, tower), qwen2(), TRAINED, connector=connector, resolution=MODES["native"])
    assert net.expected() == pytest.approx(net.counted(), rel=EXACT)


@pytest.mark.parametrize("stage", TRAININGS)
@pytest.mark.parametrize("tower", ["timm ConvNeXt", "ResNet"])
def test_measured_towers(tower: str, stage: str, towers: dict[str, Path]) -> None:
    net = Net(make_encoder(towers, tower), qwen2(), TRAININGS[stage])
    assert net.expected() == pytest.approx(net.counted(), rel=EXACT)


@pytest.mark.parametrize("pictures", [(0, 0), ()], ids=["text", "filler"])
def test_rows_without_images_cost_their_dummy(pictures: tuple[int, ...], towers: dict[str, Path]) -> None:
    net = Net(make_encoder(towers, "open_clip ViT"), qwen2(), TRAINED, pictures=pictures)
    assert net.expected() == pytest.approx(net.counted(), rel=EXACT)


PARTLY = {
    "encoder's last block": Training(encoder=1, connector=True, decoder=WHOLE, head=True),
    "encoder's blocks without its patches": Training(encoder=2, connector=True, decoder=0),
    "decoder's last layers": Training(connector=True, decoder=2),
    "decoder's last layer alone": Training(decoder=1),
    "encoder alone": Training(encoder=WHOLE),
    "head alone": Training(head=True),
}


@pytest.mark.parametrize("name", PARTLY)
def test_parts_that_train_partly(name: str, towers: dict[str, Path]) -> None:
    net = Net(make_encoder(towers, "timm ViT"), qwen2(), PARTLY[name])
    assert net.expected() == pytest.approx(net.counted(), rel=EXACT)


RECOMPUTING = [("non_reentrant", c, n) for c in ("linear", "mlp2x", "merge_mlp", "resampler") for n in (1, 2)]


@pytest.mark.parametrize(("checkpoint", "connector", "every"), [*RECOMPUTING, ("deepspeed", "mlp2x", 1)])
@pytest.mark.parametrize("stage", TRAININGS)
def test_recomputation(
    stage: str, connector: str, checkpoint: str, every: int, towers: dict[str, Path]
) -> None:
    net = Net(make_encoder(towers, "open_clip ViT"), qwen2(), TRAININGS[stage], connector=connector)
    recompute = RecomputeSection(encoder=every, connector=1, decoder=every)
    early = checkpoint == "non_reentrant"
    set_recompute(net.mllm, recompute, non_reentrant if early else BY_DEEPSPEED)
    plain = net.expected()
    expected = net.expected(recompute=recompute, stops_early=early)
    assert expected > 1.05 * plain
    assert expected == pytest.approx(net.counted(), rel=RECOMPUTED)


def test_recomputation_of_layers_that_do_not_end_with_a_product(towers: dict[str, Path]) -> None:
    net = Net(make_encoder(towers, "timm ViT, registers"), experts("Qwen3Moe"), TRAINED)
    set_recompute(net.mllm, RecomputeSection(), non_reentrant)
    assert net.expected(recompute=RecomputeSection()) == pytest.approx(net.counted(), rel=RECOMPUTED)


@pytest.mark.parametrize("stage", TRAININGS)
@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen2Moe"])
def test_experts_count_where_they_are_active(family: str, stage: str, towers: dict[str, Path]) -> None:
    extra = {"shared_expert_intermediate_size": 56} if family == "Qwen2Moe" else {}
    net = Net(make_encoder(towers, "open_clip ViT"), experts(family, **extra), TRAININGS[stage])
    shape = net.shape.decoder
    assert (shape.moe_layers, shape.experts, shape.active) == ((0, 2), 6, 2)
    assert net.expected() == pytest.approx(net.counted(), rel=EXACT)


@pytest.mark.parametrize("family", [*FAMILIES, "phi", "gpt_neox", "starcoder2", "gemma3_text", "olmo2"])
def test_decoder_families(family: str, towers: dict[str, Path]) -> None:
    """Their shapes come from the meta device; the count comes from the same config with weights."""
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": tiny.VOCABULARY,
        "pad_token_id": 0,
    }
    config = FAMILIES[family]() if family in FAMILIES else transformers.AutoConfig.for_model(family, **small)
    config.vocab_size = tiny.VOCABULARY
    with torch.device("meta"):
        described = decoder_shape(AutoModelForCausalLM.from_config(config))
    net = Net(make_encoder(towers, "open_clip ViT"), config, FROZEN)
    assert net.shape.decoder == described
    assert net.expected() == pytest.approx(net.counted(), rel=EXACT)


def test_what_trains_is_read_from_the_rates(towers: dict[str, Path]) -> None:
    for training in (*TRAININGS.values(), *PARTLY.values()):
        net = Net(make_encoder(towers, "timm ViT"), qwen2(), training)
        named = {f"encoder.{n}": p for n, p in net.encoder.named_parameters()}
        named |= {f"connector.{n}": p for n, p in net.connector.named_parameters()}
        named |= {f"decoder.llm.{n}": p for n, p in net.llm.named_parameters()}
        rates = {name: 1e-3 if p.requires_grad else None for name, p in named.items()}
        found = training_of(net.encoder, net.connector, net.llm, rates)
        read, told = (cost_model(net.shape, t).flops(net.sums) for t in (found, training))
        assert (read.encoder, read.connector, read.decoder) == (told.encoder, told.connector, told.decoder)
    tied = Net(make_encoder(towers, "timm ViT"), qwen2(tied=True), FROZEN)
    named = {f"decoder.llm.{n}": p for n, p in tied.llm.named_parameters()}
    assert training_of(tied.encoder, tied.connector, tied.llm, dict.fromkeys(named, 1e-5)).head


def test_blocks_and_layers_that_are_not_understood_are_refused_by_name(towers: dict[str, Path]) -> None:
    encoder = make_encoder(towers, "timm ViT")
    tower_blocks(encoder.visual)[1].extra = nn.Linear(3, 5)
    with pytest.raises(ConfigError, match=r"block 1 of local-dir:\S+ has matrices of"):
        encoder_shape(encoder)
    llm = AutoModelForCausalLM.from_config(qwen2())
    decoder_layers(llm)[2].extra = nn.Linear(3, 5)
    with pytest.raises(ConfigError, match="'qwen2' is not known: layer 2 has matrices of"):
        decoder_shape(llm)
