"""Whole runs of train.py on two ranks under ZeRO-3: what they write, how they resume, and what they hand over."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from mmds.config import Config, load_config
from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.mixture import Mixture, open_mixture
from mmds.data.row_maker import load_sample
from mmds.data.rows import LoadedSample
from mmds.model.build import build_geometry, build_light, find_source
from mmds.model.decoder import load_tokenizer
from mmds.monitor import scalars
from mmds.run_data import open_run_data
from mmds.stages import STAGES
from tests.engine.reference import stock_llm, stock_nll
from tests.runs import EVERY, STEPS, Runs, differing, lines, metrics, model, weights

NAMES = ["align", "killed", "instruct", "pretrain", "bf16"]


def folder_of(runs: Runs, name: str) -> Path:
    folder: Path = getattr(runs, name)
    return folder


def seen(runs: Runs, name: str) -> dict[int, list[list[list[str]]]]:
    """Step -> for each rank the sample keys of its rows; the last time that the step was run."""
    steps: dict[int, dict[int, list[list[str]]]] = defaultdict(dict)
    for rank in (0, 1):
        for line in lines(runs.notes(name) / f"{rank}.jsonl"):
            steps[line["step"]][rank] = line["rows"]
    return {step: [ranks[0], ranks[1]] for step, ranks in steps.items()}


def opened(config: Config) -> Mixture:
    tokenizer = ChatTokenizer(load_tokenizer(find_source(config.init_from, config.model).decoder_name))
    return open_mixture(config.data, tokenizer.fingerprint)


# --- resuming ---


def test_a_run_that_was_killed_and_resumed_is_the_uninterrupted_run(runs: Runs) -> None:
    assert [line["step"] for line in metrics(runs.killed)] == list(range(1, STEPS + 1))
    assert metrics(runs.killed) == metrics(runs.align)  # losses, norms, rates and counts, exactly
    assert differing(model(runs.killed / "model"), model(runs.align / "model")) == []


def test_a_resumed_run_sees_the_samples_that_the_uninterrupted_run_saw(runs: Runs) -> None:
    assert runs.killed and runs.align
    assert seen(runs, "killed") == seen(runs, "align")
    again = [line["step"] for line in lines(runs.notes("killed") / "0.jsonl")]
    assert again.count(4) == 2 and again.count(EVERY) == 1  # it went on from the checkpoint, not from step 0


def test_the_samples_seen_are_those_of_the_plan_and_each_comes_once_an_epoch(runs: Runs) -> None:
    config = load_config(runs.align / "config.json")
    mixture = opened(config)
    plan = open_run_data(runs.align / "config.json", world=2).plan
    steps = seen(runs, "align")
    for step, ranks in steps.items():
        for rank, rows in enumerate(ranks):
            for micro, keys in enumerate(rows):
                planned = [mixture.key(int(i)) for i in plan.rows_for(step - 1, micro, rank, world=2)]
                assert keys == (planned or [""])
    first_epoch = [key for step in (1, 2, 3) for rows in steps[step] for row in rows for key in row if key]
    assert sorted(first_epoch) == sorted(mixture.key(i) for i in range(len(mixture)))


def test_starting_a_finished_run_again_trains_nothing_and_keeps_the_model(runs: Runs) -> None:
    folder = runs.copy_of_align("finished", f"step-{STEPS:08d}")
    runs.forks.run(runs.config("finished"))
    assert metrics(folder) == metrics(runs.align)
    assert differing(model(folder / "model"), model(runs.align / "model")) == []


# --- what trains, and how fast ---


@pytest.mark.parametrize("name", NAMES)
def test_the_rate_of_every_group_at_every_step_is_table_times_schedule(runs: Runs, name: str) -> None:
    run = folder_of(runs, name)
    written = lines(run / "metrics.jsonl")
    table = STAGES[load_config(run / "config.json").stage.name].rates
    total = len(written)
    warmup = math.ceil(0.3 * total)
    for step, line in enumerate(written):
        decayed = 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (total - warmup))
        factor = (step + 1) / warmup if step < warmup else decayed
        expected = {}
        for group in line["rates"]:
            rate = next(rate for pattern, rate in table if fnmatchcase(group + ".", pattern))
            assert rate is not None
            expected[group] = rate * factor
        assert line["rates"] == pytest.approx(expected, rel=1e-12)
        parts = {pattern.split(".")[0] for pattern, rate in table if rate is not None}
        assert {group.split(".")[0] for group in line["rates"]} == parts


@pytest.mark.parametrize("name", ["align", "instruct", "pretrain"])
def test_what_the_table_trains_has_changed_and_the_rest_is_bit_equal(runs: Runs, name: str) -> None:
    run = folder_of(runs, name)
    start = torch.load(runs.notes(name) / "start.pt")["weights"]
    end = model(run / "model")
    table = STAGES[name].rates
    trained = {n for n in start if next(rate for p, rate in table if fnmatchcase(n, p)) is not None}
    assert set(differing({n: end[n] for n in start}, start)) == trained
    assert {n.split(".")[0] for n in trained} == {p.split(".")[0] for p, rate in table if rate is not None}


def test_a_frozen_decoder_and_encoder_leave_a_run_as_they_came(runs: Runs) -> None:
    assert differing(weights(runs.align / "model", "decoder"), weights(runs.work, "decoder")) == []
    source, tower = weights(runs.work, "encoder"), weights(runs.align / "model", "encoder")
    assert len(tower) > 10
    assert differing(tower, {name: source[name] for name in tower}) == []


# --- the loss ---


def mean_nll(folder: Path, runs: Runs, samples: list[LoadedSample]) -> float:
    """Mean NLL a supervised token of the samples under a model folder, by transformers and torch alone."""
    spec = json.loads((folder / "mmds.json").read_text())["encoder"]
    encoder = build_light(find_source(None, load_config(runs.align / "config.json").model), seed=0)[0]
    encoder.load_state_dict(weights(folder, "encoder"))
    connector = nn.ModuleDict({"up": nn.Linear(32, 48), "down": nn.Linear(48, 48)})
    connector.load_state_dict({n.removeprefix("net."): v for n, v in weights(folder, "connector").items()})
    project = nn.Sequential(connector["up"], nn.GELU(), connector["down"])
    llm = stock_llm(str(folder / "decoder"))
    mean, std = torch.tensor(spec["mean"]), torch.tensor(spec["std"])
    with torch.no_grad():
        nll = [
            stock_nll(
                llm, encoder.visual, lambda x, _: project(x), s, layer=spec["layer"], mean=mean, std=std
            )
            for s in samples
        ]
    return float(torch.stack(nll).sum()) / sum(int(s.supervised[1:].sum()) for s in samples)


def samples_of_step(run: Path, runs: Runs, step: int) -> list[LoadedSample]:
    config = load_config(run / "config.json")
    mixture = opened(config)
    encoder, connector = build_light(find_source(config.init_from, config.model), seed=0)
    geometry = build_geometry(encoder.spec, connector.section, max_pixels=None)
    index = {mixture.key(i): i for i in range(len(mixture))}
    keys = [key for rows in seen(runs, run.name)[step] for row in rows for key in row if key]
    return [load_sample(mixture, index[key], geometry) for key in keys]


def test_the_loss_of_a_step_is_the_mean_over_all_its_tokens_under_the_weights_before_it(runs: Runs) -> None:
    consolidated = runs.consolidate(runs.align, "align-3", "--tag", f"step-{EVERY:08d}")
    cases = [
        # weights, run, its step that starts from them
        (runs.align / "model", runs.instruct, 1),
        (runs.instruct / "model", runs.pretrain, 1),
        (consolidated, runs.align, EVERY + 1),
    ]
    for folder, run, step in cases:
        samples = samples_of_step(run, runs, step)
        line = metrics(run)[step - 1]
        assert line["tokens"]["supervised"] == sum(int(s.supervised[1:].sum()) for s in samples)
        assert line["images"] == sum(len(s.images) for s in samples)
        assert line["loss"] == pytest.approx(mean_nll(folder, runs, samples), rel=1e-5)


# --- hand-over ---


@pytest.mark.parametrize(("name", "source"), [("instruct", "align"), ("pretrain", "instruct")])
def test_a_stage_starts_from_the_weights_of_the_run_that_init_from_names(
    runs: Runs, name: str, source: str
) -> None:
    assert folder_of(runs, name)
    start, handed = torch.load(runs.notes(name) / "start.pt"), model(folder_of(runs, source) / "model")
    parts = {n.split(".")[0] for n in start["weights"]}
    assert parts == ({"encoder", "connector", "decoder"} if name == "pretrain" else {"connector", "decoder"})
    assert differing(start["weights"], {n: v for n, v in handed.items() if n.split(".")[0] in parts}) == []
    assert (start["step"], start["states"]) == (0, 0)  # a fresh optimizer
    assert [line["step"] for line in metrics(folder_of(runs, name))][0] == 1
    if name == "instruct":  # the frozen encoder is beside the tree
        assert (
            differing(weights(runs.instruct / "model", "encoder"), weights(runs.align / "model", "encoder"))
            == []
        )


# --- model folders ---


@pytest.mark.parametrize("name", ["align", "instruct", "pretrain", "bf16"])
def test_a_consolidated_checkpoint_is_the_final_model_folder(runs: Runs, name: str) -> None:
    run = folder_of(runs, name)
    out = runs.consolidate(run, f"{name}-consolidated")
    assert differing(model(out), model(run / "model")) == []
    assert sorted(p.relative_to(out) for p in out.rglob("*")) == sorted(
        p.relative_to(run / "model") for p in (run / "model").rglob("*")
    )
    ours, theirs = (json.loads((folder / "mmds.json").read_text()) for folder in (out, run / "model"))
    assert ours == theirs


def test_a_consolidated_checkpoint_of_a_bf16_run_can_be_all_fp32(runs: Runs) -> None:
    out = runs.consolidate(runs.bf16, "bf16-as-fp32", "--dtype", "float32")
    exact = model(out)
    assert {value.dtype for value in exact.values()} == {torch.float32}
    rounded = {name: value.to(torch.bfloat16) for name, value in exact.items()}
    assert differing(rounded, model(runs.bf16 / "model")) == []
    assert any(
        not torch.equal(exact[name], rounded[name].float()) for name in exact
    )  # the masters, not the rounded
    assert json.loads((out / "mmds.json").read_text())["dtype"] == "float32"


def test_a_bf16_run_has_one_dtype_everywhere_and_finite_losses(runs: Runs) -> None:
    assert {value.dtype for value in model(runs.bf16 / "model").values()} == {torch.bfloat16}
    start = torch.load(runs.notes("bf16") / "start.pt")["weights"]
    assert {value.dtype for value in start.values()} == {torch.bfloat16}
    assert json.loads((runs.bf16 / "model/mmds.json").read_text())["dtype"] == "bfloat16"
    fp32 = mean_nll(runs.align / "model", runs, samples_of_step(runs.bf16, runs, 1))
    assert metrics(runs.bf16)[0]["loss"] == pytest.approx(fp32, rel=5e-3)
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in metrics(runs.bf16))


@pytest.mark.parametrize("name", ["align", "bf16"])
def test_transformers_loads_the_decoder_and_its_tokenizer_of_a_model_folder(runs: Runs, name: str) -> None:
    folder = folder_of(runs, name) / "model" / "decoder"
    llm, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert {parameter.dtype for parameter in llm.parameters()} == {
        torch.bfloat16 if name == "bf16" else torch.float32
    }
    assert llm.lm_head.weight is llm.get_input_embeddings().weight  # tied, and stored once
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template and tokenizer.decode(tokenizer("red circle")["input_ids"]) == "red circle"


# --- what a run leaves for people ---


@pytest.mark.parametrize("name", NAMES)
def test_every_start_has_one_event_file_with_the_numbers_of_the_metrics(runs: Runs, name: str) -> None:
    run = folder_of(runs, name)
    files = list((run / "tensorboard").iterdir())
    assert len(files) == len(lines(run / "starts.jsonl")) == (2 if name == "killed" else 1)
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    written = {line["step"]: scalars(line) for line in lines(run / "metrics.jsonl")}
    for tag in written[1]:
        last = {event.step: event.value for event in board.Scalars(tag)}
        assert set(last) == set(written)
        for step, value in last.items():
            if not tag.startswith("speed/") or name != "killed":
                assert value == pytest.approx(written[step][tag], rel=1e-6, abs=1e-12)


def test_a_run_folder_holds_what_its_readers_look_for(runs: Runs) -> None:
    names = {path.name for path in runs.align.iterdir()}
    assert names >= {
        "config.json",
        "starts.jsonl",
        "train.log",
        "logs",
        "metrics.jsonl",
        "events.jsonl",
        "plan.json",
    }
    assert names >= {"tensorboard", "checkpoints", "parts", "model"} and "run.lock" not in names
    assert sorted(path.name for path in (runs.align / "logs").iterdir()) == [
        "rank-00000.log",
        "rank-00001.log",
    ]
    saved = [event["step"] for event in lines(runs.align / "events.jsonl") if event["event"] == "saved"]
    assert saved == [3, 6, 8]
    assert sorted(path.name for path in (runs.align / "checkpoints").glob("step-*")) == [
        f"step-{step:08d}" for step in saved
    ]
    plan: dict[str, Any] = json.loads((runs.align / "plan.json").read_text())
    assert (plan["samples"], plan["steps"], plan["rows_per_step"]) == (20, STEPS, 4)


def test_the_resolved_config_of_a_run_is_accepted_again_and_means_the_same(runs: Runs) -> None:
    resolved = load_config(runs.align / "config.json").resolved
    assert resolved == load_config(runs.work / "align.json").resolved
    assert resolved["gradient_clipping"] == 1.0  # the file is silent; the effective value is written down
    (start,) = [event for event in lines(runs.align / "events.jsonl") if event["event"] == "start"]
    assert start["clipping"] == 1.0
