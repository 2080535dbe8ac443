"""The page of a row: every fact on it against the row itself, parsed and rendered by a real browser."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmds.cost import row_sums
from mmds.data.loader import StepLoader
from mmds.data.mixture import Mixture
from mmds.data.prepare import prepare
from mmds.data.rows import IGNORE, Row, filler_row
from mmds.data.shards import ShardSet
from mmds.errors import ConfigError
from mmds.geometry import Geometry, ImagePlan
from mmds.inspect_page import render
from mmds.planner import plan_lengths
from tests import tiny
from tests.data.raw_sets import GEOMETRY, chat_tokenizer, picture, record, talk, write_jsonl
from tests.data.sample_run import write_run

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import inspect_batch

TOKENIZER = chat_tokenizer()
EVIL = "</b><script>document.title = 'broken'</script><img src=https://example.org/x.png> & \"quoted\" \u202e\x07"
BLUE = (1, 2, 250)
VOID = {"meta", "img", "br"}


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> Row:
    """One row of three samples: markup wherever people may write, two pictures side by side, text beyond ASCII."""
    folder = tmp_path_factory.mktemp("inspect")
    name = "p'\"><b>.png"
    file = io.BytesIO()
    Image.new("RGB", (60, 20), BLUE).save(file, "PNG")
    (folder / name).write_bytes(file.getvalue())
    (folder / "grey.png").write_bytes(picture(77))
    evil = record("<i>evil</i>", [name, "grey.png"], "<image><image>" + EVIL)
    evil["conversations"][1]["value"] = "It says " + EVIL
    far = {
        "id": "far",
        "conversations": talk("\u00bfQu\u00e9 \U0001f98a?\n\nSay \u4f60\u597d", "\u4f60\u597d!\n\tDone."),
    }
    plain = record("plain", ["grey.png"])
    write_jsonl(folder / "raw.jsonl", [evil, far, plain])
    prepare([folder / "raw.jsonl"], None, TOKENIZER, folder / "prepared")
    mixture = Mixture(["m"], [ShardSet.open(folder / "prepared", TOKENIZER.fingerprint)])
    lengths = mixture.sizes(GEOMETRY).tokens
    plan = plan_lengths(lengths, row_tokens=int(lengths.sum()) + 50, rows_per_step=1, seed=0, epochs=1)
    return StepLoader(mixture, plan, GEOMETRY, rank=0, world=1, accumulation=1, workers=0).row(0, 0)


@pytest.fixture(scope="module")
def page(row: Row) -> str:
    return render(row, TOKENIZER, title="A <row>", place="step 0", row_tokens=row.real_tokens + 50)


class Parsed(HTMLParser):
    """Elements of a page in order: (tag, attributes, text within, open ancestors). Fails on tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[dict[str, Any]] = []
        self._open: list[dict[str, Any]] = []
        self.feed(page)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = {
            "tag": tag,
            "attrs": dict(attrs),
            "text": "",
            "within": [e["attrs"].get("id") for e in self._open],
        }
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element["text"] += data

    def find(self, tag: str, **attrs: str) -> list[dict[str, Any]]:
        return [e for e in self.elements if e["tag"] == tag and attrs.items() <= e["attrs"].items()]

    @property
    def cells(self) -> list[dict[str, Any]]:
        return [e for e in self.elements if "data-id" in e["attrs"]]


