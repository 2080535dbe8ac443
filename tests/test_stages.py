"""The stage table: which parameter gets which rate, and what a stage refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from mmds.config import load_config
from mmds.config_types import LoraSection, StageSection
from mmds.errors import ConfigError
from mmds.stages import STAGES, assign_rates, check_text_share, stage_rates, with_last_blocks

NAMES = [
    "encoder.conv1.weight",
    "encoder.transformer.0.attn.weight",
    "connector.0.weight",
    "connector.2.bias",
    "decoder.model.embed_tokens.weight",
    "decoder.model.layers.0.self_attn.q_proj.weight",
    "decoder.lm_head.weight",
]


def rates_of(stage: StageSection) -> dict[str, float | None]:
    return assign_rates(NAMES, stage_rates(stage))


@pytest.mark.parametrize(
    ("name", "encoder", "connector", "decoder", "text_only"),
    [
        ("align", None, 1e-3, None, 0.0),
        ("pretrain", 2e-6, 2e-5, 2e-5, 0.05),
        ("instruct", None, 2e-5, 2e-5, 0.05),
        ("finetune", None, 2e-5, 1e-5, 0.0),
    ],
)
def test_each_row_gives_every_part_its_rate(
    name: Any, encoder: float | None, connector: float | None, decoder: float | None, text_only: float
) -> None:
    expected = {"encoder": encoder, "connector": connector, "decoder": decoder}
    assert rates_of(StageSection(name=name)) == {key: expected[key.split(".")[0]] for key in NAMES}
    assert STAGES[name].min_text_only == text_only and STAGES[name].name == name


def test_the_names_that_a_file_may_use_are_the_rows_of_the_table() -> None:
    assert set(get_args(get_type_hints(StageSection)["name"])) == set(STAGES)


def test_the_first_pattern_that_matches_wins_and_a_runs_own_come_first() -> None:
    own = {"decoder.lm_head.*": None, "decoder.*": 1e-5, "encoder.transformer.*": 1e-6}
    assert rates_of(StageSection(name="instruct", rates=own)) == {
        "encoder.conv1.weight": None,
        "encoder.transformer.0.attn.weight": 1e-6,
        "connector.0.weight": 2e-5,
        "connector.2.bias": 2e-5,
        "decoder.model.embed_tokens.weight": 1e-5,
        "decoder.model.layers.0.self_attn.q_proj.weight": 1e-5,
        "decoder.lm_head.weight": None,
    }


def test_a_rows_pattern_may_be_hidden_by_the_runs_own() -> None:
    own = {"decoder.model.*": 1e-5, "decoder.lm_head.*": 3e-5}
    assert rates_of(StageSection(name="instruct", rates=own))["decoder.lm_head.weight"] == 3e-5


def test_a_parameter_that_no_pattern_covers_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no pattern covers the parameter adapter\.weight"):
        assign_rates([*NAMES, "adapter.weight"], STAGES["instruct"].rates)


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r'"encoder\.blocks\.\*" matches no parameter'):
        rates_of(StageSection(name="pretrain", rates={"encoder.blocks.*": None}))


def test_matching_is_case_sensitive_and_covers_the_whole_name() -> None:
    with pytest.raises(ConfigError, match="no pattern covers"):
        assign_rates(["decoder.weight"], [("Decoder.*", 1e-5), ("decoder", 1e-5)])


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ({"vision_tower.*": None}, 'can match nothing: names start with "encoder."'),
        ({"decoder.*": 0.0}, "a rate is above 0, and frozen is null"),
        ({"decoder.*": -1e-5}, "a rate is above 0"),
        ({"decoder.*": 1e-5, "decoder.lm_head.*": None}, 'stands after "decoder.*"'),
        ({"*": 1e-5, "encoder.*": None}, 'stands after "*"'),
    ],
)
def test_patterns_and_rates_that_cannot_be_meant_are_refused(
    rates: dict[str, float | None], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        stage_rates(StageSection(name="instruct", rates=rates))
    assert says in str(error.value)


@pytest.mark.parametrize("pattern", ["decoder.*", "decoder.model.layers.0.*", "*", "[cd]*"])
def test_a_connector_sized_rate_on_the_decoder_is_refused_with_the_line_that_overrides(pattern: str) -> None:
    with pytest.raises(ConfigError, match="destroys a pretrained decoder") as error:
        stage_rates(StageSection(name="instruct", rates={pattern: 1e-3}))
    assert "--set mmds.stage.max_decoder_rate=0.001" in str(error.value)
    override = StageSection(name="instruct", rates={pattern: 1e-3}, max_decoder_rate=0.001)
    assert stage_rates(override)[0] == (pattern, 1e-3)


def test_a_high_rate_that_does_not_reach_the_decoder_is_fine() -> None:
    own = {"decoder.*": 1e-5, "*": 1e-3}
    assert stage_rates(StageSection(name="instruct", rates=own))[:2] == (("decoder.*", 1e-5), ("*", 1e-3))


def test_a_pattern_whose_parameters_all_go_to_earlier_ones_is_an_error() -> None:
    own = {"decoder.model.*": None, "decoder.lm_head.*": 1e-5, "decoder.*.weight": 2e-5}
    with pytest.raises(ConfigError, match=r'"decoder\.\*\.weight" decides nothing.*"decoder\.model\.\*"'):
        rates_of(StageSection(name="instruct", rates=own))


def test_a_wider_pattern_may_stand_after_a_narrower_one() -> None:
    names = [f"decoder.layers.{block}.mlp.weight" for block in (3, 12)]
    rates = stage_rates(
        StageSection(name="instruct", rates={"decoder.layers.?.*": 1e-6, "decoder.layers.*.*": 3e-6})
    )
    assert assign_rates(names, rates[:2]) == {names[0]: 1e-6, names[1]: 3e-6}


ADAPTED = [
    "encoder.visual.transformer.resblocks.0.attn.weight",
    "encoder.visual.transformer.resblocks.1.attn.weight",
    "connector.net.up.weight",
    "decoder.llm.model.embed_tokens.weight",
    "decoder.llm.model.layers.0.self_attn.q_proj.base_layer.weight",
    "decoder.llm.model.layers.0.self_attn.q_proj.lora_A.default.weight",
    "decoder.llm.model.layers.0.self_attn.q_proj.lora_B.default.weight",
    "decoder.llm.lm_head.weight",
]


@pytest.mark.parametrize("name", ["finetune", "instruct", "pretrain"])
def test_with_lora_the_decoders_weights_are_frozen_and_its_adapters_train(name: Any) -> None:
    rates = assign_rates(ADAPTED, stage_rates(StageSection(name=name, lora=LoraSection())))
    assert {n: rates[n] for n in ADAPTED[3:]} == {n: 2e-4 if ".lora_" in n else None for n in ADAPTED[3:]}
    assert rates["connector.net.up.weight"] == 2e-5


def test_a_runs_own_patterns_may_name_adapters() -> None:
    own = {"decoder.*.lora_B.*": 4e-4, "decoder.*.lora_*": 1e-4}
    rates = assign_rates(ADAPTED, stage_rates(StageSection(name="finetune", rates=own, lora=LoraSection())))
    assert [rates[name] for name in ADAPTED[3:]] == [None, None, 1e-4, 4e-4, None]


@pytest.mark.parametrize("pattern", ["decoder.*", "decoder.llm.lm_head.*", "*.weight", "*"])
def test_a_rate_on_weights_that_lora_freezes_is_refused_and_the_printed_line_trains_the_adapters(
    tmp_path: Path, pattern: str
) -> None:
    path = write_run(tmp_path, {"name": "finetune", "lora": {}, "rates": {pattern: 3e-4}})
    with pytest.raises(ConfigError, match="which mmds.stage.lora freezes") as error:
        load_config(path)
    config = load_config(path, as_typed(str(error.value).splitlines()[-1].strip()))
    assert assign_rates(ADAPTED, config.rates)[ADAPTED[5]] == 3e-4


def test_a_pattern_that_freezes_the_adapters_with_all_the_rest_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path, {"name": "finetune", "lora": {}, "rates": {"decoder.*": None}})
    with pytest.raises(ConfigError, match="freezes the adapters") as error:
        load_config(path)
    config = load_config(path, as_typed(str(error.value).splitlines()[-1].strip()))
    assert assign_rates(ADAPTED, config.rates)[ADAPTED[5]] == 2e-4


def test_adapters_have_a_ceiling_of_their_own_with_the_line_that_overrides(tmp_path: Path) -> None:
    stage = {"name": "finetune", "lora": {}, "rates": {"decoder.*.lora_*": 1e-3}}
    assert load_config(write_run(tmp_path, stage)).rates[0] == ("decoder.*.lora_*", 1e-3)
    path = write_run(tmp_path, {**stage, "rates": {"decoder.*.lora_*": 5e-3}})
    with pytest.raises(ConfigError, match="trains the decoder's adapters at 0.005, above 0.002") as error:
        load_config(path)
    assert load_config(path, as_typed(str(error.value).splitlines()[-1].strip())).rates[0][1] == 5e-3
    with pytest.raises(ConfigError, match="above 0.0001"):
        load_config(write_run(tmp_path, {"name": "finetune", "lora": {}, "max_decoder_rate": 1e-4}))


def test_align_has_no_use_for_adapters_and_finetune_no_start_from_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'lora: stage "align" does not train the decoder') as error:
        load_config(write_run(tmp_path, {"name": "align", "lora": {}}))
    assert str(error.value).endswith("--set mmds.stage.lora=null")
    path = write_run(tmp_path, "finetune")
    path.write_text(path.read_text().replace('"init_from": "m", ', ""))
    for more in ([], ['mmds.stage.rates={"connector.*": 1e-3}'], [f"mmds.model={json.dumps(MODEL)}"]):
        with pytest.raises(
            ConfigError, match='mmds.init_from: missing: stage "finetune" starts from.*"align"'
        ):
            load_config(path, more)
    assert load_config(path, ["mmds.init_from=runs/instruct"]).init_from == "runs/instruct"


MODEL = {"encoder": {"name": "ViT-B-32", "pretrained": "random"}, "connector": "linear", "decoder": "d"}
LAST = ["encoder.visual.transformer.resblocks.1.*"]


@pytest.mark.parametrize(
    ("name", "own", "rate"),
    [("instruct", {}, 2e-6), ("pretrain", {}, 2e-6), ("finetune", {"encoder.*": 5e-6}, 5e-6)],
)
def test_of_the_encoder_only_the_last_blocks_train_at_its_rate(
    name: Any, own: dict[str, float | None], rate: float
) -> None:
    stage = StageSection(name=name, rates=own, encoder_blocks=1)
    rates = assign_rates(ADAPTED, with_last_blocks(stage_rates(stage), LAST))
    assert [rates[name] for name in ADAPTED[:2]] == [None, rate]
    assert rates[ADAPTED[2]] == 2e-5


@pytest.mark.parametrize("own", [{"encoder.*": None}, {"*": 1e-6}])
def test_a_pattern_for_the_whole_encoder_contradicts_its_last_blocks(
    tmp_path: Path, own: dict[str, float | None]
) -> None:
    path = write_run(tmp_path, {"name": "pretrain", "rates": own, "encoder_blocks": 1})
    with pytest.raises(ConfigError, match="mmds.stage.encoder_blocks for its last 1 blocks") as error:
        load_config(path)
    assert load_config(path, as_typed(str(error.value).splitlines()[-1].strip())).stage.encoder_blocks is None


def test_a_finetune_mix_without_text_is_warned_of_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    check_text_share(0.001, StageSection(name="finetune"))
    check_text_share(0.0, StageSection(name="finetune", min_text_only=0))
    check_text_share(0.0, StageSection(name="align"))
    assert not caplog.records
    check_text_share(0.0, StageSection(name="finetune"))
    assert "no sample is text-only" in caplog.text and "--set mmds.stage.min_text_only=0" in caplog.text


def write_run(folder: Path, stage: Any) -> Path:
    path = folder / "run.json"
    run = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 3},
        "mmds": {
            "stage": stage,
            "init_from": "m",
            "output_dir": "o",
            "data": {"mix": [{"name": "a", "path": "p"}], "row_tokens": 8},
            "schedule": {"steps": 1, "warmup_steps": 0},
        },
    }
    path.write_text(json.dumps(run))
    return path


@pytest.mark.parametrize(
    "stage", ["instruct", {"name": "instruct"}, {"name": "instruct", "min_text_only": 0.2}]
)
def test_too_little_text_is_refused_and_the_printed_line_overrides_it(tmp_path: Path, stage: Any) -> None:
    path = write_run(tmp_path, stage)
    with pytest.raises(ConfigError, match="4.0% of the samples are text-only") as error:
        check_text_share(0.04, load_config(path).stage)
    line = str(error.value).splitlines()[-1].strip()
    assert line == "--set mmds.stage.min_text_only=0"
    assert check_text_share(0.0, load_config(path, [line.removeprefix("--set ")]).stage) is None


def test_enough_text_passes_and_align_needs_none() -> None:
    assert check_text_share(0.05, StageSection(name="instruct")) is None
    assert check_text_share(0.0, StageSection(name="align")) is None
    with pytest.raises(ConfigError, match='stage "align" wants at least 10.0%'):
        check_text_share(0.09, StageSection(name="align", min_text_only=0.1))


def as_typed(line: str) -> list[str]:
    """The overrides that a shell makes of a printed line."""
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]
    assert words[::2] == ["--set"] * (len(words) // 2)
    return words[1::2]


# own patterns that are refused -> what the printed line makes of some parameters
OVERRIDDEN: dict[str, tuple[dict[str, float | None], dict[str, float | None]]] = {
    "a connector's rate on the decoder": (
        {"decoder.*": 0.0012345612, "*.weight": 0.9},
        {"decoder.lm_head.weight": 0.0012345612},
    ),
    "two rates above the ceiling": (
        {"decoder.lm_head.*": 1e-3, "decoder.*": 2e-3},
        {"decoder.lm_head.weight": 1e-3, "decoder.model.embed_tokens.weight": 2e-3},
    ),
    "a pattern that reaches the decoder by its end": (
        {"*.lm_head.*": 1e-3},
        {"decoder.lm_head.weight": 1e-3, "decoder.model.embed_tokens.weight": 2e-5},
    ),
    "another trainer's name": (
        {"vision_tower.*": None, "decoder.lm_head.*": None},
        {"decoder.lm_head.weight": None, "encoder.conv1.weight": None},
    ),
    "a rate of 0": (
        {"decoder.lm_head.*": 1e-5, "decoder.*": 0.0},
        {"decoder.lm_head.weight": 1e-5, "decoder.model.embed_tokens.weight": None},
    ),
    "a hidden pattern": (
        {"connector.*": 1e-4, "decoder.*": 1e-5, "decoder.lm_head.*": None},
        {"decoder.lm_head.weight": None, "decoder.model.embed_tokens.weight": 1e-5, "connector.2.bias": 1e-4},
    ),
    "a pattern without parameters": (
        {"decoder.blocks.*": None, "encoder.conv1.*": 1e-6, "*": 1e-5},
        {"decoder.lm_head.weight": 1e-5, "encoder.conv1.weight": 1e-6, "connector.2.bias": 1e-5},
    ),
    "a pattern that decides nothing": (
        {"decoder.model.*": None, "decoder.lm_head.*": 1e-5, "decoder.*.weight": 2e-5},
        {"decoder.lm_head.weight": 1e-5, "decoder.model.embed_tokens.weight": None},
    ),
}


@pytest.mark.parametrize("case", OVERRIDDEN)
def test_the_printed_line_pasted_into_a_shell_makes_the_run_pass(tmp_path: Path, case: str) -> None:
    own, meant = OVERRIDDEN[case]
    path = write_run(tmp_path, {"name": "instruct", "rates": own})
    with pytest.raises(ConfigError) as error:
        assign_rates(NAMES, load_config(path).rates)
    typed = as_typed(str(error.value).splitlines()[-1].strip())
    assigned = assign_rates(NAMES, load_config(path, typed).rates)
    assert {name: assigned[name] for name in meant} == meant


def test_the_printed_line_for_an_uncovered_parameter_freezes_it(tmp_path: Path) -> None:
    path, name = write_run(tmp_path, "instruct"), "decoder.model.embed_tokens.weight"
    with pytest.raises(ConfigError, match=f"no pattern covers the parameter {name}") as error:
        assign_rates(NAMES, load_config(path).rates[:2])
    typed = as_typed(str(error.value).splitlines()[-1].strip())
    assert load_config(path, typed).rates[0] == (name, None)


def test_the_printed_line_for_a_decoder_rate_overrides_it(tmp_path: Path) -> None:
    path = write_run(tmp_path, {"name": "instruct", "rates": {"decoder.*": 5e-4}})
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).startswith(f"{path}:1: mmds.stage.rates")
    line = str(error.value).splitlines()[-1].strip()
    assert load_config(path, [line.removeprefix("--set ")]).rates[0] == ("decoder.*", 5e-4)


def test_the_page_about_stages_shows_the_table() -> None:
    page = (Path(__file__).parents[1] / "docs" / "stages.md").read_text(encoding="utf-8")
    for name, row in STAGES.items():
        cells = next(line for line in page.splitlines() if line.startswith(f"| `{name}`")).split("|")
        shown = [cell.strip() for cell in cells[2:8]]
        rates = ["frozen" if rate is None else f"{rate:.0e}".replace("e-0", "e-") for _, rate in row.rates]
        adapters = "-" if row.lora_rate is None else f"{row.lora_rate:.0e}".replace("e-0", "e-")
        text = "warned if none" if row.needs_trained else f"{row.min_text_only:.0%}"
        assert shown == [*rates, adapters, text, str(row.max_pixels)]
