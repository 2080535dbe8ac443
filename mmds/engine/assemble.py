"""Put a run's parts into an engine: the decoder's weights, what trains at which rate, precision, recomputation, DeepSpeed."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mmds import cpu_bf16
from mmds.config import Config, RecomputeSection, rows_per_step
from mmds.engine.core import Engine, deepspeed_config, parameter_groups
from mmds.engine.launch import Ranks
from mmds.engine.machine import check_compiler
from mmds.engine.schedule import rate_factor, warmup_steps
from mmds.engine.zero import deepspeed_checkpoint, partitioned_loading, whole, whole_tensors
from mmds.errors import CheckpointError, ConfigError
from mmds.model.build import Source, build_decoder, is_random
from mmds.model.connector import Connector
from mmds.model.decoder import weight_files
from mmds.model.encoder import Encoder, unused_parameters
from mmds.model.folder import read_tensors
from mmds.model.last_blocks import last_blocks
from mmds.model.lora import (
    Placed,
    adapter_value,
    base_name,
    has_fused_experts,
    place_adapters,
    stored_adapters,
)
from mmds.model.mllm import FrozenEncoder, Mllm
from mmds.model.recompute import Checkpoint, non_reentrant
from mmds.stages import assign_rates, with_last_blocks

log = logging.getLogger("mmds")


def assemble(
    config: Config, source: Source, encoder: Encoder, connector: Connector, ranks: Ranks, *, total_steps: int
) -> Engine:
    """The engine of a run. Every rank calls it; total_steps: optimizer steps of the whole run, for the schedule.

    Raises ConfigError when a pattern of the stage does not fit the parameters, CheckpointError when the decoder in memory
    is not the one in its files.
    """
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    if cpu_bf16.needed(ranks.device, dtype):
        cpu_bf16.widen_products()
    rows, accumulation = rows_per_step(config, ranks.world)
    ds_config = deepspeed_config(
        config.deepspeed,
        rows_per_step=rows,
        accumulation=accumulation,
        output_dir=Path(config.output_dir),
        device=ranks.device,
    )
    check_compiler(ds_config)
    streams = config.zero_stage == 3 and not is_random(source)
    loading = partitioned_loading(ds_config) if streams else contextlib.nullcontext()
    with ranks.together(f"loading the decoder {source.decoder_name}"), loading:
        decoder = build_decoder(source, dtype=dtype, seed=config.seed, kept=False)
    with ranks.together("adding adapters to the decoder"):
        stored = stored_adapters(source.decoder_name)
        placed = place_adapters(decoder.llm, config.stage.lora, stored, seed=config.seed + 2, whole=whole)
    said = [placed.said] if placed.said else []
    if config.stage.lora is not None and has_fused_experts(decoder.llm):
        said.append(
            "the decoder's experts are fused and have no adapters; its linear modules, such as the attention's, have"
        )
    if ranks.first:
        for line in said:
            log.info("%s", line)
    for part in (encoder, connector):
        part.to(dtype)  # DeepSpeed casts nothing once the decoder has arrived in partitions
    table = with_last_blocks(config.rates, last_blocks(encoder, config.stage.encoder_blocks))
    rates = assign_rates(_all_names(encoder, connector, decoder), table)
    trains = _encoder_trains(encoder, rates)
    model = Mllm(
        connector=connector, decoder=decoder, encoder=encoder if trains else None, weighting=config.weighting
    )
    _refuse_scalars(model)
    groups = parameter_groups(model, rates, config.deepspeed["optimizer"]["params"]["weight_decay"])
    if config.recompute is not None:
        checkpoint = (
            deepspeed_checkpoint(ds_config, ranks.device) if config.deepspeed_recomputes else non_reentrant
        )
        set_recompute(model, config.recompute, checkpoint)
    frozen = None if trains else FrozenEncoder(encoder, device=ranks.device, dtype=dtype)
    total, warmup = total_steps, warmup_steps(config.schedule, total_steps)
    factor = partial(rate_factor, total=total, warmup=warmup, decay=config.schedule.decay)
    engine = Engine(model, frozen=frozen, groups=groups, ds_config=ds_config, ranks=ranks, factor=factor)
    if not is_random(source):
        verify_decoder(engine, source.decoder_name, placed)
    return engine


def set_recompute(model: Mllm, every: RecomputeSection, checkpoint: Checkpoint) -> None:
    """Recompute the activations of every n-th block of the parts that back-propagate: decoder, connector, and a trained encoder."""
    model.decoder.set_recompute(every.decoder, checkpoint)
    model.connector.set_recompute(every.connector, checkpoint)
    if model.encoder is not None:
        model.encoder.set_recompute(every.encoder, checkpoint)


def verify_decoder(engine: Engine, name: str, placed: Placed) -> None:
    """Compare every decoder tensor in memory, gathered whole, with its file, bit for bit in the run's dtype.

    placed: the adapters that the folder was kept with, which are in memory beside the weights or merged into them. Raises CheckpointError on every rank naming the tensors that differ. Tensors of the files that the model has no place for are
    named in a warning: what transformers says of them is not true under ZeRO-3.
    """
    files = weight_files(name) if engine.ranks.first else []
    held = dict(read_tensors(files))
    wrong: list[str] = []
    prefix = "decoder.llm."
    for full_name, value in whole_tensors(engine.model):
        tensor = base_name(full_name.removeprefix(prefix))
        if not held or not full_name.startswith(prefix):
            continue
        expected = adapter_value(tensor, placed.training) if placed.training is not None else None
        if tensor in held:
            expected = held[tensor]().to(value.dtype)
            if placed.merged is not None:
                expected = placed.merged.merged(tensor.removesuffix(".weight"), expected)
        if expected is not None and not _equal(expected.to(value.dtype), value.cpu()):
            wrong.append(tensor)
    if surplus := surplus_tensors(held, engine.model.decoder.llm):
        log.warning(
            "decoder %s: its files hold %d tensors that the model has no place for, e.g. %s",
            name,
            len(surplus),
            ", ".join(surplus[:3]),
        )
    with engine.ranks.together("comparing the decoder with its files"):
        if wrong:
            raise CheckpointError(
                f"decoder {name}: {len(wrong)} tensors in memory differ from the files, e.g. {wrong[:3]}"
            )


def _equal(expected: Tensor, value: Tensor) -> bool:
    return expected.shape == value.shape and bool((expected == value).all())


def surplus_tensors(held: Iterable[str], llm: nn.Module) -> list[str]:
    """Names of stored tensors without a counterpart in the model, less those that its family is known to leave in its files."""
    known = {name for name, _ in llm.named_parameters(remove_duplicate=False)} | set(llm.state_dict())
    known = {base_name(name) for name in known}
    left = [*(getattr(llm, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"]
    return sorted(name for name in held if name not in known and not any(re.search(p, name) for p in left))


def _all_names(encoder: Encoder, connector: Connector, decoder: nn.Module) -> Iterator[str]:
    for part, module in (("encoder", encoder), ("connector", connector), ("decoder", decoder)):
        for name, _ in module.named_parameters():
            yield f"{part}.{name}"


def _encoder_trains(encoder: Encoder, rates: Mapping[str, float | None]) -> bool:
    """Whether any encoder parameter trains; refuses a tower that would train parameters which the features never use."""
    trained = {name for name, rate in rates.items() if name.startswith("encoder.") and rate is not None}
    if not trained:
        return False
    dead = [name for name in unused_parameters(encoder) if f"encoder.{name}" in trained]
    if dead:
        raise ConfigError(
            f"mmds.stage.rates: {len(dead)} encoder parameters never act on the features, e.g. {dead[:3]}; freeze the encoder "
            'with "rates": {"encoder.*": null}'
        )
    return True


def _refuse_scalars(model: nn.Module) -> None:
    scalars = [
        name for name, p in model.named_parameters() if p.dim() == 0 and getattr(p, "ds_numel", 1) == 1
    ]
    if scalars:
        raise ConfigError(f"0-dimensional parameters cannot be partitioned by ZeRO: {', '.join(scalars)}")
