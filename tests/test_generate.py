from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from mmds.data.conversation import Conversation, ImageMarker, Turn
from mmds.errors import CheckpointError
from mmds.evaluate import Question
from mmds.generate import Assistant, answer, load_assistant
from tests import tiny
from tests.trained import ANSWERS, TAUGHT, asked, picture, question, taught

BASE: dict[str, Any] = dict(
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=tiny.VOCABULARY,
    initializer_range=0.4,
    pad_token_id=1,
    bos_token_id=None,
    eos_token_id=1,
)
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "qwen3": lambda: transformers.Qwen3Config(**BASE, head_dim=16),
    "mistral, window shorter than the prompt": lambda: transformers.MistralConfig(**BASE, sliding_window=6),
    "mistral, window reached while answering": lambda: transformers.MistralConfig(**BASE, sliding_window=30),
    "gemma": lambda: transformers.GemmaConfig(**BASE, head_dim=16),
    "phi3": lambda: transformers.Phi3Config(**BASE),
}


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Assistant:
    return taught(tmp_path_factory)


def said(assistant: Assistant, item: Question, **how: Any) -> str:
    return "".join(answer(assistant, asked(item.conversation), item.images, **how))


def stock_answer(folder: Path, assistant: Assistant, item: Question, *, limit: int) -> str:
    """What transformers' own `generate` makes of the same prompt embeddings: stock eager attention, its own cache and positions."""
    llm = AutoModelForCausalLM.from_pretrained(
        folder / "decoder", dtype=torch.float32, attn_implementation="eager"
    )
    ids = assistant.tokenizer.prompt_ids(asked(item.conversation))
    sample = assistant.sample(ids, np.zeros(len(ids), np.bool_), item.images, item.conversation.images)
    row = assistant.row([sample])
    with torch.no_grad():
        embeddings = assistant.model.embed(row, assistant.encoder(row))[None]
    tokens = llm.generate(
        inputs_embeds=embeddings,
        attention_mask=torch.ones(embeddings.shape[:2], dtype=torch.int64),
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=sorted(assistant.tokenizer.end_ids),
    )[0].tolist()
    kept = [token for token in tokens if token not in assistant.tokenizer.end_ids]
    text: str = PreTrainedTokenizerFast.from_pretrained(folder / "decoder").decode(kept)
    return text.rstrip("\ufffd")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_transformers_own_generate(family: str, tmp_path: Path) -> None:
    folder = tiny.write_model_folder(tmp_path / "model", seed=3, config=FAMILIES[family]())
    assistant = load_assistant(folder)
    texts = [said(assistant, question(i), max_new_tokens=30) for i in range(3)]
    assert texts == [stock_answer(folder, assistant, question(i), limit=30) for i in range(3)]
    assert all(len(set(text)) > 10 for text in texts)


def test_an_answer_ends_at_the_end_of_turn_marker_and_is_what_was_taught(assistant: Assistant) -> None:
    for i in range(TAUGHT):
        assert said(assistant, question(i), max_new_tokens=60) == ANSWERS[i][1]


@pytest.mark.parametrize("index", range(TAUGHT))
def test_a_character_of_several_tokens_is_shown_whole_or_not_yet(assistant: Assistant, index: int) -> None:
    item = question(index)
    pieces = list(answer(assistant, asked(item.conversation), item.images, max_new_tokens=60))
    tokens = assistant.tokenizer.encode(item.conversation)
    spoken = int(tokens.supervised.sum()) - 1
    assert "".join(pieces) == ANSWERS[index][1]
    assert not any("\ufffd" in piece or piece == "" for piece in pieces)
    assert len(pieces) <= spoken
    if "🙂" in ANSWERS[index][1]:
        assert "🙂" in pieces
        assert len(pieces) < spoken


def test_no_more_tokens_than_asked_for_are_made(assistant: Assistant) -> None:
    whole = ANSWERS[0][1]
    for limit in (0, 1, 2):
        text = said(assistant, question(0), max_new_tokens=limit)
        assert whole.startswith(text)
        assert len(assistant.tokenizer.hf(text)["input_ids"] if text else []) == min(limit, 2)


def conversations() -> list[Question]:
    """One picture, none, two in one turn, and a dialogue with a system turn and earlier answers."""
    plain = (Turn(role="user", parts=("what?",)), Turn(role="assistant", parts=("the blue shape",)))
    two = (
        Turn(role="user", parts=(ImageMarker(index=0), "and", ImageMarker(index=1), "differ?")),
        Turn(role="assistant", parts=("red",)),
    )
    dialogue = (Turn(role="system", parts=("assistant",)), *two, *plain)
    bytes_ = (picture((9, 9, 9)), picture((200, 9, 9), seed=1))
    made = []
    for key, turns, images in (("plain", plain, ()), ("two", two, bytes_), ("dialogue", dialogue, bytes_)):
        paths = tuple(f"{key}{k}.png" for k in range(len(images)))
        conversation = Conversation(key=key, turns=turns, images=paths)
        made.append(Question(conversation=conversation, images=images, kind=key))
    return [question(0), *made]


