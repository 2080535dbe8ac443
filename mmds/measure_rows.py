"""Time of random rows: forward and backward of a run's model with random weights on this machine, one process.

Rows are drawn so that what decides their cost varies independently: patches, size of images, tokens, length of samples, supervised
tokens. Encoder and connector both cost by the patch and cannot be told apart by whole rows, so the connector is timed alone too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from mmds import cpu_bf16
from mmds.calibration import RATES, Floats, work
from mmds.config import Config
from mmds.cost import CostModel, Sums, cost_model, row_sums
from mmds.data.rows import IMAGE_MARKER, LoadedSample, Row, build_row, to_device
from mmds.engine.assemble import set_recompute
from mmds.errors import ConfigError
from mmds.geometry import Geometry, ImagePlan
from mmds.model.build import Source, describe_light, geometry_of, runs_packed
from mmds.model.connector import Connector
from mmds.model.decoder import Decoder, load_config
from mmds.model.encoder import Encoder, encoder_from_spec
from mmds.model.last_blocks import last_blocks
from mmds.model.mllm import FrozenEncoder, Mllm
from mmds.model.qualify import qualify
from mmds.model.recompute import non_reentrant
from mmds.model.shapes import model_shape, training_of
from mmds.stages import assign_rates, with_last_blocks

TEXT_ONLY = 0.15
"""Share of rows without images."""

ALONE = 4
"""Times the images of a row that the connector is timed with alone, so that what a call costs of itself does not show."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A run's model on its device, and what it should cost.

    frozen: the encoder when it does not train, else None. cost: in FLOPs, of these blocks. vocabulary: token ids.
    """

    model: Mllm
    encoder: Encoder
    frozen: FrozenEncoder | None
    geometry: Geometry
    cost: CostModel
    vocabulary: int
    device: torch.device
    dtype: torch.dtype

    def sums(self, row: Row) -> Sums:
        """Of a row, with the encoder input that a row without images sends."""
        return row_sums(
            patches=_pieces(row.plans),
            segments=row.cu_seqlens.diff().tolist(),
            supervised=row.supervised,
            dummy_patches=self.geometry.dummy.patches,
        )


def build_bench(config: Config, source: Source, device: torch.device, *, blocks: int | None = None) -> Bench:
    """The run's parts with random weights; what trains, and what is recomputed, is what the config says.

    blocks: of encoder and of decoder, at most; None = all. Raises ConfigError for what the cost model does not know.
    """
    if config.stage.lora is not None:
        raise ConfigError(
            "mmds.stage.lora: a calibration does not measure adapters; calibrate without them\n"
            "    --set mmds.stage.lora=null"
        )
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    if cpu_bf16.needed(device, dtype):
        cpu_bf16.widen_products()
    torch.manual_seed(config.seed)
    encoder, connector = describe_light(source)
    encoder = _shorter_encoder(encoder, source, blocks)
    llm = _random_llm(source, dtype, blocks)
    geometry = geometry_of(source, encoder, connector, max_pixels=config.max_pixels)
    decoder = Decoder(llm, source.positions)
    named = {
        f"{part}.{name}": parameter
        for part, module in (("encoder", encoder), ("connector", connector), ("decoder", decoder))
        for name, parameter in module.named_parameters()
    }
    table = with_last_blocks(config.rates, last_blocks(encoder, config.stage.encoder_blocks))
    rates = assign_rates(named, table)
    for name, parameter in named.items():
        parameter.requires_grad_(rates[name] is not None)
    training = training_of(encoder, connector, llm, rates)
    cost = cost_model(
        model_shape(encoder, connector, llm), training, recompute=config.recompute, causal_half=True
    )
    trains = any(rate is not None for name, rate in rates.items() if name.startswith("encoder."))
    model = Mllm(
        connector=connector, decoder=decoder, encoder=encoder if trains else None, weighting=config.weighting
    )
    model.to(device=device, dtype=dtype).train()
    if config.recompute is not None:
        set_recompute(model, config.recompute, non_reentrant)
    return Bench(
        model=model,
        encoder=encoder,
        frozen=None if trains else FrozenEncoder(encoder, device=device, dtype=dtype),
        geometry=geometry,
        cost=cost,
        vocabulary=int(load_config(source.decoder_name).get_text_config().vocab_size),
        device=device,
        dtype=dtype,
    )


def _shorter_encoder(encoder: Encoder, source: Source, blocks: int | None) -> Encoder:
    """The encoder up to an earlier feature layer, if it has more blocks than that and blocks are what its layers count."""
    if blocks is None or encoder.unpackable or encoder.spec.layer < blocks:
        return encoder
    shorter = encoder_from_spec(replace(encoder.spec, layer=blocks - 1))
    if runs_packed(source.resolution, shorter.spec):
        shorter.must_pack()
    return shorter


def _random_llm(source: Source, dtype: torch.dtype, layers: int | None) -> PreTrainedModel:
    """The decoder's first layers with random weights, from its config alone."""
    config: Any = deepcopy(load_config(source.decoder_name))
    qualify(config, source.positions)
    text = config.get_text_config()
    held = int(text.num_hidden_layers)
    if layers is not None and layers < held:
        for key, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == held:  # one entry a layer, such as layer_types
                setattr(text, key, value[:layers])
        text.num_hidden_layers = layers
    config.use_cache = False
    llm: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return llm


