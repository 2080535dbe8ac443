"""Take a LLaVA model of Hugging Face's transformers apart into a model folder: tower, projector, decoder, tokenizer, chat template.

Conversion reads one tensor at a time and accounts for each: it has a place, or a reason to be left out, or the import ends with its
name. `import_report` says where everything went.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mmds.config_types import ConnectorSection
from mmds.errors import CheckpointError
from mmds.model.connector import Connector
from mmds.model.connector_weights import read_file
from mmds.model.decoder import load_tokenizer
from mmds.model.encoder import EncoderSpec, encoder_from_spec
from mmds.model.folder import Description, read_tensors, write_readme, write_weights
from mmds.model.llava_names import TEXT, Rule, canonical, dropped, joint_rules, text_rule, tower_rules
from mmds.model.llava_settings import encoder_spec, read_processor, resolution
from mmds.model.llava_template import imported_template, source_template
from mmds.model.llava_towers import FAMILIES

KINDS = ("llava", "llava_next")
"""transformers' model_type of what can be imported: LLaVA-1.5 and LLaVA-NeXT."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TIED = "tied: the embeddings are the head"


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What became of a source. moved: (their tensors, ours). dropped: (their tensor, reason). notes: what was decided on the way."""

    moved: tuple[tuple[tuple[str, ...], str], ...]
    dropped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """The complete key report, a line for each tensor, then counts and notes."""
        lines = [f"{' + '.join(theirs)} -> {ours}" for theirs, ours in self.moved]
        lines += [f"{name} dropped: {reason}" for name, reason in self.dropped]
        taken = sum(len(theirs) for theirs, _ in self.moved)
        lines.append(f"{taken + len(self.dropped)} tensors: {taken} taken as {len(self.moved)}")
        reasons = [reason for _, reason in self.dropped]
        lines += [f"  {reasons.count(reason)} dropped: {reason}" for reason in dict.fromkeys(reasons)]
        return lines + list(self.notes)


def is_llava(folder: Path) -> bool:
    """Whether a folder holds a LLaVA model of transformers (by its config.json)."""
    file = folder / "config.json"
    return file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("model_type") in KINDS


def import_llava(source: Path, target: Path, *, name: str | None = None) -> Imported:
    """Write the model folder `target`, which appears whole or not at all, from the LLaVA folder `source`.

    name: what the source is called in mmds.json's README (default: its path). Raises CheckpointError naming the key of the config or
    the tensor that cannot be taken over, that is missing, or that has another shape.
    """
    if not is_llava(source):
        raise CheckpointError(
            f"{source} is no LLaVA folder: its config.json has no model_type {' or '.join(KINDS)}"
        )
    if target.exists():
        raise CheckpointError(f"{target} exists; move it, or name another folder")
    try:
        return _import(source, target, name or str(source))
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _import(source: Path, target: Path, name: str) -> Imported:
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    processor = read_processor(source)
    spec = encoder_spec(config, processor)
    mode, fitting = resolution(config, processor)
    connector = _connector(config, spec)
    text = config.text_config
    stored = _stored(source)
    text.tie_word_embeddings = _is_tied(config, stored)
    moves, left_out = _moves(config, spec, connector, text, stored)
    tokenizer = load_tokenizer(str(source))
    template, origin = imported_template(tokenizer, source_template(source, tokenizer), text.model_type)
    dtype = _common_dtype(stored)

    building = target.with_name(target.name + ".tmp")
    shutil.rmtree(building, ignore_errors=True)
    (building / "decoder").mkdir(parents=True)
    write_weights(building, _tensors(moves, stored), dtype=dtype)
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]]
    text.dtype = dtype
    text.save_pretrained(building / "decoder")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(building / "decoder")
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", building / "decoder" / "generation_config.json")
    description = Description(
        encoder=spec,
        connector=connector.section,
        decoder_width=text.hidden_size,
        resolution=mode,
        dtype=str(dtype).removeprefix("torch."),
    )
    description.write(building)
    facts = {"encoder": spec.name, "connector": connector.section.name, "resolution": mode.name}
    write_readme(building, {"imported from": name, **facts, "dtype": dtype}, name=target)
    building.rename(target)
    return Imported(
        moved=tuple((tuple(stored[other].name for other in rule.theirs), rule.ours) for rule in moves),
        dropped=tuple((stored[other].name, reason) for other, reason in left_out.items()),
        notes=(f"chat template: {origin}", f"pictures: {fitting}"),
    )


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """A tensor of the source: its name there, its header, and how to read it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def _stored(source: Path) -> dict[str, _Stored]:
    """All tensors of the source by canonical name. Raises CheckpointError when there are none, or two of one name."""
    found: dict[str, _Stored] = {}
    for entry in _read_all(source):
        known = found.setdefault(canonical(entry.name), entry)
        if known is not entry:
            raise CheckpointError(f"the files hold one tensor under two names: {known.name} and {entry.name}")
    return found


