"""`train.py --dry-run`: what it prints is what the run would do, without weights and without other ranks."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mmds.config import load_config
from mmds.dry_run import dry_run
from mmds.errors import ConfigError
from mmds.model.build import find_source
from tests import tiny
from tests.runs import Runs
from tests.spawn import ROOT


class Folder:
    """Parts that have given their weights away, data, and configs that name them."""

    def __init__(self, work: Path) -> None:
        self.work = work
        tiny.write_decoder(work / "decoder", tied=True)
        tiny.write_encoder(work / "encoder")
        shutil.copytree(ROOT / "data" / "sample", work / "data", ignore=shutil.ignore_patterns(".cache"))
        self.decoder = load_file(work / "decoder/model.safetensors")
        self.encoder = load_file(work / "encoder/open_clip_model.safetensors")
        for file in work.rglob("*.safetensors"):
            file.unlink()

    def config(self, stage: Any = "align", **deepspeed: Any) -> Path:
        """A run's file; deepspeed: top-level keys that replace or (None) remove."""
        top = {
            "train_batch_size": 4,
            "zero_optimization": {"stage": 3},
            "mmds": {
                "stage": stage,
                "output_dir": str(self.work / "run"),
                "model": {
                    "encoder": {"name": f"local-dir:{self.work / 'encoder'}"},
                    "connector": "mlp2x",
                    "decoder": str(self.work / "decoder"),
                },
                "data": {
                    "mix": [{"name": "llava", "path": str(self.work / "data/llava.jsonl")}],
                    "row_tokens": 160,
                },
                "schedule": {"steps": 8, "warmup_ratio": 0.3},
            },
            **deepspeed,
        }
        file = self.work / "run.json"
        file.write_text(json.dumps({key: value for key, value in top.items() if value is not None}))
        return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("dry"))


