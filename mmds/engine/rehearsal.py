"""A forward and backward pass that leaves no trace, and what is said when it does not fit into memory.

What DeepSpeed 0.19.8 keeps of a backward pass, by ZeRO's stage: 0: the parameters' gradients; 1: the same, or with bf16 the fp32
sums of them, both of which `optimizer.zero_grad()` clears; 2: sums over partitions, in three shapes (fp32, bf16, offloaded);
3: partitions of gradients, and the number of the micro-step. None of them touches weights or Adam's states before `step()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from mmds.data.rows import Row
from mmds.errors import ConfigError


@contextlib.contextmanager
def untraced(ds: Any, device: torch.device) -> Iterator[None]:
    """Inside, a forward and backward pass of the DeepSpeed engine `ds` leaves nothing: gradients, counters, buffers and the random state are
    then what they were. Enter at a step's boundary: gradients of a step that has begun would be lost."""
    backward_passes = ds._unmanaged_backward_count
    buffers = [(buffer, buffer.clone()) for buffer in ds.module.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    ds._unmanaged_backward_count = backward_passes
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    _clear_gradients(ds)


def _clear_gradients(ds: Any) -> None:
    optimizer = ds.optimizer
    ds.zero_grad()
    optimizer.zero_grad()
    if ds.zero_optimization_stage() == 3:
        optimizer.grad_partitions_flat_buffer.zero_()  # a parameter that the next step does not use adds nothing to it
        optimizer.averaged_gradients.clear()
        optimizer._offload_boundary_param_ids.clear()
    elif hasattr(optimizer, "all_grad_tensors"):  # ZeRO-1 and 2, but for ZeRO-1 in bf16
        optimizer.all_grad_tensors.clear()
        optimizer.averaged_gradients.clear()
        optimizer._release_ipg_buffers()
        optimizer.micro_step_id = -1  # as `step()` leaves it
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids.clear()


def too_large(row: Row, device: torch.device, ds_config: Mapping[str, Any]) -> ConfigError:
    """The error for a row whose passes do not fit into the device's memory, with what to change.

    The first line is equal on every rank, so that ranks which fail alike say it once.
    """
    images = len(row.plans)
    patches = sum(plan.patches for plan in row.plans)
    index = device.index if device.type == "cuda" else None
    free, total = get_accelerator().available_memory(index), get_accelerator().total_memory(index)
    remedies = [f"mmds.data.row_tokens={row.input_ids.numel() // 2}"]
    if images:
        largest = max(plan.patches * plan.cell**2 for plan in row.plans)
        remedies.append(f"mmds.data.max_pixels={max(1024, largest // 2)}")
    if "activation_checkpointing" not in ds_config:
        remedies.append("activation_checkpointing={}")
    else:
        remedies.append('zero_optimization.offload_optimizer={"device":"cpu"}')
    return ConfigError(
        f"out of memory in the rehearsal of the row that needs most: {row.input_ids.numel():,} tokens, {patches:,} patches, {images} images\n"
        f"({free / 2**30:.1f} of {total / 2**30:.1f} GiB of {device} were free when it failed). Take a smaller row, or keep less, by one of\n"
        + "\n".join(f"    --set '{remedy}'" for remedy in remedies)
    )
