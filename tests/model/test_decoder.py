from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from mmds.data.rows import IGNORE, IMAGE_MARKER
from mmds.errors import CheckpointError, ConfigError
from mmds.geometry import Geometry
from mmds.model.decoder import Decoder, load_config, load_llm, load_tokenizer, weight_files
from mmds.model.recompute import non_reentrant
from tests import tiny
from tests.model.families import (
    BY_DEEPSPEED,
    FAMILIES,
    VOCABULARY,
    alone_logits,
    alone_nll,
    gap,
    gradients,
    packed_inputs,
    random_samples,
    stock_model,
    worst,
)

LENGTHS = (7, 1, 12, 4, 9)


def packed_logits(decoder: Decoder, samples: list[Tensor], keep: Tensor | None = None) -> Tensor:
    ids, positions, bounds = packed_inputs(samples)
    return decoder(
        inputs_embeds=decoder.embed(ids),
        position_ids=positions,
        cu_seqlens=bounds,
        keep=torch.arange(len(ids)) if keep is None else keep,
    )


def next_tokens(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Row positions that predict, and what they predict: all pairs of neighbours inside a sample."""
    positions, tokens, start = [], [], 0
    for ids in samples:
        positions += range(start, start + len(ids) - 1)
        tokens += ids[1:].tolist()
        start += len(ids)
    return torch.tensor(positions), torch.tensor(tokens)


@pytest.mark.parametrize("mode", ["train", "eval", "train recomputed", "eval recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_and_gradients_equal_each_sample_alone(family: str, mode: str) -> None:
    samples = random_samples(LENGTHS)
    stock = stock_model(family)
    decoder = Decoder(deepcopy(stock))
    if "recomputed" in mode:
        decoder.set_recompute(1, non_reentrant)
    stock.train("train" in mode)
    decoder.train("train" in mode)
    keep, target = next_tokens(samples)
    logits = packed_logits(decoder, samples)
    F.cross_entropy(logits[keep], target, reduction="sum").backward()
    alone_nll(stock, samples).backward()
    assert gap(logits, alone_logits(stock, samples)) < 1e-5
    assert worst(gradients(decoder.llm), gradients(stock)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_each_sample_alone_without_gradients(family: str) -> None:
    samples = random_samples(LENGTHS)
    stock = stock_model(family).eval()
    with torch.no_grad():
        assert gap(packed_logits(Decoder(deepcopy(stock)), samples), alone_logits(stock, samples)) < 1e-5


def test_the_sliding_window_of_these_tests_changes_the_logits() -> None:
    samples = random_samples(LENGTHS)
    narrow, wide = stock_model("mistral_window").eval(), stock_model("mistral_window").eval()
    wide.config.sliding_window = None
    with torch.no_grad():
        assert gap(alone_logits(wide, samples), alone_logits(narrow, samples)) > 1e-2


def test_gradients_of_the_embeddings_handed_in_stay_inside_their_sample() -> None:
    samples = random_samples((5, 6, 4))
    decoder = Decoder(stock_model("qwen3"))
    ids, positions, bounds = packed_inputs(samples)
    embeddings = decoder.embed(ids).detach().requires_grad_()
    logits = decoder(
        inputs_embeds=embeddings, position_ids=positions, cu_seqlens=bounds, keep=torch.tensor([8])
    )
    logits.square().sum().backward()
    assert embeddings.grad is not None
    touched = embeddings.grad.abs().sum(1) > 0
    assert touched.tolist() == [5 <= t <= 8 for t in range(15)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_on_some_positions_equals_the_full_head(family: str) -> None:
    samples = random_samples(LENGTHS)
    decoder = Decoder(stock_model(family))
    keep, target = (x[::3] for x in next_tokens(samples))
    some = packed_logits(decoder, samples, keep)
    F.cross_entropy(some, target).backward()
    ours = gradients(decoder)
    decoder.zero_grad()
    full = packed_logits(decoder, samples)
    F.cross_entropy(full[keep], target).backward()
    assert gap(some, full[keep]) < 1e-6
    assert worst(ours, gradients(decoder)) == []


def test_the_head_on_no_position_gives_no_logits_and_exactly_zero_gradients() -> None:
    decoder = Decoder(stock_model("llama"))
    logits = packed_logits(decoder, random_samples((4, 3)), torch.zeros(0, dtype=torch.int64))
    logits.sum().backward()
    assert logits.shape == (0, VOCABULARY)
    assert all(float(g.abs().max()) == 0 for g in gradients(decoder).values())
    assert decoder.llm.lm_head.weight.grad is not None


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_recomputation_runs_every_block_again_in_the_backward_pass(family: str) -> None:
    calls: list[int] = []
    counts = []
    for every, checkpoint in ((0, non_reentrant), (1, non_reentrant), (2, non_reentrant), (1, BY_DEEPSPEED)):
        decoder = Decoder(stock_model(family)).train()
        decoder.set_recompute(every, checkpoint)
        for block in decoder.llm.model.layers:
            block.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
        calls.clear()
        packed_logits(decoder, random_samples((4, 5))).sum().backward()
        counts.append(len(calls))
    assert counts == [2, 4, 3, 4]


@pytest.mark.parametrize("trained", ["model.layers.1.", "model.layers.0.mlp.", "model.norm."])
def test_recomputation_gives_equal_gradients_when_only_a_piece_of_the_decoder_trains(trained: str) -> None:
    """Frozen inputs, and frozen parameters inside a recomputed block."""
    samples = random_samples(LENGTHS)
    keep, target = next_tokens(samples)
    results = []
    for every, checkpoint in ((0, non_reentrant), (1, non_reentrant), (1, BY_DEEPSPEED)):
        decoder = Decoder(stock_model("qwen3")).train()
        for name, parameter in decoder.llm.named_parameters():
            parameter.requires_grad_(name.startswith(trained))
        decoder.set_recompute(every, checkpoint)
        F.cross_entropy(packed_logits(decoder, samples, keep), target).backward()
        results.append(gradients(decoder.llm))
        moved = {name for name, grad in results[-1].items() if grad.any()}
        assert moved == {name for name in results[-1] if name.startswith(trained)}
    assert worst(results[1], results[0]) == worst(results[2], results[0]) == []


def row(**changes: Any) -> dict[str, Any]:
    """Arguments of a sound row of 3 + 4 tokens, with changes."""
    sound: dict[str, Any] = {
        "inputs_embeds": torch.randn(7, 32),
        "position_ids": torch.tensor([0, 1, 2, 0, 1, 2, 3]),
        "cu_seqlens": torch.tensor([0, 3, 7], dtype=torch.int32),
        "keep": torch.arange(7),
    }
    return {**sound, **changes}


REFUSED = {
    "an all-ones mask": (row(attention_mask=torch.ones(1, 7)), "mask"),
    "a cache": (row(past_key_values=DynamicCache()), "cache"),
    "use_cache": (row(use_cache=True), "cache"),
    "no boundaries": (row(cu_seqlens=None), "boundaries .* are missing"),
    "boundaries of nothing": (row(cu_seqlens=torch.tensor([0], dtype=torch.int32)), "are missing"),
    "a batch of boundaries": (row(cu_seqlens=torch.tensor([[0, 7]], dtype=torch.int32)), "are missing"),
    "segment ids": (row(cu_seqlens=torch.tensor([0, 0, 0, 1, 1, 1, 1], dtype=torch.int32)), "must rise"),
    "booleans": (row(cu_seqlens=torch.tensor([True] * 7)), "int32"),
    "int64 boundaries": (row(cu_seqlens=torch.tensor([0, 3, 7])), "int32"),
    "a late start": (row(cu_seqlens=torch.tensor([1, 7], dtype=torch.int32)), "must rise from 0"),
    "an early end": (row(cu_seqlens=torch.tensor([0, 3, 6], dtype=torch.int32)), "7 tokens"),
    "a late end": (row(cu_seqlens=torch.tensor([0, 3, 8], dtype=torch.int32)), "7 tokens"),
    "an empty segment": (row(cu_seqlens=torch.tensor([0, 3, 3, 7], dtype=torch.int32)), "must rise"),
    "falling boundaries": (row(cu_seqlens=torch.tensor([0, 5, 3, 7], dtype=torch.int32)), "must rise"),
    "no positions": (row(position_ids=None), "position"),
    "too few positions": (row(position_ids=torch.arange(6)), "position"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_wrapper_refuses_before_transformers_sees_anything(case: str) -> None:
    decoder = Decoder(stock_model("llama"))
    seen: list[int] = []
    decoder.llm.register_forward_pre_hook(lambda *_: seen.append(1))
    arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        decoder(**arguments)
    decoder(**row())
    assert seen == [1]


def test_generating_lends_the_model_in_eval_mode_and_takes_it_back() -> None:
    samples = random_samples((6, 3))
    decoder = Decoder(stock_model("llama")).train()
    before = packed_logits(decoder, samples).detach()
    with pytest.raises(RuntimeError, match="stop"), decoder.generating() as llm:
        assert not llm.training
        raise RuntimeError("stop")
    assert decoder.llm.training
    assert torch.equal(packed_logits(decoder, samples), before)


def test_a_local_folder_loads_with_its_own_weights_and_random_does_not(tmp_path: Path) -> None:
    folder = tiny.write_decoder(tmp_path / "decoder", tied=False)
    stored = {name: value for file in weight_files(str(folder)) for name, value in load(file).items()}
    loaded = load_llm(str(folder), dtype=torch.float32).state_dict()
    assert set(stored) == set(loaded)
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)
    fresh = load_llm(str(folder), dtype=torch.bfloat16, random=True).state_dict()
    assert {value.dtype for value in fresh.values()} == {torch.bfloat16}
    assert not torch.equal(fresh["lm_head.weight"].float(), stored["lm_head.weight"])


def test_a_weight_without_counterpart_is_fatal_and_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = tiny.write_decoder(tmp_path / "decoder")
    state = load(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load_llm(str(folder), dtype=torch.float32)


def test_a_weight_of_another_shape_is_fatal_and_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = tiny.write_decoder(tmp_path / "decoder")
    state = load(folder / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(7, 48)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj"):
        load_llm(str(folder), dtype=torch.float32)


@pytest.mark.parametrize("name", ["./gone", "/no/such/folder", "a/b/c"])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_network(name: str) -> None:
    for read in (load_config, load_tokenizer):
        with pytest.raises(ConfigError, match="does not exist"):
            read(name)


def load(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def test_a_picture_needs_no_row_of_the_vocabulary(tmp_path: Path) -> None:
    """TRAPS A9: the marker is no token, so that the table never grows: every id of a row is in it, and the tie is kept."""
    decoder = Decoder(load_llm(str(tiny.write_decoder(tmp_path / "decoder")), dtype=torch.float32))
    geometry = Geometry(mode="fixed", image_size=28, patch_size=14, merge=1)
    row, samples = tiny.random_row(3, geometry, [2, 0, 1])
    assert sum(int((sample.ids == IMAGE_MARKER).sum()) for sample in samples) == 3
    table = decoder.llm.get_input_embeddings().weight
    assert table.shape[0] == decoder.llm.config.vocab_size == tiny.VOCABULARY
    assert 0 <= int(row.input_ids.min()) and int(row.input_ids.max()) < tiny.VOCABULARY
    assert decoder.embed(row.input_ids).shape == (row.input_ids.numel(), decoder.width)
    assert decoder.llm.get_output_embeddings().weight is table
    assert int(row.labels.max()) < tiny.VOCABULARY and (row.labels[row.slots] == IGNORE).all()
