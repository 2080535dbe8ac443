"""Score the quick start's model on pictures that it has not seen: `python scripts/quickstart_eval.py runs/quickstart/stage2`.

Exact match on open answers (a colour or a shape) and on yes/no, with the right pictures and with pictures swapped between questions:
what is left when the pictures are wrong was not read off them. A config in place of a model scores its parts before training.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from mmds.config import load_config
from mmds.data.conversation import Conversation, parse_record
from mmds.data.raw import read_records
from mmds.errors import MmdsError
from mmds.evaluate import Question, accuracy_by_kind, exact_match, swapped
from mmds.generate import Assistant, answer, assistant_of, load_assistant
from mmds.model.build import find_source


def main() -> None:
    """Score, print a line, and draw the sheet when asked for."""
    parser = argparse.ArgumentParser(description="Score the quick start's model on held-out questions.")
    parser.add_argument(
        "model", type=Path, help="model folder, run folder, or a config (its untrained parts)"
    )
    parser.add_argument("--data", type=Path, default=Path(".samples/data/heldout.jsonl"))
    parser.add_argument("--open", type=int, default=200, help="questions with open answers (200)")
    parser.add_argument("--yes-no", type=int, default=100, help="questions with yes or no (100)")
    parser.add_argument("--label", default="", help="what the line of the table says")
    parser.add_argument("--scores", type=Path, help="append a JSON line to this file")
    parser.add_argument("--sheet", type=Path, help="write a PNG of pictures with question, answer and truth")
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    questions = read_questions(args.data, {"open": args.open, "yes/no": args.yes_no})
    assistant = open_model(args.model)
    with tqdm(total=2 * len(questions), desc=args.label or str(args.model), unit="question") as bar:
        scores = {
            name: accuracy_by_kind(asked, exact_match(assistant, asked, tick=bar.update))
            for name, asked in {"right": questions, "swapped": swapped(questions)}.items()
        }
    line = {
        kind: {name: round(100 * scores[name][kind][0], 1) for name in scores} for kind in ("open", "yes/no")
    }
    for kind, row in line.items():
        count = scores["right"][kind][1]
        print(
            f"{args.label:<14} {kind:<7} right {row['right']:5.1f} %   swapped {row['swapped']:5.1f} %   ({count} questions)"
        )
    if args.scores:
        with args.scores.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"label": args.label, **line}) + "\n")
    if args.sheet:
        draw_sheet(assistant, [q for q in questions if q.kind == "open"][:12], args.sheet)
        print(f"pictures with question, answer and truth: {args.sheet}")


def open_model(path: Path) -> Assistant:
    """A trained model, or for a config file its parts before training."""
    if path.is_file():
        config = load_config(path)
        source = find_source(config.init_from, config.model)
        return assistant_of(source, device=torch.device("cpu"), dtype=torch.float32, seed=config.seed)
    return load_assistant(path)


def read_questions(path: Path, wanted: dict[str, int]) -> list[Question]:
    """The first questions of each kind of a held-out file, whose records have a `type` beside the conversation."""
    left = dict(wanted)
    questions = []
    for where, record in read_records(path):
        kind = str(record.get("type"))
        if left.get(kind, 0) > 0:
            left[kind] -= 1
            conversation = parse_record(record, where=where)
            images = tuple((path.parent / image).read_bytes() for image in conversation.images)
            questions.append(Question(conversation=conversation, images=images, kind=kind))
    return questions


def draw_sheet(assistant: Assistant, questions: Sequence[Question], path: Path) -> None:
    """A grid of pictures, each with its question, the greedy answer and the truth."""
    width, height, columns = 300, 240, 4
    rows = -(-len(questions) // columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for index, question in enumerate(questions):
        x, y = index % columns * width + 10, index // columns * height + 10
        turns = question.conversation.turns
        asked = Conversation(key="sheet", turns=turns[:-1], images=question.conversation.images)
        said = "".join(answer(assistant, asked, question.images, max_new_tokens=12)).strip()
        truth = "".join(part for part in turns[-1].parts if isinstance(part, str))
        text = "".join(part for part in turns[-2].parts if isinstance(part, str)).strip()
        with Image.open(io.BytesIO(question.images[0])) as picture:
            sheet.paste(picture.convert("RGB").resize((150, 150), Image.Resampling.NEAREST), (x, y))
        colour = "darkgreen" if said == truth else "firebrick"
        draw.text((x, y + 155), text, fill="black", font=font)
        draw.text((x, y + 175), f"answer: {said[:30]}", fill=colour, font=font)
        draw.text((x, y + 195), f"truth: {truth}", fill="black", font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


if __name__ == "__main__":
    try:
        main()
    except MmdsError as error:
        sys.exit(f"{type(error).__name__}: {error}")
