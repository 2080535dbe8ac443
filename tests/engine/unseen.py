"""The runs in which a rehearsal, or the measuring of waits, must change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.engine.layouts import Layout


@dataclass(frozen=True)
class Case:
    """A layout of two ranks, in bf16 where asked; adapters have dropout."""

    layout: Layout
    bf16: bool = False

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


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}

REHEARSED = (
    Case(Layout(0, 2, 2, "pretrain")),
    Case(Layout(0, 2, 1, "instruct", "torch", lora=True)),
    Case(Layout(1, 2, 2, "pretrain", "torch")),
    Case(Layout(1, 2, 2, "pretrain"), bf16=True),
    Case(Layout(1, 2, 2, "align", extra=OFFLOADED)),
    Case(Layout(2, 2, 2, "pretrain", "deepspeed")),
    Case(Layout(2, 2, 2, "instruct", lora=True), bf16=True),
    Case(Layout(2, 2, 2, "pretrain", extra=OFFLOADED)),
    Case(Layout(2, 2, 2, "align", extra=OFFLOADED), bf16=True),
    Case(Layout(3, 2, 2, "pretrain", "deepspeed")),
    Case(Layout(3, 2, 2, "instruct", "torch", lora=True)),
    Case(Layout(3, 2, 2, "pretrain"), bf16=True),
    Case(Layout(3, 2, 2, "align", extra=OFFLOADED), bf16=True),
)