def check_against(parsed: Parsed, row: Row) -> None:
    """Compare tokens, targets, segments and pictures on the page with the row, in plain loops."""
    slots = set(row.slots.tolist())
    ids, labels, bounds = row.input_ids.tolist(), row.labels.tolist(), row.cu_seqlens.tolist()
    cells = {int(cell["attrs"]["data-t"]): cell for cell in parsed.cells}
    assert list(cells) == [t for t in range(len(ids)) if t not in slots]
    for t, cell in cells.items():
        assert int(cell["attrs"]["data-id"]) == ids[t]
        axes = row.position_ids[..., t].reshape(-1).tolist()
        assert [int(axis) for axis in cell["attrs"]["data-p"].split(",")] == axes
        assert ("s" in cell["attrs"]["class"].split()) == (labels[t] != IGNORE)
        predicted = labels[t + 1] if t + 1 < len(ids) and t + 1 not in bounds else IGNORE
        assert int(cell["attrs"].get("data-next", IGNORE)) == predicted
        segment = max(s for s, bound in enumerate(bounds[:-1]) if bound <= t)
        assert f"sample-{segment}" in cell["within"]
    sections = parsed.find("section")[: len(row.sample_keys)]
    assert [int(s["attrs"]["data-start"]) for s in sections] == bounds[:-1]
    assert [int(s["attrs"]["data-end"]) for s in sections] == bounds[1:]
    figures, images = parsed.find("figure"), iter(parsed.find("img"))
    assert [int(f["attrs"]["data-slots"]) for f in figures] == row.slot_counts.tolist()
    covered = [
        t
        for f in figures
        for t in range(int(f["attrs"]["data-t"]), int(f["attrs"]["data-t"]) + int(f["attrs"]["data-slots"]))
    ]
    assert covered == row.slots.tolist()
    assert len(figures) == len(row.image_names)
    start = 0
    for plan, name in zip(row.plans, row.image_names, strict=True):
        held = row.pixels[start : start + plan.pixel_shape[0]]
        start += plan.pixel_shape[0]
        for piece in as_seen(held, plan):
            image = next(images)
            kind, data = image["attrs"]["src"].split(",")
            assert kind == "data:image/png;base64"
            decoded = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
            assert np.array_equal(decoded, piece.permute(1, 2, 0).numpy())
            assert (int(image["attrs"]["height"]), int(image["attrs"]["width"])) == decoded.shape[:2]
            assert image["attrs"]["alt"] == name
    assert next(images, None) is None


