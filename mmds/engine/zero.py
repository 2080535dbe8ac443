"""ZeRO's partitions: loading into them, reading whole tensors out of them, and out of a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from mmds.errors import ConfigError
from mmds.model.recompute import Checkpoint, reentrant


@contextlib.contextmanager
def partitioned_loading(ds_config: dict[str, Any]) -> Iterator[None]:
    """Inside, transformers' `from_pretrained` streams weights into ZeRO-3 partitions instead of whole tensors.

    transformers keeps only a weak reference to the config object, hence the local variable.
    """
    holder = HfDeepSpeedConfig(ds_config)
    try:
        yield
    finally:
        del holder
        unset_hf_deepspeed_config()


def deepspeed_checkpoint(ds_config: dict[str, Any], device: torch.device) -> Checkpoint:
    """DeepSpeed's checkpoint function, set up by the config's `activation_checkpointing` section.

    Raises ConfigError for activations in the CPU's memory on a device that is the CPU: DeepSpeed fails there.
    """
    if ds_config["activation_checkpointing"].get("cpu_checkpointing") and device.type == "cpu":
        raise ConfigError(
            "activation_checkpointing.cpu_checkpointing: true needs a GPU to move activations away from; override with\n"
            "    --set activation_checkpointing.cpu_checkpointing=false"
        )
    deepspeed.checkpointing.configure(None, deepspeed_config=ds_config)
    return reentrant(deepspeed.checkpointing.checkpoint)


def whole(parameter: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, a parameter is whole on every rank; what rank 0 writes into it holds for all. Every rank enters."""
    gathered: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        [parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")
    )
    return gathered


def whole_tensors(
    module: nn.Module, *, first: Callable[[str], bool] = lambda name: False
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole value) of each parameter and persistent buffer, one at a time; every rank must iterate to the end.

    The value is valid until the next one; shared (tied) parameters come once, under their first name. first: names that come before
    all others.
    """
    parameters = dict(module.named_parameters())
    for name in sorted(parameters, key=first, reverse=True):  # sorting keeps the order among equals
        parameter = parameters[name]
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            yield name, parameter.data
    shared = set(dict(module.named_parameters(remove_duplicate=False)))
    for name, value in module.state_dict().items():
        if name not in shared:
            yield name, value


def full_shape(parameter: Tensor) -> torch.Size:
    """The parameter's shape, also while ZeRO-3 holds it as an empty partition."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def full_numel(parameter: Tensor) -> int:
    """Number of elements of the whole parameter."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def checkpoint_tensors(checkpoints: Path, tag: str) -> dict[str, Any]:
    """fp32 values by name out of a DeepSpeed checkpoint folder, lazily read: each value has `.contiguous()` or is a tensor.

    Trained tensors are fp32 masters; frozen ones have the run's dtype. A run at ZeRO-0, which is fp32, keeps whole tensors; so does
    one at ZeRO-1, for which DeepSpeed's reader forgets the frozen ones.
    """
    module: dict[str, Any] = {}
    kept_whole = checkpoints / tag / "mp_rank_00_model_states.pt"
    if kept_whole.is_file():
        module = torch.load(kept_whole, map_location="cpu", mmap=True, weights_only=False)["module"]
    if not list((checkpoints / tag).glob("*_optim_states.pt")):
        return module
    state: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(
        str(checkpoints), tag=tag, lazy_mode=True
    )
    return {**module, **state}
