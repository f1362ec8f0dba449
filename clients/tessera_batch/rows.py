"""What a row is, wherever it comes from: :class:`Row`, and :class:`Source`, which has them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tessera_client.messages import sampling
from tessera_wire.errors import InvalidRequest

FIELDS = ("id", "image", "question", "options")
NOT_OPTIONS = {"self", "image", "question"}  # arguments of the client's `ask` that stand elsewhere in a row
Id = str | int
Mask = np.ndarray
"""bool [rows]"""


@dataclass(frozen=True, slots=True)
class Row:
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


@dataclass(frozen=True, slots=True)
class Asked:
    """What goes for every row that does not say otherwise.

    Args:
        question: None where every row has its own.
        options: as of the client's ``ask``.
    """

    question: str | None = None
    options: Mapping[str, Any] | None = None

    def row(self, number: int, fields: Mapping[str, Any], images: tuple[Any, ...], contents: str = "") -> Row:
        """A row of its fields; ``contents`` stands for pictures that are bytes, which need not be there."""
        question = fields.get("question")
        question = self.question if question is None else question
        if not isinstance(question, str):
            raise InvalidRequest(
                "it has no question" if question is None else f"its question must be text, not {question!r:.80}",
                "give --prompt, or a field 'question'",
            )
        own = fields.get("options")
        if own is not None and (not isinstance(own, Mapping) or NOT_OPTIONS & set(own)):
            raise InvalidRequest(
                f"its options must be an object of the SDK's names, such as max_tokens, got {own!r:.80}"
            )
        options = {**(self.options or {}), **(own or {})}
        name = fields["id"]
        # Who goes first changes no answer, and may change when a job goes on.
        asked = sampling({key: value for key, value in options.items() if key != "priority"})
        shown = contents or list(images)
        told = json.dumps([name, question, asked, shown]).encode()
        return Row(
            number, name, images, question, options, int.from_bytes(blake2b(told, digest_size=8).digest(), "big")
        )


def check_id(name: Any) -> None:
    """Raises InvalidRequest for what is no id."""
    if isinstance(name, bool) or not isinstance(name, (str, int)) or (isinstance(name, int) and abs(name) >> 63):
        raise InvalidRequest(f"its id must be text or a whole number of 64 bits, got {name!r:.80}")


def located(image: Any, folder: Path) -> str:
    """A ``data:`` URL as it is, a path as one from ``folder``."""
    if not isinstance(image, str) or not image:
        raise InvalidRequest(f"its image must be a path, a data: URL or a list of them, got {image!r:.80}")
    return image if image.startswith("data:") else os.path.join(folder, image)
