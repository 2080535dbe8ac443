"""--explain: what it says about a key, about a config, and about names that are none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_config import SMALL, Write, writer

from mmds.config_explain import explain, explain_command
from mmds.config_keys import Key, walk, whole_tree
from mmds.config_load import load_document
from mmds.config_names import FOREIGN, LATER_NAMES, NEEDLESS, UNSUPPORTED
from mmds.errors import ConfigError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return writer(tmp_path)


def facts(page: str) -> dict[str, str]:
    """The named lines of a page."""
    return dict(re.findall(r"^  (\w+) +(.+)$", page, re.MULTILINE))


def test_a_page_holds_path_type_unit_default_range_and_owner() -> None:
    page = explain("mmds.schedule.warmup_ratio")
    assert page.splitlines()[0] == "mmds.schedule.warmup_ratio"
    assert facts(page) == {
        "meaning": "share of the steps with rising rate; this or warmup_steps",
        "type": "number, 0 to 1",
        "default": "null",
        "owner": "mmds",
    }
    assert facts(explain("mmds.model.resolution"))["default"] == '"fixed"'
    assert "default" not in facts(explain("mmds.data"))
    assert facts(explain("mmds.stage.min_text_only"))["owner"].startswith("the stage table")
    assert facts(explain("gradient_clipping")) == {
        "meaning": "largest global gradient norm of a step; 0 = off",
        "type": "number, at least 0",
        "default": "1.0",
        "owner": "DeepSpeed",
    }


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("row_tokens", "mmds.data.row_tokens"),
        ("encoder.layer", "mmds.model.encoder.layer"),
        ("mmds.data.mix.0.path", "mmds.data.mix[].path"),
        ("mmds.data.mix[1].path", "mmds.data.mix[].path"),
        ("mix[].images", "mmds.data.mix[].images"),
        ('mmds.stage.rates."decoder.*"', "mmds.stage.rates"),
        ("betas", "optimizer.params.betas"),
        ("device", "zero_optimization.offload_optimizer.device"),
        ("param_persistence_threshold", "zero_optimization.stage3_param_persistence_threshold"),
        ("zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
        ("prof_ops", "comms_logger.prof_ops"),
        ("extends", "extends"),
    ],
)
def test_a_path_or_a_unique_end_of_one_finds_the_key(name: str, path: str) -> None:
    assert explain(name).splitlines()[0] == path


def test_every_key_has_a_page_with_a_meaning_or_a_reason() -> None:
    keys = [key for key in walk(whole_tree(deep=True)) if key.path]
    for key in keys:
        page = explain(key.path)
        assert page.splitlines()[0] == key.path
        assert facts(page).keys() & {"meaning", "refused", "only"}, key.path
        assert ("type" in facts(page)) != bool(key.refused), key.path
    assert len(keys) > 250


def test_the_short_way_to_a_key_of_mmds_is_unique_in_deepspeeds_models_too() -> None:
    """Such a name is answered without importing deepspeed."""

    def names(*, deep: bool) -> list[str]:
        return [key.name for key in walk(whole_tree(deep=deep)) if key.path]

    mine = {key.name for key in walk(whole_tree(deep=False)) if key.path.startswith("mmds.")}
    short = [name for name in mine if names(deep=False).count(name) == 1]
    assert [name for name in short if names(deep=True).count(name) != 1] == [] and len(short) > 20


@pytest.mark.parametrize(
    ("name", "word", "says"),
    [
        ("scheduler", "refused", "the schedule belongs to mmds"),
        ("optimizer.params.lr", "refused", "rates belong to the stage table"),
        ("fp16.loss_scale", "refused", "as all of fp16: the owner of precision"),
        ("mmds.eval.sets", "refused", "as all of mmds.eval: not yet supported"),
        ("elasticity", "refused", "DeepSpeed has removed this feature"),
        ("partition_activations", "only", "false may be written: it needs tensor parallelism"),
        ("train_micro_batch_size_per_gpu", "only", "1 may be written: a micro-batch is one row"),
    ],
)
def test_a_refused_key_says_why_and_who_owns_it(name: str, word: str, says: str) -> None:
    assert facts(explain(name))[word].startswith(says)


def test_an_object_lists_its_keys() -> None:
    page = explain("mmds.recompute")
    assert re.findall(r"^    (\w+) ", page, re.MULTILINE) == ["encoder", "connector", "decoder"]
    offload = explain("offload_optimizer")
    assert re.search(r"^    ratio +only 1.0: ", offload, re.MULTILINE)
    assert re.search(r"^    nvme_path +refused: ", offload, re.MULTILINE)


@pytest.mark.parametrize("name", [*FOREIGN, *NEEDLESS, *LATER_NAMES, *UNSUPPORTED])
def test_a_name_of_another_trainer_leads_to_ours(name: str) -> None:
    page = explain(name)
    if name in LATER_NAMES:
        assert facts(page)["refused"].startswith("not yet supported")
    elif name in UNSUPPORTED:
        assert facts(page)["refused"] == UNSUPPORTED[name]
    elif name in NEEDLESS:
        assert NEEDLESS[name] in page
    else:
        assert FOREIGN[name] in page or "refused" in facts(page) or page.splitlines()[0].endswith(f".{name}")


def test_every_key_that_the_table_of_other_names_points_to_exists() -> None:
    known = {key.path: key for key in walk(whole_tree(deep=True))}
    for name, ours in FOREIGN.items():
        for word in re.findall(r"(?:mmds|optimizer|tensorboard)\.[\w.\[\]]+", ours):
            found: Key | None = known.get(word)
            assert found is not None and not found.refused, f"{name} -> {word}"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("row_tokns", "unknown key: did you mean mmds.data.row_tokens?"),
        ("mmds.data.row_token", "did you mean mmds.data.row_tokens?"),
        ("zero_optimisation.stage", "did you mean zero_optimization.stage?"),
        ("warmup", "did you mean mmds.schedule.warmup_ratio or mmds.schedule.warmup_steps?"),
        ("nothing like it", "listed by --explain mmds"),
        ("", "listed by --explain mmds"),
        ("stage", "2 keys have this name: zero_optimization.stage, mmds.stage"),
        ("enabled", "bf16.enabled, tensorboard.enabled, wandb.enabled"),
    ],
)
def test_a_name_that_is_no_key_or_several_is_an_error_with_the_nearest(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match="--explain") as error:
        explain(name)
    assert says in str(error.value)


def test_a_config_shows_the_value_and_where_it_was_written(write: Write, tmp_path: Path) -> None:
    write(SMALL, "base.json")
    child = write('{"extends": "base.json",\n"mmds": {"seed": 7,\n"init_from": null}}')
    document = load_document(
        child, ["mmds.data.row_tokens=64", "tensorboard=null", "mmds.stage.min_text_only=0"]
    )
    base = (tmp_path / "base.json").read_text().splitlines()
    line = next(n for n, text in enumerate(base, start=1) if '"path"' in text)

    def here(name: str) -> str:
        return facts(explain(name, document))["here"]

    assert here("seed") == f"7  ({child}:2)"
    assert here("row_tokens") == "64  (--set mmds.data.row_tokens=64)"
    assert here("mmds.data.mix[].path") == f'[0] "shards/one"  ({tmp_path}/base.json:{line})'
    assert here("mmds.stage.name").startswith('"instruct"  (')
    assert here("mmds.data.workers") == "absent: the default"
    assert here("init_from") == f"null  ({child}:3)"
    assert here("optimizer.type") == "absent: the default"
    assert here("max_pixels") == "absent"


def test_a_missing_or_refused_key_is_seen_in_the_config(write: Write) -> None:
    document = load_document(write('{"scheduler": {"type": "WarmupLR"}, "mmds": {}}'))
    assert facts(explain("scheduler", document))["here"].startswith('{"type": "WarmupLR"}  (')
    assert facts(explain("output_dir", document))["here"] == "absent: it is missing"
    assert "here" not in facts(explain("fp16", document))


def test_the_command_answers_on_stdout_or_fails_on_stderr(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain_command(["--explain", "seed", "--config", str(write()), "--set", "mmds.seed=3"]) == 0
    assert "3  (--set mmds.seed=3)" in capsys.readouterr().out
    assert explain_command(["--explain=sed", "--resume", "never"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("ConfigError: --explain sed: unknown key")
    assert explain_command(["--explain", "seed", "--config", "nowhere.json"]) == 1
    assert "there is no file nowhere.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--explain", "row_tokens"], ["--explain=row_tokens", "--local_rank=1"]]
)
def test_train_answers_before_it_imports_a_model(arguments: list[str]) -> None:
    code = (
        "import json, runpy, sys\n"
        "sys.argv = ['train.py', *json.loads(sys.argv[1])]\n"
        "try:\n    runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as end:\n    print(end.code, sorted({'torch', 'deepspeed', 'mmds.model'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mmds.data.row_tokens\n") and done.stdout.endswith("0 []\n")
