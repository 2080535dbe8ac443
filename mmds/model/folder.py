"""The model folder: consolidated weights of all three parts, tokenizer and `mmds.json`; loadable without DeepSpeed.

mmds.json                       what the parts are and how they join
encoder/model.safetensors       the pruned tower, keys `visual.*`
connector/model.safetensors
decoder/                        a Hugging Face folder: config, weights, tokenizer, chat template
decoder/adapter/                LoRA adapters that were kept apart, in peft's format (see `mmds.model.lora`)
README.md
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmds import __version__
from mmds.config_decode import decode, plain
from mmds.config_types import FIXED, ConnectorSection, ResolutionSection
from mmds.errors import CheckpointError, ConfigError
from mmds.jsonc import KeyPath, dotted
from mmds.model.encoder import EncoderSpec

DESCRIPTION = "mmds.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 * 2**30
_PREFIXES = {"encoder": "encoder.", "connector": "connector.", "decoder": "decoder.llm."}


@dataclass(frozen=True, kw_only=True)
class Description:
    """mmds.json: the encoder's spec, the connector, the modes, the pixel cap, the stage that made it, and the dtype.

    max_pixels: most pixels that the encoder received for one image in training; what answers a question is held to it too.
    """

    encoder: EncoderSpec
    connector: ConnectorSection
    decoder_width: int
    resolution: ResolutionSection = FIXED
    positions: str = "1d"
    max_pixels: int | None = None
    stage: str = ""
    dtype: str = "float32"

    def write(self, folder: Path) -> None:
        """Write folder/mmds.json."""
        sections = {"connector": plain(self.connector), "resolution": plain(self.resolution)}
        data = {**self.__dict__, "encoder": self.encoder.to_json(), **sections, "mmds": __version__}
        (folder / DESCRIPTION).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_description(folder: Path) -> Description:
    """mmds.json of a model folder. Raises CheckpointError when the folder is none, or is not complete."""
    file = folder / DESCRIPTION
    if not file.is_file():
        raise CheckpointError(f"{folder} is not a model folder: it has no {DESCRIPTION}")
    data = json.loads(file.read_text(encoding="utf-8"))
    data.pop("mmds", None)
    sections: dict[str, Any] = {"encoder": EncoderSpec.from_json(data["encoder"])}
    for key, section in (("connector", ConnectorSection), ("resolution", ResolutionSection)):
        if key in data:  # a bare name, as older folders have it, is the section's name
            value = {"name": data[key]} if isinstance(data[key], str) else data[key]
            sections[key] = decode(section, value, (key,), partial(_blame, file))
    return Description(**{**data, **sections})


def _blame(file: Path, path: KeyPath, problem: str) -> ConfigError:
    return ConfigError(f"{file}: {dotted(path)}: {problem}")


def find_model_folder(path: str) -> Path:
    """The model folder that `init_from` names: the folder itself, or the finished run's `model/` in it."""
    given = Path(path)
    for folder in (given, given / "model"):
        if (folder / DESCRIPTION).is_file():
            return folder
    if (given / "checkpoints").is_dir():
        raise CheckpointError(
            f"init_from: the run {given} has checkpoints but no finished model; finish it, or make one with "
            f"`python scripts/consolidate.py {given} OUT` and name OUT"
        )
    raise CheckpointError(
        f"init_from: {given} is neither a model folder nor a run folder with a finished model"
    )


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write named tensors (`encoder.*`, `connector.*`, `decoder.llm.*`) as the folder's safetensors, in one float dtype.

    Tensors are taken one at a time and leave memory with their shard. A tied weight is expected once; on loading the
    decoder's config ties it again.
    """
    writers = {part: ShardWriter(folder / part, shard_bytes) for part in _PREFIXES}
    for name, value in tensors:
        part = name.split(".", 1)[0]
        if part not in writers or not name.startswith(_PREFIXES[part]):
            raise CheckpointError(f"tensor {name} belongs to no part of the model")
        cast = value.detach().to(
            device="cpu", dtype=dtype if value.is_floating_point() else value.dtype, copy=True
        )
        writers[part].add(name.removeprefix(_PREFIXES[part]), cast.contiguous())
    for writer in writers.values():
        writer.close()


class ShardWriter:
    """safetensors of one folder: a single file, or numbered shards with Hugging Face's index. A shard leaves memory once written."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.folder, self.limit = folder, shard_bytes
        self.pending: dict[str, Tensor] = {}
        self.size = self.total = 0
        self.shards: list[list[str]] = []

    def add(self, name: str, value: Tensor) -> None:
        """Take one contiguous tensor on the CPU."""
        if self.pending and self.size + value.nbytes > self.limit:
            self._flush()
        self.pending[name] = value
        self.size += value.nbytes

    def _flush(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file(self.pending, self.folder / f"part-{len(self.shards):05d}.tmp", metadata={"format": "pt"})
        self.shards.append(list(self.pending))
        self.total += self.size
        self.pending, self.size = {}, 0

    def close(self) -> None:
        """Write what is pending, give every part its final name, and the index where there are several."""
        if self.pending:
            self._flush()
        count = len(self.shards)
        where = {}
        for i, names in enumerate(self.shards):
            final = WEIGHTS if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"part-{i:05d}.tmp").rename(self.folder / final)
            where.update(dict.fromkeys(names, final))
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": where}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def part_files(folder: Path) -> list[Path]:
    """The weight files of one part's folder. Raises CheckpointError when there are none, or when the index names one that is gone."""
    index = folder / INDEX
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    gone = [file.name for file in files if not file.is_file()]
    if not files or gone:
        raise CheckpointError(
            f"{folder}: {'weight files are missing: ' + ', '.join(gone) if gone else 'no safetensors weights'}"
        )
    return files


def read_tensors(files: Iterable[Path]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """(name, reader) of each tensor in safetensors files; a reader maps the file and returns the one tensor."""

    def reader(file: Path, name: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            with safe_open(file, framework="pt") as opened:
                value: Tensor = opened.get_tensor(name)
                return value

        return read

    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
        for name in names:
            yield name, reader(file, name)


def stored_names(folder: Path) -> list[str]:
    """Names of all tensors in a model folder, as the model names them. Raises CheckpointError when a part has no weights."""
    return [
        prefix + name
        for part, prefix in _PREFIXES.items()
        for name, _ in read_tensors(part_files(folder / part))
    ]


def load_part(module: nn.Module, folder: Path) -> None:
    """Load a part's safetensors strictly. Raises CheckpointError naming what is missing, unexpected or of another shape."""
    state: dict[str, Tensor] = {}
    for file in part_files(folder):
        state.update(load_file(file))
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"{folder} does not fit the model: {error}") from error


def write_readme(folder: Path, text: dict[str, Any], *, name: Path) -> None:
    """A README for whoever finds the folder later. name: what the folder will be called once it is whole."""
    lines = [
        "# mmds model folder",
        "",
        *(f"- {key}: {value}" for key, value in text.items()),
        "",
        "Ask it about a picture:",
        "",
        f"    python scripts/chat.py {name} --image picture.png 'What is shown?'",
        "",
        f'Train on from it: `"init_from": "{name}"` in a stage\'s JSON.',
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
