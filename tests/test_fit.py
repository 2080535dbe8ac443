"""What is said to fit fits, and nothing larger does; the lines that are printed make the run that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmds import fit
from mmds.config import load_config
from mmds.fit import CONTEXT, STEP, fit_table, fits, full_row
from mmds.run_data import RunData, open_run_data
from mmds.sample_sizes import SampleSizes
from mmds.worked_example import worked_example
from tests.data.sample_run import write_run

SETS = ["mmds.stage=pretrain", "bf16.enabled=true"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("fit"))


@pytest.fixture(scope="module")
def data(file: Path) -> RunData:
    return open_run_data(file, SETS, world=2)


def device(data: RunData, file: Path, overrides: tuple[str, ...], tokens: int) -> int:
    """Predicted bytes of a rank with a full row of so many tokens, in the run that the overrides make."""
    config = load_config(file, [*SETS, *overrides])
    sizes = data.mixture.sizes(data.geometry)
    return data.outline.rank_bytes(config, world=2, row=full_row(data, sizes, tokens)).device


@pytest.mark.parametrize("megabytes", [3, 10, 40])
def test_the_row_fits_and_the_next_larger_one_does_not(data: RunData, file: Path, megabytes: int) -> None:
    room = CONTEXT + megabytes * 1e6
    found = fits(data, room=room, world=2)
    assert found
    for way in found:
        assert way.overrides[0] == f"mmds.data.row_tokens={way.row_tokens}" and way.row_tokens % STEP == 0
        assert device(data, file, way.overrides, way.row_tokens) == way.memory.device <= room - CONTEXT
        assert device(data, file, way.overrides, way.row_tokens + STEP) > room - CONTEXT
    rows = {(way.offloaded, way.recompute): way.row_tokens for way in found}
    for recompute in (False, True):
        assert rows["optimizer", recompute] >= rows.get(("nothing", recompute), 0)
    assert rows["optimizer", True] > rows["optimizer", False]


def test_where_nothing_fits_it_says_what_would(data: RunData) -> None:
    assert fits(data, room=CONTEXT, world=2) == []
    said = fit_table(data, gigabytes=CONTEXT / 1e9, world=2)
    assert "nothing fits" in said and "mmds.stage.lora" in said


def test_a_full_row_holds_what_the_planner_may_put_in_it(data: RunData) -> None:
    """No planned row keeps more than a full row of as many tokens as the row may have."""
    sizes = data.mixture.sizes(data.geometry)
    full = full_row(data, sizes, data.plan.row_tokens)
    for step in range(data.plan.total_steps):
        for row in data.plan.step_rows(step, world=2):
            mine = data.plan.scheme.sizes(row)
            assert (
                mine.patches.sum() <= float(full.patches) + 1 and mine.tokens.sum() <= float(full.tokens) + 1
            )


def test_a_lower_pixel_cap_is_taken_where_the_runs_row_fits_with_it_alone(
    data: RunData, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = data.mixture.sizes(data.geometry)
    large = SampleSizes(
        **{**vars(small), "patches": 40 * small.patches, "patch_squares": 1600 * small.patch_squares}
    )
    own = data.config.max_pixels
    monkeypatch.setattr(fit, "CAPS", (own // 4,))
    monkeypatch.setattr(fit, "_sizes", lambda data, cap: large if cap == own else small)
    needs = [fit._memory(data, data.config, sizes, 256, 2).device for sizes in (small, large)]
    assert needs[0] < needs[1]
    first = fits(data, room=CONTEXT + sum(needs) / 2, world=2)[0]
    assert first.max_pixels == own // 4 and f"mmds.data.max_pixels={own // 4}" in first.overrides


def test_the_worked_example_is_that_of_the_design() -> None:
    said = worked_example()
    small, large = (line.split() for line in said.splitlines() if " images of " in line)
    assert "1.53e+12" in small and "3,504" in small and "2,304" in small
    assert "1.49e+13" in large and "3,672" in large and "12,288" in large
