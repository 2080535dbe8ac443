"""Ranks: who am I, how do we start together, agree, and end together.

Runs under `deepspeed`, `torchrun` and plain `python train.py` (one process).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from mmds.errors import MmdsError

T = TypeVar("T")

TIMEOUT_S = 1800
"""Longest wait for another rank, seconds; override with MMDS_TIMEOUT_S."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all: rank and world over all nodes, local_rank on this node, and its device."""

    rank: int
    world: int
    local_rank: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True on the one rank that writes the run's files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier()

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks, in double precision on the device's collective backend."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, *values: float) -> list[float]:
        """Each value's maximum over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: tuple[float, ...], op: dist.ReduceOp.RedOpType) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, op)
        result: list[float] = total.tolist()
        return result

    def from_first(self, value: T) -> T:
        """Rank 0's value, on every rank (pickled; for small objects)."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order (pickled; for small objects)."""
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run a block on every rank; when one fails, all raise and none waits for it in a later collective.

        The failing rank keeps its own error; the others raise MmdsError naming it.
        """
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:  # the verdict must reach every rank before anybody leaves
            failure = error
        messages = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        broken = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
        if broken:
            raise MmdsError(f"{what} failed on {'; '.join(broken)}")


def start_ranks() -> Ranks:
    """Join the process group of the launcher, or make a group of one. Call `stop_ranks` at the end."""
    # deepspeed 0.19 calls collectives by names that torch 2.14 deprecates: thousands of lines that no user can act on
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.* is deprecated.*")
    alone = "RANK" not in os.environ
    if alone:
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port())
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(local_rank)
    seconds = float(os.environ.get("MMDS_TIMEOUT_S", TIMEOUT_S))
    deepspeed.init_distributed(
        dist_backend=accelerator.communication_backend_name()
        if accelerator.device_name() != "cpu"
        else "gloo",
        timeout=datetime.timedelta(seconds=seconds),
        auto_mpi_discovery=False,
        verbose=False,
    )
    return Ranks(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        local_rank=local_rank,
        device=torch.device(accelerator.current_device_name()),
    )


def stop_ranks() -> None:
    """Leave the process group, so that the process can exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def launched_world() -> int:
    """Number of ranks that the launcher started, known before the process group exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This process's rank, known before the process group exists."""
    return int(os.environ.get("RANK", "0"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
