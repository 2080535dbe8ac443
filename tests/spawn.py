"""Start real ranks of a script over gloo, with a port of their own and an outer time-out, and leave none behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plain_environment() -> dict[str, str]:
    """This environment without a launcher's variables, set for small ranks on a CPU.

    The interpreter's own bin comes first in PATH: DeepSpeed compiles with the first ninja found there, and compiles again (minutes)
    whenever another version of it has been used since.
    """
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {
        **{name: value for name, value in os.environ.items() if name not in launcher},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MMDS_TIMEOUT_S": "120",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_ranks(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    world: int = 2,
    timeout: float = 240,
    check: bool = True,
) -> list[tuple[int, str]]:
    """Run `python script arguments` as `world` ranks. Returns (exit code, output) of each rank.

    When one rank fails the others get 20 seconds to end by themselves; what is still alive then counts as a hang (code -9).
    With `check`, a failing rank fails the test with the end of its output.
    """
    base = {
        **plain_environment(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
    }
    processes = []
    for rank in range(world):
        environment = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env=environment,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        results = _collect(processes, timeout)
    finally:
        for process in processes:
            process.kill()
    if check:
        for rank, (code, output) in enumerate(results):
            assert code == 0, f"rank {rank} ended with {code}:\n{output[-4000:]}"
    return results


def _collect(processes: list[subprocess.Popen[str]], timeout: float) -> list[tuple[int, str]]:
    import threading

    outputs = [""] * len(processes)

    def read(index: int) -> None:
        stream = processes[index].stdout
        assert stream is not None
        outputs[index] = stream.read()

    readers = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(len(processes))]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + timeout
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        if any(p.poll() not in (None, 0) for p in processes):
            deadline = min(deadline, time.monotonic() + 20)
        time.sleep(0.05)
    codes = [p.poll() if p.poll() is not None else -9 for p in processes]
    for process in processes:
        process.kill()
    for reader in readers:
        reader.join(10)
    return [(int(code or 0), output) for code, output in zip(codes, outputs, strict=True)]
