"""Shares of one preparation, for several jobs: which records a part is of, and where it lies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from mmds.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part `index` of `count`, counted from 1."""

    index: int
    count: int

    @staticmethod
    def parse(text: str) -> Part:
        """Read "3/8". Raises DataError."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise DataError(f"--part is {text!r}; write i/n with i from 1 to n, such as 1/4")
        return Part(index=int(match[1]), count=int(match[2]))

    def span(self, records: int) -> tuple[int, int]:
        """(first, last; not included) of the records that this part is of. Parts differ by one at most."""
        return records * (self.index - 1) // self.count, records * self.index // self.count

    def folder(self, out: Path) -> Path:
        """Where the part of the preparation `out` lies: beside it."""
        return out.parent / f"{out.name}.part-{self.index}-of-{self.count}"

    def digest(self, whole: str) -> str:
        """The digest of this part of an input."""
        return sha256(f"{whole}\0{self.index}/{self.count}".encode()).hexdigest()


def part_folders(out: Path) -> list[tuple[Part, Path]]:
    """All parts of `out` in order. Raises DataError when there are none, or some are missing."""
    pattern = re.compile(re.escape(out.name) + r"\.part-(\d+)-of-(\d+)")
    found: dict[Part, Path] = {}
    for path in out.parent.iterdir() if out.parent.is_dir() else ():
        if match := pattern.fullmatch(path.name):
            found[Part(index=int(match[1]), count=int(match[2]))] = path
    counts = sorted({part.count for part in found})
    if len(counts) != 1:
        those = f"parts of {' and of '.join(map(str, counts))}" if counts else "no part"
        raise DataError(f"there is {those} beside {out}; make the parts 1/n to n/n with --part")
    wanted = [Part(index=i, count=counts[0]) for i in range(1, counts[0] + 1)]
    missing = [f"{part.index}/{part.count}" for part in wanted if part not in found]
    if missing:
        raise DataError(f"parts of {out} are missing: {', '.join(missing)}; make them with --part")
    return [(part, found[part]) for part in wanted]
