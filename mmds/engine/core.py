"""One training step that gives the same numbers under any split over ranks and micro-steps.

Why the step looks as it does (measured on deepspeed 0.19.8): ranks meet inside every layer under ZeRO-3, so each calls every part
once a row; DeepSpeed would average per-rank means, so the loss is scaled by world / (weight of the step's samples), which is
known before the first backward pass; DeepSpeed's own schedulers flatten per-group rates, so a LambdaLR is given. ZeRO-0 to 3 take
the same path; only at ZeRO-0, where DeepSpeed has neither a gradient norm nor a check for non-finite gradients, `plain` adds both.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from mmds.data.rows import Row, to_device
from mmds.engine.launch import Ranks, cpu_group
from mmds.engine.machine import explained
from mmds.engine.plain import measure_and_clip
from mmds.engine.rehearsal import too_large, untraced
from mmds.engine.waiting import Waited, meeting
from mmds.engine.zero import full_shape
from mmds.errors import CheckpointError, ConfigError
from mmds.model.loss import sample_weights
from mmds.model.mllm import FrozenEncoder, Mllm


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step did, equal on every rank.

    loss: what is minimised, the weighted mean of token NLL over the samples of all ranks and micro-steps; token_nll: the plain mean
    over supervised tokens, equal to it under `token` weighting (both nats a token); grad_norm: before clipping; rates: by group;
    counts of the whole step: real, visual, supervised and padded tokens, images, skipped samples; applied: False when a
    non-finite gradient made the engine skip the update; suspects: then, the keys of the samples it came from; waited: None when the
    step was not measured.
    """

    step: int
    loss: float
    token_nll: float
    grad_norm: float
    rates: dict[str, float]
    real: int
    visual: int
    supervised: int
    padded: int
    images: int
    bad: int
    applied: bool
    skipped_steps: int
    skipped_in_a_row: int
    suspects: tuple[str, ...]
    waited: Waited | None = None


class Engine:
    """A DeepSpeed engine over the trainable tree, and the frozen encoder beside it."""

    def __init__(
        self,
        model: Mllm,
        *,
        frozen: FrozenEncoder | None,
        groups: list[dict[str, Any]],
        ds_config: dict[str, Any],
        ranks: Ranks,
        factor: Any,
    ) -> None:
        """groups: from `parameter_groups`. ds_config: complete DeepSpeed dict. factor: step index -> rate factor."""
        self.ranks = ranks
        self.frozen = frozen
        names = {id(p): name for name, p in model.named_parameters()}
        self.ds_config = ds_config
        self.rows_per_step = int(ds_config["train_batch_size"])
        self.group_names = [group["name"] for group in groups]
        self.trained = sorted((names[id(p)], g["lr"], g["weight_decay"]) for g in groups for p in g["params"])
        clipping = ds_config["gradient_clipping"]
        if ds_config["zero_optimization"]["stage"] == 0:
            ds_config = {**ds_config, "gradient_clipping": 0.0}  # there the engine clips by itself
        with explained():
            self.ds, _, _, _ = deepspeed.initialize(
                model=model,
                model_parameters=groups,
                config=ds_config,
                lr_scheduler=lambda optimizer: LambdaLR(optimizer, factor),
                dist_init_required=False,
            )
        if not self.ds.zero_optimization():
            measure_and_clip(self.ds.optimizer, float(clipping))
        self.ds.train()
        self.step_index = 0
        self.skipped_in_a_row = 0

    @property
    def model(self) -> Mllm:
        """The trainable tree."""
        module: Mllm = self.ds.module
        return module

    def rates(self) -> dict[str, float]:
        """Current rate of each group: table rate x factor."""
        return {
            name: float(g["lr"])
            for name, g in zip(self.group_names, self.ds.optimizer.param_groups, strict=True)
        }

    def rehearse(self, row: Row) -> None:
        """Forward and backward of a row without any result, so that a lack of memory shows before the first step.

        Every rank calls it with the same row, between steps. Raises ConfigError when the row does not fit.
        """
        scale = 1 / max(self._weight(row), 1.0)
        try:
            with untraced(self.ds, self.ranks.device):
                weighted, _ = self._forward(to_device(row, self.ranks.device))
                self.ds.backward(weighted * scale, scale_wrt_gas=False)
        except torch.OutOfMemoryError as error:
            raise too_large(row, self.ranks.device, self.ds_config) from error

    @functools.cached_property
    def _meeting_group(self) -> dist.ProcessGroup:
        return cpu_group()

    def step(self, rows: Sequence[Row], *, measure_wait: bool = False) -> StepReport:
        """Forward, backward and update over this rank's rows of one step; every rank gives equally many rows.

        measure_wait: find out how long each rank waits for the others, at some cost of time; equal on every rank.
        """
        *counts, weight = self.ranks.sum(*_counts(rows), sum(self._weight(row) for row in rows))
        real, visual, supervised, padded, images, bad = (int(n) for n in counts)
        scale = self.ranks.world / max(weight, 1.0)
        rates = self.rates()
        parts = []
        measuring = meeting(self.ds, self.ranks, self._meeting_group) if measure_wait else None
        with measuring or contextlib.nullcontext() as meetings:
            for row in rows:
                weighted, nll = self._forward(to_device(row, self.ranks.device))
                self.ds.backward(weighted * scale, scale_wrt_gas=False)
                parts.append(torch.stack((weighted.detach(), nll)))
        weighted_nll, nll_sum = self.ranks.sum(*torch.stack(parts).double().sum(0).tolist())
        applied = self._update()
        return StepReport(
            step=self.step_index,
            loss=weighted_nll / max(weight, 1.0),
            token_nll=nll_sum / max(supervised, 1),
            grad_norm=float(self.ds.get_global_grad_norm() or 0.0),
            rates=rates,
            real=real,
            visual=visual,
            supervised=supervised,
            padded=padded,
            images=images,
            bad=bad,
            applied=applied,
            skipped_steps=int(self.ds.skipped_steps),
            skipped_in_a_row=self.skipped_in_a_row,
            suspects=() if applied else self._suspects(rows, parts),
            waited=meetings.waited() if meetings is not None else None,
        )

    def _update(self) -> bool:
        """The optimizer's and the schedule's step; False when a non-finite gradient made DeepSpeed leave the weights alone."""
        skipped_before = int(self.ds.skipped_steps)
        self.ds.step()
        self.step_index += 1
        applied = int(self.ds.skipped_steps) == skipped_before
        if not applied:
            with (
                warnings.catch_warnings()
            ):  # torch warns when the very first update was the one that was left out
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self.ds.lr_scheduler.step()  # DeepSpeed holds it back; the rate of a step is that of its number
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        return applied

    def _weight(self, row: Row) -> float:
        return float(sample_weights(row.supervised_counts, self.model.weighting).sum())

    def _suspects(self, rows: Sequence[Row], parts: Sequence[Tensor]) -> tuple[str, ...]:
        """Samples of the rows whose loss is not finite, over all ranks; of all rows when every loss is finite."""
        infinite = [bool(part.isfinite().logical_not().any()) for part in parts]
        every_row = not any(any(found) for found in self.ranks.gather(infinite))
        mine = [row.sample_keys for row, bad in zip(rows, infinite, strict=True) if bad or every_row]
        return tuple(key for keys in self.ranks.gather(mine) for group in keys for key in group if key)

    def _forward(self, row: Row) -> tuple[Tensor, Tensor]:
        features = self.frozen(row) if self.frozen is not None else None
        weighted, nll = self.ds(row, features)
        return weighted, nll

    def save(self, folder: Path, tag: str) -> None:
        """Write this rank's share of the engine's state to folder/tag. Names in folder are not touched."""
        if not self.ds.save_checkpoint(
            str(folder), tag=tag, client_state={"step": self.step_index}, save_latest=False
        ):
            raise CheckpointError(f"DeepSpeed refused to save {folder / tag}")

    def load(self, folder: Path, tag: str) -> None:
        """Restore weights, optimizer, schedule and step from folder/tag, on every rank or on none."""
        path, client = self.ds.load_checkpoint(str(folder), tag=tag)
        if path is None or "step" not in (client or {}):
            raise CheckpointError(
                f"{folder / tag}: DeepSpeed found nothing to load; the folder is not a complete checkpoint"
            )
        self.step_index = int(client["step"])

    def write_events(self, values: Mapping[str, float], step: int) -> None:
        """Send scalars to DeepSpeed's monitors (TensorBoard, W&B, CSV), which write on global rank 0 only."""
        if self.ds.monitor.enabled:
            self.ds.monitor.write_events([(tag, value, step) for tag, value in values.items()])


