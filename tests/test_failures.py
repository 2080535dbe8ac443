"""Runs that cannot go on: every rank ends, non-zero, soon, with a message that says what and where; nothing else is harmed."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mmds.config import load_config
from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.mixture import ensure_mixture
from mmds.data.prepare import prepared_folder
from mmds.model.decoder import load_tokenizer
from tests.runs import STEPS, Runs, differing, metrics, model

LAST = f"step-{STEPS:08d}"


def test_rank_0_alone_cannot_write_and_every_rank_says_so(runs: Runs) -> None:
    (runs.work / "unwritable/starts.jsonl").mkdir(parents=True)
    ended = runs.fails(runs.config("unwritable"))
    assert all("Is a directory" in output and "starts.jsonl" in output for output in ended.outputs)
    assert "rank 0" in ended.outputs[1] and "opening the run folder failed" in ended.outputs[1]


def test_an_output_folder_below_a_file_ends_every_rank(runs: Runs) -> None:
    (runs.work / "file").write_text("")
    ended = runs.fails(runs.config("below", output_dir=str(runs.work / "file/run")))
    assert all("Not a directory" in output and "file/run" in output for output in ended.outputs)


def test_a_folder_that_a_live_run_holds_is_refused_on_every_rank(runs: Runs) -> None:
    folder = runs.work / "held"
    folder.mkdir()
    lock = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})  # this process lives
    (folder / "run.lock").write_text(lock)
    ended = runs.fails(runs.config("held"))
    assert all(str(folder) in output and "in use" in output for output in ended.outputs)
    assert (folder / "run.lock").read_text() == lock
    assert not (folder / "metrics.jsonl").exists() and not (folder / "config.json").exists()


def test_fewer_samples_than_a_step_needs_end_before_the_decoder_is_read(runs: Runs) -> None:
    shutil.copytree(runs.work / "decoder", runs.work / "unreadable")
    (runs.work / "unreadable/model.safetensors").write_text("reading this would be another error")
    section = load_config(runs.config("few")[1]).resolved["mmds"]["model"]
    section["decoder"]["name"] = str(runs.work / "unreadable")
    ended = runs.fails([*runs.config("few", model=section), "--set", "train_batch_size=22"])
    wanted = (
        "ConfigError: one step needs 22 rows (train_batch_size), but the data holds only 20 usable samples"
    )
    assert all(wanted in output for output in ended.outputs)


@pytest.mark.parametrize("renamed", [False, True], ids=["missing", "renamed"])
def test_a_decoder_whose_files_lack_a_tensor_never_trains_with_a_random_one(
    runs: Runs, renamed: bool
) -> None:
    folder, name = runs.work / f"decoder-{renamed}", "model.layers.1.mlp.up_proj.weight"
    shutil.copytree(runs.work / "decoder", folder)
    tensors = load_file(folder / "model.safetensors")
    value = tensors.pop(name)
    save_file(
        {**tensors, **({"model.layers.1.mlp.up.weight": value} if renamed else {})},
        folder / "model.safetensors",
    )
    section = load_config(runs.config("lacking")[1]).resolved["mmds"]["model"]
    section["decoder"]["name"] = str(folder)
    ended = runs.fails(runs.config("lacking", model=section))
    assert all(
        "CheckpointError" in output and name in output and str(folder) in output for output in ended.outputs
    )


def test_another_number_of_ranks_cannot_resume(runs: Runs) -> None:
    folder = runs.copy_of_align("other-world", LAST)
    ended = runs.fails(runs.config("other-world"), world=1)
    assert "written by 2 ranks and this run has 1" in ended.outputs[0] and str(folder) in ended.outputs[0]
    assert "Traceback" not in ended.outputs[0]
    assert metrics(folder) == metrics(runs.align)
    assert differing(model(folder / "model"), model(runs.align / "model")) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("mmds.seed=7", "other data, row size, batch or seed"),
        (
            'mmds.stage={"name": "align", "rates": {"connector.*": 0.002}}',
            "other trained parameters or rates",
        ),
    ],
    ids=["seed", "rates"],
)
def test_a_changed_run_cannot_resume_in_silence(runs: Runs, change: str, words: str) -> None:
    folder = runs.work / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    runs.copy_of_align("changed", LAST)
    ended = runs.fails([*runs.config("changed"), "--set", change])
    assert all(words in output and str(folder / "checkpoints" / LAST) in output for output in ended.outputs)
    assert metrics(folder) == metrics(runs.align)


def test_a_checkpoint_without_an_optimizer_shard_ends_every_rank_with_the_same_message(runs: Runs) -> None:
    folder = runs.copy_of_align("shardless", LAST)
    shard = next((folder / "checkpoints" / LAST).glob("*rank_1_*optim_states.pt"))
    shard.unlink()
    for arguments in ([], ["--resume", str(folder / "checkpoints" / LAST)]):
        ended = runs.fails([*runs.config("shardless"), *arguments])
        for output in ended.outputs:
            assert (
                "CheckpointError" in output
                and f"{shard.name} is missing" in output
                and "Traceback" not in output
            )
    assert metrics(folder) == metrics(runs.align)


def test_a_shard_of_the_right_size_that_one_rank_cannot_read_ends_every_rank(runs: Runs) -> None:
    folder = runs.copy_of_align("garbled", LAST)
    shard = next((folder / "checkpoints" / LAST).glob("*rank_1_*optim_states.pt"))
    shard.write_bytes(bytes(shard.stat().st_size))
    ended = runs.fails(runs.config("garbled"))
    assert all(
        "CheckpointError" in output and str(folder / "checkpoints" / LAST) in output
        for output in ended.outputs
    )


def test_a_sample_that_one_rank_cannot_read_ends_every_rank_and_is_named(runs: Runs) -> None:
    ended = runs.fails(with_a_torn_sample(runs, "bad"))
    assert not any("Traceback" in output for output in ended.outputs)
    last = [[line for line in output.splitlines() if line][-2:] for output in ended.outputs]
    told, short = sorted(last, key=lambda lines: " stopped: " in lines[-1])
    assert re.fullmatch(r"rank \d on .+ failed:", told[0]) and re.match("DataError: .*llava:sign", told[1])
    assert re.match(r"rank \d stopped: rank \d failed: DataError: .*llava:sign", short[-1])
    assert not (runs.work / "bad" / "run.lock").exists()  # every rank has unwound


TORN = "DataError: sample seven is torn:\nits picture ends too soon\n"
ENDINGS = {
    # case: codes, the lines of the others, the last words
    "fails_in_a_step": ([1, 1, 1], r"rank {} stopped: rank 1 failed: DataError: sample seven is torn:", TORN),
    "first_rank_fails": (
        [1, 1, 1],
        r"rank {} stopped: rank 0 failed: RuntimeError: a kernel was unhappy",
        "RuntimeError: a kernel was unhappy\n",
    ),
    "fails_together": (
        [1, 1, 1],
        r"rank {} stopped: .*reading the weights failed.*DataError: sample seven is torn:",
        TORN,
    ),
    "stuck": ([1, 1, 1], r"rank {} stopped: rank 1 failed: DataError: sample seven is torn:", TORN),
    "killed": (
        [1, -9, 1],
        r"rank {} stopped: rank [02] failed: .*",
        r"the process of another rank has ended without a word",
    ),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_every_rank_ends_soon_and_the_failing_one_has_the_last_word(runs: Runs, case: str) -> None:
    codes, line, last = ENDINGS[case]
    terminal = runs.work / f"{case}.txt"
    ended = runs.forks.run([case, str(terminal)], script="tests/worker_ending.py", world=3, check=False)
    text = terminal.read_text()
    assert ended.codes == codes and ended.seconds_after_failure < 12, text
    heading = re.search(r"^rank (\d) on .+ failed:$", text, re.MULTILINE)
    assert heading is not None, text
    before, after = text[: heading.start()], text[heading.end() :]
    others = {rank for rank, code in enumerate(codes) if code == 1} - {int(heading[1])}
    assert all(len(re.findall(line.format(rank), before)) == 1 for rank in others), text
    assert "Traceback" not in before and " stopped: " not in after and "[c10d]" not in text, text
    assert after.endswith(last) if case != "killed" else last in after, text


def test_ranks_that_fail_each_in_its_own_way_are_all_told_whole(runs: Runs) -> None:
    terminal = runs.work / "two_fail.txt"
    ended = runs.forks.run(["two_fail", str(terminal)], script="tests/worker_ending.py", world=3, check=False)
    text = terminal.read_text()
    assert ended.codes == [1, 1, 1], text
    for rank in (1, 2):
        assert text.count(f"\nDataError: shard of rank {rank} is torn\n") == 1, text


def test_ranks_that_lose_the_first_one_without_a_word_end_by_themselves(runs: Runs) -> None:
    terminal = runs.work / "first_rank_killed.txt"
    ended = runs.forks.run(
        ["first_rank_killed", str(terminal)], script="tests/worker_ending.py", world=3, check=False
    )
    assert ended.codes == [-9, 1, 1] and ended.seconds_after_failure < 12
    for rank in (1, 2):
        assert f"rank {rank} stopped: the process of rank 0 has ended" in terminal.read_text()


def test_ranks_that_end_well_say_nothing(runs: Runs) -> None:
    terminal = runs.work / "none_fails.txt"
    runs.forks.run(["none_fails", str(terminal)], script="tests/worker_ending.py")
    assert terminal.read_text() == ""


def with_a_torn_sample(runs: Runs, name: str) -> list[str]:
    """--config of a run whose sample llava:sign has a picture that cannot be read; it is in the second step."""
    data = runs.data(f"{name}-data")
    arguments = runs.config(name, data=data)
    shutil.copytree(runs.work / "data", runs.work / f"{name}-data", ignore=shutil.ignore_patterns(".cache"))
    config = load_config(arguments[1])
    ensure_mixture(config.data, ChatTokenizer(load_tokenizer(str(runs.work / "decoder"))))
    spoil_picture(prepared_folder(config.data.mix[0].path), b"sign")
    return arguments


def spoil_picture(prepared: Path, key: bytes) -> None:
    """Overwrite the picture of a sample within its tar; sizes stay."""
    file = next(prepared.glob("shard-*.tar"))
    data = bytearray(file.read_bytes())
    start = data.index(key + b".0.webp") + 512
    data[start : start + 512] = bytes(512)
    file.write_bytes(data)
