"""From a config (or a model folder) to the parts of a run: sources first, then the light parts, then the decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from mmds.config_types import FIXED, ConnectorSection, DecoderSection, ModelSection, ResolutionSection
from mmds.errors import ConfigError
from mmds.geometry import NATIVE_PIXELS, Geometry, Grid, tile_grids
from mmds.model.connector import Connector, kind_of, queries_of
from mmds.model.connector_weights import load_connector
from mmds.model.decoder import Decoder, load_config, load_llm
from mmds.model.encoder import Encoder, EncoderSpec, build_encoder, encoder_from_spec
from mmds.model.encoder_sources import RANDOM
from mmds.model.folder import Description, load_part, read_description
from mmds.model.lora import attach, stored_adapters
from mmds.model.published import source_folder
from mmds.model.qualify import qualify

MAX_TILES = 4
"""Tiles of an image beside its overview, unless the config says other."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the parts of a run come from: a model folder, or the sections of a config. Exactly one is set.

    resolution: of this run; it need not be the folder's. positions: of this run.
    """

    folder: Path | None
    section: ModelSection | None
    resolution: ResolutionSection = FIXED
    positions: str = "1d"

    @property
    def decoder_name(self) -> str:
        """Hub name or folder of the decoder and its tokenizer."""
        if self.folder is not None:
            return str(self.folder / "decoder")
        assert self.section is not None
        return self.section.decoder.name


def find_source(init_from: str | None, section: ModelSection | None) -> Source:
    """Decide the source of all parts. A published LLaVA model is imported on the way, once a machine.

    Raises ConfigError when neither is given or when a given model differs from the folder, CheckpointError for a folder that is none.
    """
    if init_from is None:
        if section is None:
            raise ConfigError(
                "mmds.model: name the encoder, connector and decoder, or give mmds.init_from a model folder"
            )
        return Source(
            folder=None, section=section, resolution=section.resolution, positions=section.positions
        )
    folder = source_folder(init_from)
    if section is not None:
        _must_match(section, read_description(folder), folder)
    return folder_source(folder, None if section is None else section.resolution)


def folder_source(folder: Path, resolution: ResolutionSection | None = None) -> Source:
    """The parts of a model folder. resolution: another one than the folder's own."""
    description = read_description(folder)
    resolution = resolution or description.resolution
    return Source(folder=folder, section=None, resolution=resolution, positions=description.positions)


def build_light(source: Source, *, seed: int) -> tuple[Encoder, Connector]:
    """Encoder and connector in fp32 on the CPU, loaded or freshly initialised from `seed` (equal on every rank).

    The decoder's family is qualified for packed rows on the way, before any of its weights is read.
    """
    config = load_config(source.decoder_name)
    qualify(config, source.positions)
    torch.manual_seed(seed)
    if source.folder is not None:
        encoder = encoder_from_spec(read_description(source.folder).encoder)
        load_part(encoder, source.folder / "encoder")
        connector = _connector(source, encoder.spec)
        _load_connector(connector, source.folder)
    else:
        assert source.section is not None
        encoder = build_encoder(source.section.encoder)
        connector = _connector(source, encoder.spec)
        if source.section.connector_weights is not None:
            load_connector(connector, source.section.connector_weights)
    if runs_packed(source.resolution, encoder.spec):
        encoder.must_pack()
    return encoder, connector


def describe_light(source: Source) -> tuple[Encoder, Connector]:
    """Encoder and connector as `build_light` would make them, with random weights and nothing read but configs."""
    if source.folder is not None:
        encoder = encoder_from_spec(read_description(source.folder).encoder)
    else:
        assert source.section is not None
        encoder = build_encoder(replace(source.section.encoder, pretrained=RANDOM))
    if runs_packed(source.resolution, encoder.spec):
        encoder.must_pack()
    return encoder, _connector(source, encoder.spec)


