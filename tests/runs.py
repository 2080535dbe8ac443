"""Real runs of train.py on data/sample with tiny parts, two ranks, ZeRO-3; each made when first asked for, and examined by many tests."""

from __future__ import annotations

import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from tests import tiny
from tests.forks import Ended, Forks
from tests.spawn import ROOT

STEPS = 8  # of the align run; an epoch has 3
EVERY = 3


class Runs:
    """The runs that tests share, below one folder."""

    def __init__(self, work: Path, forks: Forks) -> None:
        self.work, self.forks = work, forks
        tiny.write_decoder(work / "decoder")
        tiny.write_encoder(work / "encoder")
        ignore = shutil.ignore_patterns(".cache")
        shutil.copytree(ROOT / "data" / "sample", work / "data", ignore=ignore)

    def config(self, name: str, *, stage: Any = "align", steps: int = STEPS, **mmds: Any) -> list[str]:
        """Write a run's file with output_dir work/NAME; mmds: keys that replace or (None) remove those of "mmds". Returns --config."""
        section = {
            "stage": stage,
            "output_dir": str(self.work / name),
            "model": {
                "encoder": {"name": f"local-dir:{self.work / 'encoder'}"},
                "connector": "mlp2x",
                "decoder": str(self.work / "decoder"),
            },
            "data": self.data("data"),
            "schedule": {"steps": steps, "warmup_ratio": 0.3},
            "checkpoint": {"every": EVERY, "keep": 9},
            **mmds,
        }
        config = {
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "tensorboard": {"enabled": True},
            "mmds": {key: value for key, value in section.items() if value is not None},
        }
        file = self.work / f"{name}.json"
        file.write_text(json.dumps(config))
        return ["--config", str(file)]

    def data(self, folder: str) -> dict[str, Any]:
        """The section "data" over the sample set in work/FOLDER; rows of a few samples each."""
        mix = [
            {"name": name, "path": str(self.work / folder / f"{name}.jsonl")} for name in ("llava", "chat")
        ]
        return {"mix": mix, "row_tokens": 160, "workers": 1}

    def notes(self, name: str) -> Path:
        """Folder for what the ranks of run NAME write down about themselves."""
        folder = self.work / "notes" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @cached_property
    def align(self) -> Path:
        """The uninterrupted align run."""
        self.forks.run(self.config("align"), notes=self.notes("align"))
        return self.work / "align"

    @cached_property
    def killed(self) -> Path:
        """The same run, killed (-9) after step 4, that is one step after a checkpoint, and resumed."""
        arguments, folder = self.config("killed"), self.work / "killed"
        end = (folder / "metrics.jsonl", '"step": 4,')
        self.forks.run(arguments, notes=self.notes("killed"), kill_when=end, check=False)
        self.forks.run([*arguments, "--resume", "auto"], notes=self.notes("killed"))
        return folder

    @cached_property
    def instruct(self) -> Path:
        """From the align run's folder."""
        arguments = self.config("instruct", stage="instruct", steps=4, init_from=str(self.align), model=None)
        self.forks.run(arguments, notes=self.notes("instruct"))
        return self.work / "instruct"

    @cached_property
    def pretrain(self) -> Path:
        """From the instruct run's folder, with the encoder in training."""
        arguments = self.config(
            "pretrain", stage="pretrain", steps=2, init_from=str(self.instruct), model=None
        )
        self.forks.run(arguments, notes=self.notes("pretrain"))
        return self.work / "pretrain"

    @cached_property
    def bf16(self) -> Path:
        """Everything trains, in bf16, from the align run's fp32 folder."""
        arguments = self.config("bf16", stage="pretrain", steps=3, init_from=str(self.align), model=None)
        self.forks.run([*arguments, "--set", "bf16.enabled=true"], notes=self.notes("bf16"))
        return self.work / "bf16"

    def copy_of_align(self, name: str, *tags: str) -> Path:
        """A copy of the align run's folder as work/NAME, with these of its checkpoints only."""
        folder = self.work / name
        shutil.copytree(self.align, folder)
        for checkpoint in (folder / "checkpoints").glob("step-*"):
            if checkpoint.name not in tags:
                shutil.rmtree(checkpoint)
        return folder

    def consolidate(self, run: Path, name: str, *arguments: str) -> Path:
        """What scripts/consolidate.py makes of a run."""
        out = self.work / name
        self.forks.run([str(run), str(out), *arguments], script="scripts/consolidate.py", world=1)
        return out

    def fails(self, arguments: list[str], *, world: int = 2) -> Ended:
        """A run that must end by itself on every rank, with an error, soon after the first rank has failed."""
        ended = self.forks.run(arguments, world=world, check=False, timeout=120)
        for rank, (code, output) in enumerate(zip(ended.codes, ended.outputs, strict=True)):
            assert code == 1, f"rank {rank} ended with {code}:\n{output[-3000:]}"
        assert ended.seconds_after_failure < 15
        return ended


def lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run without what depends on the clock."""
    clock = ("seconds", "tokens_per_second", "wait")
    found = [{k: v for k, v in line.items() if k not in clock} for line in lines(run / "metrics.jsonl")]
    return [{**line, "imbalance": {**line["imbalance"], "measured": None}} for line in found]


def weights(folder: Path, part: str) -> dict[str, Tensor]:
    """Every tensor of one part of a model folder, by its name there."""
    tensors: dict[str, Tensor] = {}
    for file in (folder / part).glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def model(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a model folder, as a run names it."""
    prefixes = {"encoder": "encoder.", "connector": "connector.", "decoder": "decoder.llm."}
    return {
        prefix + name: value
        for part, prefix in prefixes.items()
        for name, value in weights(folder, part).items()
    }


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of tensors that one side lacks, or that are not bit-equal in the same dtype."""
    names = set(ours) ^ set(theirs)
    for name in set(ours) & set(theirs):
        a, b = ours[name], theirs[name]
        if a.dtype != b.dtype or a.shape != b.shape or not bool((a == b).all()):
            names.add(name)
    return sorted(names)
