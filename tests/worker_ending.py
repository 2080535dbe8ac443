"""One of several ranks of which one fails, in one of the ways below; what all print goes to one file, as on a terminal.

usage: worker_ending.py CASE FILE
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from mmds.engine.launch import Ranks, start_ranks, stop_ranks
from mmds.errors import DataError


def wait_in_a_collective() -> None:
    dist.all_reduce(torch.ones(1))


def fails_in_a_step(ranks: Ranks) -> None:
    """Rank 1 fails as the loader does, while the others wait for it in a collective."""
    if ranks.rank == 1:
        raise DataError("sample seven is torn:\nits picture ends too soon")
    wait_in_a_collective()


def first_rank_fails(ranks: Ranks) -> None:
    """The rank that holds the store fails, with an error that is not in our words."""
    if ranks.rank == 0:
        raise RuntimeError("a kernel was unhappy")
    wait_in_a_collective()


def fails_together(ranks: Ranks) -> None:
    """Rank 1 fails in a block that all run together."""
    with ranks.together("reading the weights"):
        if ranks.rank == 1:
            raise DataError("sample seven is torn:\nits picture ends too soon")


def two_fail(ranks: Ranks) -> None:
    """Ranks 1 and 2 fail, each in its own way."""
    with ranks.together("reading the weights"):
        if ranks.rank:
            raise DataError(f"shard of rank {ranks.rank} is torn")


def stuck(ranks: Ranks) -> None:
    """Rank 1 fails; the others are where no broken connection reaches them, as in a collective of NCCL."""
    if ranks.rank == 1:
        raise DataError("sample seven is torn:\nits picture ends too soon")
    time.sleep(1000)


def killed(ranks: Ranks) -> None:
    """Rank 1 is killed from outside."""
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_in_a_collective()


def first_rank_killed(ranks: Ranks) -> None:
    """The rank that holds the store is killed; the others are where no broken connection reaches them."""
    wait_in_a_collective()
    if ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def none_fails(ranks: Ranks) -> None:
    """All end well, at different times."""
    wait_in_a_collective()
    time.sleep(0.4 * ranks.rank)


CASES: dict[str, Callable[[Ranks], None]] = {
    case.__name__: case
    for case in (
        fails_in_a_step,
        first_rank_fails,
        fails_together,
        two_fail,
        stuck,
        killed,
        first_rank_killed,
        none_fails,
    )
}

if __name__ == "__main__":
    terminal = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    try:
        CASES[sys.argv[1]](start_ranks())
    finally:
        stop_ranks()
