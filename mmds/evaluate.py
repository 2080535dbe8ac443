"""Scores of a model folder on questions with known answers.

Exact match is asked by teacher forcing: a greedy answer equals the truth, end-of-turn marker included, exactly when every supervised
position's most likely token is the true one. That needs one packed forward pass for many questions instead of a generation for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mmds.data.conversation import Conversation
from mmds.data.rows import LoadedSample
from mmds.generate import Assistant
from mmds.model.loss import targets


@dataclass(frozen=True, kw_only=True)
class Question:
    """A conversation that ends with the true answer, its pictures' bytes, and the kind it is reported under."""

    conversation: Conversation
    images: tuple[bytes, ...]
    kind: str


def exact_match(
    assistant: Assistant,
    questions: Sequence[Question],
    *,
    row_tokens: int = 2048,
    tick: Callable[[int], None] | None = None,
) -> list[bool]:
    """For each question, whether the greedy answer would be the truth. tick: called with the number of questions just done."""
    hits: list[bool] = []
    for batch in _rows((_sample(assistant, q) for q in questions), assistant, row_tokens):
        hits += _row_hits(assistant, batch)
        if tick is not None:
            tick(len(batch))
    return hits


def swapped(questions: Sequence[Question]) -> list[Question]:
    """The same questions, each with the pictures of another one: what is answered without looking.

    Question i gets the pictures of question i + n/2. Raises ValueError for fewer than two questions, or unequal picture counts.
    """
    count = len(questions)
    if count < 2 or len({len(q.images) for q in questions}) != 1:
        raise ValueError("swapping needs two or more questions with equally many pictures")
    shift = count // 2
    others = [questions[(i + shift) % count] for i in range(count)]
    return [
        Question(conversation=q.conversation, images=other.images, kind=q.kind)
        for q, other in zip(questions, others, strict=True)
    ]


def accuracy_by_kind(questions: Sequence[Question], hits: Sequence[bool]) -> dict[str, tuple[float, int]]:
    """kind -> (share of hits in 0..1, number of questions)."""
    kinds = sorted({q.kind for q in questions})
    groups = {kind: [hit for q, hit in zip(questions, hits, strict=True) if q.kind == kind] for kind in kinds}
    return {kind: (sum(group) / len(group), len(group)) for kind, group in groups.items()}


def _sample(assistant: Assistant, question: Question) -> LoadedSample:
    encoded = assistant.tokenizer.encode(question.conversation)
    supervised = encoded.supervised.copy()
    start = int(supervised.nonzero()[0][-1])
    while supervised[start - 1]:  # back to where the last answer starts: earlier turns are not asked
        start -= 1
    supervised[:start] = False
    return assistant.sample(encoded.ids, supervised, question.images, question.conversation.images)


def _rows(
    samples: Iterable[LoadedSample], assistant: Assistant, row_tokens: int
) -> Iterator[list[LoadedSample]]:
    """Consecutive samples that fit into one row together."""
    batch: list[LoadedSample] = []
    size = 0
    for sample in samples:
        slots = sum(assistant.geometry.plan(*wh).visual_tokens - 1 for wh in sample.image_sizes)
        length = len(sample.ids) + slots
        if batch and size + length > row_tokens:
            yield batch
            batch, size = [], 0
        batch.append(sample)
        size += length
    if batch:
        yield batch


@torch.no_grad()
def _row_hits(assistant: Assistant, batch: Sequence[LoadedSample]) -> list[bool]:
    row = assistant.row(batch)
    keep, target = targets(row.labels, row.cu_seqlens)
    right = assistant.model.logits(row, keep, assistant.encoder(row)).argmax(-1) == target
    segment = torch.bucketize(keep, row.cu_seqlens[1:].long(), right=True)
    wrong = set(segment[~right].tolist())
    return [index not in wrong for index in range(len(batch))]
