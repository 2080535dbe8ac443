"""One answer under every layout: ZeRO 0 to 3, 1 and 2 ranks, accumulation, recomputation and packing give the numbers of a single
process in fp32 without DeepSpeed, packing or mmds attention: loss, every gradient, norms, rates, counters, and the update."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from mmds.config_types import ConnectorSection
from mmds.data.rows import IMAGE_MARKER
from mmds.engine.schedule import rate_factor
from mmds.engine.zero import checkpoint_tensors
from mmds.model.build import build_geometry
from mmds.model.connector import Connector
from mmds.model.encoder import EncoderSection, build_encoder
from tests import tiny
from tests.engine import layouts, scripted
from tests.engine.layouts import ALL_TEXT, LAYOUTS, SILENT, Batch, Layout, samples_of
from tests.engine.reference import compare, stock_llm, stock_nll
from tests.spawn import run_ranks

BLOCKS = {"encoder": 2, "connector": 1, "decoder": 2, "head": 1}
"""Blocks of each part; the tiny tower's third is above the feature layer, and gone."""
by_name = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layouts: those of one rank in one process, those of two in one pair."""
    folder = tmp_path_factory.mktemp("layouts")
    tiny.write_decoder(folder / "decoder")
    tiny.write_encoder(folder / "encoder")
    for world in (1, 2):
        run_ranks("tests/engine/worker_layouts.py", [str(folder), str(world)], world=world, timeout=900)
    return folder


@functools.cache
def result(work: Path, layout: Layout) -> dict[str, Any]:
    """What the ranks saw."""
    found: dict[str, Any] = torch.load(work / f"{layout.name}.pt")
    return found


class Reference:
    """Stock parts and torch's own AdamW, trained for the steps of a batch; what each step did is kept in `steps`."""

    def __init__(self, work: Path, batch: Batch) -> None:
        self.batch = batch
        stage, first, steps = batch.stage, batch.first, batch.steps
        self.encoder = build_encoder(EncoderSection(name=f"local-dir:{work / 'encoder'}"))
        self.connector = Connector(
            ConnectorSection(name=layouts.CONNECTOR[stage]), encoder_width=32, decoder_width=48
        )
        self.connector.load_state_dict(torch.load(work / f"{stage}.connector.pt"))
        self.llm = stock_llm(str(work / "decoder"))
        if batch.lora:
            self.llm = with_adapters(self.llm, torch.load(work / "adapters.pt"))
        self.geometry = build_geometry(self.encoder.spec, self.connector.section, max_pixels=None)
        self.weighting = batch.weighting
        self.rates = {pattern.split(".")[0]: rate for pattern, rate in batch.rates.items()}
        groups = [
            {
                "params": [
                    p for name, p in self.named().items() if name.startswith(part) and (p.dim() > 1) == decays
                ],
                "part": part,
                "weight_decay": decay,
            }
            for part in self.rates
            for decays, decay in ((True, layouts.DECAY), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=layouts.BETAS, eps=layouts.EPS)
        self.before = self.weights()
        self.steps = [self.step(index, step) for index, step in enumerate(range(first, first + steps))]
        self.after = self.weights()

    @property
    def parts(self) -> dict[str, nn.Module]:
        return {"encoder": self.encoder, "connector": self.connector, "decoder": self.llm}

    def named(self) -> dict[str, nn.Parameter]:
        """Trained parameters by the names they have in mmds."""
        prefix = {"encoder": "encoder.", "connector": "connector.", "decoder": "decoder.llm."}
        named = {
            prefix[part] + name.removeprefix("base_model.model."): parameter
            for part in self.rates
            for name, parameter in self.parts[part].named_parameters()
        }
        if self.batch.lora:
            named = {n: p for n, p in named.items() if not n.startswith("decoder.") or ".lora_" in n}
        if self.batch.last:
            blocks = [f".resblocks.{2 - block}." for block in range(1, self.batch.last + 1)]
            named = {
                n: p for n, p in named.items() if not n.startswith("encoder.") or any(b in n for b in blocks)
            }
        return named

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.named().items()}

    def step(self, index: int, step: int) -> dict[str, Any]:
        spec, named = self.encoder.spec, self.named()
        mean, std = torch.tensor(spec.mean), torch.tensor(spec.std)
        samples = samples_of(step, self.geometry)
        total, weights, nlls, counts = torch.zeros(()), 0.0, 0.0, 0
        for sample in samples:
            nll = stock_nll(
                self.llm,
                self.encoder.visual,
                self.connector.net,
                sample,
                layer=spec.layer,
                mean=mean,
                std=std,
            )
            n = int(sample.supervised[1:].sum())
            weight = {"token": float(n), "sample": float(n > 0), "sqrt": n**0.5}[self.weighting]
            total, weights = total + nll / max(n, 1) * weight, weights + weight
            nlls, counts = nlls + float(nll.detach()), counts + n
        self.optimizer.zero_grad()
        (total / weights).backward()
        for parameter in named.values():  # a part that no sample used has no gradient, which counts as zero
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        grads = {
            name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None
        }
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), layouts.CLIPPING)
        factor = rate_factor(index, total=layouts.TOTAL, warmup=layouts.WARMUP, decay="cosine")
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[group["part"]] * factor
        self.optimizer.step()
        images = sum(len(sample.images) for sample in samples)
        slots = self.geometry.plan(spec.image_size, spec.image_size).visual_tokens
        text = sum(int((sample.ids != IMAGE_MARKER).sum()) for sample in samples)
        return {
            "loss": float(total.detach()) / weights,
            "token_nll": nlls / counts,
            "grads": grads,
            "grad_norm": float(norm),
            "rates": {part: rate * factor for part, rate in self.rates.items()},
            "counts": {
                "supervised": counts,
                "images": images,
                "visual": images * slots,
                "real": text + images * slots,
            },
        }


