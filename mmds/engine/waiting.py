"""How long each rank waits for the others in a step: taken with a timer round a barrier, where the ranks meet anyway.

Only a measured step has these barriers. Under ZeRO-3 they stand at the entry of every block, forwards and backwards, and of every
module with weights outside of the blocks, since each of them gathers its weights from all ranks; a barrier at the end of the step
alone would find the ranks together. At ZeRO-2 and 3 they also stand before each reduction of gradients, of which every micro-step
has at least one; at ZeRO-0 and 1, where ranks meet once a step, after its last backward pass.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from mmds.engine.launch import Ranks
from mmds.model.encoder import tower_blocks
from mmds.model.mllm import Mllm

REDUCTIONS = {2: "reduce_ipg_grads", 3: "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"}
"""By ZeRO's stage: the method of DeepSpeed's optimizer that reduces gradients while the backward pass runs, and at its end."""


@dataclass(frozen=True, kw_only=True)
class Waited:
    """What a measured step found, equal on every rank.

    seconds: from the step's begin to its last barrier, mean over ranks; waits: seconds of it that each rank waited for others.
    """

    seconds: float
    waits: tuple[float, ...]

    @property
    def idle_share(self) -> float:
        """Share of all ranks' time that is spent waiting, in [0, 1)."""
        return fmean(self.waits) / self.seconds

    @property
    def imbalance(self) -> float:
        """The step's time over what it would be with the same work spread equally; 1 = nobody waits."""
        return self.seconds / (self.seconds - fmean(self.waits))


class Meetings:
    """The timed barriers of one step, which begins now."""

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup) -> None:
        """group: of all ranks and over gloo, so that its barriers do not mix with DeepSpeed's collectives."""
        self._ranks, self._group = ranks, group
        self._waits: list[float] = []
        self._begin = self._left = time.perf_counter()

    def meet(self, *_: Any) -> None:
        """Wait for every rank; as many times on each. Arguments, those of a hook, are not looked at.

        Only the stream that computes is awaited: another one may hold a collective that waits for the others by itself.
        """
        if self._ranks.device.type == "cuda":
            torch.cuda.current_stream(self._ranks.device).synchronize()
        arrived = time.perf_counter()
        dist.barrier(group=self._group)
        self._left = time.perf_counter()
        self._waits.append(self._left - arrived)

    def meet_backward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A forward hook: meet when the backward pass comes to this module, if it will."""
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        for value in outputs:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(self.meet)
                return

    def waited(self) -> Waited:
        """What all ranks have waited; every rank calls it. The last to come has waited for nobody: its time is the barrier's own."""
        mine = (self._left - self._begin, self._waits)
        found: list[tuple[float, list[float]]] = [mine] * self._ranks.world
        dist.all_gather_object(found, mine, group=self._group)
        barriers = sum(map(min, zip(*(waits for _, waits in found), strict=True)))
        return Waited(
            seconds=fmean(seconds for seconds, _ in found) - barriers,
            waits=tuple(sum(waits) - barriers for _, waits in found),
        )


@contextlib.contextmanager
def meeting(ds: Any, ranks: Ranks, group: dist.ProcessGroup) -> Iterator[Meetings]:
    """Inside, the forward and backward passes of a step of the DeepSpeed engine `ds` have timed barriers; none is left afterwards."""
    meetings, stage = Meetings(ranks, group), ds.zero_optimization_stage()
    with contextlib.ExitStack() as placed:
        for module in places(ds.module) if stage == 3 else ():
            # before DeepSpeed's own hook, which gathers the weights and would wait unseen
            placed.callback(module.register_forward_pre_hook(meetings.meet, prepend=True).remove)
            placed.callback(module.register_forward_hook(meetings.meet_backward).remove)
        if stage in REDUCTIONS:
            placed.enter_context(_before(ds.optimizer, REDUCTIONS[stage], meetings.meet))
        yield meetings
    if stage not in REDUCTIONS:
        meetings.meet()


def places(model: Mllm) -> list[nn.Module]:
    """Where ranks meet under ZeRO-3: every block, and every module with parameters of its own that lies in no block."""
    blocks: list[nn.Module] = [
        m for m in model.decoder.modules() if isinstance(m, GradientCheckpointingLayer)
    ]
    if model.encoder is not None:
        blocks += tower_blocks(model.encoder.visual)
    inside = {id(module) for block in blocks for module in block.modules()}
    others = [m for m in model.modules() if id(m) not in inside and list(m.parameters(recurse=False))]
    return [*blocks, *others]


@contextlib.contextmanager
def _before(owner: Any, method: str, act: Callable[[], None]) -> Iterator[None]:
    """Inside, `act` runs before each call of a method of this one object."""
    plain = getattr(owner, method)

    def acting(*args: Any, **kwargs: Any) -> Any:
        act()
        return plain(*args, **kwargs)

    setattr(owner, method, acting)
    try:
        yield
    finally:
        delattr(owner, method)
