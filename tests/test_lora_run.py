"""Whole finetune runs with adapters on two ranks: what they train, resume, keep, merge and hand on; peft and transformers judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from mmds.generate import load_assistant
from tests import tiny
from tests.model.test_lora import close
from tests.runs import Runs, differing, metrics, model, weights

LORA = {"rank": 4, "alpha": 6}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Tuned:
    """Finetune runs from the align run's folder, each made when first asked for."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.made: dict[str, str] = {}

    def run(self, name: str, *more: str, lora: Any = None, stage: str = "finetune", **mmds: Any) -> Path:
        """A run of 4 steps; more: further words of its command. Its output is kept in `made`."""
        if name not in self.made:
            section = {"name": stage, "lora": lora}
            keys = {
                "init_from": str(self.runs.align),
                "model": None,
                "checkpoint": {"every": 2, "keep": 9},
                **mmds,
            }
            arguments = self.runs.config(name, stage=section, steps=4, **keys)
            ended = self.runs.forks.run([*arguments, *more], notes=self.runs.notes(name))
            self.made[name] = "\n".join(ended.outputs) + (self.runs.work / name / "train.log").read_text()
        return self.runs.work / name

    @property
    def kept(self) -> Path:
        return self.run("lora-kept", lora={**LORA, "keep": True})

    @property
    def merged(self) -> Path:
        return self.run("lora-merged", lora=LORA)

    @property
    def bf16(self) -> Path:
        sets = ("--set", "bf16.enabled=true", "--set", "zero_optimization.stage=2")
        return self.run("lora-bf16", *sets, lora=LORA)


@pytest.fixture(scope="module")
def tuned(runs: Runs) -> Tuned:
    return Tuned(runs)


