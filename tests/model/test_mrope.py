from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from mmds.data.conversation import Conversation, ImageMarker, Turn
from mmds.data.positions import mrope_positions
from mmds.errors import ConfigError
from mmds.generate import Assistant, _tokens, answer, load_assistant
from mmds.model.decoder import Decoder
from mmds.model.mrope import sections_of
from mmds.model.qualify import qualify
from mmds.model.recompute import non_reentrant
from tests import tiny
from tests.model.families import (
    FAMILIES,
    VOCABULARY,
    alone_logits,
    excite,
    gap,
    gradients,
    packed_inputs,
    random_samples,
    stock_model,
    worst,
)
from tests.trained import picture

IMAGE = VOCABULARY - 1
TEXT: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
SECTIONS = [2, 3, 3]  # of a head of 16


def qwen2_vl() -> Qwen2VLForConditionalGeneration:
    """A tiny Qwen2-VL with random weights; its tower merges 2 x 2 patches of 14 pixels."""
    config = Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": SECTIONS}},
        vision_config=dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2, patch_size=14),
        image_token_id=IMAGE,
        video_token_id=IMAGE - 1,
        vision_start_token_id=IMAGE - 2,
        vision_end_token_id=IMAGE - 3,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config).eval()
    excite(model)
    return model


def same_decoder(theirs: Qwen2VLForConditionalGeneration, sections: list[int] | None = None) -> Decoder:
    """Its text model's weights in a Qwen2 behind our wrapper. sections: in the config; None = Qwen2-VL's own shares."""
    rope = dict(theirs.config.text_config.rope_parameters)
    rope.pop("mrope_section")
    if sections is not None:
        rope["mrope_section"] = sections
    llm = Qwen2ForCausalLM(Qwen2Config(**TEXT, rope_parameters=rope))
    state = {
        name.replace("model.language_model.", "model."): value
        for name, value in theirs.state_dict().items()
        if not name.startswith("model.visual.")
    }
    llm.load_state_dict(state, strict=True)
    return Decoder(llm, "mrope").eval()


# what a sample holds: numbers are tokens of text, pairs an image's rows and columns of visual tokens
SAMPLES: dict[str, tuple[Any, ...]] = {
    "text": (9,),
    "one image": (3, (2, 5), 4),
    "image first": ((4, 2), 5),
    "image last": (6, (3, 3)),
    "several images": (2, (1, 6), 3, (5, 2), 1, (2, 2), 1),
}


def written(parts: tuple[Any, ...], *, seed: int = 0) -> tuple[Tensor, list[tuple[int, int]]]:
    """Token ids int64 [T] with IMAGE in the slots, and the images' grids."""
    dice = torch.Generator().manual_seed(seed)
    ids, grids = [], []
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(3, IMAGE - 4, (part,), generator=dice).tolist()
        else:
            ids += [IMAGE] * (part[0] * part[1])
            grids.append(part)
    return torch.tensor(ids), grids


def their_positions(
    theirs: Qwen2VLForConditionalGeneration, ids: Tensor, grids: list[tuple[int, int]]
) -> Tensor:
    """int64 [3, T] by Qwen2-VL's own `get_rope_index`."""
    thw = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids]) if grids else None
    types = (ids == IMAGE).int()[None]
    positions, _ = theirs.model.get_rope_index(ids[None], types, image_grid_thw=thw)
    return positions[:, 0]


def embedded(theirs: Qwen2VLForConditionalGeneration, ids: Tensor, *, seed: int = 1) -> Tensor:
    """Embeddings [T, d] with random features in the slots."""
    embeddings = theirs.get_input_embeddings()(ids).detach().clone()
    slots = ids == IMAGE
    dice = torch.Generator().manual_seed(seed)
    embeddings[slots] = torch.randn(int(slots.sum()), embeddings.shape[1], generator=dice)
    return embeddings


@torch.no_grad()
def their_logits(theirs: Qwen2VLForConditionalGeneration, embeddings: Tensor, positions: Tensor) -> Tensor:
    """Logits [T, V] of Qwen2-VL itself for one sample alone."""
    output = theirs(inputs_embeds=embeddings[None], position_ids=positions[:, None], use_cache=False)
    return output.logits[0]


def our_logits(decoder: Decoder, embeddings: list[Tensor], positions: list[Tensor]) -> Tensor:
    """Logits [T, V] of samples packed into one row."""
    bounds = torch.tensor([0, *(len(e) for e in embeddings)]).cumsum(0).int()
    joined = torch.cat(embeddings)
    return decoder(
        inputs_embeds=joined,
        position_ids=torch.cat(positions, dim=-1),
        cu_seqlens=bounds,
        keep=torch.arange(len(joined)),
    )


@pytest.mark.parametrize("sections", [SECTIONS, None])
@pytest.mark.parametrize("content", SAMPLES)
def test_a_qwen2_with_mrope_gives_qwen2_vls_own_logits(content: str, sections: list[int] | None) -> None:
    theirs = qwen2_vl()
    ids, grids = written(SAMPLES[content])
    positions, embeddings = their_positions(theirs, ids, grids), embedded(theirs, ids)
    with torch.no_grad():
        ours = our_logits(same_decoder(theirs, sections), [embeddings], [positions])
    assert gap(ours, their_logits(theirs, embeddings, positions)) < 1e-5
    if grids:
        flat = torch.arange(len(ids)).expand(3, -1)
        assert gap(ours, their_logits(theirs, embeddings, flat)) > 1e-2


