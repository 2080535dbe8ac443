"""Conversations to token ids and supervised positions, through a tokenizer's own chat template.

The rendered prompt is cut at the control tokens that the template wrote and at image markers; what lies
between is encoded as plain text. Supervised is what the model has to write itself: the assistant's content up
to and including the end-of-turn marker. The tokens before it are exactly those of the prompt at generation. A
token that would join the end of the prompt to the start of the answer (a line break before an answer that
starts with one) is cut there; everywhere else the ids are those of the plain tokenisation, which is checked
when a tokenizer is taken into use.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from mmds.data.answer_split import AnswerSplitter
from mmds.data.chat_template import ChatTemplate, Run, check_endings, runs
from mmds.data.conversation import Conversation, ImageMarker, Turn, check_turns
from mmds.data.rows import IMAGE_MARKER
from mmds.data.text_encoder import Control, TextEncoder, control_tokens
from mmds.data.tokenizer_facts import added_bos, fingerprint_of, own_template
from mmds.errors import DataError

_PROBE = (
    Turn(role="system", parts=("Be brief, and exact.",)),
    Turn(role="user", parts=("How many are there?\nCount  them: one, two",)),
    Turn(role="assistant", parts=("There are 12 of them.",)),
    Turn(role="user", parts=("Why (not) 3",)),
    Turn(role="assistant", parts=("I counted.\n\n- one\n- two",)),
)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A tokenised conversation. ids: int32 [T] with one IMAGE_MARKER per image; supervised: bool [T]."""

    ids: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.bool_]


