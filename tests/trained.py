"""A tiny model that has learnt a few answers by heart, as a model folder, and the questions it was asked."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from mmds.data.conversation import Conversation, ImageMarker, Turn
from mmds.evaluate import Question
from mmds.generate import Assistant, load_assistant
from tests import tiny

# colour of the picture, the true answer; only the first four are taught
ANSWERS = [
    ((250, 10, 10), "red"),
    ((10, 250, 10), "naïve café 🙂🙃!"),
    ((10, 10, 250), "中文 blue 中"),
    ((250, 250, 10), "circle\nand  two lines"),
    ((10, 200, 200), "green shape"),
    ((200, 10, 200), "a red circle"),
]
TAUGHT = 4


def picture(colour: tuple[int, int, int], *, size: tuple[int, int] = (40, 30), seed: int = 0) -> bytes:
    """A PNG of one colour with a little noise."""
    noise = np.random.default_rng(seed).integers(-9, 10, (size[1], size[0], 3))
    pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def question(index: int) -> Question:
    """One question about one picture, with the true answer."""
    colour, answer = ANSWERS[index]
    turns = (
        Turn(role="user", parts=(ImageMarker(index=0), "\nwhat colour is the shape")),
        Turn(role="assistant", parts=(answer,)),
    )
    conversation = Conversation(key=f"q{index}", turns=turns, images=(f"{index}.png",))
    return Question(
        conversation=conversation, images=(picture(colour),), kind="taught" if index < TAUGHT else "new"
    )


def asked(whole: Conversation) -> Conversation:
    """The conversation without its last answer."""
    return replace(whole, turns=whole.turns[:-1])


def teach(folder: Path, *, steps: int = 90) -> Assistant:
    """Train connector and decoder of a fresh model folder on the first answers, through the network's own loss, and save them."""
    tiny.write_model_folder(folder)
    assistant = load_assistant(folder)
    samples = []
    for item in map(question, range(TAUGHT)):
        encoded = assistant.tokenizer.encode(item.conversation)
        samples.append(
            assistant.sample(encoded.ids, encoded.supervised, item.images, item.conversation.images)
        )
    row = assistant.row(samples)
    features = assistant.encoder(row)
    model = assistant.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(row, features)[0] / row.supervised).backward()
        optimizer.step()
    save_file(dict(model.connector.state_dict()), folder / "connector" / "model.safetensors")
    llm = AutoModelForCausalLM.from_pretrained(folder / "decoder", dtype=torch.float32)
    llm.load_state_dict(model.decoder.llm.state_dict())
    llm.save_pretrained(folder / "decoder")
    return load_assistant(folder)


_MADE: list[Assistant] = []


def taught(factory: pytest.TempPathFactory) -> Assistant:
    """The assistant of `teach`, made once a process; nobody changes it."""
    if not _MADE:
        _MADE.append(teach(factory.mktemp("taught") / "model"))
    return _MADE[0]