@pytest.mark.parametrize("index", range(4))
def test_the_prompt_is_the_training_prefix_in_ids_and_in_embeddings(assistant: Assistant, index: int) -> None:
    item = conversations()[index]
    encoded = assistant.tokenizer.encode(item.conversation)
    prompt = assistant.tokenizer.prompt_ids(asked(item.conversation))
    n = len(prompt)
    assert prompt.tolist() == encoded.ids[:n].tolist()
    assert bool(encoded.supervised[n])
    assert not bool(encoded.supervised[n - 1])
    paths = item.conversation.images
    whole = assistant.row([assistant.sample(encoded.ids, encoded.supervised, item.images, paths)])
    start = assistant.row([assistant.sample(prompt, np.zeros(n, np.bool_), item.images, paths)])
    with torch.no_grad():
        expected = assistant.model.embed(whole, assistant.encoder(whole))
        got = assistant.model.embed(start, assistant.encoder(start))
    assert torch.equal(got, expected[: len(got)])
    assert torch.equal(start.position_ids, whole.position_ids[: len(got)])


def test_sampling_depends_on_the_seed_and_falls_to_greedy_as_it_cools(tmp_path: Path) -> None:
    folder = tiny.write_model_folder(tmp_path / "model", config=FAMILIES["llama"]())
    assistant = load_assistant(folder)
    how = {"max_new_tokens": 12, "temperature": 1.5}
    texts = [said(assistant, question(0), **how, seed=seed) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    cold = said(assistant, question(0), max_new_tokens=12, temperature=1e-5, seed=5)
    assert cold == said(assistant, question(0), max_new_tokens=12)


def test_asking_leaves_the_model_able_to_take_packed_rows(assistant: Assistant) -> None:
    items = [question(i) for i in range(3)]
    encoded = [assistant.tokenizer.encode(item.conversation) for item in items]
    row = assistant.row(
        [
            assistant.sample(e.ids, e.supervised, item.images, item.conversation.images)
            for e, item in zip(encoded, items, strict=True)
        ]
    )
    with torch.no_grad():
        before, _ = assistant.model(row, assistant.encoder(row))
        for piece in answer(assistant, asked(items[0].conversation), items[0].images):
            assert piece
            break  # the caller loses interest
        assert torch.equal(assistant.model(row, assistant.encoder(row))[0], before)


def test_pictures_are_resized_to_the_encoders_input_and_kept_apart(assistant: Assistant) -> None:
    item = conversations()[2]
    ids = assistant.tokenizer.prompt_ids(asked(item.conversation))
    sample = assistant.sample(ids, np.zeros(len(ids), np.bool_), item.images, item.conversation.images)
    assert sample.image_sizes == ((40, 30), (40, 30))
    assert [image.shape for image in sample.images] == [(1, 3, 28, 28)] * 2
    assert abs(float(sample.images[0].mean()) - 9) < 5
    assert abs(float(sample.images[1][0, 0].mean()) - 200) < 5


def test_a_run_folder_loads_as_its_model_in_fp32_on_a_cpu_or_in_the_asked_dtype(tmp_path: Path) -> None:
    folder = tiny.write_model_folder(tmp_path / "run" / "model")
    assistant = load_assistant(tmp_path / "run", device="cpu")
    kinds = {p.dtype for part in (assistant.model, assistant.encoder.encoder) for p in part.parameters()}
    assert kinds == {torch.float32}
    half = load_assistant(folder, device="cpu", dtype=torch.bfloat16)
    kinds = {p.dtype for part in (half.model, half.encoder.encoder) for p in part.parameters()}
    assert kinds == {torch.bfloat16}
    assert isinstance(said(half, question(0), max_new_tokens=3), str)


@pytest.mark.parametrize("part", ["encoder", "connector"])
def test_a_folder_without_a_part_is_refused_by_that_part(part: str, tmp_path: Path) -> None:
    folder = tiny.write_model_folder(tmp_path / "model")
    shutil.rmtree(folder / part)
    with pytest.raises(CheckpointError, match=part):
        load_assistant(folder)


def test_a_conversation_and_pictures_that_do_not_match_are_refused(assistant: Assistant) -> None:
    item = question(0)
    with pytest.raises(ValueError, match="1 image markers, 0 images"):
        said(assistant, replace(item, images=()))
    twice = copy.copy(item.images) * 2
    with pytest.raises(ValueError, match="1 image markers, 2 images"):
        said(assistant, replace(item, images=twice))
