"""Runs of train.py as real ranks without paying for the imports each time.

A server process imports what train.py imports, once; each rank of each run is a fork of it that executes train.py as `__main__` and
ends as a process of its own: own exit code, own output, own process group over gloo, killed when it outlives its time. The server
itself computes nothing, so nothing of one run can reach the next.

usage (by `Forks` only): forks.py, one JSON request a line on stdin, one answer a line on stdout
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.spawn import ROOT, free_port

GRACE_S = 20.0
"""Seconds that ranks get to end by themselves after one has failed; then they count as hanging (code -9)."""


LATE_IMPORTS = (
    "deepspeed.runtime.zero.muon.muon_optimizer",  # torch.compile and all of inductor: most of a start
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
)
"""What a run would import after its start, so that forks inherit it too."""


@dataclass(frozen=True)
class Ended:
    """What became of one run: exit code and output of each rank, wall time in seconds, and time from the first failure."""

    codes: list[int]
    outputs: list[str]
    seconds: float
    seconds_after_failure: float


class Forks:
    """The server, started at first use."""

    def __init__(self, work: Path) -> None:
        self._work, self._server, self._count = work, None, 0

    def run(
        self,
        arguments: Sequence[str],
        *,
        world: int = 2,
        timeout: float = 120,
        check: bool = True,
        kill_when: tuple[Path, str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> Ended:
        """`train.py arguments` on `world` ranks. check: a failing rank fails the test. kill_when: (file, text): SIGKILL to every
        rank as soon as the file holds the text."""
        self._count += 1
        request = {
            "arguments": list(arguments),
            "world": world,
            "timeout": timeout,
            "output": str(self._work / f"run-{self._count}"),
            "kill_when": [str(kill_when[0]), kill_when[1]] if kill_when else None,
            "environment": {"MASTER_PORT": str(free_port()), **(environment or {})},
        }
        server = self._start()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, f"the server of ranks ended: {(self._work / 'server.log').read_text()[-2000:]}"
        ended = Ended(**json.loads(answer))
        if check:
            for rank, (code, output) in enumerate(zip(ended.codes, ended.outputs, strict=True)):
                assert code == 0, f"rank {rank} ended with {code}:\n{output[-4000:]}"
        return ended

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.stdin.close()
            try:
                self._server.wait(10)
            except subprocess.TimeoutExpired:
                self._server.kill()

    def _start(self) -> subprocess.Popen[str]:
        if self._server is None:
            environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
            environment |= {
                "PYTHONPATH": str(ROOT),
                "MASTER_ADDR": "127.0.0.1",
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "MMDS_TIMEOUT_S": "60",
                "TOKENIZERS_PARALLELISM": "false",
            }
            self._server = subprocess.Popen(
                [sys.executable, __file__],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(self._work / "server.log").open("w"),
                text=True,
            )
        return self._server


@contextlib.contextmanager
def started(work: Path) -> Iterator[Forks]:
    """A server that ends with the block."""
    forks = Forks(work)
    try:
        yield forks
    finally:
        forks.close()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print must not look like an answer
    import mmds.engine.core
    import train  # noqa: F401  (its imports are what the ranks inherit)

    for late in LATE_IMPORTS:
        importlib.import_module(late)

    _write_down_samples(mmds.engine.core.Engine)
    for line in sys.stdin:
        request = json.loads(line)
        started_at = time.monotonic()
        ranks = [_fork(request, rank) for rank in range(request["world"])]
        codes, after = _wait(ranks, request)
        outputs = [Path(f"{request['output']}.{rank}").read_text(errors="replace") for rank in range(request["world"])]
        answer = {
            "codes": codes,
            "outputs": outputs,
            "seconds": time.monotonic() - started_at,
            "seconds_after_failure": after,
        }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _fork(request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    world = str(request["world"])
    os.environ.update(request["environment"], RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world)
    output = os.open(f"{request['output']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["train.py", *request["arguments"]]
    runpy.run_path("train.py", run_name="__main__")
    sys.exit(0)


def _wait(pids: list[int], request: dict[str, Any]) -> tuple[list[int], float]:
    """Exit codes, negative for a signal; -9 for those still alive in the end. Seconds between the first failure and the last end."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + request["timeout"]
    failed_at: float | None = None
    kill_when = request["kill_when"]
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if failed_at is None and any(codes.values()):
            failed_at = time.monotonic()
            deadline = min(deadline, failed_at + GRACE_S)
        if kill_when is not None and Path(kill_when[0]).is_file() and kill_when[1] in Path(kill_when[0]).read_text():
            break
        time.sleep(0.02)
    after = 0.0 if failed_at is None else time.monotonic() - failed_at
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            codes[pid] = -9
    return [codes[pid] for pid in pids], after


def _write_down_samples(engine: Any) -> None:
    """Each rank appends the sample keys of each step's rows to $MMDS_SEEN/RANK.jsonl, when that is set."""
    step = engine.step

    def noting_step(self: Any, rows: Any) -> Any:
        folder = os.environ.get("MMDS_SEEN")
        if folder:
            line = {"step": self.step_index + 1, "rows": [row.sample_keys for row in rows]}
            with (Path(folder) / f"{self.ranks.rank}.jsonl").open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        return step(self, rows)

    engine.step = noting_step


if __name__ == "__main__":
    _serve()
