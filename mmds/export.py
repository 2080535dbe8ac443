"""Write the model folder of a run: from a live engine, or from a ZeRO checkpoint.

A run keeps `parts/`, a model folder without trained weights (description, decoder config, tokenizer) but with the frozen encoder, so
that a checkpoint can be made into a model folder long after the sources have moved.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from mmds.config import Config
from mmds.engine import Engine
from mmds.engine.zero import checkpoint_tensors, whole_tensors
from mmds.errors import CheckpointError
from mmds.model import lora
from mmds.model.build import Source
from mmds.model.encoder import EncoderSpec
from mmds.model.folder import (
    DESCRIPTION,
    Description,
    read_description,
    stored_names,
    write_readme,
    write_weights,
)

PARTS = "parts"

KEPT, MERGED = f"decoder/{lora.FOLDER}", "adapter.merged"
"""Where parts/ describes the adapters of a run: those that the model folder keeps, and those that are merged into its weights."""


def write_parts(
    run: Path, engine: Engine, encoder: EncoderSpec, source: Source, tokenizer: Any, config: Config
) -> None:
    """Write run/parts, on rank 0: what a checkpoint of this run lacks to become a model folder. tokenizer: Hugging Face's."""
    if not engine.ranks.first:
        return
    decoder, connector = engine.model.decoder, engine.model.connector
    description = Description(
        encoder=encoder,
        connector=connector.section,
        decoder_width=decoder.width,
        resolution=source.resolution,
        positions=source.positions,
        max_pixels=config.max_pixels,
        stage=config.stage.name,
        dtype="bfloat16" if config.bf16 else "float32",
    )
    building = run / (PARTS + ".tmp")
    shutil.rmtree(building, ignore_errors=True)
    (building / "decoder").mkdir(parents=True)
    description.write(building)
    decoder.llm.config.save_pretrained(building / "decoder")
    if isinstance(decoder.llm.generation_config, GenerationConfig):
        decoder.llm.generation_config.save_pretrained(building / "decoder")
    tokenizer.save_pretrained(building / "decoder")
    if config.stage.lora is not None:
        folder = building / (KEPT if config.stage.lora.keep else MERGED)
        adapters = copy.copy(lora.peft_config(decoder.llm))
        start = config.init_from or (config.model.decoder.name if config.model is not None else None)
        adapters.base_model_name_or_path = start
        adapters.save_pretrained(str(folder))
    if engine.frozen is not None:
        write_weights(building, _frozen_tensors(engine), dtype=_dtype(description))
    shutil.rmtree(run / PARTS, ignore_errors=True)
    building.rename(run / PARTS)


def write_model(engine: Engine, run: Path, target: Path) -> None:
    """Write the model folder of the engine's present weights to `target`; every rank calls it, rank 0 writes.

    The folder appears whole, under its name, or not at all; a failure of rank 0 is raised on every rank.
    """
    with engine.ranks.together("writing the model folder"):
        tensors = whole_tensors(engine.model, first=lora.is_adapter)
        try:
            if engine.ranks.first:
                _assemble(run / PARTS, tensors, target, dtype=None)
        finally:
            for (
                _
            ) in tensors:  # gathering is collective: every rank goes to the end, whatever happens on rank 0
                pass


def check_target(target: Path) -> None:
    """Raise CheckpointError when something that is no model folder stands where one is to be written."""
    if target.exists() and not (
        target.is_dir() and (not any(target.iterdir()) or (target / DESCRIPTION).is_file())
    ):
        raise CheckpointError(f"{target} exists and is not a model folder; move it, or name another folder")


def consolidate(run: Path, tag: str, target: Path, *, dtype: torch.dtype | None = None) -> None:
    """Make a model folder out of checkpoint `tag` of a run. dtype: of all weights; None = the run's compute dtype.

    Raises CheckpointError when the run has no parts/, the checkpoint is torn, or a weight is missing.
    """
    if not (run / PARTS).is_dir():
        raise CheckpointError(f"{run} has no {PARTS}/ folder: it is not the run folder of a training")
    state = checkpoint_tensors(run / "checkpoints", tag)
    state = {name: state[name] for name in sorted(state, key=lora.is_adapter, reverse=True)}
    _assemble(run / PARTS, _unshared(state), target, dtype=dtype)


def _assemble(
    parts: Path, tensors: Iterator[tuple[str, Tensor]], target: Path, *, dtype: torch.dtype | None
) -> None:
    """tensors: of the whole model, adapters first."""
    check_target(target)
    building = target.with_name(target.name + ".tmp")
    shutil.rmtree(building, ignore_errors=True)
    shutil.copytree(parts, building)
    description = read_description(building)
    dtype = dtype or _dtype(description)
    tensors, about_adapters = _without_adapters(building, tensors, target, dtype=dtype)
    write_weights(building, tensors, dtype=dtype)
    Description(**{**description.__dict__, "dtype": str(dtype).removeprefix("torch.")}).write(building)
    stored_names(building)  # raises when a part has no weights: such a folder must not come into being
    facts = {
        "encoder": description.encoder.name,
        "connector": description.connector.name,
        "resolution": description.resolution.name,
        "positions": description.positions,
        "stage": description.stage,
    }
    write_readme(building, {**facts, "dtype": dtype, **about_adapters}, name=target)
    shutil.rmtree(target, ignore_errors=True)
    building.rename(target)


def _without_adapters(
    building: Path, tensors: Iterator[tuple[str, Tensor]], target: Path, *, dtype: torch.dtype
) -> tuple[Iterator[tuple[str, Tensor]], dict[str, str]]:
    """The tensors of a model without adapters, and what its README says of them: merged, or written beside it and told apart."""
    folder = next((building / name for name in (KEPT, MERGED) if (building / name).is_dir()), None)
    if folder is None:
        return tensors, {}
    file = folder / lora.CONFIG
    config = json.loads(file.read_text(encoding="utf-8"))
    adapters, rest = lora.take_adapters(tensors, config, dtype=dtype)
    endings = ", ".join(sorted({name.rpartition(".")[2] for name in adapters.pairs}))
    shape = (
        f"rank {adapters.rank}, scale {adapters.scale:g}, beside {len(adapters.pairs)} modules ({endings})"
    )
    base = config["base_model_name_or_path"]
    if folder == building / MERGED:
        shutil.rmtree(folder)
        about = {
            "base": f"the decoder of {base}",
            "adapters": f"LoRA, {shape}: merged into the decoder's weights",
        }
        return lora.merged_tensors(rest, adapters), about
    lora.write_adapters(folder, adapters)
    file.write_text(
        json.dumps({**config, "base_model_name_or_path": str(target.resolve() / "decoder")}, indent=2) + "\n",
        encoding="utf-8",
    )
    where = f"kept apart in {KEPT}/, where peft and mmds find them"
    about = {"base": f"the decoder of {base}, unchanged in decoder/", "adapters": f"LoRA, {shape}: {where}"}
    return rest, about


def _unshared(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a lazily read state dict, tied ones once."""
    seen: set[Any] = set()
    for name, value in state.items():
        key = (value.data_ptr(), value.shape) if isinstance(value, Tensor) and value.numel() else id(value)
        if key not in seen:
            seen.add(key)
            yield name, value.contiguous()


def _frozen_tensors(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    assert engine.frozen is not None
    for name, value in engine.frozen.encoder.state_dict().items():
        yield f"encoder.{name}", value


def _dtype(description: Description) -> torch.dtype:
    dtype = getattr(torch, description.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