def as_seen(held: torch.Tensor, plan: ImagePlan) -> list[torch.Tensor]:
    """The pieces [3, H, W] of an image, patches laid side by side one after the other."""
    if not plan.packed:
        return list(held)
    (rows, columns), side = plan.grid, plan.cell
    whole = torch.zeros(3, rows * side, columns * side, dtype=torch.uint8)
    for number, patch in enumerate(held):
        top, left = side * (number // columns), side * (number % columns)
        whole[:, top : top + side, left : left + side] = patch
    return [whole]


def test_the_page_shows_the_row_and_what_predicts_what(page: str, row: Row) -> None:
    parsed = Parsed(page)
    assert len(row.sample_keys) == 3 and len(row.image_names) == 3
    check_against(parsed, row)
    assert sum("data-next" in cell["attrs"] for cell in parsed.cells) == row.supervised > 20


def test_counts_are_the_row_s(page: str, row: Row) -> None:
    parsed = Parsed(page)
    counts = dict(
        zip((e["text"] for e in parsed.find("dt")), (e["text"] for e in parsed.find("dd")), strict=True)
    )
    assert counts["tokens"] == str(row.real_tokens) and counts["targets"] == str(row.supervised)
    assert counts["visual tokens"] == str(row.visual_tokens) == "12"
    assert counts["images"] == counts["samples"] == "3"
    assert counts["segment boundaries"] == ", ".join(map(str, row.cu_seqlens.tolist()))


def test_the_text_of_people_stays_text(page: str, row: Row) -> None:
    parsed = Parsed(page)
    assert not parsed.find("script") and len(parsed.find("img")) == 3
    assert [e["text"] for e in parsed.find("title")] == ["A <row>"]
    assert "m:<i>evil</i>" in [e["text"] for e in parsed.find("h2")]
    start, end = next(
        (a, b)
        for key, a, b in zip(
            row.sample_keys, row.cu_seqlens.tolist(), row.cu_seqlens.tolist()[1:], strict=False
        )
        if "evil" in key
    )
    said = "".join(
        e["text"]
        for cell, e in zip(parsed.elements, parsed.elements[1:], strict=False)
        if start <= int(cell["attrs"].get("data-t", -1)) < end and e["tag"] == "b"
    )
    assert said.replace("\u22ef", "").count(EVIL.replace("\x07", "\u2407")) == 2


def test_characters_of_several_tokens_stand_at_their_last(page: str) -> None:
    parsed = Parsed(page)
    texts = "".join(
        e["text"]
        for cell, e in zip(parsed.elements, parsed.elements[1:], strict=False)
        if "data-id" in cell["attrs"]
    ).replace("\u22ef", "")
    assert "\ufffd" not in page
    for text in ("\u00bfQu\u00e9 \U0001f98a?\u21b5\u21b5Say \u4f60\u597d", "\u4f60\u597d!\u21b5\u21e5Done."):
        assert text in texts


def test_the_page_needs_nothing_else(page: str) -> None:
    parsed = Parsed(page)
    for element in parsed.elements:
        for name in ("src", "href", "srcset", "background", "data", "action"):
            assert element["attrs"].get(name, "#").startswith(("#", "data:image/png;base64,"))
        assert not any(name.startswith("on") for name in element["attrs"])
    assert not parsed.find("link") and "url(" not in parsed.find("style")[0]["text"]
    (policy,) = (e["attrs"]["content"] for e in parsed.find("meta") if "http-equiv" in e["attrs"])
    assert "default-src 'none'" in policy and "script" not in policy


def test_samples_that_are_left_out_are_listed() -> None:
    row = filler_row(GEOMETRY, bad=[("m:<b>", "cannot be <i>decoded</i>")])
    parsed = Parsed(render(row, TOKENIZER, title="t", place="p", row_tokens=10))
    assert [e["text"] for e in parsed.find("li")] == ["m:<b>: cannot be <i>decoded</i>"]
    assert "filler" in parsed.find("h2")[0]["text"]
    check_against(parsed, row)


def test_the_last_slot_says_what_it_predicts(row: Row) -> None:
    slot = int(row.slots[row.slot_counts.cumsum(0)[-1] - 1])
    labels = row.labels.clone()
    labels[slot + 1] = row.input_ids[slot + 1]
    changed = Row(**{**vars(row), "labels": labels})
    parsed = Parsed(render(changed, TOKENIZER, title="t", place="p", row_tokens=999))
    captions = [e["text"] for e in parsed.find("figcaption")]
    assert f"(id {int(labels[slot + 1])})" in captions[-1]
    assert not any("predicts" in caption for caption in captions[:-1])


ANYRES = Geometry(mode="anyres", image_size=28, patch_size=14, grids=((1, 2), (2, 1), (2, 2)))
MROPE = Geometry(
    mode="native",
    image_size=0,
    patch_size=14,
    merge=2,
    min_pixels=784,
    max_pixels=12 * 784,
    packed=True,
    positions="mrope",
)


def test_the_page_of_tiles_shows_the_overview_and_each_tile() -> None:
    row, _ = tiny.random_row(4, ANYRES, (2, 0, 1))
    parsed = Parsed(render(row, TOKENIZER, title="t", place="p", row_tokens=999))
    check_against(parsed, row)
    assert len(parsed.find("img")) == sum(plan.pieces for plan in row.plans) > len(row.plans)
    captions = [e["text"] for e in parsed.find("figcaption")]
    for caption, plan in zip(captions, row.plans, strict=True):
        assert f"an overview and {plan.pieces - 1} tiles of 28 x 28 pixels" in caption
        assert f"become {plan.visual_tokens} slots" in caption


def test_the_page_of_native_images_shows_them_whole_and_positions_of_three_axes() -> None:
    row, _ = tiny.random_row(4, MROPE, (1, 0, 2))
    parsed = Parsed(render(row, TOKENIZER, title="t", place="p", row_tokens=999))
    check_against(parsed, row)
    captions = [e["text"] for e in parsed.find("figcaption")]
    slots = row.slots.split(row.slot_counts.tolist())
    for caption, plan, places in zip(captions, row.plans, slots, strict=True):
        assert f"{plan.width} x {plan.height} pixels become {plan.visual_tokens} slots" in caption
        first, last = (",".join(map(str, row.position_ids[:, t].tolist())) for t in (places[0], places[-1]))
        assert f"position ids {first}\u2013{last}" in caption
    assert all(cell["attrs"]["data-p"].count(",") == 2 for cell in parsed.cells)


# In a browser.

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --force-device-scale-factor=1"
).split()
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