def start_of(tuned: Tuned, name: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(tuned.runs.notes(name) / "start.pt")["weights"]
    return found


def stock(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_kept_decoder_is_the_one_it_started_from_with_the_adapters_beside_it(tuned: Tuned) -> None:
    decoder = tuned.kept / "model" / "decoder"
    assert differing(weights(tuned.kept / "model", "decoder"), weights(tuned.runs.work, "decoder")) == []
    assert {path.name for path in (decoder / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    adapted = PeftModel.from_pretrained(stock(decoder), decoder / "adapter")
    assert len([n for n, _ in adapted.named_parameters() if ".lora_B." in n]) == 2 * len(LINEAR)
    assert all(bool(p.any()) for n, p in adapted.named_parameters() if ".lora_B." in n)
    assert Path(adapted.peft_config["default"].base_model_name_or_path) == decoder


def test_peft_merges_the_kept_adapters_into_the_decoder_of_the_run_that_merges(tuned: Tuned) -> None:
    assert metrics(tuned.kept) == metrics(tuned.merged)  # the same training
    decoder = tuned.kept / "model" / "decoder"
    theirs = PeftModel.from_pretrained(stock(decoder), decoder / "adapter").merge_and_unload().state_dict()
    ours = stock(tuned.merged / "model" / "decoder").state_dict()
    assert set(ours) == set(theirs) and all(close(ours[name], theirs[name]) for name in theirs)
    moved = set(differing(weights(tuned.merged / "model", "decoder"), weights(tuned.runs.work, "decoder")))
    assert moved == {name for name in weights(tuned.runs.work, "decoder") if name.split(".")[-2] in LINEAR}
    assert not (tuned.merged / "model" / "decoder" / "adapter").exists()
    assert not list((tuned.merged / "model").glob("adapter*"))


def test_an_assistant_says_the_same_with_kept_adapters_as_with_merged_ones(tuned: Tuned) -> None:
    kept, merged = (load_assistant(run / "model") for run in (tuned.kept, tuned.merged))
    row, _ = tiny.random_row(3, kept.geometry, (1, 0, 2))
    keep = torch.arange(row.input_ids.numel())
    with torch.no_grad():
        a, b = (assistant.model.logits(row, keep, assistant.encoder(row)) for assistant in (kept, merged))
    assert close(a, b)
    align = load_assistant(tuned.runs.align / "model")
    with torch.no_grad():
        before = align.model.logits(row, keep, align.encoder(row))
    assert not close(a, before)


def test_a_resumed_run_is_the_uninterrupted_run(tuned: Tuned) -> None:
    lora = {**LORA, "keep": True}
    tuned.run("lora-resumed", "--max-steps", "2", lora=lora)
    tuned.made.clear()
    run = tuned.run("lora-resumed", lora=lora)
    assert metrics(run) == metrics(tuned.kept)
    for part in ("decoder/adapter", "decoder", "connector"):
        assert differing(weights(run / "model", part), weights(tuned.kept / "model", part)) == []


@pytest.mark.parametrize("lora", [{**LORA, "alpha": 5}, {**LORA, "targets": ["q_proj"]}, None])
def test_a_checkpoint_is_refused_by_a_run_with_other_adapters(tuned: Tuned, lora: Any) -> None:
    assert tuned.kept
    stage = {"name": "finetune", "lora": lora}
    keys = {"init_from": str(tuned.runs.align), "model": None}
    arguments = tuned.runs.config("lora-other", stage=stage, steps=4, **keys)
    newest = tuned.kept / "checkpoints" / "step-00000004"
    ended = tuned.runs.fails([*arguments, "--resume", str(newest)])
    assert "belongs to a run with other trained parameters or rates" in ended.outputs[0]


@pytest.mark.parametrize("name", ["kept", "merged", "bf16"])
def test_a_consolidated_checkpoint_is_the_final_model_folder(tuned: Tuned, name: str) -> None:
    run: Path = getattr(tuned, name)
    out = tuned.runs.consolidate(run, f"lora-{name}-consolidated")
    assert differing(model(out), model(run / "model")) == []
    assert differing(weights(out, "decoder/adapter"), weights(run / "model", "decoder/adapter")) == []
    assert sorted(p.relative_to(out) for p in out.rglob("*")) == sorted(
        p.relative_to(run / "model") for p in (run / "model").rglob("*")
    )
    held = {**model(out), **weights(out, "decoder/adapter")}
    assert {value.dtype for value in held.values()} == {torch.bfloat16 if name == "bf16" else torch.float32}


def test_adapters_start_in_the_runs_dtype_and_the_rest_as_it_was_handed_over(tuned: Tuned) -> None:
    assert tuned.bf16
    start = start_of(tuned, "lora-bf16")
    assert {value.dtype for value in start.values()} == {torch.bfloat16}
    handed = model(tuned.runs.align / "model")
    for name, value in start.items():
        if ".lora_" not in name:
            assert torch.equal(value, handed[name.replace(".base_layer.", ".")].bfloat16())


def test_a_run_goes_on_with_kept_adapters_of_its_shape(tuned: Tuned) -> None:
    tuned.run("lora-onward", lora={**LORA, "keep": True}, init_from=str(tuned.kept))
    start, stored = start_of(tuned, "lora-onward"), weights(tuned.kept / "model", "decoder/adapter")
    named = {
        "base_model.model." + name.removeprefix("decoder.llm.").replace(".default", ""): value
        for name, value in start.items()
        if ".lora_" in name
    }
    assert differing(named, stored) == []
    assert "adapters that the decoder was kept with (rank 4) train on" in tuned.made["lora-onward"]


@pytest.mark.parametrize(
    ("name", "lora", "stage"),
    [("lora-wider", {"rank": 8}, "finetune"), ("lora-full", None, "instruct")],
)
def test_a_run_of_another_shape_starts_from_the_merged_decoder(
    tuned: Tuned, name: str, lora: Any, stage: str
) -> None:
    run = tuned.run(name, lora=lora, stage=stage, init_from=str(tuned.kept))
    start, merged = start_of(tuned, name), model(tuned.merged / "model")
    for tensor, value in start.items():
        if ".lora_" not in tensor and not tensor.startswith("encoder."):
            assert close(value, merged[tensor.replace(".base_layer.", ".")]), tensor
    assert "(rank 4) were merged into its weights" in tuned.made[name]
    assert (run / "model" / "mmds.json").is_file()


def test_the_readme_of_a_model_folder_names_the_base_and_the_adapters(tuned: Tuned) -> None:
    kept, merged = ((run / "model" / "README.md").read_text() for run in (tuned.kept, tuned.merged))
    assert f"- base: the decoder of {tuned.runs.align}, unchanged in decoder/" in kept
    assert "- adapters: LoRA, rank 4, scale 1.5, beside 14 modules (down_proj, gate_proj," in kept
    assert "kept apart in decoder/adapter/" in kept and "merged into the decoder's weights" in merged
    assert f"chat.py {tuned.kept / 'model'} " in kept
    config = json.loads((tuned.kept / "model/decoder/adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    assert sorted(config["target_modules"]) == sorted(LINEAR)
