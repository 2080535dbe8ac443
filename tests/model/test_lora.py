"""Adapters beside a decoder's linear modules: where they stand, how they start, and peft's own package as the judge of their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from mmds.config_types import LoraSection
from mmds.errors import CheckpointError, ConfigError
from mmds.model.build import Source, build_decoder
from mmds.model.decoder import Decoder
from mmds.model.lora import (
    Adapters,
    adapters_of,
    add_adapters,
    attach,
    choose_targets,
    has_fused_experts,
    is_adapter,
    merge_into,
    place_adapters,
    plainly,
    stored_adapters,
    take_adapters,
)
from mmds.model.recompute import non_reentrant
from tests import tiny
from tests.model.families import BY_DEEPSPEED, FAMILIES

IDS = torch.arange(3, 23)[None]
DENSE = [name for name in FAMILIES if name != "mistral_window"]


def fresh(config: Any = None, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config or tiny.decoder_config(), dtype=dtype)


def mixture() -> Any:
    return transformers.Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=96,
    )


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return found


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


def by_peft(model: Any, folder: Path | None = None, **keys: Any) -> Any:
    """The model through peft's own door, with random A and B; written to `folder` by peft itself."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], **keys})
    adapted = get_peft_model(model, config)
    torch.manual_seed(9)
    for name, parameter in adapted.named_parameters():
        if is_adapter(name):
            parameter.data.normal_(std=0.3)
    if folder is not None:
        adapted.save_pretrained(folder)
    return adapted


@pytest.mark.parametrize("family", DENSE)
def test_by_default_every_linear_module_of_the_blocks_has_one_as_pefts_all_linear(family: str) -> None:
    ours = choose_targets(fresh(FAMILIES[family]()), LoraSection())
    stock = get_peft_model(
        fresh(FAMILIES[family]()), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    )
    theirs = {
        n.removeprefix("base_model.model.")
        for n, m in stock.named_modules()
        if isinstance(m, peft.tuners.lora.Linear)
    }
    assert set(ours) == theirs and len(ours) > 4
    assert not any("head" in name or "embed" in name for name in ours)


def test_a_mixture_with_fused_experts_has_adapters_on_its_attention_alone() -> None:
    llm = fresh(mixture())
    assert has_fused_experts(llm) and not has_fused_experts(fresh())
    assert {name.split(".")[-1] for name in choose_targets(llm, LoraSection())} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    add_adapters(llm, LoraSection(rank=2), seed=0)
    assert [p.dim() for n, p in llm.named_parameters() if is_adapter(n)] == [2] * 16
    with pytest.raises(ConfigError, match=r'ends in "gate_up_proj"; its experts are fused'):
        choose_targets(fresh(mixture()), LoraSection(targets=("gate_up_proj",)))


def test_named_endings_choose_and_whole_parts_of_names_count() -> None:
    llm = fresh()
    assert choose_targets(llm, LoraSection(targets=("q_proj", "layers.1.mlp.up_proj"))) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    ]
    add_adapters(llm, LoraSection(targets=("layers.1.mlp.up_proj",)), seed=0)
    held = adapters_of(llm)
    assert held is not None and held["modules"] == ["model.layers.1.mlp.up_proj"]
    assert type(llm) is transformers.LlamaForCausalLM


