"""The typed sections of `"mmds"`: every key with type, unit, default and range (docs/config.md in code)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


def about(
    doc: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    size: int | None = None,
    path: bool = False,
    shorthand: bool = False,
    hint: str = "",
) -> Mapping[str, Any]:
    """What a field holds: meaning with unit, bounds of its number(s), items of its list, and how it is read.

    `least` and `most` are allowed, `above` is not. `path`: `~` and `${VAR}` are expanded. `shorthand`: one string stands for
    `{"name": string}`. `hint`: what to say to a number that was perhaps meant in another unit.
    """
    return dict(
        doc=doc,
        least=least,
        above=above,
        most=most,
        size=size,
        path=path,
        shorthand=shorthand,
        hint=hint,
    )


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """Small matrices beside the decoder's weights, which train in the place of the weights (LoRA, Hu et al. 2021)."""

    rank: int = field(default=16, metadata=about("inner size of the two matrices of an adapter", least=1))
    alpha: float | None = field(
        default=None,
        metadata=about("an adapter's output is scaled by alpha / rank; null = 2 x rank", above=0),
    )
    dropout: float = field(
        default=0.0,
        metadata=about(
            "share of an adapter's inputs set to 0 in training", least=0, most=0.9, hint="5 % is 0.05"
        ),
    )
    targets: tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "endings of the names of the linear modules that get adapters; null = all in the decoder's blocks"
        ),
    )
    keep: bool = field(
        default=False,
        metadata=about(
            "true: the model folder has the weights as they were and the adapters beside them; false: both merged"
        ),
    )

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by."""
        return (2.0 * self.rank if self.alpha is None else self.alpha) / self.rank


@dataclass(frozen=True, kw_only=True)
class StageSection:
    """Which row of the stage table, and this run's departures from it."""

    name: Literal["align", "pretrain", "instruct", "finetune"] = field(
        metadata=about("row of the stage table: what trains, and how fast")
    )
    rates: dict[str, float | None] = field(
        default_factory=dict,
        metadata=about(
            "parameter pattern -> learning rate, or null = frozen; tried before the row's patterns",
            most=1,
        ),
    )
    min_text_only: float | None = field(
        default=None,
        metadata=about(
            "least share of text-only samples; null = the row's", least=0, most=1, hint="5 % is 0.05"
        ),
    )
    max_decoder_rate: float | None = field(
        default=None,
        metadata=about("highest rate that a decoder pattern may have; null = the row's", least=0, most=1),
    )
    lora: LoraSection | None = field(
        default=None,
        metadata=about("adapters train in the place of the decoder's weights; {} = with the defaults"),
    )
    encoder_blocks: int | None = field(
        default=None,
        metadata=about(
            "only so many blocks of the encoder train, the last ones; null = as the row says", least=1
        ),
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
    rope: bool = field(
        default=False,
        metadata=about("rotate queries and keys by row and column, beside the tower's own positions"),
    )
    activation: Literal["gelu", "quick_gelu"] | None = field(
        default=None, metadata=about("declared when weights come by path; null = the tower's own config")
    )
    mean: tuple[float, ...] | None = field(
        default=None,
        metadata=about("channel means, RGB; null = the tower's own; with std", least=0, most=1, size=3),
    )
    std: tuple[float, ...] | None = field(
        default=None,
        metadata=about("channel deviations, RGB; null = the tower's own; with mean", above=0, most=1, size=3),
    )


@dataclass(frozen=True, kw_only=True)
class DecoderSection:
    """A Hugging Face causal language model."""

    name: str = field(metadata=about("hub name or local folder", path=True))
    random: bool = field(default=False, metadata=about("fresh weights from its config, none loaded"))


@dataclass(frozen=True, kw_only=True)
class ConnectorSection:
    """What turns encoder vectors into visual tokens."""

    name: Literal["linear", "mlp2x", "merge_mlp", "pixel_shuffle", "resampler"] = field(
        metadata=about(
            "linear, mlp2x: a token a patch; merge_mlp, pixel_shuffle: one for 2 x 2; resampler: a fixed number an image"
        )
    )
    queries: int | None = field(
        default=None, metadata=about("visual tokens of an image; null = 64; resampler only", least=1)
    )


@dataclass(frozen=True, kw_only=True)
class ResolutionSection:
    """How an image of any size becomes encoder input."""

    name: Literal["fixed", "anyres", "native"] = field(
        metadata=about(
            "fixed: one square; anyres: overview and tiles; native: its own aspect, near its own size"
        )
    )
    size: int | None = field(
        default=None,
        metadata=about("pixels a side of the square or tile; null = the tower's own; fixed, anyres", least=1),
    )
    fit: Literal["resize", "pad"] = field(
        default="resize",
        metadata=about("distort to the square, or pad to it with the mean colour; fixed only"),
    )
    max_tiles: int | None = field(
        default=None, metadata=about("most tiles beside the overview; null = 4; anyres only", least=2)
    )
    grids: tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            'grids of tiles to choose from, "ROWSxCOLUMNS"; null = all of 2 to max_tiles tiles; anyres only'
        ),
    )
    min_pixels: int | None = field(
        default=None,
        metadata=about(
            "fewest pixels (height x width) of a resized image; null = 4 visual tokens; native only", least=1
        ),
    )


