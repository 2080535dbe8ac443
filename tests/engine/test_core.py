"""Optimizer groups, DeepSpeed's dict, and an engine alone in a process group of one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmds.config import load_config
from mmds.config_types import ConnectorSection
from mmds.data.rows import IGNORE, Row
from mmds.engine import Engine, Ranks
from mmds.engine.assemble import assemble
from mmds.engine.core import deepspeed_config, parameter_groups
from mmds.engine.launch import start_ranks, stop_ranks
from mmds.engine.schedule import rate_factor
from mmds.engine.zero import whole_tensors
from mmds.errors import ConfigError
from mmds.geometry import Geometry
from mmds.model.build import build_decoder, build_geometry, build_light, find_source
from mmds.model.connector import Connector
from mmds.model.encoder import EncoderSection, build_encoder
from mmds.model.mllm import FrozenEncoder, Mllm
from tests import tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda")
USER: dict[str, Any] = {
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3},
}


class Tied(nn.Module):
    """A part whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """Names as in a run: a tower with a convolution, a connector, a decoder with tied weights."""
    encoder = build_encoder(
        EncoderSection(name=f"local-dir:{tiny.write_encoder(tmp_path_factory.mktemp('encoder'))}")
    )
    connector = Connector(ConnectorSection(name="merge_mlp"), encoder_width=32, decoder_width=8)
    return nn.ModuleDict({"encoder": encoder, "connector": connector, "decoder": Tied()})


def rates_of(model: nn.Module, **by_part: float | None) -> dict[str, float | None]:
    return {name: by_part[name.split(".")[0]] for name, _ in model.named_parameters()}


def names_by_group(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["name"]: [names[id(p)] for p in group["params"]] for group in groups}


def test_biases_and_norms_get_no_weight_decay_and_every_matrix_does(tree: nn.Module) -> None:
    groups = parameter_groups(tree, rates_of(tree, encoder=2e-6, connector=1e-3, decoder=2e-5), 0.1)
    decays = {
        name: group["weight_decay"]
        for group in groups
        for name in names_by_group(tree, groups)[group["name"]]
    }
    shapes = {name: parameter.dim() for name, parameter in tree.named_parameters()}
    assert set(decays) == set(shapes)
    assert {decays[name] for name in shapes if name.endswith(".bias")} == {0.0}
    assert {decays[name] for name in shapes if ".ln_" in name or ".norm." in name} == {0.0}
    assert decays["encoder.visual.conv1.weight"] == decays["connector.net.up.weight"] == 0.1
    assert decays["decoder.embed.weight"] == 0.1
    assert all(decays[name] == (0.1 if dims > 1 else 0.0) for name, dims in shapes.items())


def test_groups_are_named_after_their_part_and_numbered_where_a_part_has_several(tree: nn.Module) -> None:
    groups = parameter_groups(tree, rates_of(tree, encoder=None, connector=1e-3, decoder=2e-5), 0.1)
    assert sorted(group["name"] for group in groups) == ["connector", "connector.2", "decoder", "decoder.2"]
    assert {group["name"].split(".")[0]: group["lr"] for group in groups} == {
        "connector": 1e-3,
        "decoder": 2e-5,
    }
    without_decay = parameter_groups(tree, rates_of(tree, encoder=None, connector=1e-3, decoder=2e-5), 0.0)
    assert [group["name"] for group in without_decay] == ["connector", "decoder"]


def test_parameters_of_one_part_with_two_rates_are_two_groups(tree: nn.Module) -> None:
    rates = rates_of(tree, encoder=None, connector=None, decoder=2e-5)
    rates["decoder.norm.weight"] = rates["decoder.norm.bias"] = 1e-4
    groups = parameter_groups(tree, rates, 0.0)
    assert {(group["name"], group["lr"]) for group in groups} == {("decoder", 2e-5), ("decoder.2", 1e-4)}
    assert names_by_group(tree, groups)["decoder.2"] == ["decoder.norm.weight", "decoder.norm.bias"]


def test_frozen_parameters_need_no_gradient_are_in_no_group_and_thaw_again(tree: nn.Module) -> None:
    groups = parameter_groups(tree, rates_of(tree, encoder=None, connector=1e-3, decoder=None), 0.1)
    listed = {name for names in names_by_group(tree, groups).values() for name in names}
    assert listed == {name for name, _ in tree["connector"].named_parameters(prefix="connector")}
    assert {name for name, p in tree.named_parameters() if p.requires_grad} == listed
    parameter_groups(tree, rates_of(tree, encoder=2e-6, connector=1e-3, decoder=2e-5), 0.1)
    assert all(parameter.requires_grad for parameter in tree.parameters())


def test_a_tied_weight_is_in_one_group_once(tree: nn.Module) -> None:
    groups = parameter_groups(tree, rates_of(tree, encoder=None, connector=None, decoder=2e-5), 0.1)
    listed = [name for names in names_by_group(tree, groups).values() for name in names]
    assert sorted(listed) == ["decoder.embed.weight", "decoder.norm.bias", "decoder.norm.weight"]