@pytest.mark.parametrize("ending", ["lm_head", "embed_tokens", "proj", "q_prj", "self_attn"])
def test_an_ending_of_no_linear_module_of_the_blocks_is_refused(ending: str) -> None:
    with pytest.raises(
        ConfigError, match=rf'targets: no linear module .* ends in "{ending}".*q_proj, up_proj'
    ):
        choose_targets(fresh(), LoraSection(targets=(ending,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fresh_adapters_follow_the_seed_and_change_nothing_yet(dtype: torch.dtype) -> None:
    plain = logits(fresh(dtype=dtype))
    one, same, other = (fresh(dtype=dtype) for _ in range(3))
    for llm, seed in ((one, 5), (same, 5), (other, 6)):
        add_adapters(llm, LoraSection(rank=4), seed=seed)
    assert torch.equal(logits(one), plain)
    first, again, third = (
        {n: p for n, p in m.named_parameters() if is_adapter(n)} for m in (one, same, other)
    )
    assert {p.dtype for p in first.values()} == {dtype}
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert bool(value.any()) == (".lora_A." in name) == (not torch.equal(value, third[name]))


def test_alpha_is_twice_the_rank_unless_it_is_given() -> None:
    assert LoraSection(rank=8).scale == 2.0 and LoraSection(rank=8, alpha=4).scale == 0.5
    llm = fresh()
    add_adapters(llm, LoraSection(rank=8, alpha=4), seed=0)
    assert {m.scaling["default"] for m in llm.modules() if isinstance(m, peft.tuners.lora.Linear)} == {0.5}


def test_adapters_that_peft_wrote_compute_what_peft_computes(tmp_path: Path) -> None:
    theirs = by_peft(fresh(), tmp_path / "adapter")
    stored = stored_adapters(tmp_path)
    assert stored is not None and (stored.rank, stored.scale) == (4, 1.5)
    beside, merged = fresh(), fresh()
    attach(beside, stored)
    merge_into(merged, stored, plainly)
    wanted = logits(theirs)
    assert not close(logits(fresh()), wanted)
    assert close(logits(beside), wanted) and close(logits(merged), wanted)
    by_them = theirs.merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        assert close(value, by_them[name]), name


@pytest.mark.parametrize("keys", [{"use_dora": True}, {"use_rslora": True}, {"bias": "lora_only"}])
def test_adapters_that_are_more_than_plain_lora_are_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    by_peft(fresh(), tmp_path / "adapter", **keys)
    with pytest.raises(
        CheckpointError, match=rf"not plain LoRA \({next(iter(keys))}\).*merge them with peft"
    ):
        stored_adapters(tmp_path)


def test_adapters_of_another_decoder_are_refused_by_name(tmp_path: Path) -> None:
    by_peft(fresh(tiny.decoder_config(layers=3)), tmp_path / "adapter")
    stored = stored_adapters(tmp_path)
    assert stored is not None
    for use in (lambda llm: attach(llm, stored), lambda llm: merge_into(llm, stored, plainly)):
        with pytest.raises(CheckpointError, match=r"another decoder: .* no linear module model\.layers\.2\."):
            use(fresh())


@pytest.mark.parametrize(
    ("asked", "goes_on"),
    [
        (LoraSection(rank=4, alpha=6, targets=("q_proj", "up_proj")), True),
        (LoraSection(rank=4, alpha=6, targets=("q_proj", "up_proj"), dropout=0.1), True),
        (LoraSection(rank=8, alpha=12, targets=("q_proj", "up_proj")), False),
        (LoraSection(rank=4, alpha=8, targets=("q_proj", "up_proj")), False),
        (LoraSection(rank=4, alpha=6, targets=("q_proj",)), False),
        (None, False),
    ],
)
def test_kept_adapters_train_on_in_the_same_shape_and_are_merged_first_for_any_other(
    tmp_path: Path, asked: LoraSection | None, goes_on: bool
) -> None:
    wanted = logits(by_peft(fresh(), tmp_path / "adapter"))
    llm, stored = fresh(), stored_adapters(tmp_path)
    assert stored is not None
    placed = place_adapters(llm, asked, stored, seed=1, whole=plainly)
    assert close(logits(llm), wanted)  # whatever happened, the model is the same
    assert ("train on" in placed.said, "merged" in placed.said) == (goes_on, not goes_on)
    assert (placed.training is stored, placed.merged is stored) == (goes_on, not goes_on)
    held = adapters_of(llm)
    assert (held is None) == (asked is None)
    rising = [bool(p.any()) for n, p in llm.named_parameters() if ".lora_B." in n]
    assert rising == [goes_on] * len(rising)


def test_a_decoder_folder_with_kept_adapters_is_built_with_them(tmp_path: Path) -> None:
    folder = tiny.write_model_folder(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(folder / "decoder")
    wanted = logits(by_peft(plain, folder / "decoder" / "adapter"))
    source = Source(folder=folder, section=None)
    with_them, without = (
        build_decoder(source, dtype=torch.float32, seed=0, kept=kept) for kept in (True, False)
    )
    with with_them.generating() as llm:
        assert close(logits(llm), wanted)
    with without.generating() as llm:
        assert not close(logits(llm), wanted)


@pytest.mark.parametrize("checkpoint", [non_reentrant, BY_DEEPSPEED], ids=["torch", "deepspeed"])
@pytest.mark.parametrize("trained", [0, 1])
def test_frozen_parameters_inside_recomputed_blocks_leave_the_gradients_as_they_are(
    checkpoint: Any, trained: int
) -> None:
    """One block is all frozen, the other has frozen weights and adapters, and nothing before them needs a gradient (TRAPS A11)."""

    def gradients(recompute: bool) -> dict[str, Tensor]:
        llm = fresh()
        add_adapters(llm, LoraSection(rank=4, targets=(f"layers.{trained}.mlp.up_proj",)), seed=3)
        decoder = Decoder(llm)
        for name, parameter in decoder.named_parameters():
            parameter.requires_grad_(is_adapter(name))
            if ".lora_B." in name:
                parameter.data.normal_(generator=torch.Generator().manual_seed(1))
        decoder.set_recompute(int(recompute), checkpoint)
        row = {
            "inputs_embeds": decoder.embed(IDS[0]).detach(),
            "position_ids": torch.arange(20),
            "cu_seqlens": torch.tensor([0, 20], dtype=torch.int32),
            "keep": torch.arange(20),
        }
        decoder.train()(**row).square().mean().backward()
        return {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}

    plain, recomputed = gradients(False), gradients(True)
    assert len(plain) == 2 and set(plain) == set(recomputed)
    assert all(bool(value.any()) and close(recomputed[name], value) for name, value in plain.items())


def test_adapters_that_are_not_whole_are_not_written() -> None:
    pair = [
        ("decoder.llm.q.lora_A.default.weight", torch.ones(2, 3)),
        ("decoder.llm.q.base_layer.weight", torch.ones(3, 3)),
    ]
    with pytest.raises(CheckpointError, match="only one of its two matrices"):
        take_adapters(iter(pair), {"r": 2, "lora_alpha": 2}, dtype=torch.float32)


def test_a_merge_is_computed_in_fp32_and_rounded_once() -> None:
    torch.manual_seed(0)
    w, a, b = torch.randn(6, 5).bfloat16(), torch.randn(2, 5).bfloat16(), torch.randn(6, 2).bfloat16()
    merged = Adapters(rank=2, scale=0.5, pairs={"q": (a, b)}).merged("q", w)
    assert torch.equal(merged, (w.double() + 0.5 * (b.double() @ a.double())).float().bfloat16())


def test_a_loaded_folder_is_pefts_too(tmp_path: Path) -> None:
    """What peft wrote, peft reads; the yardstick of the test above is no accident of our names."""
    by_peft(fresh(), tmp_path / "adapter")
    again = PeftModel.from_pretrained(fresh(), tmp_path / "adapter")
    stored = stored_adapters(tmp_path)
    assert stored is not None
    ours = fresh()
    attach(ours, stored)
    assert close(logits(ours), logits(again))
