"""What a chat template writes around a conversation, apart from what people said.

The template is rendered once with a stand-in character for the contents of each turn, which shows the literal
text and the control tokens that the template itself writes. The contents then go into their places. A second
rendering with the real contents must give the same string, so a template that drops, repeats or rewrites
contents is refused, not trained on.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmds.data.conversation import ImageMarker, Turn
from mmds.data.text_encoder import Control, TextEncoder
from mmds.errors import DataError

_PRIVATE_USE = (0xF0000, 0x10FFFD)
"""Planes 15 and 16 of Unicode, which mean nothing by themselves: the stand-ins are taken from here."""

_MOST_SKELETONS = 256

_TRIMS: tuple[Callable[[str], str], ...] = (str, str.strip, str.rstrip, str.lstrip)
"""What templates do to contents: nothing, or white space trimmed on one or both sides."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Characters of the rendered prompt. turn: whose content they are, None for the template's own."""

    text: str
    turn: int | None = None


Atom = Text | Control | ImageMarker


@dataclass(frozen=True, kw_only=True)
class Run:
    """Text between two control tokens or image markers.

    before, after: what encloses it (None at the ends of the prompt). answer: offset in `text` where an
    assistant's content starts. header: the template's text right before that. closing: the template's text
    after it, up to `after`; None when something else than the template's text follows.
    """

    text: str
    before: Control | ImageMarker | None
    after: Control | ImageMarker | None
    answer: int | None = None
    header: str = ""
    closing: str | None = None


class ChatTemplate:
    """Renders turns through a chat template into atoms: text, control tokens and image markers."""

    def __init__(self, tokenizer: Any, source: str, encoder: TextEncoder) -> None:
        """tokenizer: of transformers. source: the template (Jinja). encoder: knows the control tokens."""
        self.source = source
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._skeletons: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}

    def atoms(self, turns: Sequence[Turn], *, place: str, open_answer: bool = False) -> tuple[Atom, ...]:
        """The rendered prompt, cut at the control tokens that the template wrote and at image markers.

        open_answer: add an assistant turn that is still to be written, as one empty Text; what follows it is
        included too. place: prefix of messages. Raises DataError when the template refuses the turns or does
        not keep their contents.
        """
        roles = [*(turn.role for turn in turns), *(["assistant"] if open_answer else [])]
        stand_ins = _stand_ins(turns, len(roles) + 1, place)
        image = stand_ins.pop()
        contents = [
            "".join(part if isinstance(part, str) else image for part in turn.parts) for turn in turns
        ]
        contents += stand_ins[len(turns) :]
        direct = self._render(roles, contents, place)
        skeleton = self._skeleton(tuple(roles), tuple(stand_ins), place)
        kept = _kept_contents(skeleton, stand_ins, roles, contents, direct)
        if kept is None:  # a template may write the date: ask again before giving up
            self._skeletons.clear()
            skeleton = self._skeleton(tuple(roles), tuple(stand_ins), place)
            kept = _kept_contents(skeleton, stand_ins, roles, contents, direct)
        if kept is None:
            raise DataError(
                f"{place}: the chat template rewrites what is said, beyond trimming white space, so it "
                "cannot be told what to supervise; change the contents or give another template"
            )
        if open_answer:
            kept[-1] = ""
        markers = iter([part for turn in turns for part in turn.parts if isinstance(part, ImageMarker)])
        return tuple(self._cut(skeleton, stand_ins, kept, image, markers))

    def _skeleton(self, roles: tuple[str, ...], stand_ins: tuple[str, ...], place: str) -> str:
        """The rendered prompt with a stand-in, once, for what is said in each turn."""
        key = (roles, stand_ins)
        if key in self._skeletons:
            return self._skeletons[key]
        skeleton = self._render(roles, stand_ins, place)
        for i, stand_in in enumerate(stand_ins):
            if (count := skeleton.count(stand_in)) != 1:
                raise DataError(
                    f"{place}: the chat template writes turn {i} ({roles[i]}) {count} times instead of once"
                )
        if len(self._skeletons) >= _MOST_SKELETONS:
            self._skeletons.clear()
        self._skeletons[key] = skeleton
        return skeleton

    def _render(self, roles: Sequence[str], contents: Sequence[str], place: str) -> str:
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, chat_template=self.source, tokenize=False, add_generation_prompt=False
            )
        except Exception as error:  # a template may raise anything
            raise DataError(
                f"{place}: the chat template refuses these turns ({', '.join(roles)}): {error}"
            ) from error
        return str(text)

    def _cut(
        self,
        skeleton: str,
        stand_ins: Sequence[str],
        contents: Sequence[str],
        image: str,
        markers: Iterator[ImageMarker],
    ) -> Iterator[Atom]:
        """Atoms of a skeleton with the contents in their places. markers: of all turns, in order."""
        for chunk in re.split(f"([{''.join(stand_ins)}])", skeleton):
            if chunk not in stand_ins:
                for piece in self._encoder.split_controls(chunk):
                    yield Text(text=piece) if isinstance(piece, str) else piece
                continue
            turn = stand_ins.index(chunk)
            for k, text in enumerate(contents[turn].split(image)):
                if k:
                    yield next(markers)
                if text or not contents[turn]:
                    yield Text(text=text, turn=turn)


