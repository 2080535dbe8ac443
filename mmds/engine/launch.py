"""Ranks: who am I, how do we start together, agree, and end together.

Runs under `deepspeed`, `torchrun` and plain `python train.py` (one process).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from mmds.engine.ending import Ending, StoppedByOther
from mmds.engine.machine import explained, free_port, leave_out_shared_memory_op, own_tools_first

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

        The failing rank keeps its own error, with a note of what it did; the others raise StoppedByOther (an MmdsError) naming it.
        """
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:  # the verdict must reach every rank before anybody leaves
            failure = error
        messages = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            failure.add_note(f"{what} failed")
            raise failure
        broken = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
        if broken:
            raise StoppedByOther(f"{what} failed on {'; '.join(broken)}")


_endings: list[Ending] = []
"""How this process ends with the others; empty without others."""


def start_ranks() -> Ranks:
    """Join the process group of the launcher, or make a group of one. Call `stop_ranks` at the end.

    Raises MmdsError when the port where the ranks meet is taken.
    """
    # deepspeed 0.19 calls collectives by names that torch 2.14 deprecates: thousands of lines that no user can act on
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.* is deprecated.*")
    alone = "RANK" not in os.environ
    if alone:
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    own_tools_first()
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    if on_cpu:
        leave_out_shared_memory_op()
    else:
        accelerator.set_device(local_rank)
    with explained():
        deepspeed.init_distributed(
            dist_backend="gloo" if on_cpu else accelerator.communication_backend_name(),
            timeout=_timeout(),
            auto_mpi_discovery=False,
            verbose=False,
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    if world > 1:
        _endings.append(Ending(_launchers_store(), rank=rank, world=world))
    device = torch.device(accelerator.current_device_name())
    return Ranks(rank=rank, world=world, local_rank=local_rank, device=device)


def cpu_group() -> dist.ProcessGroup:
    """A new group of all ranks over gloo, apart from the device's collectives; every rank calls it. It ends with `stop_ranks`."""
    group = dist.new_group(backend="gloo", timeout=_timeout())
    assert isinstance(group, dist.ProcessGroup), "this rank is one of all"
    return group


def _timeout() -> datetime.timedelta:
    return datetime.timedelta(seconds=float(os.environ.get("MMDS_TIMEOUT_S", TIMEOUT_S)))


def stop_ranks() -> None:
    """Leave the process group, so that the process can exit. Every rank calls it, also when an exception is on its way out.

    That exception then ends all ranks here (see `Ending.fail`); a process without others lets it pass.
    """
    if not dist.is_initialized():
        return
    failure = sys.exception()
    for ending in _endings:
        if failure is not None:
            ending.fail(failure)
        try:
            dist.barrier()
        except RuntimeError as error:
            ending.fail(error)
        ending.close()
    _endings.clear()
    dist.destroy_process_group()


def _launchers_store() -> dist.Store:
    """The key-value store in which the ranks have met, with keys of this start of the run."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    minute = datetime.timedelta(minutes=1)
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=minute)
    start = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    return dist.PrefixStore("/".join(("mmds", *start)), store)


def launched_world() -> int:
    """Number of ranks that the launcher started, known before the process group exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This process's rank, known before the process group exists."""
    return int(os.environ.get("RANK", "0"))
