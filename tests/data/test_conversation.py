from __future__ import annotations

from typing import Any

import pytest

from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.conversation import Conversation, ImageMarker, Turn, parse_record
from mmds.errors import DataError
from tests.chat_fixtures import hf_tokenizer


def _llava(*turns: tuple[str, str], **fields: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in turns], **fields}


def _chat(*turns: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **fields}


def _parse(record: dict[str, Any], **options: Any) -> Conversation:
    return parse_record(record, where="data.jsonl:7", **options)


IMAGE_0 = ImageMarker(index=0)

STYLES = [
    _llava(("human", "<image>\nWhat?"), ("gpt", "A cat."), id="k", image="a.png"),
    _llava(("human", "<image>\nWhat?"), ("gpt", "A cat."), id="k", image=["a.png"]),
    _llava(("user", "<image>\nWhat?"), ("assistant", "A cat."), id="k", images=["a.png"]),
    _chat(("user", "<image>\nWhat?"), ("assistant", "A cat."), id="k", images=["a.png"]),
    _chat(
        ("user", [{"type": "image", "image": "a.png"}, {"type": "text", "text": "\nWhat?"}]),
        ("assistant", [{"type": "text", "text": "A cat."}]),
        id="k",
    ),
    _chat(
        ("user", [{"type": "image"}, {"type": "text", "text": "\n"}, {"type": "text", "text": "What?"}]),
        ("assistant", "A cat."),
        id="k",
        images=["a.png"],
    ),
    _chat(
        ("user", [{"type": "image", "path": "a.png"}, {"type": "text", "text": "\nWhat?"}]),
        ("assistant", "A cat."),
        id="k",
        images=None,
    ),
]


@pytest.mark.parametrize("record", STYLES)
def test_every_style_is_the_same_conversation(record: dict[str, Any]) -> None:
    assert _parse(record) == Conversation(
        key="k",
        turns=(
            Turn(role="user", parts=(IMAGE_0, "\nWhat?")),
            Turn(role="assistant", parts=("A cat.",)),
        ),
        images=("a.png",),
    )


def test_both_styles_give_the_same_ids_and_labels() -> None:
    tokenizer = ChatTokenizer(hf_tokenizer("byte_level", "chatml"))
    encoded = [tokenizer.encode(_parse(record)) for record in STYLES]
    assert len({tuple(e.ids.tolist()) for e in encoded}) == 1
    assert len({tuple(e.supervised.tolist()) for e in encoded}) == 1


def test_markers_take_the_paths_in_order_over_all_turns() -> None:
    record = _llava(
        ("human", "<image> and <image>"),
        ("gpt", "a"),
        ("human", "then <image>"),
        ("gpt", "b"),
        image=["1", "2", "3"],
    )
    conversation = _parse(record)
    assert conversation.images == ("1", "2", "3")
    assert conversation.turns[0].parts == (IMAGE_0, " and ", ImageMarker(index=1))
    assert conversation.turns[2].parts == ("then ", ImageMarker(index=2))


def test_an_escaped_marker_is_literal_text() -> None:
    record = _llava(("human", r"<image> Write \<image> twice: \<image>\<image>"), ("gpt", "ok"), image="a")
    assert _parse(record).turns[0].parts == (IMAGE_0, " Write <image> twice: <image><image>")


def test_a_marker_in_answers_system_turns_and_text_parts_stays_text() -> None:
    record = _chat(
        ("system", "Say <image>."),
        ("user", [{"type": "text", "text": r"<image> \<image>"}]),
        ("assistant", r"<image> \<image>"),
    )
    conversation = _parse(record)
    assert conversation.images == ()
    assert [turn.parts for turn in conversation.turns] == [
        ("Say <image>.",),
        (r"<image> \<image>",),
        (r"<image> \<image>",),
    ]


@pytest.mark.parametrize(("markers", "images"), [(0, 1), (1, 0), (2, 1), (1, 2), (0, 2), (3, 0)])
@pytest.mark.parametrize("style", [_llava, _chat])
def test_markers_and_images_must_be_equally_many(style: Any, markers: int, images: int) -> None:
    text = "Look: " + "<image>" * markers
    paths = [f"{i}.png" for i in range(images)]
    user, assistant = ("human", "gpt") if style is _llava else ("user", "assistant")
    record = style((user, text), (assistant, "ok"), id="k9", **({"image": paths} if images else {}))
    with pytest.raises(DataError) as caught:
        _parse(record)
    message = str(caught.value)
    assert message.startswith("data.jsonl:7 (sample k9): ")
    assert f"{markers} image markers but {images} images" in message