def made(user: dict[str, Any], device: torch.device = CPU) -> dict[str, Any]:
    return deepspeed_config(user, rows_per_step=8, accumulation=4, output_dir=Path("runs/x"), device=device)


def test_deepspeed_gets_the_users_keys_and_the_batch_that_mmds_owns() -> None:
    before = json.dumps(USER)
    config = made(USER)
    assert config["zero_optimization"] == USER["zero_optimization"]
    assert config["gradient_clipping"] == 0.5
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (8, 4)
    assert config["train_micro_batch_size_per_gpu"] == 1
    assert config["managed_gradient_accumulation"] is False
    assert "mmds" not in config  # the dict is pickled into every checkpoint
    assert json.dumps(USER) == before


def test_adam_is_torchs_own_on_a_cpu_unless_the_user_says_otherwise() -> None:
    assert made(USER)["optimizer"]["params"]["torch_adam"] is True
    assert "torch_adam" not in made(USER, GPU)["optimizer"]["params"]
    chosen = {**USER, "optimizer": {"type": "Adam", "params": {"torch_adam": False}}}
    assert made(chosen)["optimizer"]["params"]["torch_adam"] is False


def test_tensorboard_writes_into_the_run_folder_unless_the_user_says_otherwise() -> None:
    section = made({**USER, "tensorboard": {"enabled": True}})["tensorboard"]
    assert (section["output_path"], section["job_name"]) == ("runs/x", "tensorboard")
    section = made({**USER, "tensorboard": {"enabled": True, "output_path": "/logs"}})["tensorboard"]
    assert section["output_path"] == "/logs"
    assert made({**USER, "tensorboard": {"enabled": False}})["tensorboard"] == {"enabled": False}


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """A process group of this process alone, made without a launcher; the environment is put back afterwards."""
    before = dict(os.environ)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
    try:
        yield start_ranks()
    finally:
        stop_ranks()
        os.environ.clear()
        os.environ.update(before)


class Alone:
    """Engines of one rank from the same tiny parts and config."""

    def __init__(self, work: Path, ranks: Ranks) -> None:
        self.work, self.ranks = work, ranks
        tiny.write_decoder(work / "decoder")
        tiny.write_encoder(work / "encoder")

    def engine(
        self, *, zero: int = 3, keys: dict[str, Any] | None = None, **stage: Any
    ) -> tuple[Engine, Geometry]:
        """A fresh engine of a four-step `instruct` run that warms up over two steps; zero: ZeRO's stage; keys: of
        DeepSpeed's, added; stage: departures from the table."""
        file = self.work / "run.json"
        file.write_text(json.dumps({**self._config(zero, stage), **(keys or {})}))
        config = load_config(file)
        source = find_source(None, config.model)
        encoder, connector = build_light(source, seed=config.seed)
        geometry = build_geometry(encoder.spec, connector.section, max_pixels=None)
        return assemble(config, source, encoder, connector, self.ranks, total_steps=4), geometry

    def _config(self, zero: int, stage: dict[str, Any]) -> dict[str, Any]:
        return {
            "train_batch_size": 1,
            "gradient_clipping": 1e-3,
            "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}},
            "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
            "mmds": {
                "stage": {"name": "instruct", **stage},
                "output_dir": str(self.work / "run"),
                "model": {
                    "encoder": {"name": f"local-dir:{self.work / 'encoder'}"},
                    "connector": "mlp2x",
                    "decoder": str(self.work / "decoder"),
                },
                "data": {"mix": [{"name": "none", "path": "none.jsonl"}], "row_tokens": 256},
                "schedule": {"steps": 4, "warmup_steps": 2},
            },
        }


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, alone: Ranks) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"), alone)


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in whole_tensors(engine.model)}


def row(geometry: Geometry, seed: int = 0) -> Row:
    return tiny.random_row(seed, geometry, (1, 0))[0]


def test_a_run_without_a_launcher_is_a_world_of_one(alone: Ranks) -> None:
    assert (alone.rank, alone.world, alone.first) == (0, 1, True)
    assert alone.sum(1.5, 2) == alone.max(1.5, 2) == [1.5, 2.0]
    assert alone.gather("x") == ["x"]
    with pytest.raises(OSError, match="disk full"), alone.together("writing"):
        raise OSError("disk full")


def test_rate_of_every_group_is_table_times_schedule_and_the_norm_is_reported_before_clipping(
    parts: Alone,
) -> None:
    engine, geometry = parts.engine(rates={"connector.*": 3e-4})
    table = {"connector": 3e-4, "connector.2": 3e-4, "decoder": 2e-5, "decoder.2": 2e-5}
    for step in range(4):
        factor = rate_factor(step, total=4, warmup=2, decay="cosine")
        report = engine.step([row(geometry, step)])
        assert report.step == step + 1
        assert report.rates == pytest.approx({name: rate * factor for name, rate in table.items()})
        assert report.grad_norm > 1e-3  # gradient_clipping
        assert report.applied


