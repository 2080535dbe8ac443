"""LoRA: two small matrices A [r, in] and B [out, r] beside a frozen linear module W [out, in]; its output gains scale * B(A(x)).

The `peft` package puts them in place and computes with them; the decoder stays the Hugging Face model that it was, and only names
change: `q_proj.weight` becomes `q_proj.base_layer.weight` beside `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`.
In a model folder kept adapters are `decoder/adapter/`, in peft's own format. Source: Hu et al. 2021, arXiv 2106.09685.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mmds.config_types import LoraSection
from mmds.errors import CheckpointError, ConfigError

FOLDER = "adapter"
"""Below a decoder's folder."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's names
_PEFT = "base_model.model."  # before every name in peft's files
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"
_DECODER = "decoder.llm."

Whole = Callable[[Tensor], contextlib.AbstractContextManager[Any]]
"""Makes a parameter whole inside, and what was written into it true on every rank (`plainly` where nothing is partitioned)."""


def plainly(parameter: Tensor) -> contextlib.AbstractContextManager[Any]:
    """For parameters that are whole anyway."""
    return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Adapters without their model. pairs: name of a linear module -> (A, B)."""

    rank: int
    scale: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]

    def merged(self, module: str, weight: Tensor) -> Tensor:
        """The module's weight [out, in] with its adapter added, in fp32 on the CPU, in the weight's dtype; as it is without one."""
        if module not in self.pairs:
            return weight
        a, b = self.pairs[module]
        return (weight.cpu().float() + self.scale * (b.cpu().float() @ a.cpu().float())).to(weight.dtype)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """What became of the adapters that a decoder was kept with: merged into its weights, or in training; and how to say it."""

    said: str = ""
    merged: Adapters | None = None
    training: Adapters | None = None


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is one of an adapter's two matrices."""
    return name.endswith((_A, _B))


def adapter_value(name: str, adapters: Adapters) -> Tensor | None:
    """The value among `adapters` that a model's parameter of this name had at first."""
    for place, ending in enumerate((_A, _B)):
        if name.endswith(ending):
            return adapters.pairs[name.removesuffix(ending)][place]
    return None


def base_name(name: str) -> str:
    """The name that a parameter has without adapters."""
    return name.replace(".base_layer.", ".")


