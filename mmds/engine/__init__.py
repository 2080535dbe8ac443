"""The only package that talks to DeepSpeed: launch, ZeRO's partitions, the training step."""

from mmds.engine.core import Engine, StepReport
from mmds.engine.launch import Ranks
from mmds.engine.waiting import Waited

__all__ = ["Engine", "Ranks", "StepReport", "Waited"]
