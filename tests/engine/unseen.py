"""The runs in which a rehearsal, or the measuring of waits, must change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.engine.layouts import Layout


@dataclass(frozen=True)
class Case:
    """A layout of two ranks, in bf16 where asked; adapters have dropout. measured: it also runs with its waits measured."""

    layout: Layout
    bf16: bool = False
    measured: bool = False

    @property
    def name(self) -> str:
        """For file names and test ids."""
        return self.layout.name + "-bf16" * self.bf16

    def configured(self, config: dict[str, Any]) -> dict[str, Any]:
        """The layout's config with what this case adds."""
        config["bf16"] = {"enabled": self.bf16}
        if self.layout.lora:
            config["mmds"]["stage"]["lora"]["dropout"] = 0.3
        return config


SLOW_RANK, SLEEP_S = 1, 0.2
"""The rank that sleeps, and how long after each pass of a decoder block, in the second of a measured run's steps."""

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}

CASES = (
    Case(Layout(0, 2, 2, "pretrain"), measured=True),
    Case(Layout(0, 2, 1, "instruct", "torch", lora=True)),
    Case(Layout(1, 2, 2, "pretrain", "torch")),
    Case(Layout(1, 2, 2, "pretrain"), bf16=True, measured=True),
    Case(Layout(1, 2, 2, "align", extra=OFFLOADED)),
    Case(Layout(2, 2, 2, "pretrain", "deepspeed"), measured=True),
    Case(Layout(2, 2, 2, "instruct", lora=True), bf16=True),
    Case(Layout(2, 2, 2, "pretrain", extra=OFFLOADED)),
    Case(Layout(2, 2, 2, "align", extra=OFFLOADED), bf16=True),
    Case(Layout(3, 2, 2, "pretrain", "deepspeed"), measured=True),
    Case(Layout(3, 2, 2, "instruct", "torch", lora=True), measured=True),
    Case(Layout(3, 2, 2, "pretrain"), bf16=True, measured=True),
    Case(Layout(3, 2, 2, "align", "torch"), measured=True),
    Case(Layout(3, 2, 2, "align", extra=OFFLOADED), bf16=True),
)
