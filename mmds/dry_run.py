"""`train.py --dry-run`: what the run would do, printed without weights, without a process group, in seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch
from transformers import AutoModelForCausalLM

from mmds.config import Config, rows_per_step
from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.loader import load_sample
from mmds.data.mixture import Mixture, ensure_mixture, open_mixture, plan_run
from mmds.data.rows import IGNORE, Row, build_row
from mmds.engine.schedule import warmup_steps
from mmds.geometry import Geometry
from mmds.model.build import Source, build_geometry, describe_light
from mmds.model.connector import Connector
from mmds.model.decoder import load_config, load_tokenizer
from mmds.model.encoder import Encoder
from mmds.model.qualify import qualify
from mmds.planner import RunPlan
from mmds.stages import assign_rates, check_text_share


def dry_run(config: Config, source: Source, world: int) -> None:
    """Print the resolved run, what trains, the step's size and the first row with its supervised tokens marked."""
    print(json.dumps(config.resolved, indent=2))
    decoder_config = load_config(source.decoder_name)
    qualify(decoder_config)
    with torch.device("meta"):
        llm = AutoModelForCausalLM.from_config(decoder_config)
    encoder, connector = describe_light(source)
    print(_trainable_table(config, encoder, connector, llm))
    tokenizer = ChatTokenizer(load_tokenizer(source.decoder_name))
    ensure_mixture(config.data, tokenizer)
    mixture = open_mixture(config.data, tokenizer.fingerprint)
    check_text_share(mixture.text_only_share, config.stage)
    geometry = build_geometry(encoder.spec, connector.name, max_pixels=config.max_pixels)
    rows, accumulation = rows_per_step(config, world)
    plan = plan_run(config, mixture, geometry, rows=rows)
    print(_step_table(config, plan, mixture, geometry, world, accumulation))
    first = [
        load_sample(mixture, int(i), geometry, encoder.spec.interpolation)
        for i in plan.rows_for(0, 0, 0, world=world)
    ]
    print(marked_row(build_row(first, geometry), tokenizer))


def marked_row(row: Row, tokenizer: ChatTokenizer) -> str:
    """The row as text: supervised tokens between » and «, each run of slots as <image: n slots>, samples by line."""
    pieces, slots = [], set(row.slots.tolist())
    bounds = row.cu_seqlens.tolist()
    for key, start, end in zip(row.sample_keys, bounds, bounds[1:], strict=False):
        pieces.append(f"\n[{key}] {end - start} tokens\n")
        for kind, ids in _runs(row, range(start, end), slots):
            text = f"<image: {len(ids)} slots>" if kind == "slot" else tokenizer.decode(ids)
            pieces.append(f"»{text}«" if kind == "supervised" else text)
    return "first row of rank 0, supervised tokens between » and «:" + "".join(pieces)


def _runs(row: Row, positions: Iterable[int], slots: set[int]) -> list[tuple[str, list[int]]]:
    runs: list[tuple[str, list[int]]] = []
    for t in positions:
        kind = "slot" if t in slots else "supervised" if int(row.labels[t]) != IGNORE else "context"
        if not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append(int(row.input_ids[t]))
    return runs


def _trainable_table(config: Config, encoder: Encoder, connector: Connector, llm: torch.nn.Module) -> str:
    sizes = {f"encoder.{n}": p.numel() for n, p in encoder.named_parameters()}
    sizes |= {f"connector.{n}": p.numel() for n, p in connector.named_parameters()}
    sizes |= {f"decoder.llm.{n}": p.numel() for n, p in llm.named_parameters()}
    rates = assign_rates(sizes, config.rates)
    lines = [f"{'part':<10} {'parameters':>15} {'rate':>10}"]
    rows: dict[tuple[str, float | None], int] = {}
    for name, rate in rates.items():
        rows[name.split(".")[0], rate] = rows.get((name.split(".")[0], rate), 0) + sizes[name]
    for (part, rate), count in rows.items():
        lines.append(f"{part:<10} {count:>15,} {'frozen' if rate is None else f'{rate:g}':>10}")
    return "\n".join(lines)


def _step_table(
    config: Config, plan: RunPlan, mixture: Mixture, geometry: Geometry, world: int, accumulation: int
) -> str:
    first = plan.epoch(0)
    tokens = int(mixture.lengths(geometry)[first.samples].sum())
    supervised = sum(int(shards.supervised.sum()) for shards in mixture.sets)
    facts = {
        "ranks": world,
        "rows a step": f"{plan.rows_per_step} = {world} ranks x {accumulation} micro-steps",
        "tokens a step": f"{tokens / first.steps:,.0f} of {plan.rows_per_step * config.data.row_tokens:,}",
        "samples a step": f"{len(first.samples) / first.steps:,.1f}",
        "visual tokens an image": geometry.plan(geometry.image_size, geometry.image_size).visual_tokens,
        "samples": f"{len(mixture):,}, text-only {mixture.text_only_share:.1%}, too long {len(plan.dropped):,}",
        "supervised tokens": f"{supervised:,} an epoch",
        "steps": f"{plan.total_steps:,}, warm-up {warmup_steps(config.schedule, plan.total_steps):,}",
        "clipping": f"{config.clipping:g}" if config.clipping else "off",
        "precision": "bf16, fp32 masters" if config.bf16 else "fp32",
        "recompute": "every block that back-propagates" if config.recompute else "off",
    }
    return "\n".join(f"{key:<24}{value}" for key, value in facts.items())
