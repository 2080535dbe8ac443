"""`train.py --dry-run`: what the run would do, printed without weights, without a process group, in seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from transformers import PreTrainedModel

from mmds.config import Config, rows_per_step
from mmds.config_types import LoraSection
from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.mixture import ensure_mixture
from mmds.data.row_maker import load_sample
from mmds.data.rows import IGNORE, Row, build_row
from mmds.engine.launch import launched_rank
from mmds.engine.schedule import warmup_steps
from mmds.geometry import Geometry
from mmds.model.build import Source, describe_light
from mmds.model.decoder import load_config, load_tokenizer
from mmds.model.encoder import describe_pruned
from mmds.model.lora import adapters_of, has_fused_experts, is_adapter
from mmds.model.qualify import qualify
from mmds.planner import RunPlan
from mmds.run_data import RunData, plan_data
from mmds.run_forecast import plan_facts
from mmds.run_outline import outline
from mmds.stages import PARTS
from mmds.text_tables import facts, table

WEIGHTINGS = {"token": "its supervised tokens", "sample": "1", "sqrt": "the root of its supervised tokens"}

USUAL_SIZES = ((336, 336), (640, 480), (1344, 896), (1700, 2200))
"""Width and height of images whose visual tokens are shown: a thumbnail, a photograph, a large one, a page."""

OTHER_RANKS = (1, 2, 4, 8, 16)
"""Rank counts whose step is shown when each count makes another step."""


def dry_run(config: Config, source: Source, world: int) -> None:
    """Print the resolved run, what trains, the step's size and the first row with its supervised tokens marked.

    world: ranks that the launcher started; the first of them prints. Raises what the run itself would, before it reads a weight.
    """
    if launched_rank():
        return
    print(json.dumps(config.resolved, indent=2))
    qualify(load_config(source.decoder_name), source.positions)
    encoder, connector = describe_light(source)
    tokenizer = ChatTokenizer(load_tokenizer(source.decoder_name))
    known = outline(config, source, encoder, connector)
    sizes, rates = known.sizes, known.rates
    print(f"\n{rate_table(sizes, rates)}\n\n{total_table(sizes, rates, encoder.pruned)}")
    print(f"pruned from the encoder: {describe_pruned(encoder.pruned)}")
    print(f"{known.exports}\n")
    ensure_mixture(config.data, tokenizer)
    data = plan_data(config, source, encoder, connector, tokenizer, world=world)
    print(_step_table(data))
    print(_engine_table(config, known.encoder_trains))
    if config.stage.lora is not None:
        print(_adapter_table(config.stage.lora, known.llm))
    print(f"\n{rank_table(config, world, samples_a_row=_samples_a_row(data.plan))}\n")
    samples = data.plan.rows_for(0, 0, 0, world=world).tolist()
    first = [load_sample(data.mixture, i, data.geometry) for i in samples]
    print(marked_row(build_row(first, data.geometry), tokenizer))


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


def rate_table(sizes: Mapping[str, int], rates: Mapping[str, float | None]) -> str:
    """Parameters of each part by their rate. sizes, rates: by parameter name; None = frozen."""
    counts: dict[tuple[str, float | None], int] = {}
    for name, rate in rates.items():
        key = name.split(".")[0], rate
        counts[key] = counts.get(key, 0) + sizes[name]
    rows = [(part, f"{n:,}", "frozen" if rate is None else f"{rate:g}") for (part, rate), n in counts.items()]
    return table(("part", "parameters", "rate"), rows)


def total_table(
    sizes: Mapping[str, int], rates: Mapping[str, float | None], pruned: Mapping[str, int]
) -> str:
    """Trained, frozen and pruned parameters of each part and of all. pruned: `Encoder.pruned`."""
    rows, sums = [], [0, 0, 0]
    for part in PARTS:
        names = [name for name in sizes if name.split(".")[0] == part]
        trained = sum(sizes[name] for name in names if rates[name] is not None)
        gone = sum(pruned.values()) if part == "encoder" else 0
        counts = (trained, sum(sizes[name] for name in names) - trained, gone)
        sums = [total + n for total, n in zip(sums, counts, strict=True)]
        rows.append((part, *(f"{n:,}" for n in counts)))
    rows.append(("all", *(f"{n:,}" for n in sums)))
    return table(("", "trained", "frozen", "pruned"), rows)


def rank_table(config: Config, world: int, *, samples_a_row: float) -> str:
    """The step on other numbers of ranks: the same rows shared out anew, or, where the file fixes only the micro-steps, other rows."""
    rows, accumulation = rows_per_step(config, world)
    if "train_batch_size" not in config.deepspeed:
        counts = sorted({*OTHER_RANKS, world})
    elif "gradient_accumulation_steps" not in config.deepspeed:
        counts = [ranks for ranks in range(1, rows + 1) if rows % ranks == 0]
    else:
        counts = [world]
    lines = []
    for ranks in counts:
        rows, accumulation = rows_per_step(config, ranks)
        tokens, samples = rows * config.data.row_tokens, rows * samples_a_row
        here = "this run" if ranks == world else ""
        lines.append((str(ranks), str(accumulation), str(rows), f"{tokens:,}", f"{samples:,.0f}", here))
    return table(("ranks", "micro-steps", "rows a step", "tokens at most", "samples about", ""), lines)


def _samples_a_row(plan: RunPlan) -> float:
    first = plan.preview()
    return first.samples / first.rows


def _step_table(data: RunData) -> str:
    config, plan = data.config, data.plan
    first = plan.preview()
    supervised = sum(int(shards.supervised.sum()) for shards in data.mixture.sets)
    held_out = sum(len(source.held_out) for source in plan.stream.sources)
    return facts(
        {
            "ranks": str(data.world),
            "rows a step": f"{plan.rows_per_step} = {data.world} ranks x {data.accumulation} micro-steps of one row",
            "tokens a step": f"{first.tokens / first.steps:,.0f} of {plan.rows_per_step * config.data.row_tokens:,}",
            "samples a step": f"{first.samples / first.steps:,.1f}",
            "visual tokens an image": visual_tokens_text(data.geometry),
            "samples": f"{len(data.mixture):,}, held out {held_out:,}; of those seen {data.text_share:.1%} are text-only",
            "too large": f"{first.dropped:,} of the samples of the first {first.steps:,} steps",
            "supervised tokens": f"{supervised:,}, each sample once",
            "steps": f"{plan.total_steps:,}, warm-up {warmup_steps(config.schedule, plan.total_steps):,}",
            **plan_facts(data),
        }
    )


def visual_tokens_text(geometry: Geometry) -> str:
    """Visual tokens of an image: one number where every image has as many, else those of usual sizes."""
    counts = {(w, h): geometry.plan(w, h).visual_tokens for w, h in USUAL_SIZES}
    if len(set(counts.values())) == 1:
        return f"{counts[USUAL_SIZES[0]]:,}"
    return ", ".join(f"{count:,} at {w} x {h}" for (w, h), count in counts.items())


def _engine_table(config: Config, encoder_trains: bool) -> str:
    offload = config.deepspeed["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    return facts(
        {
            "weight of a sample": f"{config.weighting}: {WEIGHTINGS[config.weighting]}",
            "clipping": f"gradient norm {config.clipping:g}" if config.clipping else "off",
            "precision": "bf16, fp32 masters" if config.bf16 else "fp32",
            "ZeRO": f"ZeRO-{config.zero_stage}"
            + ("" if offload == "none" else f", optimizer states in the memory of the {offload.upper()}"),
            "recompute": _recomputed(config, encoder_trains),
        }
    )


def _adapter_table(lora: LoraSection, llm: PreTrainedModel) -> str:
    """What the adapters are, where they stand, and what becomes of them. llm: with its adapters."""
    adapters = adapters_of(llm)
    assert adapters is not None
    modules = adapters["modules"]
    endings = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
    size = sum(p.numel() for name, p in llm.named_parameters() if is_adapter(name))
    without = "; the experts are fused and have none" if has_fused_experts(llm) else ""
    end = "kept beside the decoder, in decoder/adapter" if lora.keep else "merged into the decoder"
    return facts(
        {
            "adapters": f"rank {lora.rank}, scale {lora.scale:g}, dropout {lora.dropout:g}: {size:,} parameters",
            "adapters beside": f"{len(modules)} linear modules: {endings}{without}",
            "adapters at the end": end,
        }
    )


def _recomputed(config: Config, encoder_trains: bool) -> str:
    if config.recompute is None:
        return "off"
    shown = []
    for part in PARTS:
        n = int(getattr(config.recompute, part))
        words = {0: "no block", 1: "every block"}.get(n, f"blocks 0, {n}, {2 * n}, ...")
        shown.append(f"{part} {words if encoder_trains or part != 'encoder' else 'frozen'}")
    return ", ".join(shown) + (" (DeepSpeed's function)" if config.deepspeed_recomputes else "")
