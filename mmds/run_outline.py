"""What a run trains, costs and needs, from its config and the configs of its parts: no weights, no data, no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from mmds.architecture import ModelShape
from mmds.calibration import Calibration
from mmds.config import Config
from mmds.cost import CostModel, Floats, Sums, Training, cost_model
from mmds.errors import ConfigError
from mmds.hf_target import exports_to
from mmds.memory import StateBytes, activation_bytes, state_bytes
from mmds.model.build import Source
from mmds.model.connector import Connector
from mmds.model.decoder import load_config
from mmds.model.encoder import Encoder
from mmds.model.folder import Description
from mmds.model.last_blocks import last_blocks
from mmds.model.lora import add_adapters, base_name, is_adapter
from mmds.model.shapes import model_shape, training_of
from mmds.stages import assign_rates, with_last_blocks


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Memory of one rank in a micro-step, bytes. states: weights, gradients, optimizer. activations: at their peak. host: CPU memory of a node."""

    states: int
    activations: int
    host: int

    @property
    def device(self) -> int:
        """What the device must hold; allocator slack, communication buffers and the CUDA context (1 to 3 GB) come on top."""
        return self.states + self.activations


@dataclass(frozen=True, kw_only=True)
class Outline:
    """The run's parts without weights.

    llm: on the meta device, with its adapters. sizes, rates: number of elements and peak rate (None = frozen) of every parameter by its name in
    the stage table. shape, training: None where the decoder's family cannot be counted; `unknown` says why. exports: what
    scripts/export_hf.py would make of the run's model.
    """

    llm: PreTrainedModel
    sizes: Mapping[str, int]
    rates: Mapping[str, float | None]
    largest_module: int
    shape: ModelShape | None
    training: Training | None
    unknown: str
    exports: str

    @property
    def encoder_trains(self) -> bool:
        """Whether anything of the encoder trains, so that it is a part of the engine."""
        return any(rate is not None for name, rate in self.rates.items() if name.startswith("encoder."))

    def known(self) -> tuple[ModelShape, Training]:
        """Raises ConfigError where the cost of the decoder's family is not known."""
        if self.shape is None or self.training is None:
            raise ConfigError(
                f'{self.unknown}, or plan by tokens alone with\n    --set mmds.planner.scheme="token_budget"'
            )
        return self.shape, self.training

    def flops(self, config: Config) -> CostModel:
        """FLOPs of rows in this run, the causal half of attention counted, as its kernels compute. Raises as `known`."""
        shape, training = self.known()
        return cost_model(
            shape,
            training,
            recompute=config.recompute,
            stops_early=not config.deepspeed_recomputes,
            causal_half=True,
        )

    def cost(self, config: Config) -> CostModel | None:
        """What the planner balances: seconds where the run has a calibration, else FLOPs. None where they are not known and not needed."""
        if self.shape is None and config.planner.scheme != "cost":
            return None
        flops = self.flops(config)
        if config.planner.calibration is None:
            return flops
        return Calibration.load(config.planner.calibration).apply(flops)

    def rank_bytes(
        self, config: Config, *, world: int, row: Sums, ranks_per_node: int | None = None
    ) -> RankBytes:
        """Memory of a rank that runs this row. Raises as `known`."""
        inside = [name for name in self.sizes if self.encoder_trains or not name.startswith("encoder.")]
        trained = sum(self.sizes[name] for name in inside if self.rates[name] is not None)
        offload = config.deepspeed["zero_optimization"]
        states: StateBytes = state_bytes(
            trained=trained,
            frozen=sum(self.sizes[name] for name in inside) - trained,
            replicated=sum(self.sizes.values()) - sum(self.sizes[name] for name in inside),
            zero_stage=config.zero_stage,
            ranks=world,
            ranks_per_node=ranks_per_node,
            largest_layer=self.largest_module,
            offload_optimizer=_offloads(offload, "offload_optimizer"),
            offload_weights=_offloads(offload, "offload_param"),
        )
        kept = float(self.activations(config, row).max())
        return RankBytes(states=states.device, activations=int(kept), host=states.host)

    def activations(self, config: Config, rows: Sums) -> Floats:
        """Bytes that a micro-step of each row keeps at its fullest, in the shape of the sums. Raises as `known`."""
        shape, training = self.known()
        kept = activation_bytes(
            shape, rows, training, recompute=config.recompute, keeps_inputs=config.zero_stage == 3
        )
        return kept.peak if config.bf16 else 2 * kept.peak


def outline(config: Config, source: Source, encoder: Encoder, connector: Connector) -> Outline:
    """Of a run whose light parts are built. Raises ConfigError when a pattern of the stage does not fit the parameters."""
    decoder_config = load_config(source.decoder_name)
    with torch.device("meta"):
        llm = AutoModelForCausalLM.from_config(decoder_config)
    shape, unknown = None, ""
    try:
        shape = model_shape(encoder, connector, llm)
    except ConfigError as error:
        unknown = str(error)
    bare = llm
    if config.stage.lora is not None:
        with torch.device("meta"):
            llm = AutoModelForCausalLM.from_config(decoder_config)
            add_adapters(llm, config.stage.lora, seed=0)
    sizes = {f"encoder.{n}": p.numel() for n, p in encoder.named_parameters()}
    sizes |= {f"connector.{n}": p.numel() for n, p in connector.named_parameters()}
    sizes |= {f"decoder.llm.{n}": p.numel() for n, p in llm.named_parameters()}
    rates = assign_rates(
        sizes, with_last_blocks(config.rates, last_blocks(encoder, config.stage.encoder_blocks))
    )
    training = None
    if shape is not None:
        own = {base_name(name): rate for name, rate in rates.items() if not is_adapter(name)}
        adapters = sum(sizes[name] for name, rate in rates.items() if is_adapter(name) and rate is not None)
        training = replace(training_of(encoder, connector, bare, own), adapters=adapters)
    return Outline(
        llm=llm,
        sizes=sizes,
        rates=rates,
        largest_module=max(_own_size(module) for module in llm.modules()),
        shape=shape,
        training=training,
        unknown=unknown,
        exports=_exports(config, source, encoder, connector, decoder_config),
    )


def _exports(
    config: Config, source: Source, encoder: Encoder, connector: Connector, decoder_config: Any
) -> str:
    description = Description(
        encoder=encoder.spec,
        connector=connector.section,
        decoder_width=int(decoder_config.get_text_config().hidden_size),
        resolution=source.resolution,
        positions=source.positions,
        max_pixels=config.max_pixels,
    )
    name, reason = exports_to(description, decoder_config)
    return f"exports to {name} of transformers" if name else f"exports to its model folder alone: {reason}"


def _own_size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters(recurse=False))


def _offloads(zero: Mapping[str, object], key: str) -> bool:
    section = zero.get(key)
    return isinstance(section, Mapping) and section.get("device", "none") != "none"
