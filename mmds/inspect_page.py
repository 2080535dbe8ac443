"""A packed row as one HTML page that needs nothing else: what the model sees, and which position predicts what."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Mapping, Sequence

import torch
from PIL import Image
from torch import Tensor

from mmds.data.chat_tokenizer import ChatTokenizer
from mmds.data.pieces import pieces_of
from mmds.data.rows import IGNORE, Row
from mmds.model.loss import targets

_STYLE = """
:root { --ink: #1d2330; --quiet: #6a7283; --line: #dfe3ea; --mark: #b3261e; --paper: #f6f7f9 }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, "Segoe UI", sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 20px 24px 80px }
h1 { font-size: 20px; margin: 0 0 2px }
h2 { font-size: 15px; margin: 0 }
p { margin: 0 }
.quiet { color: var(--quiet) }
dl { display: flex; flex-wrap: wrap; gap: 8px; margin: 14px 0 }
dl div { background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: 5px 11px }
dt { color: var(--quiet); font-size: 12px }
dd { margin: 0; font-variant-numeric: tabular-nums; font-weight: 600 }
.bar { display: flex; height: 22px; border-radius: 5px; overflow: hidden; background: #e4e7ec; margin: 6px 0 4px }
.bar a { display: flex; border-right: 2px solid var(--paper); background: hsl(var(--h) 60% 86%) }
.bar a i { background: repeating-linear-gradient(45deg, hsl(var(--h) 45% 70%) 0 3px, transparent 3px 6px) }
.bar a b { background: hsl(var(--h) 62% 45%) }
.bar a span, .bar a i, .bar a b { display: block; height: 100%; flex-basis: 0 }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; align-items: center; color: var(--quiet); margin: 8px 0 20px }
.legend .t { cursor: default }
section { background: #fff; border: 1px solid var(--line); border-left: 10px solid hsl(var(--h) 62% 52%);
  border-radius: 6px; padding: 12px 16px 14px; margin: 0 0 14px }
section header { display: flex; flex-wrap: wrap; gap: 2px 18px; align-items: baseline; margin-bottom: 10px }
.row { line-height: 0 }
.t { position: relative; display: inline-grid; grid-template-rows: 20px 15px; vertical-align: top; margin: 1px 1px 4px 0;
  min-width: 9px; font: 13px/20px ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre; unicode-bidi: isolate }
.t > b { font-weight: 400; background: #eef0f4; border-radius: 3px; padding: 0 1px }
.t > i { font: 10px/15px ui-monospace, "DejaVu Sans Mono", monospace; color: var(--mark); padding: 0 1px; unicode-bidi: isolate }
.t > i::before { content: "\\2192"; opacity: .55 }
.s > b { background: hsl(var(--h) 70% 84%); box-shadow: inset 0 -2px hsl(var(--h) 62% 42%) }
.x > b { color: var(--quiet); font-size: 11px; outline: 1px dashed #c3c9d4; outline-offset: -1px }
.t:hover { z-index: 2 }
.t:hover > b { outline: 2px solid var(--ink) }
.t:hover::after { position: absolute; left: 0; bottom: 100%; background: var(--ink); color: #fff; border-radius: 5px; padding: 5px 9px;
  font: 12px/17px system-ui, sans-serif; white-space: pre; pointer-events: none;
  content: "token id " attr(data-id) "\\A row position " attr(data-t) "\\A position id " attr(data-p) }
.t[data-next]:hover::after { content: "token id " attr(data-id) "\\A row position " attr(data-t) "\\A position id " attr(data-p)
  "\\A predicts token id " attr(data-next) }
figure { display: block; margin: 6px 0 10px; line-height: 1.4 }
figure img { display: block; max-width: none; outline: 1px solid var(--line) }
figcaption { color: var(--quiet); font-size: 12px; padding-top: 3px }
.bad { border-left-color: var(--mark) }
.bad li { margin: 2px 0 }
@media print { .t:hover::after { display: none } section { break-inside: avoid } }
"""

_SIGNS = {**{code: chr(0x2400 + code) for code in range(32)}, 9: "\u21e5", 10: "\u21b5", 127: "\u2421"}
_BLANK = "\u2423"  # a token of spaces only
_PART = "\u22ef"  # a token that is only a part of a character

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def render(
    row: Row,
    tokenizer: ChatTokenizer,
    *,
    title: str,
    place: str,
    row_tokens: int,
    cost: Mapping[str, str] | None = None,
) -> str:
    """The page of a row. title: of the page; place: where the row stands; row_tokens: most tokens of a row; cost: what of it -> how much."""
    view = _View(row, tokenizer)
    samples = range(len(row.sample_keys))
    return "".join(
        (
            "<!DOCTYPE html>\n",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{shown(title)}</title><style>{_STYLE}</style></head><body><main>",
            f'<h1>{shown(title)}</h1><p class="quiet">{shown(place)}</p>',
            _counts(row, view, row_tokens),
            _values({f"cost: {name}": shown(value) for name, value in (cost or {}).items()}),
            _overview(view, row_tokens),
            _LEGEND,
            *(view.sample(index) for index in samples),
            _bad(row.bad),
            "</main></body></html>\n",
        )
    )


def shown(text: str) -> str:
    """Text of people as HTML: markup is text, and characters that cannot be seen have a sign."""
    return html.escape(text.encode("utf-8", "replace").decode().translate(_SIGNS))


class _View:
    """A row position by position. Lists are indexed by row position."""

    def __init__(self, row: Row, tokenizer: ChatTokenizer) -> None:
        self.row = row
        self.bounds: list[int] = row.cu_seqlens.tolist()
        self.ids: list[int] = row.input_ids.tolist()
        axes = row.position_ids.reshape(-1, len(self.ids)).T.tolist()
        self.positions = [",".join(map(str, axis)) for axis in axes]
        self.supervised: list[bool] = (row.labels != IGNORE).tolist()
        predictors, predicted = targets(row.labels, row.cu_seqlens)
        self.next: dict[int, int] = dict(zip(predictors.tolist(), predicted.tolist(), strict=True))
        starts = row.slots[(row.slot_counts.cumsum(0) - row.slot_counts)]
        self.images: dict[int, int] = {int(t): k for k, t in enumerate(starts)}
        self.slots = set(row.slots.tolist())
        self.control = set(tokenizer.hf.added_tokens_decoder)
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def kind(self, t: int) -> str:
        """slot, supervised or context."""
        return "slot" if t in self.slots else "supervised" if self.supervised[t] else "context"

    def sample(self, index: int) -> str:
        """The section of a sample."""
        start, end = self.bounds[index : index + 2]
        count = sum(start <= t < end for t in self.next)
        key = self.row.sample_keys[index]
        images = sum(start <= t < end for t in self.images)
        facts = (
            f"{end - start} tokens",
            f"row positions {start}\u2013{end - 1}",
            f"position ids {self.positions[start]}\u2013{self.positions[end - 1]}",
            f"{count} target{'' if count == 1 else 's'}",
            f"{images} image{'' if images == 1 else 's'}",
        )
        return (
            f'<section id="sample-{index}" style="--h:{hue(index)}" data-start="{start}" data-end="{end}"><header>'
            f"<h2>{shown(key) if key else 'filler: no usable sample is left here'}</h2>"
            + "".join(f'<span class="quiet">{fact}</span>' for fact in facts)
            + f'</header><div class="row">{"".join(self._cells(start, end))}</div></section>'
        )

    def _cells(self, start: int, end: int) -> Iterator[str]:
        t = start
        while t < end:
            if t in self.images:
                image = self.images[t]
                yield self._figure(t, image)
                t += int(self.row.slot_counts[image])
                continue
            stop = t
            while stop < end and stop not in self.slots:
                stop += 1
            for place, text in zip(range(t, stop), self._pieces(self.ids[t:stop]), strict=True):
                yield self._cell(place, text)
            t = stop

    def _cell(self, t: int, text: str) -> str:
        target = self.next.get(t)
        classes = "t" + (" s" if self.supervised[t] else "") + (" x" if self.ids[t] in self.control else "")
        after = "" if target is None else f' data-next="{target}"'
        below = "" if target is None else f"<i>{shown(self._target(target))}</i>"
        return (
            f'<span class="{classes}" data-t="{t}" data-p="{self.positions[t]}" data-id="{self.ids[t]}"{after}>'
            f"<b>{shown(text)}</b>{below}</span>" + ("<br>" if text.endswith("\n") else "")
        )

    def _figure(self, t: int, image: int) -> str:
        count = int(self.row.slot_counts[image])
        pieces = image_pieces(self.row, image)
        height, width = pieces[0].shape[1:]
        tiles = f", an overview and {len(pieces) - 1} tiles of" if len(pieces) > 1 else ":"
        pictures = "".join(
            f'<img src="{data_uri(piece)}" width="{width}" height="{height}" alt="{shown(self.row.image_names[image])}">'
            for piece in pieces
        )
        last = t + count - 1
        target = self.next.get(last)
        predicts = (
            "" if target is None else f"; the last slot predicts {shown(self._target(target))} (id {target})"
        )
        name = shown(self.row.image_names[image])
        return (
            f'<figure data-t="{t}" data-slots="{count}">{pictures}'
            f"<figcaption>{name}{tiles} {width} x {height} pixels become {count} slots, row positions {t}\u2013{last}, position ids "
            f"{self.positions[t]}\u2013{self.positions[last]}{predicts}</figcaption></figure>"
        )

    def _pieces(self, ids: Sequence[int]) -> Iterator[str]:
        """The text of each token; a character that several tokens make stands at the last of them."""
        open_: list[int] = []
        for token in ids:
            open_.append(token)
            text = self._text(token) if len(open_) == 1 else self._tokenizer.decode(open_)
            if "\ufffd" in text and len(open_) < 8:
                yield _PART
            else:
                yield text
                open_ = []

    def _target(self, token: int) -> str:
        """The text of a token that is to be predicted, never empty."""
        text = self._text(token)
        return _PART if "\ufffd" in text else text.strip(" ") or _BLANK

    def _text(self, token: int) -> str:
        """The text of one token, with the space that a decoder drops at the beginning."""
        if token not in self._texts:
            text = self._tokenizer.decode([token])
            piece = str(self._tokenizer.hf.convert_ids_to_tokens(token))
            lost = piece.startswith("\u2581") and not text.startswith(" ")
            self._texts[token] = " " + text if lost else text
        return self._texts[token]


def hue(index: int) -> int:
    """Colour of a sample's band, degrees: neighbours differ most (golden angle)."""
    return round(210 + index * 137.508) % 360


def image_pieces(row: Row, image: int) -> list[Tensor]:
    """What the encoder sees of an image: uint8 [3, H, W] of its one square or rectangle, or of its overview and each tile."""
    plan = row.plans[image]
    start = sum(before.pixel_shape[0] for before in row.plans[:image])
    pixels = row.pixels[start : start + plan.pixel_shape[0]].numpy()
    return [torch.from_numpy(piece) for piece in pieces_of(pixels, plan)]


def data_uri(pixels: Tensor) -> str:
    """uint8 [3, H, W] as a PNG within the page."""
    file = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _counts(row: Row, view: _View, row_tokens: int) -> str:
    values: dict[str, int | str] = {
        "tokens": row.real_tokens,
        "of a row's": f"{row_tokens} ({row.real_tokens / row_tokens:.1%})",
        "samples": sum(bool(key) for key in row.sample_keys),
        "images": len(row.image_names),
        "visual tokens": row.visual_tokens,
        "targets": len(view.next),
        "bad samples": len(row.bad),
        "segment boundaries": ", ".join(map(str, view.bounds)),
    }
    return _values(values)


def _values(values: Mapping[str, int | str]) -> str:
    """Names and values side by side."""
    return "<dl>" + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in values.items()) + "</dl>"


def _overview(view: _View, row_tokens: int) -> str:
    """The row as a bar: a band a sample, slots hatched, supervised tokens dark."""
    tags = {"slot": "i", "supervised": "b", "context": "span"}
    bands = []
    for index, start in enumerate(view.bounds[:-1]):
        end = view.bounds[index + 1]
        parts, t = [], start
        while t < end:
            stop = t
            while stop < end and view.kind(stop) == view.kind(t):
                stop += 1
            tag = tags[view.kind(t)]
            parts.append(f'<{tag} style="flex-grow:{stop - t}"></{tag}>')
            t = stop
        bands.append(
            f'<a href="#sample-{index}" title="{shown(view.row.sample_keys[index])}" '
            f'style="--h:{hue(index)};flex:{end - start} 0 0">{"".join(parts)}</a>'
        )
    free = max(row_tokens - len(view.ids), 0)
    return f'<div class="bar">{"".join(bands)}<div style="flex:{free} 0 0"></div></div>'


_LEGEND = (
    '<div class="legend" style="--h:210"><span><span class="t"><b>context</b></span></span>'
    '<span><span class="t s"><b>supervised</b></span></span>'
    '<span><span class="t x"><b>control token</b></span></span>'
    '<span><span class="t"><b>token</b><i>what it must predict</i></span></span>'
    "<span>Grey at the end of the bar is free room, hatched are slots, dark is supervised. "
    "Hover over a token for its ids.</span></div>"
)


def _bad(bad: Sequence[tuple[str, str]]) -> str:
    if not bad:
        return ""
    lines = "".join(f"<li><b>{shown(key)}</b>: {shown(reason)}</li>" for key, reason in bad)
    return f'<section class="bad"><h2>Samples of the plan that are left out of this row</h2><ul>{lines}</ul></section>'