@pytest.fixture
def printed(folder: Folder, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs dry and returns what was printed."""

    def run(stage: Any = "align", *overrides: str, world: int = 1, **deepspeed: Any) -> str:
        config = load_config(folder.config(stage, **deepspeed), overrides)
        dry_run(config, find_source(config.init_from, config.model), world)
        return capsys.readouterr().out

    return run


def numbers(text: str, first: str) -> list[int]:
    """The numbers of the only line that begins with these words and holds numbers alone."""
    (line,) = re.findall(rf"^{re.escape(first)}((?: +[\d,]+)+)(?: +this run)?$", text, re.MULTILINE)
    return [int(number.replace(",", "")) for number in line.split()]


def test_it_begins_with_the_resolved_run(printed: Any, folder: Folder) -> None:
    decoded, _ = json.JSONDecoder().raw_decode(printed())
    assert decoded == load_config(folder.config()).resolved


@pytest.mark.parametrize("stage", ["align", "instruct", "pretrain"])
def test_parameters_are_counted_by_part_as_trained_frozen_or_pruned(
    printed: Any, folder: Folder, stage: str
) -> None:
    text = printed(stage, "mmds.stage.min_text_only=0")
    decoder = sum(value.numel() for value in folder.decoder.values())
    tower = {name.removeprefix("visual."): value.numel() for name, value in folder.encoder.items()}
    unused = ("transformer.resblocks.2.", "ln_post.", "proj")
    pruned = sum(size for name, size in tower.items() if name.startswith(unused))
    encoder = sum(tower.values()) - pruned
    connector = 32 * 48 + 48 + 48 * 48 + 48
    trains = {"align": (0, 1, 0), "instruct": (0, 1, 1), "pretrain": (1, 1, 1)}[stage]
    sizes = (encoder, connector, decoder)
    trained = [size * on for size, on in zip(sizes, trains, strict=True)]
    frozen = [size - on for size, on in zip(sizes, trained, strict=True)]
    for i, part in enumerate(("encoder", "connector", "decoder")):
        assert numbers(text, part) == [trained[i], frozen[i], 0 if i else pruned]
    assert numbers(text, "all") == [sum(trained), sum(frozen), pruned]
    line = f"pruned from the encoder: proj, transformer.resblocks.2, ln_post: {pruned:,} parameters"
    assert line in text


def test_parameters_of_one_part_with_two_rates_are_told_apart(printed: Any) -> None:
    text = printed({"name": "align", "rates": {"connector.net.up.*": 3e-4}})
    assert re.search(r"^connector +1,584 +0\.0003$", text, re.MULTILINE)
    assert re.search(r"^connector +2,352 +0\.001$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ({}, "gradient norm 1"),  # DeepSpeed's default: the file is silent
        ({"gradient_clipping": 0.5}, "gradient norm 0.5"),
        ({"gradient_clipping": 0}, "off"),
    ],
)
def test_the_clipping_in_effect_is_printed(printed: Any, keys: dict[str, Any], shown: str) -> None:
    assert re.search(rf"^clipping +{re.escape(shown)}$", printed(**keys), re.MULTILINE)


OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ({}, ["ZeRO +ZeRO-3", "recompute +off", "weight of a sample +token: its supervised tokens"]),
        ({"zero_optimization": OFFLOAD}, ["ZeRO +ZeRO-2, optimizer states in the memory of the CPU"]),
        (
            {"activation_checkpointing": {}},
            ["recompute +encoder frozen, connector every block, decoder every block"],
        ),
    ],
)
def test_what_the_engine_does_is_printed(printed: Any, keys: dict[str, Any], shown: list[str]) -> None:
    text = printed(**keys)
    for line in shown:
        assert re.search(f"^{line}$", text, re.MULTILINE), text


def test_every_nth_recomputed_block_and_the_weighting_are_printed(printed: Any) -> None:
    overrides = ("mmds.recompute.decoder=2", "mmds.recompute.connector=0", "mmds.weighting=sqrt")
    text = printed("pretrain", "mmds.stage.min_text_only=0", *overrides, activation_checkpointing={})
    assert "encoder every block, connector no block, decoder blocks 0, 2, 4, ..." in text
    assert "sqrt: the root of its supervised tokens" in text


def test_rows_of_the_batch_are_shared_out_over_every_number_of_ranks_that_divides_them(printed: Any) -> None:
    text = printed(world=2)
    assert "4 = 2 ranks x 2 micro-steps" in text
    table = {ranks: numbers(text, str(ranks)) for ranks in (1, 2, 4)}
    assert {ranks: row[:3] for ranks, row in table.items()} == {
        1: [4, 4, 640],
        2: [2, 4, 640],
        4: [1, 4, 640],
    }
    assert [line for line in text.splitlines() if line.startswith("3 ")] == []
    (here,) = [line for line in text.splitlines() if line.endswith("this run")]
    assert here.startswith("2 ")


def test_micro_steps_alone_make_another_step_on_each_number_of_ranks(printed: Any) -> None:
    text = printed(world=1, train_batch_size=None, gradient_accumulation_steps=2)
    for ranks in (1, 2, 4, 8, 16):
        assert numbers(text, str(ranks))[:3] == [2, 2 * ranks, 2 * ranks * 160]


def test_supervised_words_of_the_first_row_are_marked_and_no_others(printed: Any, folder: Folder) -> None:
    records = {}
    for line in (folder.work / "data/llava.jsonl").read_text().splitlines():
        record = json.loads(line)
        records[f"llava:{record['id']}"] = record
    text = printed().partition("supervised tokens between » and «:")[2]
    samples = re.split(r"^\[(.+)\] \d+ tokens$", text, flags=re.MULTILINE)[1:]
    assert len(samples) >= 2
    for key, row in zip(samples[::2], samples[1::2], strict=True):
        turns = records[key]["conversations"]
        answers = [turn["value"] + "<|im_end|>" for turn in turns if turn["from"] == "gpt"]
        assert [marked.strip() for marked in re.findall("»(.*?)«", row, re.DOTALL)] == answers
        images = sum(turn["value"].count("<image>") for turn in turns)
        assert row.count("<image: 4 slots>") == images


def test_no_rank_waits_for_another_and_only_the_first_prints(runs: Runs) -> None:
    arguments = runs.config("dry")
    ended = runs.forks.run([*arguments, "--dry-run"], world=2)
    assert "first row of rank 0" in ended.outputs[0] and "first row" not in ended.outputs[1]
    assert not (runs.work / "dry").exists()


def test_a_run_that_would_be_refused_is_refused_dry(printed: Any) -> None:
    with pytest.raises(ValueError, match="text-only"):
        printed({"name": "instruct", "min_text_only": 1.0})
    with pytest.raises(ValueError, match="matches no parameter"):
        printed({"name": "align", "rates": {"connector.gone.*": 1e-3}})


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("mmds.seed=1", "exports to LlavaForConditionalGeneration of transformers"),
        (
            'mmds.model.resolution={"name": "anyres", "max_tiles": 2}',
            "exports to LlavaNextForConditionalGeneration of transformers",
        ),
        (
            'mmds.model.connector="linear"',
            "exports to its model folder alone: transformers' LLaVA has a two-layer projector (mlp2x), not 'linear'",
        ),
    ],
)
def test_it_says_what_the_model_exports_to(printed: Any, override: str, line: str) -> None:
    assert line in printed("align", override, "mmds.data.row_tokens=400").splitlines()


def test_adapters_and_the_last_encoder_blocks_show_in_the_tables(printed: Any, folder: Folder) -> None:
    lora = {"rank": 4, "targets": ["q_proj", "mlp.down_proj"], "keep": True}
    text = printed({"name": "instruct", "lora": lora, "encoder_blocks": 1, "min_text_only": 0})
    adapters = 2 * (4 * (48 + 48) + 4 * (96 + 48))  # q_proj 48 -> 48 and down_proj 96 -> 48 of two layers
    decoder = sum(value.numel() for value in folder.decoder.values())
    block = "visual.transformer.resblocks.1."
    last = sum(value.numel() for name, value in folder.encoder.items() if name.startswith(block))
    assert re.search(rf"^encoder +{last:,} +2e-06$", text, re.MULTILINE)
    assert re.search(rf"^decoder +{adapters:,} +0\.0002$", text, re.MULTILINE)
    assert numbers(text, "decoder") == [adapters, decoder, 0]
    assert f"rank 4, scale 2, dropout 0: {adapters:,} parameters" in text
    assert re.search(r"^adapters beside +4 linear modules: down_proj, q_proj$", text, re.MULTILINE)
    assert re.search(
        r"^adapters at the end +kept beside the decoder, in decoder/adapter$", text, re.MULTILINE
    )


def test_more_encoder_blocks_than_there_are_are_refused_before_any_weight_is_read(printed: Any) -> None:
    with pytest.raises(ConfigError, match=r"encoder_blocks: 3 blocks are to train, .* has 2 blocks"):
        printed({"name": "instruct", "encoder_blocks": 3})
