"""One conversation, whatever style the raw record has.

Rules for every record:
- Turns: at most one system turn, first; then user and assistant in turn, user first; training ends with the
  assistant.
- No turn is empty (white space only counts as empty); a user turn may be pictures alone.
- `<image>` in the *string* of a user turn is an image marker; `\\<image>` there is the literal text
  `<image>`. In system and assistant strings, and in explicit text parts, `<image>` stays text.
- Markers take the paths of `image` / `images` in order; there are as many of the one as of the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmds.errors import DataError

Role = Literal["system", "user", "assistant"]

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_CHAT_ROLES = ("system", "user", "assistant")
_MARKER = re.compile(r"\\<image>|<image>")
_PATH_KEYS = ("image", "path", "url")
_UNSUPPORTED_RECORD_KEYS = ("video", "videos", "audio", "audios", "tools")
_UNSUPPORTED_TURN_KEYS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, kw_only=True)
class ImageMarker:
    """The place of one image in a turn. index: position in the conversation's `images`."""

    index: int


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one speaker says: text and image markers in order, neighbouring texts joined."""

    role: Role
    parts: tuple[str | ImageMarker, ...]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A sample before tokenisation. key: its id; images: paths as written, one per marker, in order."""

    key: str
    turns: tuple[Turn, ...]
    images: tuple[str, ...] = ()


def parse_record(
    record: Mapping[str, Any], *, where: str, ends_with: Literal["assistant", "user"] = "assistant"
) -> Conversation:
    """A record of LLaVA style (`conversations`) or chat style (`messages`) as a Conversation.

    where: "file:line", for messages and as the key of a record without `id`. ends_with: the last speaker;
    "user" for a conversation to be answered. Raises DataError naming where, the sample and the rule that is
    broken.
    """
    key = _key(record, where)
    place = where if key == where else f"{where} (sample {key})"
    for name in _UNSUPPORTED_RECORD_KEYS:
        if record.get(name):
            raise DataError(f"{place}: {name!r} is not supported; only text and images are")
    styles = [name for name in ("conversations", "messages") if record.get(name) is not None]
    if len(styles) != 1:
        raise DataError(
            f"{place}: needs 'conversations' (LLaVA style) or 'messages' (chat style), not both or none"
        )
    raw_turns = record[styles[0]]
    if not isinstance(raw_turns, Sequence) or isinstance(raw_turns, str) or not raw_turns:
        raise DataError(f"{place}: {styles[0]!r} must be a list with at least one turn")
    listed = _listed_images(record, place)
    inline: list[str | None] = []
    turns = tuple(
        _turn(raw, inline, llava=styles[0] == "conversations", place=f"{place}: turn {i}")
        for i, raw in enumerate(raw_turns)
    )
    conversation = Conversation(key=key, turns=turns, images=_match_images(inline, listed, place))
    check_turns(conversation, place=place, ends_with=ends_with)
    return conversation


def check_turns(
    conversation: Conversation, *, place: str, ends_with: Literal["assistant", "user"] = "assistant"
) -> None:
    """Raise DataError, prefixed with `place`, when a conversation breaks the rules above."""
    _check_order([turn.role for turn in conversation.turns], place, ends_with)
    markers = []
    for i, turn in enumerate(conversation.turns):
        found = [part.index for part in turn.parts if isinstance(part, ImageMarker)]
        if not found and not any(isinstance(part, str) and part.strip() for part in turn.parts):
            raise DataError(f"{place}: turn {i} ({turn.role}) is empty; give it text or remove it")
        if found and turn.role != "user":
            raise DataError(f"{place}: turn {i} ({turn.role}) holds an image; only user turns may")
        markers += found
    if markers != list(range(len(conversation.images))):
        raise DataError(_miscounted(len(markers), len(conversation.images), place))


def _check_order(roles: Sequence[Role], place: str, ends_with: Role) -> None:
    """Raise DataError unless, after an optional system turn, user and assistant take turns."""
    first = 1 if roles[:1] == ["system"] else 0
    for i, role in enumerate(roles[first:], start=first):
        expected = "user" if (i - first) % 2 == 0 else "assistant"
        if role != expected:
            raise DataError(
                f"{place}: turn {i} is {role!r}, but {expected!r} is expected: after an optional system "
                "turn, user and assistant speak in turn, user first; join or reorder the turns"
            )
    if len(roles) == first or roles[-1] != ends_with:
        last = roles[-1] if roles else "missing"
        raise DataError(f"{place}: the last turn is {last!r}, but must be {ends_with!r}")


def _miscounted(markers: int, images: int, place: str) -> str:
    return (
        f"{place}: {markers} image markers but {images} images; they must be equal "
        r"(write \<image> for literal text)"
    )