def random_rows(bench: Bench, count: int, *, row_tokens: int, seed: int) -> list[Row]:
    """Rows of about a quarter to all of `row_tokens` tokens (more where one image is larger) whose sizes vary independently of each other."""
    rng = np.random.default_rng(seed)
    return [_random_row(bench, rng, row_tokens, number) for number in range(count)]


def _random_row(bench: Bench, rng: np.random.Generator, row_tokens: int, number: int) -> Row:
    """Tokens from a quarter of the row up; of these any share visual, images of one size, samples of one length, one share supervised."""
    geometry = bench.geometry
    tokens = int(row_tokens * rng.uniform(0.25, 1.0))
    visual = 0.0 if rng.random() < TEXT_ONLY else rng.uniform(0.1, 0.9)
    area = np.exp(rng.uniform(np.log(max(geometry.min_pixels, 1024)), np.log(geometry.max_pixels)))
    images: list[tuple[tuple[int, int], ImagePlan]] = []
    left = visual * tokens
    while visual:
        ratio = np.exp(rng.uniform(np.log(0.5), np.log(2.0)))
        size = (max(1, int((area * ratio) ** 0.5)), max(1, int((area / ratio) ** 0.5)))
        plan = geometry.plan(*size)
        left -= plan.visual_tokens
        if left < 0 and images:
            break
        images.append((size, plan))
    text = max(8, tokens - sum(plan.visual_tokens for _, plan in images))
    samples = int(np.exp(rng.uniform(0, np.log(max(2, text // 16)))))
    share = rng.uniform(0.02, 1.0)
    owner = rng.integers(0, samples, len(images))
    lengths = np.maximum(2, rng.multinomial(text, rng.dirichlet(np.full(samples, 4.0))))
    loaded = []
    for sample in range(samples):
        own = [image for image, its in zip(images, owner, strict=True) if its == sample]
        ids = np.concatenate(
            [
                np.full(len(own), IMAGE_MARKER, np.int32),
                rng.integers(0, bench.vocabulary, int(lengths[sample]), dtype=np.int32),
            ]
        )
        supervised = (rng.random(len(ids)) < share) & (ids != IMAGE_MARKER)
        supervised[-1] = True
        loaded.append(
            LoadedSample(
                key=f"{number}.{sample}",
                ids=ids,
                supervised=supervised,
                images=tuple(rng.integers(0, 256, plan.pixel_shape, dtype=np.uint8) for _, plan in own),
                image_sizes=tuple(size for size, _ in own),
                image_paths=tuple(f"random-{k}" for k in range(len(own))),
            )
        )
    return build_row(loaded, geometry)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """features [R, COLUMNS] as `calibration.work` has them, sums (each [R]) and seconds [R] of rows; the same of the connector alone."""

    sums: Sums
    features: Floats
    seconds: Floats
    alone_features: Floats
    alone_seconds: Floats


def time_rows(
    bench: Bench, rows: Sequence[Row], *, repeats: int, seed: int, say: Callable[[str], None] = print
) -> Timed:
    """Least seconds of each row over `repeats` passes, each in another random order, so that drift does not look like size.

    Two rows run before any is timed. Seconds: of the clock on a GPU, which is waited for; on a CPU CPU seconds of this process, which
    other processes disturb less and which with one thread are the seconds of computing.
    """
    each = [bench.sums(row) for row in rows]
    features = [work(bench.cost, sums) for sums in each]
    jobs: list[Callable[[], float]] = [_whole(bench, row) for row in rows]
    pictured = [row for row in rows if row.plans][: max(4, len(rows) // 8)]
    alone = [_alone_features(bench, row) for row in pictured]
    jobs += [_alone(bench, row) for row in pictured]
    largest = int(np.argmax([done.sum() for done in features]))
    for index in (largest, 0):
        jobs[index]()
    least = np.full(len(jobs), np.inf)
    rng = np.random.default_rng(seed)
    for number in range(repeats):
        for done, index in enumerate(rng.permutation(len(jobs)).tolist()):
            least[index] = min(least[index], jobs[index]())
            if index < len(rows):
                say(
                    f"pass {number + 1}/{repeats}, {done + 1}/{len(jobs)}: {int(each[index].tokens)} tokens, "
                    f"{int(each[index].patches)} patches, {least[index]:.4f} s"
                )
    columns = {f.name: np.stack([getattr(sums, f.name) for sums in each]) for f in fields(Sums)}
    return Timed(
        sums=Sums(**columns),
        features=np.stack(features),
        seconds=least[: len(rows)],
        alone_features=np.stack(alone) if alone else np.zeros((0, features[0].size)),
        alone_seconds=least[len(rows) :],
    )


def _whole(bench: Bench, row: Row) -> Callable[[], float]:
    """A function that runs the row forward and backward and returns its seconds; gradients are freed outside of the time."""

    def run() -> float:
        placed = to_device(row, bench.device)
        start = _now(bench.device)
        features = None if bench.frozen is None else bench.frozen(placed)
        loss, _ = bench.model(placed, features)
        loss.backward()
        seconds = _now(bench.device) - start
        bench.model.zero_grad(set_to_none=True)
        return seconds

    return run


def _alone(bench: Bench, row: Row) -> Callable[[], float]:
    """As `_whole`, for the connector alone, with the images of the row several times."""
    connector: Connector = bench.model.connector
    plans = row.plans * ALONE
    patches, width = sum(plan.patches for plan in plans), bench.encoder.spec.width

    def run() -> float:
        features = torch.randn(patches, width, device=bench.device, dtype=bench.dtype)
        features.requires_grad_(bench.frozen is None)
        start = _now(bench.device)
        visual: Tensor = connector(features, plans)
        if visual.requires_grad:
            visual.backward(torch.ones_like(visual))
        seconds = _now(bench.device) - start
        connector.zero_grad(set_to_none=True)
        return seconds

    return run


def _alone_features(bench: Bench, row: Row) -> Floats:
    """`calibration.work` of `_alone`: nothing but the connector's FLOPs."""
    sums = row_sums(patches=_pieces(row.plans * ALONE), segments=[0], supervised=0)
    nothing = np.zeros_like(work(bench.cost, sums))
    nothing[RATES.index("connector")] = bench.cost.connector.of(sums)
    return nothing


def _pieces(plans: Sequence[ImagePlan]) -> list[int]:
    """Patches of each encoder input of these images."""
    return [plan.grid[0] * plan.grid[1] for plan in plans for _ in range(plan.pieces)]


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