def _connector(source: Source, encoder: EncoderSpec) -> Connector:
    """The connector of a source, freshly initialised."""
    if source.folder is not None:
        description = read_description(source.folder)
        section, width = description.connector, description.decoder_width
    else:
        assert source.section is not None
        section = source.section.connector
        width = int(load_config(source.decoder_name).get_text_config().hidden_size)
    separator = source.resolution.name == "anyres"
    return Connector(section, encoder_width=encoder.width, decoder_width=width, separator=separator)


def _load_connector(connector: Connector, folder: Path) -> None:
    """The folder's connector; a run that begins or ends to have tiles begins or drops their separator."""
    fresh, connector.separator = connector.separator, None
    if read_description(folder).resolution.name == "anyres":
        connector.separator = nn.Parameter(torch.empty(read_description(folder).decoder_width))
    load_part(connector, folder / "connector")
    if fresh is None:
        connector.separator = None
    elif connector.separator is None:
        connector.separator = fresh


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
    return Decoder(llm, source.positions)


def is_random(source: Source) -> bool:
    """Whether the decoder starts from random weights (debugging)."""
    return source.section is not None and source.section.decoder.random


def build_geometry(
    spec: EncoderSpec,
    connector: ConnectorSection,
    *,
    max_pixels: int | None,
    resolution: ResolutionSection = FIXED,
    positions: str = "1d",
) -> Geometry:
    """What this encoder and this connector make of an image, held to the pixel cap.

    Raises ConfigError when the modes, the parts and the cap do not fit each other.
    """
    kind, cell = kind_of(connector), spec.patch_size
    grids: tuple[Grid, ...] = ()
    if resolution.name == "anyres":
        given = [tuple(int(n) for n in grid.split("x")) for grid in resolution.grids or ()]
        grids = tuple((g[0], g[1]) for g in given) or tile_grids(resolution.max_tiles or MAX_TILES)
    least = 4 * (cell * kind.merge) ** 2 if resolution.min_pixels is None else resolution.min_pixels
    native = resolution.name == "native"
    if native and resolution.min_pixels is None and max_pixels is not None:
        least = min(least, max_pixels)
    return Geometry(
        mode=resolution.name,
        image_size=resolution.size or spec.image_size,
        patch_size=cell,
        merge=kind.merge,
        queries=queries_of(connector),
        pad=resolution.fit == "pad",
        grids=grids,
        min_pixels=least if native else 0,
        max_pixels=max_pixels if native and max_pixels is not None else NATIVE_PIXELS,
        packed=runs_packed(resolution, spec),
        positions=positions,
        interpolation=spec.interpolation,
        fill=tuple(int(255 * x) for x in spec.mean),  # type: ignore[arg-type]
    ).capped(max_pixels)


def geometry_of(
    source: Source, encoder: Encoder, connector: Connector, *, max_pixels: int | None
) -> Geometry:
    """`build_geometry` of a run's parts."""
    return build_geometry(
        encoder.spec,
        connector.section,
        max_pixels=max_pixels,
        resolution=source.resolution,
        positions=source.positions,
    )


def runs_packed(resolution: ResolutionSection, spec: EncoderSpec) -> bool:
    """Whether images reach the encoder as patches of any grid, not as squares of the tower's own size."""
    forced = resolution.size is not None and resolution.size != spec.image_size
    return resolution.name == "native" or forced or spec.rope


def _must_match(section: ModelSection, description: Description, folder: Path) -> None:
    """A model given beside init_from must be the folder's."""
    if section.connector_weights is not None:
        raise ConfigError(
            f"mmds.model.connector_weights: with init_from the connector is that of {folder}; leave one of the two out, as in\n"
            "    --set mmds.model.connector_weights=null"
        )
    layer = section.encoder.layer
    pairs = {
        "encoder.name": (section.encoder.name, description.encoder.name),
        "encoder.norm": (section.encoder.norm, description.encoder.norm),
        "encoder.rope": (section.encoder.rope, description.encoder.rope),
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
