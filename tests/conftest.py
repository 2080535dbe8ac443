"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import forks
from tests.runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Real training runs, each made when a test first asks for it."""
    work = tmp_path_factory.mktemp("runs")
    with forks.started(work) as server:
        yield Runs(work, server)
