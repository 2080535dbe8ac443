"""Ask a model folder about pictures: `python scripts/chat.py MODEL_FOLDER --image a.png "What is shown?"`.

Without a question it starts a conversation. Greedy by default; loads without DeepSpeed; the prompt's ids are those of training.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from mmds.data.conversation import Conversation, ImageMarker, Turn
from mmds.errors import MmdsError
from mmds.generate import Assistant, answer, load_assistant


def main() -> None:
    """One question, or a conversation about the given pictures."""
    parser = argparse.ArgumentParser(description="Ask a trained model about pictures.")
    parser.add_argument("model", help="model folder, or a run folder with a finished model")
    parser.add_argument("question", nargs="?", help="one question; without it, a conversation")
    parser.add_argument(
        "--image", action="append", default=[], type=Path, help="picture; repeatable, in order"
    )
    parser.add_argument("--system", help="system turn, if training used one")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    args = parser.parse_intermixed_args()
    pictures = [read(path) for path in args.image]
    assistant = load_assistant(args.model, device=args.device)
    turns = [Turn(role="system", parts=(args.system,))] if args.system else []
    if args.question is not None:
        say(assistant, [*turns, first_turn(args.question, len(pictures))], args, pictures)
        return
    print("Ask away; an empty line ends.")
    asked = 0
    while question := input("> ").strip():
        turns.append(first_turn(question, 0 if asked else len(pictures)))
        turns.append(Turn(role="assistant", parts=(say(assistant, turns, args, pictures),)))
        asked += 1


def first_turn(question: str, pictures: int) -> Turn:
    """A user turn: its pictures, a line each, then the question (as `<image>\\nquestion` in training data)."""
    parts: list[str | ImageMarker] = []
    for index in range(pictures):
        parts += [ImageMarker(index=index), "\n"]
    if parts:
        return Turn(role="user", parts=(*parts[:-1], "\n" + question))
    return Turn(role="user", parts=(question,))


def say(assistant: Assistant, turns: list[Turn], args: argparse.Namespace, pictures: list[bytes]) -> str:
    """Print the assistant's turn as it comes, and return it."""
    conversation = Conversation(key="chat", turns=tuple(turns), images=tuple(map(str, args.image)))
    said = ""
    for piece in answer(
        assistant,
        conversation,
        pictures,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
    ):
        said += piece
        print(piece, end="", flush=True)
    print()
    return said


def read(path: Path) -> bytes:
    """The bytes of a picture. Raises MmdsError when there is no such file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise MmdsError(f"--image {path}: {error.strerror}") from error


if __name__ == "__main__":
    try:
        with torch.no_grad():
            main()
    except MmdsError as error:
        sys.exit(f"{type(error).__name__}: {error}")
