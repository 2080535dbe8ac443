"""The typed sections of `"mmds"`: every key with type, unit, default and range (docs/config.md in code)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


def about(
    doc: str,
    *,
    least: float | None = None,
    most: float | None = None,
    path: bool = False,
    shorthand: bool = False,
    later: tuple[str, ...] = (),
) -> Mapping[str, Any]:
    """What a field holds: meaning with unit, inclusive bounds of its number(s), and how it is read.

    `path`: `~` and `${VAR}` are expanded. `shorthand`: one string stands for `{"name": string}`.
    `later`: documented values that are refused as not yet supported.
    """
    return {"doc": doc, "least": least, "most": most, "path": path, "shorthand": shorthand, "later": later}


@dataclass(frozen=True, kw_only=True)
class StageSection:
    """Which row of the stage table, and this run's departures from it."""

    name: Literal["align", "pretrain", "instruct"] = field(
        metadata=about("row of the stage table", later=("finetune",))
    )
    rates: dict[str, float | None] = field(
        default_factory=dict,
        metadata=about(
            "parameter pattern -> learning rate, or null = frozen; tried before the row's patterns", most=1
        ),
    )
    min_text_only: float | None = field(
        default=None,
        metadata=about("least share of text-only samples (0..1); null = the row's", least=0, most=1),
    )
    max_decoder_rate: float | None = field(
        default=None,
        metadata=about("highest rate that a decoder pattern may have; null = the row's", least=0, most=1),
    )


@dataclass(frozen=True, kw_only=True)
class EncoderSection:
    """An open_clip vision tower."""

    name: str = field(metadata=about("open_clip model name, or local-dir:PATH", path=True))
    pretrained: str | None = field(
        default=None,
        metadata=about(
            'open_clip tag, weight file, or "random"; null only with local-dir: (its own)', path=True
        ),
    )
    layer: int = field(
        default=-2, metadata=about("block whose output is taken: 0 = first, -1 = last, -2 = last but one")
    )
    norm: bool = field(default=False, metadata=about("apply the tower's final norm to that output"))
    activation: Literal["gelu", "quick_gelu"] | None = field(
        default=None, metadata=about("declared when weights come by path; null = the tower's own config")
    )
    mean: tuple[float, ...] | None = field(
        default=None,
        metadata=about("3 channel means (RGB, of values 0..1); null = the tower's own", least=0, most=1),
    )
    std: tuple[float, ...] | None = field(
        default=None,
        metadata=about("3 channel deviations (RGB, of values 0..1); null = the tower's own", most=1),
    )


@dataclass(frozen=True, kw_only=True)
class DecoderSection:
    """A Hugging Face causal language model."""

    name: str = field(metadata=about("hub name or local folder", path=True))
    random: bool = field(default=False, metadata=about("fresh weights from its config, none loaded"))


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The three parts and how images and positions enter."""

    encoder: EncoderSection = field(metadata=about("vision tower"))
    connector: Literal["linear", "mlp2x", "merge_mlp"] = field(
        metadata=about("encoder vectors -> visual tokens", later=("resampler",))
    )
    decoder: DecoderSection = field(metadata=about("language model: name or {name, random}", shorthand=True))
    resolution: Literal["fixed"] = field(
        default="fixed", metadata=about("how an image is resized", later=("anyres", "native"))
    )
    positions: Literal["1d"] = field(default="1d", metadata=about("position ids in a row", later=("mrope",)))


@dataclass(frozen=True, kw_only=True)
class MixEntry:
    """One source of samples."""

    name: str = field(metadata=about("shown in logs; unique in the mix"))
    path: str = field(metadata=about("shard folder, or a raw .json/.jsonl file", path=True))
    images: str | None = field(
        default=None, metadata=about("folder that image paths of a raw file are relative to", path=True)
    )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """What is read and how rows are filled."""

    mix: tuple[MixEntry, ...] = field(metadata=about("sources; every sample of each once an epoch"))
    row_tokens: int = field(metadata=about("most tokens in a row, visual tokens included", least=1))
    max_pixels: int | None = field(
        default=None,
        metadata=about(
            "most pixels (height x width) the encoder receives for one image; null = the row's", least=1
        ),
    )
    on_bad_sample: Literal["raise", "skip"] = field(
        default="raise", metadata=about("a sample that cannot be read: stop, or count and leave out")
    )
    on_long_sample: Literal["drop", "raise"] = field(
        default="drop", metadata=about("a sample longer than row_tokens: count and leave out, or stop")
    )
    workers: int = field(
        default=4, metadata=about("loader processes per rank; 0 = in the training process", least=0)
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """How long, and how the rates of the table are scaled over the steps."""

    epochs: int | None = field(default=None, metadata=about("passes over the mix (or give steps)", least=1))
    steps: int | None = field(default=None, metadata=about("optimizer steps (or give epochs)", least=1))
    warmup_ratio: float | None = field(
        default=None,
        metadata=about("share of the steps with rising rate (or give warmup_steps)", least=0, most=1),
    )
    warmup_steps: int | None = field(
        default=None, metadata=about("steps with rising rate (or give warmup_ratio)", least=0)
    )
    decay: Literal["cosine", "linear", "constant"] = field(
        default="cosine", metadata=about("shape after the warm-up; cosine and linear end at 0")
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When to save, and how many to keep."""

    every: int | None = field(
        default=None, metadata=about("optimizer steps between saves; null = none", least=1)
    )
    keep: int = field(default=2, metadata=about("newest checkpoints that stay on disk", least=1))


@dataclass(frozen=True, kw_only=True)
class RecomputeSection:
    """Which blocks recompute their activations in the backward pass, once `activation_checkpointing` is present."""

    encoder: int = field(
        default=1,
        metadata=about("every n-th block of the encoder, counted from the first; 0 = none", least=0),
    )
    connector: int = field(
        default=1, metadata=about("1 = the connector, which is one block; 0 = not", least=0, most=1)
    )
    decoder: int = field(
        default=1,
        metadata=about("every n-th block of the decoder, counted from the first; 0 = none", least=0),
    )


@dataclass(frozen=True, kw_only=True)
class MmdsSection:
    """The whole `"mmds"` object."""

    stage: StageSection = field(metadata=about("row name or {name, rates, min_text_only}", shorthand=True))
    init_from: str | None = field(
        default=None,
        metadata=about("model folder, run folder, or hub name that the parts start from", path=True),
    )
    output_dir: str = field(metadata=about("run folder", path=True))
    seed: int = field(
        default=42, metadata=about("of order, fresh weights and dropout", least=0, most=2**32 - 1)
    )
    model: ModelSection | None = field(default=None, metadata=about("may be absent with init_from"))
    data: DataSection = field(metadata=about("what is read"))
    schedule: ScheduleSection = field(metadata=about("how long"))
    weighting: Literal["token", "sample", "sqrt"] = field(
        default="token",
        metadata=about(
            "weight of a sample with n supervised tokens in the loss: n, 1, or the square root of n"
        ),
    )
    recompute: RecomputeSection | None = field(
        default=None,
        metadata=about("blocks that activation_checkpointing acts on; null = all that back-propagate"),
    )
    stop_after_skipped: int = field(
        default=5,
        metadata=about("steps in a row without an update (non-finite gradient) that end the run", least=1),
    )
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection, metadata=about("when to save"))