def test_parts_with_some_paths_missing_are_counted_too() -> None:
    parts = [{"type": "image", "image": "a"}, {"type": "image"}, {"type": "text", "text": "x"}]
    with pytest.raises(DataError, match="2 image markers but 1 images"):
        _parse(_chat(("user", parts), ("assistant", "ok")))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (["gpt", "human"], "turn 0 is 'assistant', but 'user'"),
        (["system", "gpt"], "turn 1 is 'assistant', but 'user'"),
        (["human", "human", "gpt"], "turn 1 is 'user', but 'assistant'"),
        (["human", "gpt", "gpt"], "turn 2 is 'assistant', but 'user'"),
        (["human", "system", "gpt"], "turn 1 is 'system'"),
        (["system", "system", "human", "gpt"], "turn 1 is 'system'"),
        (["human"], "last turn is 'user', but must be 'assistant'"),
        (["human", "gpt", "human"], "last turn is 'user'"),
        (["system"], "last turn is 'system'"),
        (["human", "bot"], "'from' is 'bot'; known are"),
        (["human", "function_call"], "'from' is 'function_call'"),
        (["Human", "gpt"], "'from' is 'Human'"),
    ],
)
def test_turns_out_of_order_are_refused_with_place_and_sample(roles: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        _parse(_llava(*((role, "text") for role in roles), id="s3"))
    assert "data.jsonl:7 (sample s3)" in str(caught.value)


@pytest.mark.parametrize(
    "roles", [["human", "gpt"], ["system", "human", "gpt"], ["human", "gpt", "human", "gpt"]]
)
def test_turns_in_order_pass(roles: list[str]) -> None:
    conversation = _parse(_llava(*((role, "text") for role in roles)))
    assert len(conversation.turns) == len(roles)


def test_chat_style_knows_only_its_own_role_names() -> None:
    with pytest.raises(DataError, match="'role' is 'human'; known are system, user, assistant"):
        _parse(_chat(("human", "q"), ("gpt", "a")))
    with pytest.raises(DataError, match="'role' is 'tool'"):
        _parse(_chat(("user", "q"), ("tool", "a")))


@pytest.mark.parametrize("empty", ["", "  \n", []])
@pytest.mark.parametrize("turn", [0, 1])
def test_empty_turns_are_refused(empty: Any, turn: int) -> None:
    contents: list[Any] = ["q", "a"]
    contents[turn] = empty
    with pytest.raises(DataError, match=f"turn {turn} .* is empty"):
        _parse(_chat(("user", contents[0]), ("assistant", contents[1])))


def test_a_picture_alone_is_a_turn() -> None:
    assert _parse(_llava(("human", "<image>"), ("gpt", "a"), image="p")).turns[0].parts == (IMAGE_0,)


def test_an_answer_cannot_hold_an_image() -> None:
    record = _chat(("user", "draw"), ("assistant", [{"type": "image", "image": "a"}]))
    with pytest.raises(DataError, match="only user turns may"):
        _parse(record)


def test_a_conversation_to_be_answered_ends_with_the_user() -> None:
    assert _parse(_chat(("user", "q")), ends_with="user").turns[-1].role == "user"
    with pytest.raises(DataError, match="must be 'user'"):
        _parse(_chat(("user", "q"), ("assistant", "a")), ends_with="user")


def test_the_key_is_the_id_or_the_place() -> None:
    for given, key in (("x/1", "x/1"), (17, "17"), (0, "0"), (None, "data.jsonl:7")):
        assert _parse(_llava(("human", "q"), ("gpt", "a"), id=given)).key == key
    for wrong in ("", True, 1.5, ["a"]):
        with pytest.raises(DataError, match="'id' must be"):
            _parse(_llava(("human", "q"), ("gpt", "a"), id=wrong))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"id": "a"}, "needs 'conversations'"),
        (_llava(("human", "q"), ("gpt", "a")) | _chat(("user", "q")), "not both"),
        ({"messages": []}, "at least one turn"),
        ({"messages": "hi"}, "must be a list"),
        ({"messages": ["hi", "ho"]}, "turn 0 must be an object"),
        ({"messages": [{"role": "user"}]}, "'content' must be a string or a list of parts, not NoneType"),
        ({"conversations": [{"from": "human", "value": [1]}]}, "'value' must be a string, not list"),
        ({"conversations": [{"role": "user", "content": "q"}]}, "'from' is None"),
        (_chat(("user", [{"type": "video", "path": "a"}]), ("assistant", "a")), "part 0: must have type"),
        (_chat(("user", ["text"]), ("assistant", "a")), "part 0: must have type"),
        (_chat(("user", [{"type": "text"}]), ("assistant", "a")), "'text' must be a string"),
        (
            _chat(("user", [{"type": "image", "image": "a", "path": "b"}]), ("assistant", "a")),
            "image and path",
        ),
        (
            _chat(("user", [{"type": "image", "image": "a"}]), ("assistant", "a"), images=["a"]),
            "keep one way",
        ),
        (_llava(("human", "<image>"), ("gpt", "a"), image="a", images=["a"]), "both 'image' and 'images'"),
        (_llava(("human", "<image>"), ("gpt", "a"), image=7), "not int"),
        (_llava(("human", "<image>"), ("gpt", "a"), image=[None]), "image path must be a string"),
        (_llava(("human", "<image>"), ("gpt", "a"), image=""), "image path must be a string"),
        (_llava(("human", "<image>"), ("gpt", "a"), image="https://x/a.png"), "not a local path"),
        (_llava(("human", "q"), ("gpt", "a"), video="a.mp4"), "'video' is not supported"),
        (_llava(("human", "q"), ("gpt", "a \ud800")), "lone surrogate"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [1]}]},
            "tool_calls",
        ),
    ],
)
def test_malformed_records_are_refused_with_their_place(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        _parse(record)
    assert str(caught.value).startswith("data.jsonl:7")