def parameter_groups(
    model: nn.Module, rates: Mapping[str, float | None], weight_decay: float
) -> list[dict[str, Any]]:
    """Optimizer groups by rate and decay; also sets requires_grad of every parameter of the tree.

    rates: parameter name -> rate, None = frozen. Biases and norms (one dimension or none) get no weight decay. Each group
    is named after its parts, rate and decay, for logs.
    """
    groups: dict[tuple[str, float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        rate = rates[name]
        parameter.requires_grad_(rate is not None)
        if rate is not None:
            decay = weight_decay if len(full_shape(parameter)) > 1 else 0.0
            groups.setdefault((name.split(".")[0], rate, decay), []).append(parameter)
    if not groups:
        raise ConfigError("mmds.stage.rates: nothing trains; give some pattern a rate")
    counted: dict[str, int] = {}
    result = []
    for (part, rate, decay), parameters in groups.items():
        counted[part] = counted.get(part, 0) + 1
        label = part if counted[part] == 1 else f"{part}.{counted[part]}"
        result.append({"name": label, "params": parameters, "lr": rate, "weight_decay": decay})
    return result


def deepspeed_config(
    user: Mapping[str, Any], *, rows_per_step: int, accumulation: int, output_dir: Path, device: torch.device
) -> dict[str, Any]:
    """The dict that DeepSpeed gets: the user's keys with their defaults (`Config.deepspeed`), and those that mmds owns."""
    config = copy.deepcopy(dict(user))
    optimizer = config["optimizer"]
    if device.type == "cpu" and optimizer["type"].lower() in ("adam", "adamw"):
        optimizer["params"].setdefault("torch_adam", True)  # DeepSpeed's fused Adam is a GPU kernel
    config.update(
        train_batch_size=rows_per_step,
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=accumulation,
        managed_gradient_accumulation=False,
    )
    config.setdefault("steps_per_print", 2**31)
    if config.get("tensorboard", {}).get("enabled"):
        config["tensorboard"] = {
            "output_path": str(output_dir),
            "job_name": "tensorboard",
            **config["tensorboard"],
        }
    return config


def _counts(rows: Sequence[Row]) -> tuple[int, ...]:
    return (
        sum(row.real_tokens for row in rows),
        sum(row.visual_tokens for row in rows),
        sum(row.supervised for row in rows),
        sum(row.padded for row in rows),
        sum(len(row.image_names) for row in rows),
        sum(len(row.bad) for row in rows),
    )


__all__ = ["Engine", "StepReport", "deepspeed_config", "parameter_groups"]
