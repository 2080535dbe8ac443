"""The config of a run over data/sample with tiny parts, for scripts that look at the data of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests import tiny
from tests.spawn import ROOT


def write_run(folder: Path, **data: Any) -> Path:
    """Write decoder, encoder, data and config into `folder`; data: keys of "data". Returns the config's file."""
    tiny.write_decoder(folder / "decoder")
    tiny.write_encoder(folder / "encoder")
    shutil.copytree(ROOT / "data" / "sample", folder / "data", ignore=shutil.ignore_patterns(".cache"))
    mix = [{"name": name, "path": str(folder / "data" / f"{name}.jsonl")} for name in ("llava", "chat")]
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": 3},
        "mmds": {
            "stage": "align",
            "output_dir": str(folder / "run"),
            "model": {
                "encoder": {"name": f"local-dir:{folder / 'encoder'}"},
                "connector": "mlp2x",
                "decoder": str(folder / "decoder"),
            },
            "data": {"mix": mix, "row_tokens": 160, "workers": 0, **data},
            "schedule": {"epochs": 9, "warmup_ratio": 0.1},
        },
    }
    file = folder / "run.json"
    file.write_text(json.dumps(config))
    return file