def test_a_step_without_a_supervised_token_has_loss_zero_and_no_gradient(parts: Alone) -> None:
    engine, geometry = parts.engine()
    some = row(geometry)
    silent = Row(**{**some.__dict__, "labels": torch.full_like(some.labels, IGNORE)})
    report = engine.step([silent])
    assert (report.loss, report.grad_norm, report.supervised) == (0.0, 0.0, 0)
    assert all(bool(value.isfinite().all()) for value in weights(engine).values())


@pytest.mark.parametrize("zero", range(4))
def test_a_non_finite_gradient_changes_no_weight_is_counted_and_names_its_samples(
    parts: Alone, zero: int
) -> None:
    engine, geometry = parts.engine(zero=zero)
    before = weights(engine)
    forward = engine._forward
    engine._forward = lambda row: tuple(x * float("inf") for x in forward(row))  # type: ignore[assignment, return-value]
    bad, good = row(geometry), row(geometry, 1)
    reports = [engine.step([bad]) for _ in range(2)]
    after = weights(engine)
    assert [report.applied for report in reports] == [False, False]
    assert [report.skipped_steps for report in reports] == [1, 2]
    assert [report.skipped_in_a_row for report in reports] == [1, 2]
    assert all(report.suspects == bad.sample_keys for report in reports)
    assert all(torch.equal(before[name], after[name]) for name in before)

    engine._forward = forward  # type: ignore[method-assign]
    report = engine.step([good])
    assert report.applied and report.skipped_in_a_row == 0 and report.suspects == ()
    factor = rate_factor(2, total=4, warmup=2, decay="cosine")  # skipped steps count in the schedule
    assert report.rates["decoder"] == pytest.approx(2e-5 * factor)
    assert not torch.equal(weights(engine)["connector.net.up.weight"], before["connector.net.up.weight"])


def test_activations_cannot_leave_a_cpu_for_the_cpu(parts: Alone) -> None:
    with pytest.raises(ConfigError, match="cpu_checkpointing: true needs a GPU"):
        parts.engine(keys={"activation_checkpointing": {"cpu_checkpointing": True}})


def test_a_saved_engine_loads_bit_equal_and_goes_on_the_same(parts: Alone) -> None:
    engine, geometry = parts.engine()
    engine.step([row(geometry, 0)])
    engine.save(parts.work / "saved", "tag")
    saved = weights(engine)
    onward = engine.step([row(geometry, 1)])
    after = weights(engine)

    fresh, _ = parts.engine()
    fresh.load(parts.work / "saved", "tag")
    assert fresh.step_index == 1
    assert all(torch.equal(saved[name], value) for name, value in weights(fresh).items())
    again = fresh.step([row(geometry, 1)])
    assert (again.loss, again.grad_norm, again.rates) == (onward.loss, onward.grad_norm, onward.rates)
    assert all(torch.equal(after[name], value) for name, value in weights(fresh).items())


def test_weights_after_some_steps_are_those_of_torchs_own_clipped_adamw(parts: Alone) -> None:
    engine, geometry = parts.engine(rates={"connector.*": 3e-4})
    config = load_config(parts.work / "run.json")
    encoder, connector = build_light(find_source(None, config.model), seed=config.seed)
    llm = build_decoder(find_source(None, config.model), dtype=torch.float32, seed=config.seed)
    plain = Mllm(connector=connector, decoder=llm, encoder=None)
    frozen = FrozenEncoder(encoder, device=CPU, dtype=torch.float32)
    groups = [
        {
            "params": [
                p for n, p in plain.named_parameters() if n.startswith(part) and (p.dim() > 1) == (decay > 0)
            ],
            "lr": rate,
            "weight_decay": decay,
        }
        for part, rate in (("connector", 3e-4), ("decoder", 2e-5))
        for decay in (0.1, 0.0)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    start = {n: p.detach().clone() for n, p in plain.named_parameters()}
    for step in range(3):
        some = row(geometry, step)
        report = engine.step([some])
        optimizer.zero_grad()
        loss = plain(some, frozen(some))[0] / some.supervised
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
        for group, rate in zip(optimizer.param_groups, (3e-4, 3e-4, 2e-5, 2e-5), strict=True):
            group["lr"] = rate * rate_factor(step, total=4, warmup=2, decay="cosine")
        optimizer.step()
        assert report.loss == pytest.approx(loss.item(), rel=1e-5)
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-4)
    ours = weights(engine)
    assert set(ours) == set(start)
    for name, parameter in plain.named_parameters():
        moved = (parameter.detach() - start[name]).abs().max()
        gap = (ours[name] - parameter.detach()).abs().max()
        assert float(moved) > 0 and float(gap) < 0.02 * float(moved), (name, float(gap), float(moved))