def _key(record: Mapping[str, Any], where: str) -> str:
    """The record's `id`, or where it stands."""
    key = record.get("id")
    if key is None:
        return where
    if isinstance(key, bool) or not isinstance(key, str | int) or key == "":
        raise DataError(f"{where}: 'id' must be a string or a whole number, not {key!r}")
    return _text(str(key), f"{where}: 'id'")


def _listed_images(record: Mapping[str, Any], place: str) -> list[str] | None:
    """Paths under `image` or `images`; None when the record has neither."""
    given = [name for name in ("image", "images") if record.get(name) is not None]
    if not given:
        return None
    if len(given) == 2:
        raise DataError(f"{place}: has both 'image' and 'images'; keep one")
    value = record[given[0]]
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list):
        raise DataError(
            f"{place}: {given[0]!r} must be a path or a list of paths, not {type(value).__name__}"
        )
    return [_path(path, f"{place}: {given[0]!r}") for path in paths]


def _match_images(inline: list[str | None], listed: list[str] | None, place: str) -> tuple[str, ...]:
    """The path of each marker: its own if the part gave one, else the next of the listed ones."""
    own = [path for path in inline if path is not None]
    if own and listed:
        raise DataError(
            f"{place}: image parts give {len(own)} paths and the record lists {len(listed)}; keep one way"
        )
    if own and len(own) < len(inline):
        raise DataError(_miscounted(len(inline), len(own), place))
    return tuple(own or listed or ())


def _turn(raw: Any, inline: list[str | None], *, llava: bool, place: str) -> Turn:
    """One raw turn; appends to `inline` the path, or None, of each marker it holds."""
    role_key, content_key = ("from", "value") if llava else ("role", "content")
    if not isinstance(raw, Mapping):
        raise DataError(f"{place} must be an object with {role_key!r} and {content_key!r}")
    for name in _UNSUPPORTED_TURN_KEYS:
        if raw.get(name):
            raise DataError(
                f"{place}: {name!r} is not supported and would be lost; put its text into {content_key!r}"
            )
    known = tuple(_ROLES) if llava else _CHAT_ROLES
    role = raw.get(role_key)
    if not isinstance(role, str) or role not in known:
        raise DataError(f"{place}: {role_key!r} is {role!r}; known are {', '.join(known)}")
    content = raw.get(content_key)
    if isinstance(content, str):
        parts = _string_parts(_text(content, place), inline, role=_ROLES[role])
    elif isinstance(content, list) and not llava:
        parts = [_part(part, inline, f"{place} part {i}") for i, part in enumerate(content)]
    else:
        expected = "a string" if llava else "a string or a list of parts"
        raise DataError(f"{place}: {content_key!r} must be {expected}, not {type(content).__name__}")
    return Turn(role=_ROLES[role], parts=_joined(parts))


def _string_parts(text: str, inline: list[str | None], *, role: Role) -> list[str | ImageMarker]:
    """Text and markers of a turn written as one string."""
    if role != "user":
        return [text]
    parts: list[str | ImageMarker] = []
    end = 0
    for match in _MARKER.finditer(text):
        parts.append(text[end : match.start()])
        parts.append("<image>" if match.group().startswith("\\") else _marker(inline, None))
        end = match.end()
    return [*parts, text[end:]]


def _part(part: Any, inline: list[str | None], place: str) -> str | ImageMarker:
    """One explicit part: text stays text, whatever it holds."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise DataError(f"{place}: 'text' must be a string")
        return _text(part["text"], place)
    if kind == "image":
        given = [name for name in _PATH_KEYS if part.get(name) is not None]
        if len(given) > 1:
            raise DataError(f"{place}: gives {' and '.join(given)}; keep one")
        return _marker(inline, _path(part[given[0]], place) if given else None)
    raise DataError(f"{place}: must have type 'text' or 'image', not {kind!r}")


def _marker(inline: list[str | None], path: str | None) -> ImageMarker:
    inline.append(path)
    return ImageMarker(index=len(inline) - 1)


def _joined(parts: Iterable[str | ImageMarker]) -> tuple[str | ImageMarker, ...]:
    """Neighbouring texts joined, empty texts dropped: how a turn was cut into parts must not matter."""
    joined: list[str | ImageMarker] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return tuple(joined)


def _path(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{place}: an image path must be a string that is not empty, not {value!r}")
    if re.match(r"(?i)(https?|ftp|data|file):", value):
        raise DataError(f"{place}: {value[:60]!r} is not a local path; download the image first")
    return _text(value, place)


def _text(text: str, place: str) -> str:
    """The text, if it can be written as UTF-8 (a lone surrogate cannot)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: holds a lone surrogate, which is not text; remove it") from error
    return text
