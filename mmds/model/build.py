"""From a config (or a model folder) to the parts of a run: sources first, then the light parts, then the decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mmds.config_types import DecoderSection, ModelSection
from mmds.errors import ConfigError
from mmds.geometry import Geometry
from mmds.model.connector import Connector, connector_merge
from mmds.model.decoder import Decoder, load_config, load_llm
from mmds.model.encoder import Encoder, EncoderSpec, build_encoder, encoder_from_spec
from mmds.model.encoder_sources import RANDOM
from mmds.model.folder import Description, find_model_folder, load_part, read_description
from mmds.model.lora import attach, stored_adapters
from mmds.model.qualify import qualify


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the parts of a run come from: a model folder, or the sections of a config. Exactly one is set."""

    folder: Path | None
    section: ModelSection | None

    @property
    def decoder_name(self) -> str:
        """Hub name or folder of the decoder and its tokenizer."""
        if self.folder is not None:
            return str(self.folder / "decoder")
        assert self.section is not None
        return self.section.decoder.name


def find_source(init_from: str | None, section: ModelSection | None) -> Source:
    """Decide the source of all parts. Raises ConfigError when neither is given or when a given model differs from the folder."""
    if init_from is None:
        if section is None:
            raise ConfigError(
                "mmds.model: name the encoder, connector and decoder, or give mmds.init_from a model folder"
            )
        return Source(folder=None, section=section)
    folder = find_model_folder(init_from)
    if section is not None:
        _must_match(section, read_description(folder), folder)
    return Source(folder=folder, section=None)


def build_light(source: Source, *, seed: int) -> tuple[Encoder, Connector]:
    """Encoder and connector in fp32 on the CPU, loaded or freshly initialised from `seed` (equal on every rank).

    The decoder's family is qualified for packed rows on the way, before any of its weights is read.
    """
    config = load_config(source.decoder_name)
    qualify(config)
    torch.manual_seed(seed)
    if source.folder is not None:
        description = read_description(source.folder)
        encoder = encoder_from_spec(description.encoder)
        load_part(encoder, source.folder / "encoder")
        connector = Connector(
            description.connector,
            encoder_width=description.encoder.width,
            decoder_width=description.decoder_width,
        )
        load_part(connector, source.folder / "connector")
        return encoder, connector
    assert source.section is not None
    encoder = build_encoder(source.section.encoder)
    width = int(config.get_text_config().hidden_size)
    return encoder, Connector(source.section.connector, encoder_width=encoder.spec.width, decoder_width=width)


def describe_light(source: Source) -> tuple[Encoder, Connector]:
    """Encoder and connector as `build_light` would make them, with random weights and nothing read but configs."""
    if source.folder is not None:
        description = read_description(source.folder)
        encoder, name, width = (
            encoder_from_spec(description.encoder),
            description.connector,
            description.decoder_width,
        )
    else:
        assert source.section is not None
        encoder = build_encoder(replace(source.section.encoder, pretrained=RANDOM))
        name = source.section.connector
        width = int(load_config(source.decoder_name).get_text_config().hidden_size)
    return encoder, Connector(name, encoder_width=encoder.spec.width, decoder_width=width)


def build_decoder(source: Source, *, dtype: torch.dtype, seed: int, kept: bool = True) -> Decoder:
    """The decoder in `dtype`; weights stream into partitions when the engine's loading context is active.

    kept: with the adapters that the folder was written with, if any, beside the weights; False: the weights alone.
    """
    section = DecoderSection(name=source.decoder_name) if source.section is None else source.section.decoder
    torch.manual_seed(seed + 1)
    llm = load_llm(section.name, dtype=dtype, random=section.random)
    adapters = stored_adapters(section.name) if kept else None
    if adapters is not None:
        attach(llm, adapters)
    return Decoder(llm)


def is_random(source: Source) -> bool:
    """Whether the decoder starts from random weights (debugging)."""
    return source.section is not None and source.section.decoder.random


def build_geometry(spec: EncoderSpec, connector: str, *, max_pixels: int | None) -> Geometry:
    """What this encoder and this connector make of an image, held to the pixel cap."""
    geometry = Geometry(
        mode="fixed", image_size=spec.image_size, patch_size=spec.patch_size, merge=connector_merge(connector)
    )
    geometry.check_cap(max_pixels)
    return geometry


def _must_match(section: ModelSection, description: Description, folder: Path) -> None:
    """A model given beside init_from must be the folder's."""
    layer = section.encoder.layer
    pairs = {
        "encoder.name": (section.encoder.name, description.encoder.name),
        "encoder.norm": (section.encoder.norm, description.encoder.norm),
        "connector": (section.connector, description.connector),
        "positions": (section.positions, description.positions),
    }
    if layer >= 0:
        pairs["encoder.layer"] = (layer, description.encoder.layer)
    for key, (given, held) in pairs.items():
        if given != held:
            raise ConfigError(
                f"mmds.model.{key} is {given!r}, but init_from {folder} holds {held!r}; leave mmds.model out to take the folder's"
            )