FIXED = ResolutionSection(name="fixed")
"""What a model has when it says nothing: every image becomes the tower's own square."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The three parts and how images and positions enter."""

    encoder: EncoderSection = field(metadata=about("vision tower"))
    connector: ConnectorSection = field(
        metadata=about("encoder vectors -> visual tokens: its name, or an object", shorthand=True)
    )
    connector_weights: str | None = field(
        default=None,
        metadata=about(
            "the connector's weights: original LLaVA's mm_projector.bin, or the connector/ of a model folder; null = fresh",
            path=True,
        ),
    )
    decoder: DecoderSection = field(metadata=about("language model: its name, or an object", shorthand=True))
    resolution: ResolutionSection = field(
        default=FIXED,
        metadata=about(
            "image size -> encoder input: a mode, or an object; without it, fixed", shorthand=True
        ),
    )
    positions: Literal["1d", "mrope"] = field(
        default="1d",
        metadata=about(
            "1d: position ids count tokens; mrope: visual tokens have time, row and column; from 0 in each sample"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class MixEntry:
    """One source of samples."""

    name: str = field(metadata=about("shown in logs; unique in the mix"))
    path: str = field(metadata=about("shard folder, or a raw .json / .jsonl file (prepared once)", path=True))
    images: str | None = field(
        default=None, metadata=about("folder that image paths of a raw file are relative to", path=True)
    )
    weight: float | None = field(
        default=None,
        metadata=about(
            "share of the samples, relative to the other entries' weights; every entry or none, with schedule.steps",
            least=1e-6,
        ),
    )
    epochs: float | None = field(
        default=None,
        metadata=about(
            "how often each of its samples comes in an epoch of the run; 0.5 takes half of them; null = 1",
            least=1e-6,
            most=1000,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """What is read and how rows are filled."""

    mix: tuple[MixEntry, ...] = field(metadata=about("sources: by weight, or each so many times an epoch"))
    row_tokens: int = field(metadata=about("most tokens in a row, visual tokens included", least=1))
    max_pixels: int | None = field(
        default=None,
        metadata=about(
            "most pixels (height x width) the encoder receives for one image; null = the stage's",
            least=1024,
            hint="an area: a side of 336 pixels is 336 x 336 = 112896",
        ),
    )
    holdout: float = field(
        default=0.0,
        metadata=about(
            "share of the samples kept out of training, with every sample that has a picture of theirs",
            least=0,
            most=0.5,
        ),
    )
    on_bad_sample: Literal["raise", "skip"] = field(
        default="raise", metadata=about("a sample that cannot be read: stop, or count, list and leave out")
    )
    on_long_sample: Literal["drop", "raise"] = field(
        default="drop", metadata=about("a sample above a cap of a row alone: count and leave out, or stop")
    )
    workers: int = field(
        default=4, metadata=about("loader processes per rank; 0 = in the training process", least=0)
    )


@dataclass(frozen=True, kw_only=True)
class PlannerSection:
    """Which samples share a row and a step, so that all ranks are equally busy."""

    scheme: Literal["cost", "token_budget", "resolution_bucket"] = field(
        default="cost",
        metadata=about(
            "cost: rows equal in encoder and decoder cost; token_budget: in tokens alone; resolution_bucket: steps of like images"
        ),
    )
    objective: Literal["zero3", "step"] | None = field(
        default=None,
        metadata=about(
            "cost: equal in every micro-step (zero3) or over the step (step); null = by ZeRO's stage"
        ),
    )
    row_patches: int | None = field(
        default=None,
        metadata=about("cost: most patches in a row; null = 1.25 x the mean of a full row", least=1),
    )
    row_images: int | None = field(
        default=None, metadata=about("cost: most images in a row; null = any number", least=1)
    )
    last_step: Literal["share", "drop", "repeat"] = field(
        default="share",
        metadata=about(
            "an epoch's last samples: shared out over a whole step, left out, or filled up with its first ones"
        ),
    )
    calibration: str | None = field(
        default=None,
        metadata=about("cost: file of scripts/calibrate.py; null = costs are FLOPs", path=True),
    )
    rehearse: bool = field(
        default=True,
        metadata=about(
            "before the first step run the row that needs most memory, and discard what comes of it"
        ),
    )
    measure_wait: int = field(
        default=50,
        metadata=about("every n-th step measure how long ranks wait for one another; 0 = never", least=0),
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """How long, and how the rates of the table are scaled over the steps."""

    epochs: int | None = field(
        default=None,
        metadata=about("passes over the mix; this or steps", least=1, hint="for a part of a pass give steps"),
    )
    steps: int | None = field(default=None, metadata=about("optimizer steps; this or epochs", least=1))
    warmup_ratio: float | None = field(
        default=None,
        metadata=about(
            "share of the steps with rising rate; this or warmup_steps",
            least=0,
            most=1,
            hint="for a number of steps give warmup_steps",
        ),
    )
    warmup_steps: int | None = field(
        default=None,
        metadata=about(
            "steps with rising rate (0 = none); this or warmup_ratio",
            least=0,
            hint="for a share of the steps give warmup_ratio",
        ),
    )
    decay: Literal["cosine", "linear", "constant"] = field(
        default="cosine", metadata=about("shape after the warm-up; cosine and linear end at 0")
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When to save, and how many to keep."""

    every: int | None = field(
        default=None, metadata=about("optimizer steps between saves; null = none on the way", least=1)
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

    stage: StageSection = field(
        metadata=about("row of the stage table: its name, or an object", shorthand=True)
    )
    init_from: str | None = field(
        default=None,
        metadata=about(
            "model folder, run folder, or LLaVA (llava-hf/ name or folder) to start from", path=True
        ),
    )
    output_dir: str = field(metadata=about("run folder", path=True))
    seed: int = field(
        default=42, metadata=about("of sample order, fresh weights and dropout", least=0, most=2**32 - 1)
    )
    model: ModelSection | None = field(
        default=None, metadata=about("the three parts; may be absent with init_from")
    )
    data: DataSection = field(metadata=about("what is read, and how rows are filled"))
    planner: PlannerSection = field(
        default_factory=PlannerSection, metadata=about("which samples share a row and a step")
    )
    schedule: ScheduleSection = field(metadata=about("how long, and the shape of the rates"))
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
    checkpoint: CheckpointSection = field(
        default_factory=CheckpointSection, metadata=about("when to save, and how many to keep")
    )
