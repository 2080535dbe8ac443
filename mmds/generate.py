"""Answers from a model folder, without DeepSpeed: one unpacked sequence with a cache, and the prompt ids of training."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.conversation import Conversation
from mmds.data.images import probe
from mmds.data.pieces import load_pieces
from mmds.data.rows import LoadedSample, Row, build_row, to_device
from mmds.geometry import Geometry
from mmds.model.build import Source, build_decoder, build_light, folder_source, geometry_of
from mmds.model.decoder import Decoder, load_tokenizer
from mmds.model.folder import read_description
from mmds.model.mllm import FrozenEncoder, Mllm
from mmds.model.published import source_folder


@dataclass(frozen=True, kw_only=True)
class Assistant:
    """A model folder in memory, ready to answer."""

    model: Mllm
    encoder: FrozenEncoder
    tokenizer: ChatTokenizer
    geometry: Geometry
    device: torch.device

    def row(self, samples: Sequence[LoadedSample]) -> Row:
        """Samples packed into one row on the model's device."""
        return to_device(build_row(samples, self.geometry), self.device)

    def sample(
        self, ids: np.ndarray, supervised: np.ndarray, images: Sequence[bytes], paths: Sequence[str]
    ) -> LoadedSample:
        """One sample with its pictures decoded at the size that the encoder takes. ids int32 [T] with one marker an image."""
        sizes = tuple(probe(data) for data in images)
        plans = [self.geometry.plan(*size) for size in sizes]
        pixels = tuple(
            load_pieces(data, plan, self.geometry) for data, plan in zip(images, plans, strict=True)
        )
        return LoadedSample(
            key="prompt",
            ids=ids,
            supervised=supervised,
            images=pixels,
            image_sizes=sizes,
            image_paths=tuple(paths),
        )


def load_assistant(
    path: str | Path, *, device: str | None = None, dtype: torch.dtype | None = None
) -> Assistant:
    """Load a model folder, a run folder with a finished model, or a published LLaVA model.

    dtype: default fp32 on CPUs, the folder's own elsewhere. Raises CheckpointError when it is neither, or not whole.
    """
    folder = source_folder(str(path))
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    own: torch.dtype = getattr(torch, read_description(folder).dtype)
    source = folder_source(folder)
    return assistant_of(source, device=place, dtype=dtype or (torch.float32 if place.type == "cpu" else own))


def assistant_of(
    source: Source, *, device: torch.device, dtype: torch.dtype, seed: int = 0, max_pixels: int | None = None
) -> Assistant:
    """An assistant of a model folder, or of a config's parts as they are before any training (a fresh connector from `seed`).

    max_pixels: most that the encoder receives for one image; None = as in the folder's training.
    """
    if max_pixels is None and source.folder is not None:
        max_pixels = read_description(source.folder).max_pixels
    encoder, connector = build_light(source, seed=seed)
    decoder = build_decoder(source, dtype=dtype, seed=seed)
    model = Mllm(connector=connector.to(dtype), decoder=decoder, encoder=None).to(device).eval()
    return Assistant(
        model=model,
        encoder=FrozenEncoder(encoder, device=device, dtype=dtype),
        tokenizer=ChatTokenizer(load_tokenizer(source.decoder_name)),
        geometry=geometry_of(source, encoder, connector, max_pixels=max_pixels),
        device=device,
    )


@torch.no_grad()
def answer(
    assistant: Assistant,
    conversation: Conversation,
    images: Sequence[bytes],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[str]:
    """The assistant's next turn, piece by piece as text. temperature 0 = greedy.

    conversation: ends in a user turn; images: the bytes of its pictures in order. Ends at the template's end-of-turn marker.
    """
    ids = assistant.tokenizer.prompt_ids(conversation)
    sample = assistant.sample(ids, np.zeros(len(ids), dtype=np.bool_), images, conversation.images)
    row = assistant.row([sample])
    embeddings = assistant.model.embed(row, assistant.encoder(row))
    said: list[int] = []
    shown = ""
    with assistant.model.decoder.generating() as llm:
        decoder = assistant.model.decoder
        for token in _tokens(decoder, llm, embeddings, row.position_ids, max_new_tokens, temperature, seed):
            if token in assistant.tokenizer.end_ids:
                break
            said.append(token)
            text = assistant.tokenizer.decode(said)
            if not text.endswith("�"):  # a character may need more than one token
                yield text[len(shown) :]
                shown = text


def _tokens(
    decoder: Decoder,
    llm: PreTrainedModel,
    embeddings: Tensor,
    positions: Tensor,
    limit: int,
    temperature: float,
    seed: int,
) -> Iterator[int]:
    """Token ids after the prompt `embeddings` [T, d] at `positions` [T] or [3, T], with mmds's own positions and a cache."""
    name = "cache" if "cache" in inspect.signature(llm.forward).parameters else "past_key_values"
    cache = {name: DynamicCache(config=llm.config)}
    dice = torch.Generator(device=embeddings.device).manual_seed(seed)
    inputs: dict[str, Tensor] = {"inputs_embeds": embeddings[None]}
    for _ in range(limit):
        placed = decoder.place(positions)
        output = llm(**inputs, **cache, position_ids=placed, use_cache=True, logits_to_keep=1)
        positions = (positions.max() + 1).expand(
            *positions.shape[:-1], 1
        )  # one after the largest, on every axis
        token = _choose(output.logits[0, -1].float(), temperature, dice)
        yield token
        inputs = {"input_ids": torch.tensor([[token]], device=embeddings.device)}


def _choose(logits: Tensor, temperature: float, dice: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=dice))
