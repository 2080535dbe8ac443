"""Runs of train.py as real ranks without paying for the imports each time.

A server process imports what train.py imports, once; each rank of each run is a fork of it that executes the script as `__main__` and
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.spawn import ROOT, free_port, plain_environment

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
    """What became of one run: exit code and output of each rank, and seconds from the first failure to the last end."""

    codes: list[int]
    outputs: list[str]
    seconds_after_failure: float


class Forks:
    """The server, started at first use."""

    def __init__(self, work: Path) -> None:
        self._work, self._count = work, 0
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        arguments: Sequence[str],
        *,
        script: str = "train.py",
        world: int = 2,
        timeout: float = 240,
        check: bool = True,
        kill_when: tuple[Path, str] | None = None,
        notes: Path | None = None,
    ) -> Ended:
        """`script arguments` on `world` ranks; with `check`, a failing rank fails the test with the end of its output.

        kill_when: (file, text): SIGKILL to every rank as soon as the file holds the text. notes: folder for what the ranks write
        down about themselves (see `_take_notes`).
        """
        self._count += 1
        request = {
            "script": script,
            "arguments": list(arguments),
            "world": world,
            "timeout": timeout,
            "output": str(self._work / f"run-{self._count}"),
            "kill_when": [str(kill_when[0]), kill_when[1]] if kill_when else None,
            "environment": {"MASTER_PORT": str(free_port()), **({"TEST_NOTES": str(notes)} if notes else {})},
        }
        ended = Ended(**self._ask(request))
        if check:
            for rank, (code, output) in enumerate(zip(ended.codes, ended.outputs, strict=True)):
                assert code == 0, f"rank {rank} ended with {code}:\n{output[-4000:]}"
        return ended

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.communicate(timeout=30)  # closes its stdin

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, __file__],
                env={**plain_environment(), "MASTER_ADDR": "127.0.0.1"},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(self._work / "server.log").open("w"),
                text=True,
            )
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, f"the server of ranks ended: {(self._work / 'server.log').read_text()[-2000:]}"
        answered: dict[str, Any] = json.loads(answer)
        return answered


@contextlib.contextmanager
def started(work: Path) -> Iterator[Forks]:
    """A server that ends with the block; `work` takes the outputs of its runs."""
    forks = Forks(work)
    try:
        yield forks
    finally:
        forks.close()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print must not look like an answer
    engine = importlib.import_module("mmds.engine.core").Engine
    for name in ("train", *LATE_IMPORTS):
        importlib.import_module(name)
    _take_notes(engine)
    for line in sys.stdin:
        request = json.loads(line)
        pids = [_fork(request, rank) for rank in range(request["world"])]
        codes, after = _wait(pids, request)
        outputs = [
            Path(f"{request['output']}.{rank}").read_text(errors="replace") for rank in range(len(pids))
        ]
        answers.write(json.dumps({"codes": codes, "outputs": outputs, "seconds_after_failure": after}) + "\n")
        answers.flush()


def _fork(request: Mapping[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    world = str(request["world"])
    os.environ.update(request["environment"], RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world)
    output = os.open(f"{request['output']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, stream)
    sys.argv = [request["script"], *request["arguments"]]
    runpy.run_path(request["script"], run_name="__main__")
    sys.exit(0)


def _wait(pids: Sequence[int], request: Mapping[str, Any]) -> tuple[list[int], float]:
    """Exit codes in rank order, negative for a signal, -9 for those still alive in the end; and seconds after the first failure."""
    codes: dict[int, int] = {}
    deadline, failed_at = time.monotonic() + request["timeout"], None
    while len(codes) < len(pids) and time.monotonic() < deadline and not _reached(request["kill_when"]):
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if failed_at is None and any(codes.values()):
            failed_at = time.monotonic()
            deadline = min(deadline, failed_at + GRACE_S)
        time.sleep(0.02)
    after = 0.0 if failed_at is None else time.monotonic() - failed_at
    for pid in set(pids) - set(codes):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[pid] = -9
    return [codes[pid] for pid in pids], after


def _reached(kill_when: Sequence[str] | None) -> bool:
    if kill_when is None or not Path(kill_when[0]).is_file():
        return False
    return kill_when[1] in Path(kill_when[0]).read_text(errors="replace")


def _take_notes(engine: Any) -> None:
    """In a run with $TEST_NOTES: each rank appends the sample keys of each step to RANK.jsonl there, and rank 0 saves the weights and
    the number of optimizer states of the new engine to start.pt."""
    begin, step = engine.__init__, engine.step

    def noted_begin(self: Any, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        if "TEST_NOTES" in os.environ:
            from mmds.engine.zero import whole_tensors

            weights = {name: value.detach().cpu().clone() for name, value in whole_tensors(self.model)}
            if self.ranks.first:
                import torch

                start = {
                    "weights": weights,
                    "states": len(self.ds.optimizer.optimizer.state),
                    "step": self.step_index,
                }
                torch.save(start, Path(os.environ["TEST_NOTES"]) / "start.pt")

    def noted_step(self: Any, rows: Any, **options: Any) -> Any:
        if "TEST_NOTES" in os.environ:
            with (Path(os.environ["TEST_NOTES"]) / f"{self.ranks.rank}.jsonl").open("a") as stream:
                keys = [row.sample_keys for row in rows]
                stream.write(json.dumps({"step": self.step_index + 1, "rows": keys}) + "\n")
        return step(self, rows, **options)

    engine.__init__, engine.step = noted_begin, noted_step


if __name__ == "__main__":
    _serve()
