"""Where, in tokens, the prompt ends and the answer starts.

A template such as "ASSISTANT: " leaves white space before the answer, which most tokenizers join to the
answer's first word: then that white space is the answer's. The ids before the answer are the same whatever
the answer is, so that the prompt at generation is a prefix of the training ids. An answer whose first token
would reach back over the border (a line break that joins the header's) is encoded apart from what stands
before it.
"""

from __future__ import annotations

from functools import lru_cache

from mmds.data.chat_template import Run
from mmds.data.text_encoder import EncodedText, TextEncoder

_ANSWER_STARTS = ("a", "A", "1", "(", "中")
"""How usual answers start: letters of two cases, a digit, punctuation, a script without spaces."""


class AnswerSplitter:
    """Encodes the texts of a rendered prompt, and those that hold an answer in two parts."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder
        known = [
            text
            for text in _ANSWER_STARTS
            if not encoder.has_unknown(encoder.encode(text, at_start=False).ids)
        ]
        self._starts = tuple(known)
        self._held = lru_cache(maxsize=256)(self._find_held)

    def encode(self, run: Run) -> tuple[int, ...]:
        """Ids of a whole run."""
        return self._encode(run, run.text).ids

    def split(self, run: Run) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids of a run before and from its answer; the first are the same for every answer."""
        cut = self.cut(run)
        prompt = self.prompt(run)
        whole = self._encode(run, run.text)
        if _ids_before(whole, cut) == prompt:
            return prompt, whole.ids[len(prompt) :]
        return prompt, self._encoder.encode(run.text[cut:], at_start=run.before is None and cut == 0).ids

    def prompt(self, run: Run) -> tuple[int, ...]:
        """Ids of a run before its answer, as they are when a usual answer follows."""
        cut = self.cut(run)
        if cut == 0:
            return ()
        for start in self._starts[:1]:
            ids = _ids_before(self._encode(run, run.text[:cut] + start), cut)
            if ids is not None:
                return ids
        return self._encode(run, run.text[:cut]).ids

    def cut(self, run: Run) -> int:
        """Offset in a run where its answer's first token starts."""
        assert run.answer is not None
        return run.answer - self._held(run.header)

    def _encode(self, run: Run, text: str) -> EncodedText:
        """Encode text that starts a run."""
        return self._encoder.encode(text, at_start=run.before is None)

    def _find_held(self, header: str) -> int:
        """How many characters of white space at the end of a header a usual answer's first token takes in."""
        probes = [self._encoder.encode(header + start, at_start=False) for start in self._starts]
        for cut in range(len(header), len(header.rstrip()) - 1, -1):
            prompts = {_ids_before(encoded, cut) for encoded in probes}
            if len(prompts) == 1 and None not in prompts:
                return len(header) - cut
        return 0


def _ids_before(encoded: EncodedText, cut: int) -> tuple[int, ...] | None:
    """Ids of the tokens before character `cut`; None when a token reaches over it."""
    n = sum(end <= cut for _, end in encoded.spans)
    return encoded.ids[:n] if all(start >= cut for start, _ in encoded.spans[n:]) else None