def choose_targets(llm: nn.Module, lora: LoraSection) -> list[str]:
    """Names of the linear modules that get adapters: all of the decoder's blocks, or those that `lora.targets` names; never the head.

    Raises ConfigError for an ending that no linear module of the blocks has.
    """
    linear = _linear_modules(llm)
    if lora.targets is None:
        if not linear:
            raise ConfigError(
                f"mmds.stage.lora: {type(llm).__name__} has no linear modules in its blocks, so no place for adapters; take lora "
                "out with\n    --set mmds.stage.lora=null"
            )
        return linear
    for ending in lora.targets:
        if not any(_ends(name, ending) for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            fused = "; its experts are fused and take no adapters" if has_fused_experts(llm) else ""
            raise ConfigError(
                f'mmds.stage.lora.targets: no linear module of the blocks of {type(llm).__name__} ends in "{ending}"{fused} (the head '
                f"and the embeddings never have adapters): choose of {', '.join(known)}, or leave targets out for all of them"
            )
    return [name for name in linear if any(_ends(name, ending) for ending in lora.targets)]


def has_fused_experts(llm: nn.Module) -> bool:
    """Whether a mixture of experts keeps its experts' weights as 3-D parameters, which are no linear modules."""
    return any(len(getattr(p, "ds_shape", p.shape)) == 3 for p in llm.parameters())


def add_adapters(llm: PreTrainedModel, lora: LoraSection, *, seed: int) -> None:
    """Put fresh adapters beside the chosen modules: A random from `seed`, equal on every rank, B zero, in the weights' dtype."""
    targets = choose_targets(llm, lora)
    endings = sorted({name.rpartition(".")[2] for name in targets})
    matched = [name for name, _ in llm.named_modules() if any(_ends(name, ending) for ending in endings)]
    alpha = lora.scale * lora.rank
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=endings if matched == targets else targets,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    inject_adapter_in_model(config, llm)


def adapters_of(llm: nn.Module) -> dict[str, Any] | None:
    """What defines the adapters of a model beside their values: rank, scale and modules; None without any."""
    layers = {name: module for name, module in llm.named_modules() if isinstance(module, LoraLayer)}
    if not layers:
        return None
    layer: Any = next(iter(layers.values()))
    return {"rank": layer.r["default"], "scale": layer.scaling["default"], "modules": sorted(layers)}


def peft_config(llm: nn.Module) -> LoraConfig:
    """peft's description of the adapters of a model that has some."""
    configs: Any = llm.peft_config
    config: LoraConfig = configs["default"]
    return config


def place_adapters(
    llm: PreTrainedModel, asked: LoraSection | None, stored: Adapters | None, *, seed: int, whole: Whole
) -> Placed:
    """Give a decoder without adapters those that a run asks for; `stored`: those it was kept with, if any.

    Kept adapters of the shape that the run asks for train on; others are first merged into the weights.
    """
    goes_on = stored is not None and asked is not None and _same_shape(llm, asked, stored)
    if stored is not None and not goes_on:
        merge_into(llm, stored, whole)
    if asked is not None:
        add_adapters(llm, asked, seed=seed)
    if stored is None:
        return Placed()
    of_rank = f"the adapters that the decoder was kept with (rank {stored.rank})"
    if goes_on:
        load_values(llm, stored)
        return Placed(said=f"{of_rank} train on", training=stored)
    why = "none" if asked is None else "adapters of another shape"
    return Placed(said=f"{of_rank} were merged into its weights, for this run has {why}", merged=stored)


def merge_into(llm: PreTrainedModel, adapters: Adapters, whole: Whole) -> None:
    """Add adapters to the weights of a model that has none."""
    for module in adapters.pairs:
        weight = _target(llm, module).weight
        with whole(weight):
            weight.data.copy_(adapters.merged(module, weight.data))


def attach(llm: PreTrainedModel, adapters: Adapters) -> None:
    """Put adapters beside the weights of a model that has none, as they were kept."""
    for module in adapters.pairs:
        _target(llm, module)
    add_adapters(llm, _section(adapters), seed=0)
    load_values(llm, adapters)


def load_values(llm: PreTrainedModel, adapters: Adapters) -> None:
    """Give a model's adapters these values."""
    for module, (a, b) in adapters.pairs.items():
        layer: Any = llm.get_submodule(module)
        layer.lora_A["default"].weight.data.copy_(a)
        layer.lora_B["default"].weight.data.copy_(b)


def stored_adapters(decoder: str | Path) -> Adapters | None:
    """The adapters in `decoder/adapter/`; None where there are none, as in every hub model.

    Raises CheckpointError for a kind of adapter that is not plain LoRA.
    """
    folder = Path(decoder) / FOLDER
    if not (folder / CONFIG).is_file():
        return None
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    special = [key for key in _SPECIAL if config.get(key)] + ["bias"] * (config.get("bias", "none") != "none")
    if config.get("peft_type") != "LORA" or special:
        what = f"not plain LoRA ({', '.join(special) or config.get('peft_type')})"
        raise CheckpointError(
            f"{folder}: adapters that are {what} are not supported; merge them with peft first"
        )
    tensors = load_file(folder / WEIGHTS)
    pairs = {}
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            other = name.replace(".lora_A.", ".lora_B.")
            if other not in tensors:
                raise CheckpointError(f"{folder / WEIGHTS} holds {name} without {other}")
            module = name.removeprefix(_PEFT).removesuffix(".lora_A.weight")
            pairs[module] = (tensors[name], tensors[other])
    if len(tensors) != 2 * len(pairs):
        raise CheckpointError(
            f"{folder / WEIGHTS} holds more than pairs of lora_A and lora_B; merge them with peft first"
        )
    rank = int(config["r"])
    return Adapters(rank=rank, scale=float(config["lora_alpha"]) / rank, pairs=pairs)


def write_adapters(folder: Path, adapters: Adapters) -> None:
    """Write `adapter_model.safetensors` as peft reads it; `adapter_config.json` is there already."""
    tensors = {}
    for module, (a, b) in adapters.pairs.items():
        tensors[f"{_PEFT}{module}.lora_A.weight"] = a.contiguous()
        tensors[f"{_PEFT}{module}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def take_adapters(
    tensors: Iterator[tuple[str, Tensor]], config: Mapping[str, Any], *, dtype: torch.dtype
) -> tuple[Adapters, Iterator[tuple[str, Tensor]]]:
    """Split a model's named tensors, adapters first, into the adapters, in `dtype`, and the rest, still to be read, under their names
    without adapters. config: peft's. Raises CheckpointError when a matrix has no counterpart."""
    halves: dict[str, dict[str, Tensor]] = {_A: {}, _B: {}}
    rest: list[tuple[str, Tensor]] = []
    for name, value in tensors:
        if not is_adapter(name):
            rest.append((name, value))
            break
        ending = _A if name.endswith(_A) else _B
        module = name.removeprefix(_DECODER).removesuffix(ending)
        halves[ending][module] = value.detach().to(device="cpu", dtype=dtype, copy=True)
    if not halves[_A] or set(halves[_A]) != set(halves[_B]):
        raise CheckpointError(
            "the adapters are not whole: a module has only one of its two matrices, or none has any"
        )
    pairs = {module: (a, halves[_B][module]) for module, a in halves[_A].items()}
    rank = int(config["r"])
    adapters = Adapters(rank=rank, scale=float(config["lora_alpha"]) / rank, pairs=pairs)
    return adapters, ((base_name(name), value) for name, value in _chained(rest, tensors))


def merged_tensors(tensors: Iterable[tuple[str, Tensor]], adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
    """The tensors, in fp32 where an adapter was merged into one."""
    for name, value in tensors:
        module = name.removeprefix(_DECODER).removesuffix(".weight")
        merges = name.startswith(_DECODER) and module in adapters.pairs and name.endswith(".weight")
        yield name, adapters.merged(module, value.float()) if merges else value


def _chained(
    first: list[tuple[str, Tensor]], others: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    yield from first
    yield from others


_SPECIAL = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "fan_in_fan_out",
    "lora_bias",
    "target_parameters",
)
"""Keys of peft's config that make an adapter more than scale * B(A(x))."""


def _linear_modules(llm: nn.Module) -> list[str]:
    """Names of the linear modules in the decoder's blocks; of a family without known blocks, of all but the head."""
    blocks = [name for name, module in llm.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    head = llm.get_output_embeddings() if isinstance(llm, PreTrainedModel) else None
    return [
        name
        for name, module in llm.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and (not blocks or any(name.startswith(block + ".") for block in blocks))
    ]


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith("." + ending)


def _target(llm: nn.Module, module: str) -> nn.Linear:
    try:
        found = llm.get_submodule(module)
    except AttributeError:
        found = None
    if not isinstance(found, nn.Linear):
        raise CheckpointError(
            f"the adapters are of another decoder: {type(llm).__name__} has no linear module {module}"
        )
    return found


def _same_shape(llm: nn.Module, asked: LoraSection, stored: Adapters) -> bool:
    same = asked.rank == stored.rank and abs(asked.scale - stored.scale) <= 1e-6 * stored.scale
    return same and set(choose_targets(llm, asked)) == set(stored.pairs)


def _section(adapters: Adapters) -> LoraSection:
    return LoraSection(
        rank=adapters.rank, alpha=adapters.scale * adapters.rank, targets=tuple(sorted(adapters.pairs))
    )
