"""Users' text that a chat template may look at as it likes, and that can be told from the template's own afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from tessera.errors import CheckpointError

SURROGATES = range(0xD800, 0xE000)  # lone ones: no valid text holds them


class Disguise:
    """One stand-in for each character that ``tokens`` consist of: disguised text holds no part of any of them."""

    def __init__(self, tokens: Iterable[str]) -> None:
        characters = sorted({character for token in tokens for character in token if not character.isspace()})
        if len(characters) > len(SURROGATES):
            raise CheckpointError(f"the special tokens consist of {len(characters)} characters; too many to guard")
        stand_ins = list(map(chr, SURROGATES[: len(characters)]))
        self._hide = str.maketrans(dict(zip(characters, stand_ins)))
        self._show = str.maketrans(dict(zip(stand_ins, characters)))

    def hide(self, text: str) -> str:
        return text.translate(self._hide)

    def show(self, text: str) -> str:
        return text.translate(self._show)


class UserText(str):
    """Disguised text that is the plain text to code that compares, searches, cuts or extends it.

    What comes of that is such text again: where a character came from stays known.
    """

    disguise: Disguise

    def __new__(cls, text: str, disguise: Disguise) -> UserText:
        self = super().__new__(cls, text)
        self.disguise = disguise
        return self

    @cached_property
    def plain(self) -> str:
        return self.disguise.show(self)

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return hash(self.plain)

    def __iter__(self) -> Iterator[str]:
        return map(self._like, super().__iter__())

    def __getitem__(self, key: Any) -> UserText:
        return self._like(super().__getitem__(key))

    def __add__(self, other: str) -> UserText:
        return self._like(super().__add__(other))

    def __radd__(self, other: str) -> UserText:
        return self._like(str.__add__(other, self))

    def replace(self, old: str, new: str, count: Any = -1) -> UserText:
        return self._like(new.join(self.split(old, count)))

    def _like(self, text: str) -> UserText:
        return UserText(text, self.disguise)


def shown(value: Any) -> Any:
    """``value`` with every UserText in it as plain text."""
    if isinstance(value, UserText):
        return value.plain
    if isinstance(value, list | tuple):
        return type(value)(map(shown, value))
    return {key: shown(item) for key, item in value.items()} if isinstance(value, dict) else value


def _answers_as_plain_text(name: str) -> Any:
    return lambda text, *values: getattr(text.plain, name)(*map(shown, values))


def _cuts(name: str) -> Any:
    def cut(text: UserText, *values: Any, **named: Any) -> Any:
        pieces = getattr(text.plain, name)(*shown(values), **shown(named))
        separator = values[0] if values else named.get("sep")
        gap = len(separator) if "split" in name and isinstance(separator, str) else 0
        parts: list[str] = []
        at = 0
        # The pieces stand in order; what lies between them, a separator or whitespace, begins none of them.
        for piece in [pieces] if isinstance(pieces, str) else pieces:
            start = text.plain.index(piece, at)
            at = start + len(piece) + gap
            parts.append(text[start : start + len(piece)])
        return parts[0] if isinstance(pieces, str) else type(pieces)(parts)

    return cut


def _all_disguised(name: str) -> Any:
    return lambda text: text._like(text.disguise.hide(getattr(text.plain, name)()))


for _name in (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__", "startswith", "endswith", "find"),
    *("rfind", "index", "rindex", "count", "isalnum", "isalpha", "isdigit", "islower", "isspace", "istitle", "isupper"),
):
    setattr(UserText, _name, _answers_as_plain_text(_name))
for _name in ("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition"):
    setattr(UserText, _name, _cuts(_name))
for _name in ("lower", "upper", "title", "capitalize", "casefold", "swapcase"):
    setattr(UserText, _name, _all_disguised(_name))