class _Output:
    """Ids and supervised flags under construction."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.supervised: list[bool] = []

    def add(self, ids: Sequence[int], *, supervised: bool) -> None:
        self.ids += ids
        self.supervised += [supervised] * len(ids)


class ChatTokenizer:
    """Tokenises conversations for training and prompts for generation, in the same way."""

    def __init__(self, hf_tokenizer: Any, *, template: str | None = None) -> None:
        """hf_tokenizer: a fast transformers tokenizer. template: Jinja source instead of the tokenizer's own.

        Raises DataError for a slow tokenizer, no template, a template that does not end the assistant's turn
        with a control token, or pieces that do not join to the plain tokenisation.
        """
        self.hf = hf_tokenizer
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise DataError("the tokenizer is not a fast one (tokenizer.json): character offsets are needed")
        source = template if template is not None else own_template(hf_tokenizer)
        self._backend = backend
        self._encoder = TextEncoder(backend, control_tokens(backend.get_added_tokens_decoder(), source))
        self._template = ChatTemplate(hf_tokenizer, source, self._encoder)
        self._bos = added_bos(hf_tokenizer)
        self._splitter = AnswerSplitter(self._encoder)
        self.fingerprint = fingerprint_of(hf_tokenizer, backend, source)
        self.end_ids = frozenset(self._check_tokenizer())

    def encode(self, conversation: Conversation) -> Encoded:
        """Ids and supervised positions of a conversation that ends with the assistant.

        Raises DataError naming the sample when its turns break the rules, the template does not fit, or a
        decoded answer is not what the assistant says.
        """
        place = f"sample {conversation.key}"
        check_turns(conversation, place=place)
        output = self._encode_turns(conversation.turns, place, check=True)
        share = sum(output.supervised) / len(output.ids)
        if not 0 < share < 1:
            raise DataError(
                f"{place}: {share:.0%} of its tokens are supervised; the chat template must leave both kinds"
            )
        return Encoded(ids=np.array(output.ids, np.int32), supervised=np.array(output.supervised, np.bool_))

    def prompt_ids(self, conversation: Conversation) -> npt.NDArray[np.int32]:
        """int32 [T]: a conversation that ends with the user, up to where the answer starts in training."""
        place = f"sample {conversation.key}"
        check_turns(conversation, place=place, ends_with="user")
        turns = (*conversation.turns, Turn(role="assistant", parts=()))
        atoms = self._template.atoms(conversation.turns, place=place, open_answer=True)
        output, found = _Output(), runs(atoms, turns)
        last = max(i for i, run in enumerate(found) if run.answer is not None)
        for run in found[:last]:
            self._add_run(run, output)
        output.add(self._splitter.prompt(found[last]), supervised=False)
        return np.array(self._with_bos(output).ids, np.int32)

    def decode(self, ids: Iterable[int], *, skip_control: bool = False) -> str:
        """Text of token ids, markers as "<image>". skip_control: without control tokens and markers."""
        hidden = {control.id for control in self._encoder.controls} if skip_control else set()
        plain: list[int] = []
        markers: list[int] = []  # for each marker, how many ids of `plain` stand before it
        for i in map(int, ids):
            if i == IMAGE_MARKER:
                markers.append(len(plain))
            elif i not in hidden:
                plain.append(i)
        text = self._decode(plain)
        if skip_control or not markers:
            return text
        cuts = [0, *(len(self._decode(plain[:n])) for n in markers), len(text)]
        return "<image>".join(text[a:b] for a, b in itertools.pairwise(cuts))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def _encode_turns(self, turns: Sequence[Turn], place: str, *, check: bool) -> _Output:
        """Tokens of whole turns. check: decode every answer and compare it with the rendered text."""
        found = runs(self._template.atoms(turns, place=place), turns)
        check_endings(found, place)
        output = _Output()
        for run in found:
            start = len(output.ids)
            self._add_run(run, output)
            if check and run.answer is not None:
                self._check_decoded(run, output, start, place)
        return self._with_bos(output)

    def _add_run(self, run: Run, output: _Output) -> None:
        """Append one run and the control token or image marker after it."""
        if run.answer is None:
            output.add(self._splitter.encode(run), supervised=False)
        else:
            prompt, answer = self._splitter.split(run)
            output.add(prompt, supervised=False)
            output.add(answer, supervised=True)
        if isinstance(run.after, Control):
            output.add([run.after.id], supervised=run.answer is not None)
        elif run.after is not None:
            output.add([IMAGE_MARKER], supervised=False)

    def _check_decoded(self, run: Run, output: _Output, start: int, place: str) -> None:
        """Decode the supervised end of a run, in its context, and compare it with its characters."""
        assert isinstance(run.after, Control)
        first = output.supervised.index(True, start)
        context = output.ids[start:first] or ([run.before.id] if isinstance(run.before, Control) else [])
        before = self._decode(context)
        decoded = self._decode([*context, *output.ids[first:]])
        said = decoded[len(before) : -len(run.after.text)]
        expected = run.text[self._splitter.cut(run) :]
        readings = [self._encoder.canonical(text) for text in (expected, f" {expected}")]
        alike = said == expected or self._encoder.canonical(said) in readings
        if not (decoded.startswith(before) and decoded.endswith(run.after.text) and alike):
            lost = (
                " (the vocabulary lacks some of its characters)"
                if self._encoder.has_unknown(output.ids[first:])
                else ""
            )
            raise DataError(
                f"{place}: the supervised tokens decode to {said[:80]!r}, but the answer is {expected[:80]!r}"
                f"{lost}; the tokenizer or its chat template cannot be used for it"
            )

    def _with_bos(self, output: _Output) -> _Output:
        """Put the BOS that the tokenizer adds by itself in front, unless the template wrote it."""
        if self._bos is not None and output.ids[:1] != [self._bos]:
            output.ids.insert(0, self._bos)
            output.supervised.insert(0, False)
        return output

    def _check_tokenizer(self) -> set[int]:
        """Compare with the plain tokenisation of a probe conversation; returns the ids that end a turn."""
        place = "tokenizer check"
        turns = _PROBE[1:]
        found = runs(self._template.atoms(turns, place=place), turns)
        end = check_endings(found, place)
        self._check_plain(turns, place)
        try:
            self._template.atoms(_PROBE, place=place)
        except DataError:  # no system turns in this template: a sample with one is refused when it comes
            return self._end_ids(end)
        self._check_plain(_PROBE, place)
        return self._end_ids(end)

    def _end_ids(self, end: Control) -> set[int]:
        eos = self.hf.eos_token_id
        return {end.id} if eos is None else {end.id, int(eos)}

    def _check_plain(self, turns: Sequence[Turn], place: str) -> None:
        """Raise DataError when the joined pieces are not the plain tokenisation of the rendered text."""
        output = self._encode_turns(turns, place, check=False)
        text = "".join(
            atom.text
            for atom in self._template.atoms(turns, place=place)
            if not isinstance(atom, ImageMarker)
        )
        plain = list(self.hf(text, add_special_tokens=False, split_special_tokens=False)["input_ids"])
        if self._bos is not None and plain[:1] != [self._bos]:
            plain.insert(0, self._bos)
        if output.ids != plain:
            pairs = zip(output.ids, plain, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(output.ids), len(plain)))
            raise DataError(
                f"{place}: the pieces of a conversation do not join to the tokenizer's plain tokenisation: "
                f"token {at} is {self.decode(output.ids[at : at + 3])!r}, plainly "
                f"{self.decode(plain[at : at + 3])!r}; this tokenizer is not supported"
            )
