"""What a preparation would stumble over, found without writing anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.examine import BadSample, examine
from mmds.data.inputs import Inputs
from mmds.data.reasons import counted


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What a check found. bad: every bad sample, in file order. The counts are of the good ones.

    tokens: as stored, a marker counts as one. supervised: tokens that count as targets. repeated_ids:
    samples whose id was taken, so that they are called after their file and line.
    """

    samples: int
    images: int
    text_only: int
    tokens: int
    supervised: int
    repeated_ids: int
    bad: tuple[BadSample, ...]

    def kinds(self) -> list[tuple[str, int]]:
        """(kind of reason, how many samples are bad for it), the most frequent first."""
        return counted(sample.reason for sample in self.bad)


def check(
    raw_paths: Sequence[Path | str],
    images_dir: Path | str | None,
    tokenizer: ChatTokenizer,
    *,
    workers: int | None = None,
    progress: bool = False,
) -> CheckReport:
    """Examine every record as `prepare` would (same arguments), and list all that is wrong.

    Raises DataError only for what is not there at all: everything else is in the report.
    """
    inputs = Inputs.of(raw_paths, images_dir)
    samples = images = text_only = tokens = supervised = repeated_ids = 0
    bad = []
    for sample in examine(inputs, tokenizer, workers=workers, progress=progress):
        if isinstance(sample, BadSample):
            bad.append(sample)
            continue
        samples += 1
        images += len(sample.images)
        text_only += not sample.images
        tokens += len(sample.ids)
        supervised += int(sample.supervised.sum())
        repeated_ids += sample.renamed
    return CheckReport(
        samples=samples,
        images=images,
        text_only=text_only,
        tokens=tokens,
        supervised=supervised,
        repeated_ids=repeated_ids,
        bad=tuple(bad),
    )
