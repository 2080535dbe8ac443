"""docs/models.md and docs/new-parts.md: the table of examples is computed, and the code on the page runs."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from mmds.config_types import ConnectorSection, EncoderSection, ResolutionSection
from mmds.model.build import build_geometry
from mmds.model.connector import CONNECTORS, Connector
from mmds.model.decoder import Decoder
from mmds.model.encoder import build_encoder
from mmds.model.mllm import Mllm
from tests import tiny

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def registered() -> Iterator[None]:
    """What the page adds to the table is taken out again."""
    before = dict(CONNECTORS)
    yield
    CONNECTORS.clear()
    CONNECTORS.update(before)


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_pages_encoder_and_connector_train_together_at_native_resolution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: None
) -> None:
    monkeypatch.chdir(tmp_path)
    encoder_code, connector_code = blocks("new-parts.md")
    exec(encoder_code, {})
    exec(connector_code, {})
    encoder = build_encoder(EncoderSection(name="local-dir:my_tower", layer=0))
    section = ConnectorSection(name="average")  # type: ignore[arg-type]
    geometry = build_geometry(
        encoder.spec, section, max_pixels=7056, resolution=ResolutionSection(name="native")
    )
    model = Mllm(
        connector=Connector(section, encoder_width=encoder.spec.width, decoder_width=48),
        decoder=Decoder(LlamaForCausalLM(tiny.decoder_config())),
        encoder=encoder,
    )
    row, _ = tiny.random_row(0, geometry, (2, 0, 1))
    assert len({plan.grid for plan in row.plans}) > 1
    model(row)[0].backward()
    assert model.connector.net.proj.weight.grad.any()


def example_rows() -> list[str]:
    """The rows of the page's table of examples."""
    spec = tiny.spec(image_size=336)
    modes = [
        ("mlp2x", ResolutionSection(name="fixed")),
        ("mlp2x", ResolutionSection(name="anyres", grids=("1x2", "2x1", "2x2", "1x3", "3x1"))),
        ("merge_mlp", ResolutionSection(name="native")),
    ]
    rows = []
    for width, height in ((336, 336), (640, 480), (1344, 896), (1700, 2200), (1, 10_000)):
        plans = [
            build_geometry(spec, ConnectorSection(name=name), max_pixels=1344 * 896, resolution=mode).plan(
                width, height
            )
            for name, mode in modes
        ]
        cells = [f"{plan.visual_tokens:,} of {plan.patches:,} patches" for plan in plans]
        rows.append(f"| {width} x {height} | " + " | ".join(cells) + " |")
    return rows


def test_the_table_of_examples_is_what_the_geometry_says() -> None:
    page = (DOCS / "models.md").read_text()
    missing = [row for row in example_rows() if row not in page]
    assert missing == [], "put these rows in docs/models.md:\n" + "\n".join(missing)


def test_every_connector_can_be_asked_for_in_a_config_and_is_on_the_page() -> None:
    page = (DOCS / "models.md").read_text()
    assert [name for name in CONNECTORS if f"| `{name}` |" not in page] == []
    names = typing.get_args(typing.get_type_hints(ConnectorSection)["name"])
    assert set(names) == set(CONNECTORS)
