"""Checkpoints are whole or not there: what is found, refused, set aside, and left by a kill at any moment of a save."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from mmds.checkpoint import RunState, clean, complete, find, load, read_state, save, set_aside
from mmds.engine import Engine, Ranks
from mmds.errors import CheckpointError

STATE = RunState(step=0, world=1, zero_stage=3, trainable="t", plan="p", frozen={"encoder": "e"})


class LoneRanks(Ranks):
    """One rank without a process group."""

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        yield


LONE = LoneRanks(rank=0, world=1, local_rank=0, device=torch.device("cpu"))


class Files:
    """Stands for the engine: what it saves are two files of the step's number, as DeepSpeed would write them."""

    ranks = LONE

    def __init__(self, step: int = 0) -> None:
        self.step_index = step

    def save(self, folder: Path, tag: str) -> None:
        """Write the weights' file and the optimizer's."""
        for name in ("model_states.pt", "optim_states.pt"):
            (folder / tag / name).write_text(f"{name} of step {self.step_index}" * 50)

    def load(self, folder: Path, tag: str) -> None:
        """Read the step's number back."""
        self.step_index = int(
            (folder / tag / "optim_states.pt").read_text().split("optim_states.pt of step ")[1]
        )


def saved(folder: Path, *steps: int, keep: int = 9) -> Path:
    """Checkpoints of these steps in `folder`, and the newest of them."""
    for step in steps:
        newest = save(cast(Engine, Files(step)), folder, STATE.at(step), keep=keep)
    return newest


def refusal(folder: Path, resume: str = "auto") -> str:
    with pytest.raises(CheckpointError) as error:
        find(folder, resume)
    return str(error.value)


def test_nothing_to_resume_starts_at_step_zero(tmp_path: Path) -> None:
    assert find(tmp_path / "absent", "auto") is None
    assert find(tmp_path, "auto") is None
    assert complete(tmp_path) == []


def test_the_newest_complete_checkpoint_is_found_and_says_what_run_it_is_of(tmp_path: Path) -> None:
    newest = saved(tmp_path, 500, 1000, 1500)
    assert find(tmp_path, "auto") == newest == tmp_path / "step-00001500"
    assert [path.name for path in complete(tmp_path)] == ["step-00000500", "step-00001000", "step-00001500"]
    assert read_state(newest) == STATE.at(1500)
    assert (tmp_path / "latest").read_text() == newest.name


