"""The data of the quick start: easy-vqa's pictures and questions as raw JSONL, and text-only conversations.

Files made (LLaVA style; pictures are 64 x 64 PNG, one flat shape on a flat background):
    align.jsonl       a caption of each training picture, made from its answers ("teal circle")
    instruct.jsonl    one conversation about each training picture, several questions, mostly open ones
    text_only.jsonl   short arithmetic and spelling from reasoning-gym
    heldout.jsonl     one question about a test picture each, with "type": "open" or "yes/no"; in random order
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from mmds.errors import DataError

COLOURS = frozenset("black blue brown gray green red teal yellow".split())
SHAPES = frozenset("circle rectangle triangle".split())
TEXT_ONLY = 400  # conversations; about 9 % of the samples of stage 2
SEED = 7
SIDES = (56, 448)
"""Least and largest width and height in pixels of the pictures of `write_varied`."""

QA = tuple[str, str]  # question, answer
Record = dict[str, Any]


def write_data(unpacked: Path, folder: Path) -> None:
    """Fill `folder` with pictures and the four JSONL files."""
    source = unpacked / "easy_vqa" / "data"
    train, test = (read_questions(source / split / "questions.json") for split in ("train", "test"))
    for split in ("train", "test"):
        shutil.copytree(source / split / "images", folder / "images" / split)
    _write(folder / "align.jsonl", captions(train))
    _write(folder / "instruct.jsonl", conversations(train, random.Random(SEED)))
    _write(folder / "text_only.jsonl", text_only(TEXT_ONLY))
    _write(folder / "heldout.jsonl", heldout(test, random.Random(SEED)))


def write_varied(data: Path, folder: Path) -> None:
    """The same files with every picture resized to a random width and height, so that resolution and aspect vary."""
    sides = random.Random(SEED)
    for picture in sorted(
        (data / "images").glob("*/*.png"), key=lambda path: (path.parent.name, int(path.stem))
    ):
        target = folder / picture.relative_to(data)
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(picture) as image:
            image.convert("RGB").resize(
                (sides.randint(*SIDES), sides.randint(*SIDES)), Image.Resampling.BICUBIC
            ).save(target)
    for name in ("align", "instruct", "text_only", "heldout"):
        shutil.copyfile(data / f"{name}.jsonl", folder / f"{name}.jsonl")


def read_questions(path: Path) -> dict[int, list[QA]]:
    """easy-vqa's [question, answer, picture] triples, by picture."""
    by_picture: dict[int, list[QA]] = defaultdict(list)
    for question, answer, picture in json.loads(path.read_text(encoding="utf-8")):
        by_picture[picture].append((question, answer))
    return dict(sorted(by_picture.items()))


def truth(questions: Iterable[QA]) -> tuple[str | None, str | None]:
    """(colour, shape) of a picture as far as its answers tell; a yes/no answer tells a word, or excludes it.

    Raises DataError when they contradict each other.
    """
    held: set[str] = set()
    excluded: set[str] = set()
    for question, answer in questions:
        words = set(re.findall("[a-z]+", question))
        named = words & (COLOURS | SHAPES)
        if answer in ("yes", "no"):
            negated = bool(words & {"not", "no"})
            (held if (answer == "yes") != negated else excluded).update(named)
        else:
            held |= named | {answer}
    found: list[str | None] = []
    for names in (COLOURS, SHAPES):
        left = names - excluded
        told = (held & names) or (left if len(left) == 1 else frozenset())
        if len(told) > 1 or told & excluded:
            raise DataError(f"easy-vqa: contradicting answers say {sorted(told)}")
        found.append(next(iter(told), None))
    return found[0], found[1]


def captions(train: dict[int, list[QA]]) -> Iterable[Record]:
    """One caption of each picture whose colour and shape are known (about 9 in 10)."""
    for picture, questions in train.items():
        colour, shape = truth(questions)
        if colour and shape:
            yield record(f"caption-{picture}", "train", picture, [("", f"A {colour} {shape}.")])


def conversations(train: dict[int, list[QA]], dice: random.Random) -> Iterable[Record]:
    """One conversation of each picture: its colour and its shape as far as they are asked for, every third with a yes or no."""
    for picture, questions in train.items():
        chosen = pick(questions, dice, yes_no=picture % 3 == 0)
        if chosen:
            yield record(f"talk-{picture}", "train", picture, chosen)


def pick(questions: Sequence[QA], dice: random.Random, *, yes_no: bool) -> list[QA]:
    """At most one question for the colour, one for the shape, and last a yes/no one; no answer stands in an earlier turn.

    A question such as "what color is the circle?" gives the shape away, so that a later turn could be answered without looking.
    """
    chosen: list[QA] = []
    shuffled = dice.sample(questions, len(questions))
    for names in dice.sample([COLOURS, SHAPES], 2):
        said = " ".join(word for qa in chosen for word in qa)
        fitting = [qa for qa in shuffled if qa[1] in names and qa[1] not in said]
        chosen += fitting[:1]
    if yes_no:
        chosen += [qa for qa in shuffled if question_type(qa[1]) == "yes/no"][:1]
    return chosen


def heldout(test: dict[int, list[QA]], dice: random.Random) -> Iterable[Record]:
    """Every question about a test picture on its own, in random order: any first n are a fair sample."""
    asked = [(picture, turn, qa) for picture, qas in test.items() for turn, qa in enumerate(qas)]
    dice.shuffle(asked)
    for picture, turn, qa in asked:
        yield record(f"test-{picture}-{turn}", "test", picture, [qa]) | {"type": question_type(qa[1])}


def text_only(count: int) -> Iterable[Record]:
    """Short questions of reasoning-gym with short answers."""
    import reasoning_gym

    tasks = [
        reasoning_gym.create_dataset("chain_sum", size=count, seed=SEED, max_terms=2, max_digits=2),
        reasoning_gym.create_dataset("spell_backward", size=count, seed=SEED, max_word_len=6),
    ]
    for index in range(count):
        item = tasks[index % len(tasks)][index // len(tasks)]
        yield {"id": f"text-{index}", "conversations": turns([(item["question"], str(item["answer"]))])}


def question_type(answer: str) -> str:
    """ "yes/no" or "open"."""
    return "yes/no" if answer in ("yes", "no") else "open"


def record(key: str, split: str, picture: int, questions: Sequence[QA]) -> Record:
    """A conversation about one picture, which comes first in the first turn."""
    first = [("<image>" + (f"\n{questions[0][0]}" if questions[0][0] else ""), questions[0][1])]
    image = f"images/{split}/{picture}.png"
    return {"id": key, "image": image, "conversations": turns([*first, *questions[1:]])}


def turns(questions: Sequence[QA]) -> list[dict[str, str]]:
    """LLaVA's turns."""
    return [
        {"from": speaker, "value": text}
        for question, answer in questions
        for speaker, text in (("human", question), ("gpt", answer))
    ]


def _write(path: Path, records: Iterable[Record]) -> None:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
