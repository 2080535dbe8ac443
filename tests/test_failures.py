"""Runs that cannot go on: every rank ends, non-zero, soon, with a message that says what and where; nothing else is harmed."""

from __future__ import annotations

import json
import os
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
    assert "opening the run folder failed on rank 0" in ended.outputs[1]


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
    arguments = runs.config("bad", data=runs.data("bad-data"))
    shutil.copytree(runs.work / "data", runs.work / "bad-data", ignore=shutil.ignore_patterns(".cache"))
    config = load_config(arguments[1])
    ensure_mixture(config.data, ChatTokenizer(load_tokenizer(str(runs.work / "decoder"))))
    spoil_picture(prepared_folder(config.data.mix[0].path), b"sign")
    ended = runs.fails(arguments)
    named = [output for output in ended.outputs if "DataError" in output and "llava:sign" in output]
    assert len(named) == 1
    assert "Traceback" not in named[0]


def spoil_picture(prepared: Path, key: bytes) -> None:
    """Overwrite the picture of a sample within its tar; sizes stay."""
    file = next(prepared.glob("shard-*.tar"))
    data = bytearray(file.read_bytes())
    start = data.index(key + b".0.webp") + 512
    data[start : start + 512] = bytes(512)
    file.write_bytes(data)
