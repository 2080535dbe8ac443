"""Fixtures that several test modules share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests import forks
from tests.runs import Runs

# Read when deepspeed is first imported: tests in this process use the CPU, as the ranks that they start do.
os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Real training runs, each made when a test first asks for it."""
    work = tmp_path_factory.mktemp("runs")
    with forks.started(work) as server:
        yield Runs(work, server)
