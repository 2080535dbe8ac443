"""A small valid configuration for tests, and what `load_config` says to a changed one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmds.config import load_config
from mmds.errors import ConfigError

Write = Callable[..., Path]

SMALL: dict[str, Any] = {
    "train_batch_size": 4,
    "zero_optimization": {"stage": 3},
    "mmds": {
        "stage": "instruct",
        "output_dir": "runs/test",
        "model": {
            "encoder": {"name": "ViT-B-32", "pretrained": "random"},
            "connector": "mlp2x",
            "decoder": "some/decoder",
        },
        "data": {"mix": [{"name": "one", "path": "shards/one"}], "row_tokens": 128},
        "schedule": {"epochs": 1, "warmup_ratio": 0.03},
    },
}


def writer(folder: Path) -> Write:
    """A function that writes a config (an object, text, or by default the small one) into `folder`."""

    def write(value: Any = None, name: str = "run.json") -> Path:
        path = folder / name
        value = SMALL if value is None else value
        path.write_text(value if isinstance(value, str) else json.dumps(value, indent=1), encoding="utf-8")
        return path

    return write


def refusal(path: Path, *overrides: str) -> str:
    """The message with which `load_config` refuses."""
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value)
