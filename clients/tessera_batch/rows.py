"""What a row is, wherever it comes from: :class:`Row`, and :class:`Source`, which has them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from tessera_client.messages import sampling
from tessera_wire.errors import InvalidRequest

FIELDS = ("id", "image", "question", "options")
NOT_OPTIONS = {"self", "image", "question"}  # arguments of the client's `ask` that stand elsewhere in a row
Id = str | int
Mask = np.ndarray
"""bool [rows]"""


class Row(NamedTuple):
    """One request.

    ``number``: its place in the source, from 0. ``images``: each a path, a ``data:`` URL or a file's bytes.
    ``asked``: 64 bits that stand for its id and what it asks, the contents of picture files left out.
    """

    number: int
    id: Id
    images: tuple[Any, ...]
    question: str
    options: Mapping[str, Any]
    asked: int


class Source(Protocol):
    """Rows that can be gone through several times. Raises InvalidRequest for a row that is none."""

    path: Path

    @property
    def passed_over(self) -> Sequence[str]:
        """Fields that nobody asks for; known after the first row."""
        ...

    def rows(self, wanted: Mask | None = None) -> Iterator[Row]:
        """Those whose number is ``wanted``, or all of them."""
        ...


class Asked:
    """What goes for every row that does not say otherwise.

    Args:
        question: None where every row has its own.
        options: as of the client's ``ask``.
    """

    def __init__(self, question: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self._question, self._options = question, dict(options or {})
        told = json.dumps([question, without_priority(self._options)])
        self._digest = blake2b(told.encode(), digest_size=8)

    def row(self, number: int, fields: Mapping[str, Any], images: tuple[Any, ...], own: bytes) -> Row:
        """A row of its fields. ``own`` is all that it says itself: a line of a file, say."""
        question = fields.get("question")
        if question is None:
            question = self._question
        if not isinstance(question, str):
            raise InvalidRequest(
                "it has no question" if question is None else f"its question must be text, not {question!r:.80}",
                "give --prompt, or a field 'question'",
            )
        options: Mapping[str, Any] = self._options
        if (given := fields.get("options")) is not None:
            if not isinstance(given, dict) or NOT_OPTIONS & set(given):
                raise InvalidRequest(f"its options must be an object of names such as max_tokens, got {given!r:.80}")
            options = {**options, **given}
            without_priority(options)
        digest = self._digest.copy()
        digest.update(own)
        return Row(number, fields["id"], images, question, options, int.from_bytes(digest.digest(), "big"))


def without_priority(options: Mapping[str, Any]) -> str | None:
    """Options as the server gets them, but for who goes first, which changes no answer. Raises InvalidRequest."""
    return sampling({name: value for name, value in options.items() if name != "priority"})


def check_id(name: Any) -> None:
    """Raises InvalidRequest for what is no id."""
    if isinstance(name, bool) or not isinstance(name, (str, int)) or (isinstance(name, int) and abs(name) >> 63):
        raise InvalidRequest(f"its id must be text or a whole number of 64 bits, got {name!r:.80}")


def located(image: Any, folder: str) -> str:
    """A ``data:`` URL as it is, a path as one from ``folder``."""
    if not isinstance(image, str) or not image:
        raise InvalidRequest(f"its image must be a path, a data: URL or a list of them, got {image!r:.80}")
    return image if image.startswith(("/", "data:")) else os.path.join(folder, image)
