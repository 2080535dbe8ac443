"""train.py under each launcher, and under none: it starts, goes on from another launcher's checkpoint, and leaves nothing running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.runs import Runs, differing, lines, metrics, model
from tests.spawn import ROOT, free_port, plain_environment
from tests.test_failures import with_a_torn_sample

BIN = Path(sys.executable).parent


def launch(*commands: Sequence[str | Path], timeout: float = 240, code: int = 0) -> str:
    """Run commands side by side on one terminal, each in a session of its own, which is killed when it outlives its time.

    All must end with `code`. Returns what they printed.
    """
    read, write = os.pipe()
    processes = [
        subprocess.Popen(
            [str(word) for word in command],
            env=plain_environment(),
            cwd=ROOT,
            stdout=write,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for command in commands
    ]
    os.close(write)
    alarm = threading.Timer(
        timeout, lambda: [os.killpg(p.pid, signal.SIGKILL) for p in processes if p.poll() is None]
    )
    alarm.start()
    with os.fdopen(read, errors="replace") as terminal:
        output = terminal.read()  # until the last process that can print has ended
    codes = [process.wait() for process in processes]
    alarm.cancel()
    assert codes == [code] * len(commands), output[-4000:]
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


def test_two_nodes_train_the_steps_of_one_with_two_ranks(runs: Runs) -> None:
    folder = runs.work / "nodes"
    hosts = runs.work / "hosts"
    hosts.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    launcher = [BIN / "deepspeed", "--hostfile", hosts, "--no_ssh", "--master_addr", "127.0.0.1"]
    launcher += ["--master_port", str(free_port())]
    arguments = ["train.py", *runs.config("nodes"), "--max-steps", "2"]
    launch(*([*launcher, "--node_rank", str(node), *arguments] for node in (0, 1)))
    assert metrics(folder) == metrics(runs.align)[:2]
    assert (folder / "checkpoints/step-00000002").is_dir()
    assert still_running(str(runs.work / "nodes.json")) == []


def test_under_torchrun_on_two_nodes_the_failing_rank_has_the_last_word_and_ends_both(runs: Runs) -> None:
    arguments = with_a_torn_sample(runs, "torn")
    launcher = [BIN / "torchrun", "--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
    launcher += ["--master_port", str(free_port())]
    output = launch(
        *([*launcher, "--node_rank", str(node), "train.py", *arguments] for node in (0, 1)), code=1
    )
    (told,) = re.findall(r"^rank (\d) on .+ failed:\nDataError: sample llava:sign .+\n", output, re.MULTILINE)
    before, _, after = output.partition(f"\nrank {told} on ")
    other = 1 - int(told)
    assert re.search(
        rf"^rank {other} stopped: rank {told} failed: DataError: .*llava:sign", before, re.MULTILINE
    )
    ours = r"^align: |^rank \d|gloo|c10d|train\.py\", line"
    after = after.partition("\n")[2]
    assert not re.search(ours, after.partition("ChildFailedError")[0], re.MULTILINE), output[-4000:]
    assert still_running(str(runs.work / "torn.json")) == []
