"""A run's outline: what trains and what a rank must hold, against the parts themselves and DeepSpeed's own estimators."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from mmds.calibration import RATES, Calibration
from mmds.config import Config, load_config
from mmds.cost import WHOLE, row_sums
from mmds.errors import ConfigError
from mmds.model import shapes
from mmds.model.build import describe_light, find_source
from mmds.run_outline import Outline, outline
from tests.data.sample_run import write_run

ROW = row_sums(patches=[4, 4], segments=[60, 50], supervised=40)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("outline"))


def outlined(file: Path, *overrides: str) -> tuple[Config, Outline]:
    config = load_config(file, overrides)
    source = find_source(config.init_from, config.model)
    return config, outline(config, source, *describe_light(source))


def test_what_trains_is_what_the_stage_table_says(file: Path) -> None:
    for stage, encoder, decoder in (("align", 0, 0), ("instruct", 0, 2), ("pretrain", WHOLE, 2)):
        _, known = outlined(file, f"mmds.stage={stage}")
        training = known.known()[1]
        assert training.connector and (training.encoder, training.decoder) == (
            encoder,
            decoder,
        )  # a decoder of two layers
        assert known.encoder_trains == (encoder > 0)
        assert all(p.device.type == "meta" for p in known.llm.parameters())


def test_adapters_train_in_the_place_of_the_decoder(file: Path) -> None:
    config, known = outlined(file, "mmds.stage=instruct", 'mmds.stage.lora={"rank": 4}')
    training = known.known()[1]
    of_adapters = {name: n for name, n in known.sizes.items() if ".lora_" in name}
    assert training.decoder == 0 and training.adapters == sum(of_adapters.values()) > 0
    whole_config, whole = outlined(file, "mmds.stage=instruct")
    lora, full = known.flops(config).flops(ROW), whole.flops(whole_config).flops(ROW)
    assert 0.5 < float(lora.decoder) / float(full.decoder) < 1.0


@pytest.mark.parametrize("world", [1, 4])
def test_states_are_those_of_deepspeeds_estimators(file: Path, world: int) -> None:
    """The pretrain stage trains everything."""
    for stage in (2, 3):
        config, known = outlined(
            file, "mmds.stage=pretrain", f"zero_optimization.stage={stage}", "bf16.enabled=true"
        )
        total = sum(known.sizes.values())
        assert all(rate is not None for rate in known.rates.values())
        if stage == 2:
            _, theirs = estimate_zero2_model_states_mem_needs(
                total, num_gpus_per_node=world, cpu_offload=False
            )
        else:
            _, theirs, _ = estimate_zero3_model_states_mem_needs(
                total,
                known.largest_module,
                num_gpus_per_node=world,
                cpu_offload=False,
                cpu_offload_params=False,
            )
        memory = known.rank_bytes(config, world=world, row=ROW)
        assert memory.states == pytest.approx(theirs, rel=1e-3)
        assert memory.device == memory.states + memory.activations


def test_a_frozen_encoder_is_whole_on_every_rank_and_offloading_empties_the_device(file: Path) -> None:
    config, known = outlined(file, "bf16.enabled=true")
    encoder = sum(n for name, n in known.sizes.items() if name.startswith("encoder."))
    many = known.rank_bytes(config, world=10**6, row=ROW).states
    assert many == pytest.approx(2 * encoder + 4 * known.largest_module, rel=1e-2)
    offloaded, same = outlined(
        file,
        "bf16.enabled=true",
        "mmds.stage=instruct",
        'zero_optimization.offload_optimizer={"device":"cpu"}',
    )
    here, known = outlined(file, "bf16.enabled=true", "mmds.stage=instruct")
    trained = sum(n for name, n in known.sizes.items() if known.rates[name] is not None)
    gone = (
        known.rank_bytes(here, world=1, row=ROW).states - same.rank_bytes(offloaded, world=1, row=ROW).states
    )
    assert gone == 16 * trained


def test_fp32_keeps_twice_the_activations_and_larger_rows_more(file: Path) -> None:
    bf16, known = outlined(file, "bf16.enabled=true", "mmds.stage=instruct")
    fp32, _ = outlined(file, "mmds.stage=instruct")
    assert known.activations(fp32, ROW) == 2 * known.activations(bf16, ROW)
    larger = row_sums(patches=[4, 4], segments=[60, 90], supervised=40)
    assert known.activations(bf16, larger) > known.activations(bf16, ROW)


def test_a_family_that_cannot_be_counted_plans_by_tokens_or_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "decoder_matrices", lambda shape, layer: 1)
    config, known = outlined(file)
    assert "family 'llama' is not known" in known.unknown
    with pytest.raises(ConfigError, match=r'(?s)not known.*--set mmds.planner.scheme="token_budget"'):
        known.cost(config)
    tokens, known = outlined(file, 'mmds.planner.scheme="token_budget"')
    assert known.cost(tokens) is None


def test_costs_are_flops_or_the_seconds_of_a_calibration(file: Path, tmp_path: Path) -> None:
    config, known = outlined(file)
    assert known.cost(config) == known.flops(config)
    measured = Calibration(
        **dict.fromkeys(RATES, 2e-12),
        row=0.01,
        piece=0.0,
        device="cpu",
        dtype="float32",
        torch="2",
        rows=9,
        error=0.01,
    )
    measured.save(tmp_path / "calibration.json")
    config, known = outlined(file, f"mmds.planner.calibration={tmp_path / 'calibration.json'}")
    cost = known.cost(config)
    assert cost is not None
    assert float(cost.flops(ROW).total) == pytest.approx(2e-12 * float(known.flops(config).flops(ROW).total))