def test_older_checkpoints_beyond_keep_are_removed_and_nothing_else_is_left(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003", "step-00000004"]


@pytest.mark.parametrize("text", [None, "", "step-00000999", "\0\0"])
def test_a_missing_empty_or_wrong_latest_changes_nothing(tmp_path: Path, text: str | None) -> None:
    newest = saved(tmp_path, 1, 2)
    (tmp_path / "latest").unlink()
    if text is not None:
        (tmp_path / "latest").write_text(text)
    assert find(tmp_path, "auto") == newest


def test_latest_without_any_checkpoint_never_starts_from_scratch(tmp_path: Path) -> None:
    shutil.rmtree(saved(tmp_path, 1))
    assert "no complete checkpoint" in refusal(tmp_path)
    assert "--resume never" in refusal(tmp_path)


DAMAGE: dict[str, tuple[str, str | None]] = {
    # what is done to which file: None = deleted, else its new text; and the words that name it
    "no manifest": ("manifest.json", None),
    "empty manifest": ("manifest.json", ""),
    "torn manifest": ("manifest.json", '{"files": {"model_st'),
    "manifest of another kind": ("manifest.json", '{"files": ["model_states.pt"]}'),
    "manifest that lists nothing": ("manifest.json", '{"files": {}}'),
    "manifest that is no object": ("manifest.json", "null"),
    "deleted optimizer shard": ("optim_states.pt", None),
    "truncated weights": ("model_states.pt", "model"),
    "empty weights": ("model_states.pt", ""),
    "no state": ("state.json", None),
}


def damage(checkpoint: Path, kind: str) -> str:
    """Damage it; the name of the file that a message must contain."""
    name, text = DAMAGE[kind]
    if text is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_text(text)
    return name


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_when_it_is_the_only_one(tmp_path: Path, kind: str) -> None:
    checkpoint = saved(tmp_path, 7)
    name = damage(checkpoint, kind)
    message = refusal(tmp_path)
    assert checkpoint.name in message and name in message and "--resume never" in message


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(tmp_path: Path, kind: str) -> None:
    before = saved(tmp_path, 7)
    damage(saved(tmp_path, 8), kind)
    assert find(tmp_path, "auto") == before
    assert complete(tmp_path) == [before]


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_named_by_path_is_refused_and_never_replaced_by_another(
    tmp_path: Path, kind: str
) -> None:
    checkpoint = saved(tmp_path, 7, 8)
    name = damage(checkpoint, kind)
    message = refusal(tmp_path, str(checkpoint))
    assert str(checkpoint) in message and name in message


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    for foreign in (tmp_path, tmp_path / "absent", tmp_path / "latest"):
        assert str(foreign) in refusal(tmp_path, str(foreign))


def test_an_older_checkpoint_can_be_named_and_never_means_step_zero(tmp_path: Path) -> None:
    saved(tmp_path, 7, 8)
    assert find(tmp_path, str(tmp_path / "step-00000007")) == tmp_path / "step-00000007"
    assert find(tmp_path, "never") is None


def test_going_on_from_an_older_checkpoint_keeps_what_it_saves(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    again = saved(tmp_path, 7, keep=1)
    assert again.is_dir()
    assert (tmp_path / "latest").read_text() == again.name


def test_loading_brings_the_step_back_and_refuses_a_damaged_folder(tmp_path: Path) -> None:
    engine = Files()
    load(cast(Engine, engine), saved(tmp_path, 7), STATE)
    assert engine.step_index == 7
    damage(tmp_path / "step-00000007", "truncated weights")
    with pytest.raises(CheckpointError, match=r"model_states\.pt has 5 bytes"):
        load(cast(Engine, engine), tmp_path / "step-00000007", STATE)


def test_files_of_another_step_than_the_state_says_are_refused(tmp_path: Path) -> None:
    checkpoint = save(cast(Engine, Files(6)), tmp_path, STATE.at(7), keep=1)
    with pytest.raises(CheckpointError, match="step 7.*say 6"):
        load(cast(Engine, Files()), checkpoint, STATE)


def test_a_checkpoint_of_the_same_run_at_any_step_matches(tmp_path: Path) -> None:
    STATE.must_match(STATE.at(1500), tmp_path)
    assert json.loads(json.dumps(STATE.frozen)) == STATE.frozen


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world": 4}, ["4 ranks", "this run has 1", "consolidate.py", "init_from"]),
        ({"zero_stage": 2}, ["zero_optimization.stage"]),
        ({"trainable": "x"}, ["other trained parameters or rates"]),
        ({"plan": "x"}, ["other data", "seed"]),
        ({"frozen": {"encoder": "x"}}, ["other frozen weights"]),
        ({"frozen": {}}, ["other frozen weights"]),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_difference_and_the_way_out(
    tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as error:
        STATE.must_match(replace(STATE, **change), tmp_path / "step-00000007")
    assert all(word in str(error.value) for word in [str(tmp_path / "step-00000007"), *words])


def test_starting_over_sets_old_checkpoints_aside_each_time(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        saved(folder, step)
        set_aside(folder, complete(folder), LONE)
    assert (tmp_path / "checkpoints.old-1/step-00000001").is_dir()
    assert (tmp_path / "checkpoints.old-2/step-00000002").is_dir()
    assert find(folder, "auto") is None
    set_aside(folder, complete(folder), LONE)  # nothing to set aside
    assert not (tmp_path / "checkpoints.old-3").exists()


def test_what_an_interrupted_save_left_is_removed_and_finished_checkpoints_stay(tmp_path: Path) -> None:
    newest = saved(tmp_path, 1)
    (tmp_path / ".saving-step-00000002").mkdir()
    (tmp_path / ".saving-step-00000002/model_states.pt").write_text("half")
    assert find(tmp_path, "auto") == newest
    clean(tmp_path, LONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def save_killed_before_operation(folder: Path, step: int, keep: int, number: int) -> bool:
    """Save in a process that kills itself (SIGKILL) before its file operation `number`; False once a save has fewer operations."""
    child = os.fork()
    if child == 0:
        count = 0
        kinds = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}

        def count_down(event: str, _: tuple[Any, ...]) -> None:
            nonlocal count
            if event in kinds:
                count += 1
                if count > number:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count_down)
            saved(folder, step, keep=keep)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize(
    ("before", "step", "keep"),
    [((1, 2), 3, 1), ((1, 2), 3, 2), ((2,), 2, 1)],
    ids=["keep 1", "keep 2", "same step again"],
)
def test_a_kill_at_any_moment_of_a_save_leaves_the_previous_checkpoint_or_the_new_one(
    tmp_path: Path, before: tuple[int, ...], step: int, keep: int
) -> None:
    start = tmp_path / "start"
    saved(start, *before, keep=keep)
    found = []
    killed = True
    while killed:
        folder = tmp_path / f"killed-{len(found)}"
        shutil.copytree(start, folder)
        killed = save_killed_before_operation(folder, step, keep, len(found))
        clean(folder, LONE)  # as at the next start
        checkpoint = find(folder, "auto")
        assert checkpoint is not None
        engine = Files()
        load(cast(Engine, engine), checkpoint, STATE)
        found.append(engine.step_index)
        # The interrupted save can be made again.
        assert saved(folder, step + 1, keep=keep) == find(folder, "auto")
    assert found == sorted(found)
    assert set(found) == {before[-1], step}
    assert len(found) > 15