@pytest.mark.parametrize("content", SAMPLES)
def test_positions_are_those_of_get_rope_index(content: str) -> None:
    ids, grids = written(SAMPLES[content])
    ours = mrope_positions((ids == IMAGE).numpy(), grids)
    assert torch.equal(torch.from_numpy(ours), their_positions(qwen2_vl(), ids, grids))


def test_a_packed_row_gives_each_samples_own_logits() -> None:
    theirs = qwen2_vl()
    decoder = same_decoder(theirs)
    made = [written(parts, seed=i) for i, parts in enumerate(SAMPLES.values())]
    embeddings = [embedded(theirs, ids, seed=i) for i, (ids, _) in enumerate(made)]
    positions = [their_positions(theirs, ids, grids) for ids, grids in made]
    with torch.no_grad():
        ours = our_logits(decoder, embeddings, positions)
    alone = [their_logits(theirs, *pair) for pair in zip(embeddings, positions, strict=True)]
    assert gap(ours, torch.cat(alone)) < 1e-5


def test_gradients_are_qwen2_vls_own_with_recomputation_too() -> None:
    theirs = qwen2_vl().train()
    ids, grids = written(SAMPLES["several images"])
    positions, embeddings = their_positions(theirs, ids, grids), embedded(theirs, ids)
    output = theirs(inputs_embeds=embeddings[None], position_ids=positions[:, None], use_cache=False)
    output.logits[0].sin().sum().backward()
    expected = {
        name.replace("model.language_model.", "model."): grad
        for name, grad in gradients(theirs).items()
        if not name.startswith("model.visual.")
    }
    for every in (0, 1):
        decoder = same_decoder(theirs).train()
        decoder.set_recompute(every, non_reentrant)
        our_logits(decoder, [embeddings], [positions]).sin().sum().backward()
        assert worst(gradients(decoder.llm), expected) == []


ABLE = ["llama", "qwen2_tied", "qwen3", "mistral_window", "phi3", "gemma"]


@pytest.mark.parametrize("family", ABLE)
def test_equal_axes_are_exactly_one_axis(family: str) -> None:
    samples = random_samples((7, 1, 12))
    ids, positions, bounds = packed_inputs(samples)
    stock = stock_model(family).eval()
    one, three = Decoder(deepcopy(stock)), Decoder(deepcopy(stock), "mrope")
    given: dict[str, Any] = {
        "inputs_embeds": one.embed(ids),
        "cu_seqlens": bounds,
        "keep": torch.arange(len(ids)),
    }
    with torch.no_grad():
        ours = three(position_ids=positions.expand(3, -1), **given)
        assert torch.equal(ours, one(position_ids=positions, **given))
        assert gap(ours, alone_logits(stock, samples)) < 1e-5
        spread = torch.stack([positions, positions, 2 * positions])
        assert gap(three(position_ids=spread, **given), ours) > 1e-3


@pytest.mark.parametrize("family", ABLE)
def test_these_families_are_held_with_mrope(family: str) -> None:
    qualify(FAMILIES[family](), "mrope")


_SIZES: dict[str, Any] = {**TEXT, "tie_word_embeddings": True}
UNABLE: dict[str, tuple[Any, str]] = {
    "Gemma 3 has two rotaries": (
        lambda: transformers.Gemma3TextConfig(**{**_SIZES, "num_hidden_layers": 6}, head_dim=16),
        "gemma3_text",
    ),
    "GPT-2 has a table": (
        lambda: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=80),
        "gpt2",
    ),
    "OPT has a table": (
        lambda: transformers.OPTConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=96, vocab_size=80
        ),
        "opt",
    ),
    "StableLM drops the boundaries": (lambda: transformers.StableLmConfig(**_SIZES), "stablelm"),
    "Cohere turns neighbouring dimensions": (lambda: transformers.CohereConfig(**_SIZES), "cohere"),
}


@pytest.mark.parametrize("case", UNABLE)
def test_a_family_that_cannot_have_three_axes_is_refused_by_name(case: str) -> None:
    build, name = UNABLE[case]
    with pytest.raises(ConfigError, match=name):
        qualify(build(), "mrope")


def test_the_configs_own_sections_count_and_must_add_up() -> None:
    config = Qwen2Config(**TEXT, rope_parameters={"rope_type": "default", "mrope_section": [4, 2, 2]})
    assert sections_of(config, 16) == [4, 2, 2]
    assert sections_of(Qwen2Config(**TEXT), 16) == SECTIONS
    assert sections_of(Qwen2Config(**TEXT), 128) == [16, 24, 24]  # Qwen2-VL's
    with pytest.raises(ConfigError, match=r"mrope_section \[4, 2, 2\] must be 3 numbers that add up to 32"):
        sections_of(config, 64)