def runs(atoms: Sequence[Atom], turns: Sequence[Turn]) -> list[Run]:
    """The texts of a rendered prompt, joined between control tokens and image markers.

    White space that the enclosing control tokens eat (as the tokenizer would) is left out.
    """
    found: list[Run] = []
    texts: list[Text] = []
    before: Control | ImageMarker | None = None
    for atom in [*atoms, None]:
        if isinstance(atom, Text):
            texts.append(atom)
            continue
        found.append(_eaten(_run(texts, turns, before, atom)))
        texts, before = [], atom
    return found


def check_endings(found: Sequence[Run], place: str) -> Control:
    """The control token that ends every assistant turn. Raises DataError when there is no such one."""
    ends = {}
    for run in found:
        if run.answer is None:
            continue
        if not isinstance(run.after, Control) or run.closing is None:
            raise DataError(
                f"{place}: the chat template writes no control token at the end of an assistant turn, so a "
                "model could never learn to stop; give a template that ends them, for example with the eos "
                "token"
            )
        ends[run.closing + run.after.text] = run.after
    if len(ends) > 1:
        raise DataError(
            f"{place}: the chat template ends assistant turns differently ({', '.join(map(repr, ends))}); "
            "give a template that ends them all alike"
        )
    return next(iter(ends.values()))


def _run(
    texts: Sequence[Text],
    turns: Sequence[Turn],
    before: Control | ImageMarker | None,
    after: Control | ImageMarker | None,
) -> Run:
    """Join the texts between two control tokens or image markers."""
    run = Run(text="".join(piece.text for piece in texts), before=before, after=after)
    for k, piece in enumerate(texts):
        if piece.turn is not None and turns[piece.turn].role == "assistant":
            follows = texts[k + 1 :]
            return replace(
                run,
                answer=sum(len(other.text) for other in texts[:k]),
                header=texts[k - 1].text if k and texts[k - 1].turn is None else "",
                closing=None
                if any(p.turn is not None for p in follows)
                else "".join(p.text for p in follows),
            )
    return run


def _eaten(run: Run) -> Run:
    """The run without the white space that the control tokens around it eat."""
    text, answer, header = run.text, run.answer, run.header
    if isinstance(run.before, Control) and run.before.eats_right:
        text = text.lstrip()
    lost = len(run.text) - len(text)
    if answer is not None:
        answer = max(answer - lost, 0)
        header = header[max(len(header) - answer, 0) :]
    if isinstance(run.after, Control) and run.after.eats_left:
        text = text.rstrip()
    return replace(run, text=text, answer=answer, header=header)


def _stand_ins(turns: Sequence[Turn], count: int, place: str) -> list[str]:
    """`count` private-use characters that occur in none of the turns."""
    said = set("".join(part for turn in turns for part in turn.parts if isinstance(part, str)))
    free = (chr(code) for code in range(*_PRIVATE_USE) if chr(code) not in said)
    found = list(itertools.islice(free, count))
    if len(found) < count:
        raise DataError(f"{place}: uses nearly all private-use characters; shorten it")
    return found


def _kept_contents(
    skeleton: str, stand_ins: Sequence[str], roles: Sequence[str], contents: Sequence[str], direct: str
) -> list[str] | None:
    """What the template keeps of the contents: all, or all but outer white space; None if neither."""
    kinds = sorted(set(roles))
    for trims in itertools.product(_TRIMS, repeat=len(kinds)):
        by_role = dict(zip(kinds, trims, strict=True))
        kept = [by_role[role](content) for role, content in zip(roles, contents, strict=True)]
        filled = skeleton.translate({ord(mark): text for mark, text in zip(stand_ins, kept, strict=True)})
        if filled == direct:
            return kept
    return None
