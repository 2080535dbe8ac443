"""train.py under each launcher, and under none: it starts, goes on from another launcher's checkpoint, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.runs import Runs, differing, lines, metrics, model
from tests.spawn import ROOT, free_port, plain_environment

BIN = Path(sys.executable).parent


def launch(command: Sequence[str | Path], timeout: float = 240) -> str:
    """Run a command in a session of its own, which is killed when it outlives its time. Returns its output; it must succeed."""
    process = subprocess.Popen(
        [str(word) for word in command],
        env=plain_environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, output[-4000:]
    return output


def still_running(word: str) -> list[str]:
    """Command lines of processes that mention `word`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if word in command:
            found.append(command)
    return found


def test_deepspeed_begins_and_torchrun_ends_the_same_run_as_without_a_break(runs: Runs) -> None:
    arguments = ["train.py", *runs.config("launched")]
    folder = runs.work / "launched"
    launcher = [BIN / "deepspeed", "--num_accelerators", "2", "--master_port", str(free_port())]
    launch([*launcher, *arguments, "--max-steps", "5"])
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5]
    assert (folder / "checkpoints/step-00000005").is_dir() and not (folder / "model").exists()

    launch([BIN / "torchrun", "--nproc_per_node", "2", "--master_port", str(free_port()), *arguments])
    assert [start["ranks"] for start in lines(folder / "starts.jsonl")] == [2, 2]
    assert metrics(folder) == metrics(runs.align)
    assert differing(model(folder / "model"), model(runs.align / "model")) == []
    assert still_running(str(runs.work / "launched.json")) == []


def test_python_alone_trains_as_one_process(runs: Runs) -> None:
    launch([sys.executable, "train.py", *runs.config("alone", steps=1)])
    folder = runs.work / "alone"
    assert [start["ranks"] for start in lines(folder / "starts.jsonl")] == [1]
    # The same step as on two ranks: four rows, all on one.
    (alone,), together = metrics(folder), metrics(runs.align)[0]
    assert alone["tokens"] == together["tokens"]
    assert abs(alone["loss"] - together["loss"]) < 1e-5 * together["loss"]
    assert abs(alone["grad_norm"] - together["grad_norm"]) < 1e-4 * together["grad_norm"]
    assert (folder / "model/mmds.json").is_file()
