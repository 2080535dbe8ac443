"""Spoil valid pictures and records at random and see that nothing but a DataError ever comes of it.

    python scripts/fuzz_data.py --count 10000 --seed 0

Every item is read in a process that is watched: a crash, an item that takes longer than 20 seconds, one that needs
more than 1 GiB and any other exception are failures. Each is printed with its number, and its bytes are saved.
The same seed gives the same items.
"""

from __future__ import annotations

import argparse
import collections
import functools
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fuzz_cases
import numpy as np
import torch

from mmds.data.conversation import parse_record
from mmds.data.images import load_image, probe
from mmds.data.raw import read_records
from mmds.errors import DataError

SECONDS = 20
MEMORY = 1 << 30
FAILED = "failed: "
MOST_FAILURES = 50
"""So many are no accident: the rest is left out."""

SIZES = ((96, 72), (24, 32))
"""Heights and widths that every picture is loaded at; the second lets a JPEG decode at half its size."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is fuzzed. make: an item's bytes, the same ones for the same chance. read: one word for what came of them.

    read raises anything but DataError for a failure.
    """

    name: str
    make: Callable[[random.Random], bytes]
    read: Callable[[bytes], str]

    def item(self, seed: int, number: int) -> bytes:
        """The bytes of one item."""
        return self.make(random.Random(f"{self.name} {seed} {number}"))


@dataclass(kw_only=True)
class Report:
    """outcomes: how often each. failures: (number of the item, what happened). memory: most bytes in use at once."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)
    memory: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz both kinds, print what came of it; 1 when anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="items of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("fuzz-failures"), help="folder for items that failed"
    )
    given = parser.parse_args(arguments)
    failed = False
    for kind in (PICTURES, RECORDS):
        started = time.monotonic()
        report = fuzz(kind, count=given.count, seed=given.seed)
        seconds = time.monotonic() - started
        memory = report.memory >> 20
        print(f"{given.count} {kind.name}, seed {given.seed}: {seconds:.0f} s, at most {memory} MiB an item")
        for outcome, times in sorted(report.outcomes.items()):
            print(f"  {times:6}  {outcome}")
        for number, what in report.failures:
            path = given.out / f"{kind.name}-{given.seed}-{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(kind.item(given.seed, number))
            print(f"  {path}: {what}")
        failed |= bool(report.failures)
    return int(failed)


def fuzz(kind: Kind, *, count: int, seed: int, seconds: int = SECONDS, memory: int = MEMORY) -> Report:
    """Read items 0 .. count - 1 in a process of their own, in a fresh one after each that ends it."""
    spawning = multiprocessing.get_context("spawn")
    report, number = Report(), 0
    kind.item(seed, 0)  # a mistake in making items must show here, not as items that end their process
    while number < count and len(report.failures) < MOST_FAILURES:
        here, there = spawning.Pipe(duplex=False)
        numbers = range(number, count)
        process = spawning.Process(target=_work, args=(kind, seed, numbers, seconds, memory, there))
        process.start()
        there.close()
        try:
            while True:
                outcome, in_use = here.recv()
                report.outcomes[outcome] += 1
                report.memory = max(report.memory, in_use)
                if outcome.startswith(FAILED):
                    report.failures.append((number, outcome))
                number += 1
        except EOFError:
            process.join()
        if number < count:
            hung = process.exitcode == -signal.SIGALRM
            what = FAILED + (f"took over {seconds} s" if hung else f"ended the process ({process.exitcode})")
            report.outcomes[what] += 1
            report.failures.append((number, what))
            number += 1
    return report


def _work(
    kind: Kind, seed: int, numbers: range, seconds: int, memory: int, there: Connection[Any, Any]
) -> None:
    """Read items one after the other and tell what came of each. The alarm ends this process, even within C code."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where libjpeg and libtiff complain
    torch.set_num_threads(1)
    signal.alarm(seconds)
    _read(kind, kind.item(seed, numbers[0]))  # what is loaded once must not count as an item's memory
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, resource.RLIM_INFINITY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in numbers:
        signal.alarm(seconds)
        outcome = _read(kind, kind.item(seed, number))
        there.send((outcome, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)))
    signal.alarm(0)


def _read(kind: Kind, data: bytes) -> str:
    """What came of an item."""
    try:
        return kind.read(data)
    except Exception as error:  # the very thing that is looked for
        return f"{FAILED}{type(error).__name__}: {str(error)[:200]}"


def spoilt_picture(chance: random.Random) -> bytes:
    """A valid picture after an accident."""
    (_, data), (_, other) = chance.choices(_pictures(), k=2)
    return fuzz_cases.spoil(data, other, chance)


@functools.cache
def _pictures() -> list[tuple[str, bytes]]:
    return fuzz_cases.pictures()


def read_picture(data: bytes) -> str:
    """Probe it and load it, as preparation and training do; whether it is good must not depend on the size."""
    try:
        width, height = probe(data)
    except DataError:
        size = "no size"
    else:
        size = "a size"
        assert width > 0 and height > 0
    results = []
    for rows, columns in SIZES:
        try:
            pixels = load_image(data, height=rows, width=columns)
        except DataError as error:
            assert str(error)
            results.append(False)
        else:
            assert pixels.shape == (3, rows, columns) and pixels.dtype == np.uint8
            results.append(True)
    assert len(set(results)) == 1, f"loads at {SIZES}: {results}"
    assert not results[0] or size == "a size", "loads, but does not probe"
    return f"{size}, {'loaded' if results[0] else 'refused'}"


def read_lines(data: bytes) -> str:
    """Read the records and parse each; every refusal must name the file."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(data)
        file.flush()
        parsed = 0
        try:
            for where, record in read_records(file.name):
                parse_record(record, where=where)
                parsed += 1
        except DataError as error:
            assert str(error).startswith(file.name), f"names no file: {error}"
            return "refused" if parsed == 0 else "refused after whole records"
    return "parsed"


PICTURES = Kind(name="pictures", make=spoilt_picture, read=read_picture)
RECORDS = Kind(name="records", make=fuzz_cases.spoiled_lines, read=read_lines)

if __name__ == "__main__":
    sys.exit(main())