def with_adapters(llm: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """The decoder through peft's own door, with adapters of these values on every linear module of its blocks."""
    config = LoraConfig(
        r=layouts.LORA["rank"],
        lora_alpha=layouts.LORA["alpha"],
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )
    model = get_peft_model(llm, config)
    mine = {"decoder.llm." + n.removeprefix("base_model.model."): p for n, p in model.named_parameters()}
    assert set(values) == {name for name, p in mine.items() if p.requires_grad}
    with torch.no_grad():
        for name, value in values.items():
            assert (".lora_B." in name) == (not value.any())  # B starts at zero, A does not
            mine[name].copy_(value)
    return model


@functools.cache
def reference(work: Path, batch: Batch) -> Reference:
    return Reference(work, batch)


@by_name
def test_loss_gradients_norm_rates_and_counters_of_every_step(work: Path, layout: Layout) -> None:
    wanted = reference(work, layout.batch)
    steps = result(work, layout)["steps"]
    assert len(steps) == len(wanted.steps)
    for index, (ours, theirs) in enumerate(zip(steps, wanted.steps, strict=True)):
        report = ours["report"]
        assert report["step"] == index + 1 and report["applied"] and report["skipped_steps"] == 0
        assert report["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert report["token_nll"] == pytest.approx(theirs["token_nll"], rel=1e-5)
        assert report["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4, abs=1e-9)
        by_part = {name.split(".")[0]: rate for name, rate in report["rates"].items()}
        assert by_part == pytest.approx(theirs["rates"], rel=1e-6)
        assert {name: report[name] for name in theirs["counts"]} == theirs["counts"]
        assert report["padded"] == report["bad"] == 0
        assert set(ours["grads"]) == set(theirs["grads"])
        assert compare(ours["grads"], theirs["grads"]) == []


@by_name
def test_the_update_of_all_steps_is_that_of_torchs_clipped_adamw(work: Path, layout: Layout) -> None:
    ours, wanted = result(work, layout), reference(work, layout.batch)
    moves = {name: ours["after"][name] - ours["before"][name] for name in wanted.after}
    theirs = {name: wanted.after[name] - wanted.before[name] for name in wanted.after}
    for part in wanted.rates:
        names = [name for name in theirs if name.startswith(part)]
        largest = max(float(theirs[name].abs().max()) for name in names)
        worst = max(float((moves[name] - theirs[name]).abs().max()) for name in names)
        assert worst <= 2e-3 * largest, (part, worst, largest)
    acted = {name for step in wanted.steps for name, grad in step["grads"].items() if grad.any()}
    moved = {name for name, value in ours["after"].items() if not torch.equal(value, ours["before"][name])}
    assert acted <= moved <= set(wanted.after), "what trains is what the table says"


@by_name
def test_blocks_run_twice_a_micro_step_with_recomputation_and_once_without(
    work: Path, layout: Layout
) -> None:
    for step in result(work, layout)["steps"]:
        for part, count in BLOCKS.items():
            recomputed = part in ("connector", "decoder") or (part, layout.stage) == ("encoder", "pretrain")
            first = count - layout.last if part == "encoder" and layout.last else 0 if recomputed else count
            twice = range(first if layout.recompute != "off" else count, count)
            wanted = {f"{part}.{b}": (1 + (b in twice)) * layout.accumulation for b in range(count)}
            assert {name: n for name, n in step["passes"].items() if name.startswith(part)} == wanted


@pytest.mark.parametrize("weighting", scripted.EXPECTED)
@pytest.mark.parametrize("world", scripted.SPLITS)
def test_one_token_at_4_nats_and_nine_at_2_weigh_as_declared_in_every_split(
    work: Path, world: int, weighting: str
) -> None:
    losses = json.loads((work / f"scripted-{world}.json").read_text())
    mine = {split: loss for split, loss in losses.items() if f", {weighting}, " in split}
    assert len(mine) == 4 * len(scripted.SPLITS[world])
    assert mine == pytest.approx(dict.fromkeys(mine, scripted.EXPECTED[weighting]), rel=1e-6)


@pytest.mark.parametrize("layout", ALL_TEXT, ids=lambda layout: layout.name)
def test_a_step_without_a_picture_leaves_the_visual_side_bit_equal(work: Path, layout: Layout) -> None:
    found = result(work, layout)
    visual = [name for name in found["steps"][0]["grads"] if not name.startswith("decoder")]
    assert visual
    assert not any(bool(found["steps"][0]["grads"][name].any()) for name in visual)
    for name in visual:
        # Weight decay is AdamW's own and the only thing that may move a matrix whose gradient is zero.
        rate = layout.batch.rates[name.split(".")[0] + ".*"] * rate_factor(
            0, total=layouts.TOTAL, warmup=layouts.WARMUP, decay="cosine"
        )
        decay = layouts.DECAY if found["before"][name].dim() > 1 else 0.0
        assert torch.allclose(
            found["after"][name], found["before"][name] * (1 - rate * decay), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x.saved], ids=lambda layout: layout.name)
def test_a_saved_run_goes_on_bit_equal_and_its_checkpoint_holds_the_weights(
    work: Path, layout: Layout
) -> None:
    found = result(work, layout)
    step, weights = found["resumed"]
    onward = found["steps"][2]
    for key in ("loss", "grad_norm", "rates", "step"):
        assert step["report"][key] == onward["report"][key], key
    assert all(torch.equal(weights[name], value) for name, value in found["after"].items())
    stored = checkpoint_tensors(work / layout.name, "saved")
    for name, value in found["saved"].items():
        assert torch.equal(stored[name].contiguous(), value), name


def test_the_batch_is_as_hard_as_it_says(work: Path) -> None:
    """Or the tests above could not fail: clipping acts, a sample is silent, rows are text-only beside rows with pictures."""
    wanted = reference(work, Batch("pretrain", "token", 0, 3, False, 0))
    assert all(step["grad_norm"] > 2 * layouts.CLIPPING for step in wanted.steps)
    silent = samples_of(SILENT[0], wanted.geometry)[SILENT[1]]
    assert not silent.supervised.any()
    by_weighting = {
        weighting: reference(work, Batch("instruct", weighting, 0, 3, False, 0)).steps[0]["loss"]
        for weighting in ("token", "sample", "sqrt")
    }
    assert len({round(loss, 3) for loss in by_weighting.values()}) == 3
