"""The decoder: a Hugging Face causal LM behind a wrapper that only knows packed rows.

The wrapper refuses, before transformers sees anything, what transformers would run silently: a mask, a cache, or a row without
segment boundaries. Shapes: T tokens of a row, S segments, K supervised positions, d hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mmds.errors import CheckpointError, ConfigError
from mmds.model.attention import ROWS, SEQUENCE
from mmds.model.mrope import MultiAxisRotary
from mmds.model.recompute import Checkpoint


class Decoder(nn.Module):
    """A causal LM that takes embeddings of one packed row and gives logits at chosen positions only."""

    def __init__(self, llm: PreTrainedModel, positions: str = "1d") -> None:
        """positions: `1d` or `mrope`. Raises ConfigError for a family that mrope cannot be given to."""
        super().__init__()
        self.llm = llm
        self.rotary = MultiAxisRotary(llm) if positions == "mrope" else None
        llm.config.use_cache = False
        llm.set_attn_implementation(ROWS)

    @property
    def width(self) -> int:
        """Hidden size d."""
        return int(self.llm.config.get_text_config().hidden_size)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token embeddings [T, d] of int64 ids [T]."""
        embedded: Tensor = self.llm.get_input_embeddings()(input_ids)
        return embedded

    def forward(
        self,
        *,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        keep: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> Tensor:
        """Logits [K, V] at row positions `keep` int64 [K] (K may be 0).

        inputs_embeds [T, d]; position_ids int64 [T], or [3, T] with mrope, restarting in each segment; cu_seqlens int32 [S + 1] with
        cu_seqlens[0] = 0 and cu_seqlens[-1] = T. Raises ValueError for a mask, a cache, or boundaries that do not cover the row.
        """
        if attention_mask is not None:
            raise ValueError(
                "decoder: an attention mask was given; packed rows are isolated by cu_seqlens and take no mask"
            )
        if past_key_values is not None or use_cache:
            raise ValueError(
                "decoder: a cache was asked for; packed rows are computed whole, generation uses mmds.generate"
            )
        if position_ids is None or position_ids.shape[-1:] != inputs_embeds.shape[:1]:
            raise ValueError("decoder: position_ids must give one position for each token of the row")
        longest = _check_boundaries(cu_seqlens, inputs_embeds.shape[0])
        output = self.llm(
            inputs_embeds=inputs_embeds[None],
            attention_mask=None,
            position_ids=self.place(position_ids),
            use_cache=False,
            logits_to_keep=keep,
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=longest,
            max_length_k=longest,
        )
        logits: Tensor = output.logits
        return logits[0]

    def place(self, position_ids: Tensor) -> Tensor:
        """What the LM is to be given as its `position_ids` [1, T]; with mrope its rotary module is told all axes on the way.

        position_ids: int64 [T], with mrope [3, T]. Raises ValueError for the wrong number of axes.
        """
        axes = 3 if self.rotary is not None else 1
        if position_ids.dim() != (2 if axes == 3 else 1) or (axes == 3 and position_ids.shape[0] != 3):
            raise ValueError(f"decoder: positions have {axes} axes, got {tuple(position_ids.shape)}")
        if self.rotary is None:
            return position_ids[None]
        self.rotary.positions = position_ids
        return position_ids[:1]

    def set_recompute(self, every: int, checkpoint: Checkpoint) -> None:
        """Recompute every n-th layer in the backward pass, through transformers' own switch; every = 0: none.

        Raises ConfigError for a family without that switch.
        """
        layers: list[Any] = [m for m in self.llm.modules() if isinstance(m, GradientCheckpointingLayer)]
        if every and not layers:
            raise ConfigError(
                f"activation_checkpointing: {type(self.llm).__name__} has no layers that can recompute; override with\n"
                "    --set mmds.recompute.decoder=0"
            )
        for index, layer in enumerate(layers):
            layer.gradient_checkpointing = bool(every) and index % every == 0
            layer._gradient_checkpointing_func = partial(checkpoint, layer)

    @contextlib.contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """The bare LM with the one-sequence backend, in eval mode; packed rows again afterwards."""
        was_training = self.llm.training
        self.llm.set_attn_implementation(SEQUENCE)
        self.llm.eval()
        try:
            yield self.llm
        finally:
            self.llm.set_attn_implementation(ROWS)
            self.llm.train(was_training)


def _check_boundaries(cu_seqlens: Tensor | None, tokens: int) -> int:
    """The longest segment; raises ValueError unless the boundaries rise from 0 to `tokens`."""
    if cu_seqlens is None or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            "decoder: segment boundaries (cu_seqlens) are missing; without them packed samples would leak"
        )
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(f"decoder: cu_seqlens must be int32 boundaries, got {cu_seqlens.dtype}")
    bounds = cu_seqlens.tolist()
    lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    if bounds[0] != 0 or bounds[-1] != tokens or min(lengths) < 1:
        raise ValueError(f"decoder: cu_seqlens must rise from 0 to the row's {tokens} tokens, got {bounds}")
    return max(lengths)


def load_config(name: str) -> Any:
    """The Hugging Face config of a hub name or local folder; a local folder never touches the network."""
    return AutoConfig.from_pretrained(name, local_files_only=_is_local(name))


def load_tokenizer(name: str) -> Any:
    """The fast tokenizer of a hub name or local folder."""
    tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=_is_local(name))
    if not tokenizer.is_fast:
        raise ConfigError(f"mmds.model.decoder: {name} has no fast tokenizer; labels need character offsets")
    return tokenizer


def load_llm(name: str, *, dtype: torch.dtype, random: bool = False) -> PreTrainedModel:
    """A causal LM from a hub name or a local folder, or with random weights from its config alone.

    Under ZeRO-3 (transformers' own integration, when the engine has enabled it) weights arrive partitioned. Raises
    CheckpointError when a weight of the model has no counterpart in the files.
    """
    config = load_config(name)
    config.use_cache = False
    if random:
        return AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        name,
        config=config,
        dtype=dtype,
        local_files_only=_is_local(name),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
    )
    llm: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    problems = {
        kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "mismatched_keys") if info.get(kind)
    }
    if problems:
        raise CheckpointError(
            f"decoder {name}: the weights do not fit its config: {problems}; is the download complete?"
        )
    return llm


def weight_files(name: str) -> list[Path]:
    """The safetensors files of a local folder, or of a hub model in the local cache; empty when it has none of that format."""
    if _is_local(name):
        return sorted(Path(name).glob("*.safetensors"))
    for entry in ("model.safetensors.index.json", "model.safetensors"):
        found = try_to_load_from_cache(name, entry)
        if isinstance(found, str):
            return sorted(Path(found).parent.glob("*.safetensors"))
    return []


def fetch(name: str) -> None:
    """Bring a hub model into the local cache (one process a node calls it); nothing to do for a local folder."""
    if not _is_local(name):
        snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])


def _is_local(name: str) -> bool:
    if Path(name).is_dir():
        return True
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"mmds.model.decoder: the folder {name} does not exist")
    return False
