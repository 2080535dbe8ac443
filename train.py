"""Train one stage of a multimodal language model: `deepspeed train.py --config ds_configs/stage2.json`.

Reads from top to bottom as the protocol of a run. Also runs under torchrun and as plain `python train.py` (one process).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from mmds.config_explain import explain_command

if __name__ == "__main__" and any(argument.startswith("--explain") for argument in sys.argv[1:]):
    sys.exit(explain_command(sys.argv[1:]))  # before the imports below, which take seconds

from mmds import checkpoint, export, monitor
from mmds.config import load_config, rows_per_step
from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.loader import StepLoader
from mmds.data.mixture import ensure_mixture
from mmds.dry_run import dry_run
from mmds.engine import Engine
from mmds.engine.assemble import assemble
from mmds.engine.ending import describe
from mmds.engine.launch import launched_rank, launched_world, start_ranks, stop_ranks
from mmds.engine.machine import check_card
from mmds.model.build import build_light, find_source
from mmds.model.decoder import fetch, load_tokenizer
from mmds.model.encoder import describe_pruned
from mmds.monitor import RunFolder
from mmds.rehearse import rehearse
from mmds.run_data import RunData, plan_data


def arguments() -> argparse.Namespace:
    """The command line; everything else is in the config."""
    parser = argparse.ArgumentParser(description="Train one stage of a multimodal model.", allow_abbrev=False)
    for flag, options in {
        "--config": {"required": True, "help": "JSON file of the run"},
        "--set": {
            "action": "append",
            "default": [],
            "metavar": "a.b=JSON",
            "help": "override a key; repeatable",
        },
        "--resume": {
            "default": "auto",
            "metavar": "auto|PATH|never",
            "help": "checkpoint to continue (newest)",
        },
        "--max-steps": {"type": int, "metavar": "N", "help": "stop after step N, with a checkpoint"},
        "--dry-run": {"action": "store_true", "help": "print what the run would do, and stop"},
        "--explain": {"metavar": "KEY", "help": "say what a key of the config means, and stop"},
        "--local_rank": {"type": int, "default": 0, "help": argparse.SUPPRESS},  # given by the launcher
    }.items():
        parser.add_argument(flag, **options)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """One run, from the config to the model folder."""
    config = load_config(args.config, args.set)
    rows_per_step(config, launched_world())  # a batch that these ranks cannot share out is refused at once
    source = find_source(config.init_from, config.model)
    if args.dry_run:
        dry_run(config, source, launched_world())
        return
    fetch(source.decoder_name)  # from the hub, once a machine
    tokenizer = ChatTokenizer(load_tokenizer(source.decoder_name))
    ensure_mixture(
        config.data, tokenizer, progress=launched_rank() == 0
    )  # raw files, before ranks wait for each other

    with contextlib.ExitStack() as at_end:
        ranks = start_ranks()
        at_end.callback(stop_ranks)
        with ranks.together("opening the run folder"):
            check_card(ranks.device, bf16=config.bf16)
            run = RunFolder(Path(config.output_dir), ranks)
            at_end.callback(run.close)
            export.check_target(run.path / "model")

        with ranks.together("building the encoder and the plan"):
            encoder, connector = build_light(source, seed=config.seed)
            data = plan_data(config, source, encoder, connector, tokenizer, world=ranks.world)
            plan = data.plan

        engine = assemble(config, source, encoder, connector, ranks, total_steps=plan.total_steps)
        state = checkpoint.RunState.of(engine, plan.fingerprint)
        found = checkpoint.resume(engine, run.path / "checkpoints", state, args.resume, plan)
        with ranks.together("describing the run"):
            summary = monitor.plan_summary(data)
            facts = {"clipping": config.clipping, "pruned": describe_pruned(encoder.pruned)}
            run.begin(engine.step_index, config.resolved, summary, resumed=str(found), **facts)
            export.write_parts(run.path, engine, encoder.spec, source, tokenizer.hf, config)

        stop = plan.total_steps if args.max_steps is None else min(plan.total_steps, args.max_steps)
        steps = data.loader(
            rank=ranks.rank,
            workers=config.data.workers,
            start_step=engine.step_index,
            stop_step=stop,
            pin_memory=ranks.device.type == "cuda",
        )
        rehearse(engine, steps, data, run)
        train(data, engine, steps, run, state)
        if stop == plan.total_steps:
            export.write_model(engine, run.path, run.path / "model")
            run.event("model", path=str(run.path / "model"))


def train(
    data: RunData, engine: Engine, steps: StepLoader, run: RunFolder, state: checkpoint.RunState
) -> None:
    """The loader's steps; a checkpoint where the config asks for one, and at the last step unless the run ends there."""
    config, plan = data.config, data.plan
    every, last = config.checkpoint.every, engine.step_index + len(steps)
    with monitor.progress_bar(config.stage.name, engine, last) as bar:
        started = time.monotonic()
        for step in steps:
            report = engine.step(step.rows, measure_wait=monitor.measures_wait(config, step.index))
            now = time.monotonic()
            line = monitor.record(run, engine, report, step.rows, now - started, data)
            bar.set_postfix_str(
                f"loss {line['loss']:.3f}, {line['tokens_per_second']:,.0f} tokens/s", refresh=False
            )
            bar.update()
            started = now
            at_end = report.step == last and (every or last < plan.total_steps)
            if (every and report.step % every == 0) or at_end:
                folder = run.path / "checkpoints"
                place = state.at(report.step, plan.state_at(report.step))
                saved = checkpoint.save(engine, folder, place, keep=config.checkpoint.keep)
                run.event("saved", step=report.step, path=str(saved))


if __name__ == "__main__":
    try:
        main(arguments())
    except Exception as error:
        sys.exit(describe(error))
