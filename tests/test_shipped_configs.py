"""Every shipped configuration is read, resolved, and checked against DeepSpeed's own parser."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import pytest

from mmds.config import load_config, rows_per_step

FOLDER = Path(__file__).parents[1] / "ds_configs"
FILES = sorted(path for path in FOLDER.rglob("*.json") if path.name != "schema.json")
REAL = [FOLDER / name for name in ("stage1.json", "stage1_5.json", "stage2.json")]
TUNING = [FOLDER / name for name in ("finetune_lora_24gb.json", "finetune_lora_8x80gb.json")]


def test_the_documented_files_are_there() -> None:
    assert {*REAL, *TUNING} <= set(FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_it_parses_and_its_resolved_form_is_the_same_run(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    again = tmp_path / "config.json"
    again.write_text(json.dumps(config.resolved))
    assert load_config(again).resolved == config.resolved
    rows, accumulation = rows_per_step(config, 2)
    assert rows == 2 * accumulation


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_deepspeeds_own_parser_takes_its_part(path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger

    section = copy.deepcopy(load_config(path).deepspeed)
    section["train_batch_size"] = section["train_micro_batch_size_per_gpu"] = 1
    section["gradient_accumulation_steps"] = 1
    level = logger.level
    logger.setLevel(logging.ERROR)
    parsed = DeepSpeedConfig(section)
    logger.setLevel(level)
    assert parsed.zero_optimization_stage == (2 if path in TUNING else 3)
    assert parsed.gradient_clipping == section["gradient_clipping"]
    assert parsed.grad_accum_dtype == "fp32"


@pytest.mark.parametrize("path", [*REAL, *TUNING], ids=lambda path: path.name)
def test_a_real_run_fits_in_45_lines_and_divides_over_8_ranks(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 45
    assert rows_per_step(load_config(path), 8)[1] >= 1


@pytest.mark.parametrize("path", TUNING, ids=lambda path: path.name)
def test_a_finetune_run_trains_adapters_of_a_published_model(path: Path) -> None:
    run = load_config(path)
    assert run.stage.name == "finetune" and run.stage.lora is not None and run.init_from
    assert dict(run.rates) == {
        "encoder.*": None,
        "connector.*": 2e-5,
        "decoder.*.lora_*": 2e-4,
        "decoder.*": None,
    }


def test_one_card_of_24_gb_has_one_row_a_micro_step() -> None:
    assert rows_per_step(load_config(TUNING[0]), 1) == (32, 32)


def test_the_three_stages_hand_over_by_run_folder() -> None:
    runs = [load_config(path) for path in REAL]
    assert [run.stage.name for run in runs] == ["align", "pretrain", "instruct"]
    assert runs[0].init_from is None and runs[0].model is not None
    assert runs[0].model.encoder.name == "ViT-L-14-336-quickgelu"
    assert (runs[1].init_from, runs[2].init_from) == (runs[0].output_dir, runs[1].output_dir)
    assert len({run.output_dir for run in runs}) == 3
