"""Rows of a Hugging Face `datasets` set: a folder that `save_to_disk` wrote, or a name on the hub.

A row is a record: it has a column `conversations` or `messages`. Pictures come from its columns of the
`Image` type (or lists of it), in the order of the columns, and from the columns `image` and `images` as paths
when they hold text. The package `datasets` is needed (pip install mmds[datasets]).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmds.data.raw_item import Inline, RawItem
from mmds.data.sources import told
from mmds.errors import DataError

HUB = "hub:"
_MARKS = ("dataset_info.json", "state.json")


def is_saved_set(path: str) -> bool:
    """Whether a local folder was written by `Dataset.save_to_disk`. Raises DataError for a set of splits."""
    folder = Path(path)
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        raise DataError(f"{path}: holds the splits {', '.join(splits)}; name one, such as {path}/{splits[0]}")
    return all((folder / name).is_file() for name in _MARKS)


def open_set(path: str) -> Any:
    """The `datasets.Dataset` of a saved folder, or of "hub:NAME:SPLIT", which is the only one that may use
    the network. Pictures are not decoded. Raises DataError.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{path}: needs the package datasets: pip install mmds[datasets]") from error
    try:
        if path.startswith(HUB):
            name, _, split = path.removeprefix(HUB).partition(":")
            found = datasets.load_dataset(name, split=split or "train")
        else:
            found = datasets.load_from_disk(path)
    except Exception as error:  # noqa: BLE001  it raises almost anything
        raise DataError(f"{path}: cannot be read as a data set: {told(error)}") from error
    for column in picture_columns(found):
        feature = found.features[column]
        plain = datasets.Image(decode=False)
        found = found.cast_column(column, plain if isinstance(feature, datasets.Image) else [plain])
    return found


def picture_columns(found: Any) -> list[str]:
    """Columns of the `Image` type, or lists of it."""
    kinds = {name: getattr(feature, "feature", feature) for name, feature in found.features.items()}
    kinds = {name: kind[0] if isinstance(kind, list) else kind for name, kind in kinds.items()}
    return [name for name, kind in kinds.items() if type(kind).__name__ == "Image"]


def scan_set(path: str, base: str) -> Iterator[RawItem]:
    """Every row, in order. base: where paths start, of pictures that are not stored in the set."""
    found = open_set(path)
    columns = picture_columns(found)
    size = found.data.nbytes // max(1, len(found))
    if not len(found):
        raise DataError(f"{path}: holds no record")
    for number, row in enumerate(found):
        where = f"{path}:{number}"
        pictures: list[Inline] = []
        problem = ""
        for column in columns:
            value = row.pop(column)
            for entry in value if isinstance(value, list) else [value]:
                if entry is None:
                    continue
                try:
                    pictures.append(_picture(entry, f"{column}-{len(pictures)}", base))
                except DataError as error:
                    problem = problem or str(error)
        if columns and pictures:
            row["images"] = [picture.name for picture in pictures]
        yield RawItem(
            where=where,
            record=None if problem else row,
            base=base,
            problem=problem,
            size=size,
            pictures=tuple(pictures) if columns else None,
        )


def _picture(entry: dict[str, Any], fallback: str, base: str) -> Inline:
    """A picture stored in the set, or beside it. Raises DataError with the reason."""
    name = entry.get("path") or fallback
    if entry.get("bytes") is not None:
        return Inline(name=Path(name).name, data=entry["bytes"])
    path = Path(base) / name
    try:
        return Inline(name=name, data=path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {told(error)}") from error