def browse(folder: Path, page: str, *flags: str) -> str:
    """What a fresh browser without a network prints for a page."""
    (folder / "page.html").write_text(page, encoding="utf-8")
    command = [
        str(CHROMIUM),
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        *flags,
        f"file://{folder / 'page.html'}",
    ]
    return subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout


@needs_chromium
def test_a_browser_builds_the_same_page(page: str, row: Row, tmp_path: Path) -> None:
    parsed = Parsed(browse(tmp_path, page, "--dump-dom"))
    check_against(parsed, row)
    assert [e["text"] for e in parsed.find("title")] == ["A <row>"]  # no script has run
    assert [cell["text"] for cell in parsed.cells] == [cell["text"] for cell in Parsed(page).cells]


@needs_chromium
def test_a_browser_shows_pictures_at_the_size_that_the_encoder_sees(
    page: str, row: Row, tmp_path: Path
) -> None:
    shot = tmp_path / "shot.png"
    browse(tmp_path, page, f"--screenshot={shot}", "--window-size=1240,3000")
    drawn = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    size = GEOMETRY.image_size
    for colour in (BLUE, (77, 77, 77)):
        found = np.argwhere((drawn == colour).all(-1))
        wanted = int((row.pixels == torch.tensor(colour)[None, :, None, None]).all(1).any(-1).any(-1).sum())
        assert wanted >= 1 and len(found) == wanted * size * size
    found = np.argwhere((drawn == BLUE).all(-1))
    assert (np.ptp(found, axis=0) + 1).tolist() == [size, size]
    band = {tuple(pixel) for pixel in drawn.reshape(-1, 3)}
    assert len(band) > 50, "the page is drawn"


# The script.


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["inspect_batch.py", *map(str, arguments)])
    inspect_batch.main()


def test_the_script_writes_the_row_that_training_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = write_run(tmp_path), tmp_path / "page.html"
    call(monkeypatch, "--config", config, "-o", out, "--step", 1, "--rank", 1, "--world", 2, "--micro", 1)
    said = capsys.readouterr().out
    from mmds.run_data import open_run_data

    data = open_run_data(config, world=2)
    (step,) = data.loader(rank=1, start_step=1, stop_step=2)
    check_against(Parsed(out.read_text(encoding="utf-8")), step.rows[1])
    assert f"step 1, micro-step 1, rank 1 of 2: {step.rows[1].real_tokens} tokens" in said
    mine = step.rows[1]
    sums = row_sums(
        patches=[plan.patches for plan in mine.plans],
        segments=mine.cu_seqlens.diff().tolist(),
        supervised=mine.supervised,
        dummy_patches=data.geometry.dummy.patches,
    )
    flops = data.outline.flops(data.config).flops(sums)
    for name, cost in (("images", flops.vision), ("decoder", flops.decoder), ("row", flops.total)):
        text = f"{float(cost):.3g} FLOPs"
        assert re.search(rf"^  {name} +{re.escape(text)}, ", said, re.MULTILINE)
        assert f"<dt>cost: {name}</dt><dd>{text}" in out.read_text(encoding="utf-8")
    for flag, value, message in (
        ("--step", 10**6, "--step is 1000000"),
        ("--rank", 1, "--rank is 1, but on 1 ranks"),
    ):
        with pytest.raises(ConfigError, match=message):
            call(monkeypatch, "--config", config, "-o", out, flag, value)
    assert json.loads(config.read_text())["mmds"]["output_dir"] and not (tmp_path / "run").exists()
