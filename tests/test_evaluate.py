from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mmds.data.conversation import Conversation, Turn
from mmds.evaluate import Question, accuracy_by_kind, exact_match, swapped
from mmds.generate import Assistant, answer
from tests.trained import ANSWERS, TAUGHT, asked, picture, question, taught


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Assistant:
    return taught(tmp_path_factory)


def with_answer(item: Question, text: str) -> Question:
    turns = (*item.conversation.turns[:-1], Turn(role="assistant", parts=(text,)))
    return replace(item, conversation=replace(item.conversation, turns=turns))


def generated(assistant: Assistant, item: Question) -> str:
    return "".join(answer(assistant, asked(item.conversation), item.images, max_new_tokens=80))


def random_questions(count: int) -> list[Question]:
    """Pictures of random colours, each with a taught text as the claimed truth."""
    rng = np.random.default_rng(0)
    made = []
    for k in range(count):
        colour = tuple(int(x) for x in rng.integers(0, 256, 3))
        item = with_answer(question(0), ANSWERS[int(rng.integers(TAUGHT))][1])
        made.append(replace(item, images=(picture(colour, seed=k),)))
    return made


def test_exact_match_is_what_really_generating_gives_in_rows_of_any_length(assistant: Assistant) -> None:
    """Taught, new and random questions, and near misses: one token short, one too many, another case."""
    items = [question(i) for i in range(len(ANSWERS))] + random_questions(12)
    items += [with_answer(question(0), text) for text in ("re", "redd", "Red", "red")]
    expected = [generated(assistant, item) == item.conversation.turns[-1].parts[0] for item in items]
    for row_tokens in (1, 90, 2048):
        assert exact_match(assistant, items, row_tokens=row_tokens) == expected
    assert 5 <= sum(expected) <= len(items) - 5


def test_only_the_last_answer_of_a_dialogue_is_asked(assistant: Assistant) -> None:
    """The earlier answers are given, whether or not the model would have said them."""
    item = question(0)
    earlier = (Turn(role="user", parts=("user",)), Turn(role="assistant", parts=("system shape",)))
    dialogue = replace(
        item, conversation=replace(item.conversation, turns=(*earlier, *item.conversation.turns))
    )
    truthful = with_answer(dialogue, generated(assistant, dialogue))
    assert exact_match(assistant, [truthful, with_answer(dialogue, "green")]) == [True, False]


def test_the_tick_counts_every_question_once_and_none_is_no_question(assistant: Assistant) -> None:
    ticks: list[int] = []
    items = [question(i) for i in range(len(ANSWERS))]
    exact_match(assistant, items, row_tokens=90, tick=ticks.append)
    assert sum(ticks) == len(items)
    assert len(ticks) > 1
    assert exact_match(assistant, []) == []


@pytest.mark.parametrize("count", range(2, 10))
def test_swapping_gives_every_question_another_ones_pictures_and_uses_each_once(count: int) -> None:
    items = [replace(question(0), images=(bytes([k]),), kind=str(k)) for k in range(count)]
    got = swapped(items)
    assert [g.kind for g in got] == [i.kind for i in items]
    assert [g.conversation for g in got] == [i.conversation for i in items]
    assert all(g.images != i.images for g, i in zip(got, items, strict=True))
    assert sorted(g.images for g in got) == sorted(i.images for i in items)


def test_swapping_needs_two_questions_with_equally_many_pictures() -> None:
    one = question(0)
    for items in ([], [one], [one, replace(one, images=())]):
        with pytest.raises(ValueError, match="two or more questions with equally many"):
            swapped(items)


def test_a_model_that_looks_at_the_picture_fails_on_swapped_ones(assistant: Assistant) -> None:
    items = [question(i) for i in range(TAUGHT)]
    assert exact_match(assistant, items) == [True] * TAUGHT
    assert exact_match(assistant, swapped(items)) == [False] * TAUGHT


def test_accuracy_is_the_share_of_hits_of_each_kind_with_its_count() -> None:
    empty = Conversation(key="", turns=())
    items = [Question(conversation=empty, images=(), kind=kind) for kind in "babba"]
    assert accuracy_by_kind(items, [True, False, False, True, True]) == {"a": (0.5, 2), "b": (2 / 3, 3)}