@pytest.mark.parametrize("positions", [torch.arange(7), torch.zeros(2, 7).long(), torch.zeros(3, 6).long()])
def test_positions_of_the_wrong_shape_are_refused(positions: Tensor) -> None:
    decoder = Decoder(stock_model("llama"), "mrope")
    with pytest.raises(ValueError, match="position"):
        decoder(
            inputs_embeds=torch.randn(7, 32),
            position_ids=positions,
            cu_seqlens=torch.tensor([0, 7], dtype=torch.int32),
            keep=torch.arange(7),
        )
    with pytest.raises(ValueError, match="axes"):
        Decoder(stock_model("llama")).place(torch.zeros(3, 7).long())


GENERATING = {
    "llama": lambda: transformers.LlamaConfig(**_GENERATING),
    "qwen3": lambda: transformers.Qwen3Config(**_GENERATING, head_dim=16),
    "mistral, window shorter than the prompt": lambda: transformers.MistralConfig(
        **_GENERATING, sliding_window=9
    ),
}
_GENERATING: dict[str, Any] = dict(
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


def spied(llm: Any) -> tuple[list[Tensor], Any]:
    """Logits [V] of the last position at each forward pass from now on, and the handle that ends it."""
    seen: list[Tensor] = []
    handle = llm.register_forward_hook(lambda module, inputs, output: seen.append(output.logits[0, -1]))
    return seen, handle


@pytest.mark.parametrize("content", ["one image", "image last", "several images", "text"])
@torch.no_grad()
def test_generation_goes_on_with_qwen2_vls_own_logits(content: str) -> None:
    """Token by token with a cache, against Qwen2-VL's full forward pass over the grown sequence at its own positions."""
    theirs = qwen2_vl()
    decoder = same_decoder(theirs)
    ids, grids = written(SAMPLES[content])
    embeddings = embedded(theirs, ids)
    positions = their_positions(theirs, ids, grids)
    with decoder.generating() as llm:
        seen, handle = spied(llm)
        said = list(_tokens(decoder, llm, embeddings, positions, 8, 0.0, 0))
        handle.remove()
    assert len(seen) == 8
    for step, logits in enumerate(seen):
        grown = torch.cat([ids, torch.tensor(said[:step], dtype=torch.int64)])
        at = their_positions(theirs, grown, grids)
        inputs = torch.cat([embeddings, theirs.get_input_embeddings()(grown[len(ids) :])])
        expected = their_logits(theirs, inputs, at)[-1]
        assert gap(logits, expected) < 1e-5
        assert said[step] == int(expected.argmax())
        if step:
            assert at[:, len(ids)].tolist() == [int(positions.max()) + 1] * 3


@pytest.fixture(params=GENERATING)
def assistant(request: pytest.FixtureRequest, tmp_path: Path) -> Assistant:
    """A model folder with resolution native and positions mrope."""
    folder = tiny.write_model_folder(
        tmp_path / "model", seed=3, connector="merge_mlp", config=GENERATING[request.param]()
    )
    written = json.loads((folder / "mmds.json").read_text())
    written.update(resolution={"name": "native"}, positions="mrope")
    (folder / "mmds.json").write_text(json.dumps(written))
    return load_assistant(folder)


@torch.no_grad()
def test_an_answer_about_pictures_of_any_size_goes_on_from_the_largest_position(assistant: Assistant) -> None:
    """`answer` on a model folder: each step's logits equal a packed forward pass without cache over the grown sequence."""
    turn = Turn(
        role="user", parts=("compare", ImageMarker(index=0), "with", ImageMarker(index=1), "what colour?")
    )
    conversation = Conversation(key="q", turns=(turn,), images=("a.png", "b.png"))
    images = [picture((9, 200, 40), size=(150, 60)), picture((200, 9, 9), size=(40, 90), seed=1)]
    decoder = assistant.model.decoder
    ids = assistant.tokenizer.prompt_ids(conversation)
    row = assistant.row([assistant.sample(ids, np.zeros(len(ids), np.bool_), images, conversation.images)])
    assert row.position_ids.shape == (3, row.input_ids.numel())
    assert len({plan.grid for plan in row.plans}) == 2
    embeddings = assistant.model.embed(row, assistant.encoder(row))
    seen, handle = spied(decoder.llm)
    text = "".join(answer(assistant, conversation, images, max_new_tokens=10))
    handle.remove()
    grown, places, said = embeddings, row.position_ids, []
    for logits in seen:
        count = len(grown)
        expected = decoder(
            inputs_embeds=grown,
            position_ids=places,
            cu_seqlens=torch.tensor([0, count], dtype=torch.int32),
            keep=torch.tensor([count - 1]),
        )[0]
        assert gap(logits, expected) < 1e-5
        said.append(int(expected.argmax()))
        grown = torch.cat([grown, decoder.embed(torch.tensor(said[-1:]))])
        places = torch.cat([places, torch.full((3, 1), int(places.max()) + 1)], dim=1)
    assert len(seen) == 10
    assert int(places[0, -1]) < count  # an image of many tokens takes few positions
    assert text and assistant.tokenizer.decode(said).startswith(text)