def _read_all(source: Path) -> Iterator[_Stored]:
    """Every tensor of the safetensors files, or where there are none of the PyTorch files, with nothing read but headers."""
    files, binaries = sorted(source.glob("*.safetensors")), sorted(source.glob("pytorch_model*.bin"))
    index = source / ("model.safetensors.index.json" if files else "pytorch_model.bin.index.json")
    if index.is_file():
        wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        gone = sorted(file for file in wanted if not (source / file).is_file())
        if gone:
            raise CheckpointError(f"weight files are missing: {', '.join(gone)}; is the download complete?")
    if not files and not binaries:
        raise CheckpointError("no weights: neither *.safetensors nor pytorch_model*.bin")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            headers = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  no mapping
            shapes = {
                name: (tuple(head.get_shape()), _DTYPES.get(head.get_dtype()))
                for name, head in headers.items()
            }
        for name, read in read_tensors([file]):
            shape, dtype = shapes[name]
            yield _Stored(name=name, shape=shape, dtype=dtype or read().dtype, read=read)
    for file in () if files else binaries:
        for name, value in read_file(file).items():
            yield _Stored(name=name, shape=tuple(value.shape), dtype=value.dtype, read=partial(_given, value))


def _given(value: Tensor) -> Tensor:
    return value  # mapped from its file: read when it is copied


def _is_tied(config: Any, stored: Mapping[str, _Stored]) -> bool:
    """Whether the head is the embedding: as configured, unless the files hold a head of its own."""
    configured = bool(config.tie_word_embeddings) or bool(config.text_config.tie_word_embeddings)
    head, table = stored.get(TEXT + "lm_head.weight"), stored.get(TEXT + "model.embed_tokens.weight")
    if not configured or head is None or table is None:
        return configured
    return torch.equal(head.read(), table.read())


def _moves(
    config: Any, spec: EncoderSpec, connector: Connector, text: Any, stored: Mapping[str, _Stored]
) -> tuple[list[Rule], dict[str, str]]:
    """Rules that fill every tensor of ours, and why each tensor of theirs that none takes is left out."""
    with torch.device("meta"):
        llm = AutoModelForCausalLM.from_config(text)
        encoder = encoder_from_spec(spec)
    wanted = {f"encoder.{n}": v for n, v in encoder.state_dict().items()}
    wanted |= {f"connector.{n}": v for n, v in connector.state_dict().items()}
    wanted |= {f"decoder.llm.{n}": v for n, v in llm.state_dict().items()}
    if text.tie_word_embeddings:
        wanted.pop("decoder.llm.lm_head.weight", None)
    rules = tower_rules(FAMILIES[config.vision_config.model_type], spec.layer + 1)
    rules += joint_rules(separator="connector.separator" in wanted)
    rules += [text_rule(ours) for ours in wanted if ours.startswith("decoder.")]
    missing = [other for rule in rules for other in rule.theirs if other not in stored]
    if missing:
        raise CheckpointError(f"{len(missing)} tensors are missing: {', '.join(missing[:6])}")
    assert {rule.ours for rule in rules} == set(wanted), "the name table and the parts disagree"
    for rule in rules:
        parts = [torch.empty(stored[other].shape, device="meta") for other in rule.theirs]
        shape = tuple(rule.to_ours(parts).shape)
        if shape != tuple(wanted[rule.ours].shape):
            raise CheckpointError(
                f"{' + '.join(rule.theirs)} has the shape {shape}, but the config makes {tuple(wanted[rule.ours].shape)} of {rule.ours}"
            )
    used = {other for rule in rules for other in rule.theirs}
    left_out, unknown = {}, []
    for other in stored:
        if other in used:
            continue
        tied = text.tie_word_embeddings and other == TEXT + "lm_head.weight"
        if reason := _TIED if tied else dropped(other, layer=spec.layer):
            left_out[other] = reason
        else:
            unknown.append(stored[other].name)
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors have no place in a model folder: {', '.join(unknown[:6])}"
        )
    return rules, left_out


def _tensors(rules: list[Rule], stored: Mapping[str, _Stored]) -> Iterator[tuple[str, Tensor]]:
    for rule in rules:
        yield rule.ours, rule.to_ours([stored[other].read() for other in rule.theirs])


def _common_dtype(stored: Mapping[str, _Stored]) -> torch.dtype:
    """The one float type of the source, fp32 where it has several."""
    kinds = {entry.dtype for entry in stored.values() if entry.dtype.is_floating_point}
    return kinds.pop() if len(kinds) == 1 else torch.float32


def _connector(config: Any, spec: EncoderSpec) -> Connector:
    if config.projector_hidden_act != "gelu":
        raise CheckpointError(
            f"projector_hidden_act is {config.projector_hidden_act!r}; mlp2x computes 'gelu'"
        )
    if not config.multimodal_projector_bias:
        raise CheckpointError("multimodal_projector_bias is false; mlp2x has biases")
    with torch.device("meta"):
        return Connector(
            ConnectorSection(name="mlp2x"),
            encoder_width=spec.width,
            decoder_width=config.text_config.hidden_size,
            separator=config.model_type == "llava_next",
        )
