"""What a row is, wherever it comes from: :class:`Row`, and :class:`Source`, which has them."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tessera_client.messages import sampling
from tessera_wire.errors import InvalidRequest

FIELDS = ("id", "image", "question", "options")
NOT_OPTIONS = {"self", "image", "question"}  # arguments of the client's `ask` that stand elsewhere in a row
ALL_BITS = (1 << 64) - 1
Id = str | int
Options = Mapping[str, Any] | None
Conversation = Sequence[Mapping[str, Any]]
Mask = np.ndarray
"""bool [rows]"""


class Row(NamedTuple):
    """One request.

    ``number``: its place in the source, from 0. ``images``: each a path, a ``data:`` URL or a file's bytes.
    ``asked``: 64 bits that stand for its id and what it asks, the contents of picture files left out. ``stat``: 64 bits
    that are others where such a file was written meanwhile; 0 where there is none, or one is missing. ``error``: why it
    cannot be asked; its id is then None. ``messages``: a conversation, in the place of images and question.
    """

    number: int
    id: Id | None
    images: tuple[Any, ...]
    question: str
    options: Mapping[str, Any]
    asked: int
    stat: int = 0
    error: InvalidRequest | None = None
    messages: Conversation | None = None

    @property
    def unseeded(self) -> bool:
        """Whether each answer to it is another."""
        return bool(self.options.get("temperature")) and self.options.get("seed") is None


def _about(path: str) -> tuple[int, ...]:
    try:
        about = os.stat(path)
    except (OSError, ValueError):
        return ()
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino


def without_priority(options: Mapping[str, Any]) -> str | None:
    """Options as the server gets them, but for the priority, which changes no answer. Raises InvalidRequest."""
    return sampling({name: value for name, value in options.items() if name != "priority"})


class Source(ABC):
    """Rows that can be gone through several times, in which one that is none has an error.

    Args:
        path: where they come from.
        question: of every row that does not have its own.
        options: as of the client's ``ask``, of every row that does not say otherwise.
    """

    unit = "row"
    """What its rows are called."""
    passed_over: Sequence[str] = ()
    """Fields that mean nothing here; known after the first row."""
    _named: bool | None = True
    """Whether its rows have ids of their own."""
    _files: Sequence[str] = ()
    """Where bytes among the images come from."""

    def __init__(self, path: Path, question: str | None = None, options: Options = None) -> None:
        self.path, self._question, self._options = path, question, dict(options or {})
        self.where, self.folder = f"{path}, {self.unit} ", str(path.resolve().parent)
        """What stands before a row's place in its name; the folder of relative paths."""
        told = json.dumps([question, without_priority(self._options)])
        self._digest = blake2b(told.encode(), digest_size=8)
        # Many rows may be about one picture. Where a stat is older than the bytes that are read, these are compared.
        self._about = lru_cache(4096)(_about)

    def rows(self, wanted: Mask | None = None) -> Iterator[Row]:
        """Those whose number is ``wanted``, or all of them."""
        for number, (place, own, given) in enumerate(self._read()):
            if wanted is None or wanted[number]:
                yield self._row_or_error(number, place, own, given)

    def _read(self) -> Iterator[tuple[int | str, bytes, Any]]:
        """Of each row the place, all that it says itself, and what :meth:`_row` makes one of."""
        raise NotImplementedError

    @abstractmethod
    def _row(self, number: int, place: Any, own: bytes, given: Any) -> Row:
        """Raises InvalidRequest."""

    def _row_or_error(self, number: int, place: int | str, own: bytes, given: Any) -> Row:
        try:
            return self._row(number, place, own, given)
        except InvalidRequest as error:
            where = f"{self.where}{place}"
            asked = self._asked(b"%b %b" % (where.encode(errors="replace"), own))
            return Row(number, None, (), "", {}, asked, 0, InvalidRequest(f"{where}: {error.message}", error.remedy))

    def _identify(self, fields: dict[str, Any], otherwise: int) -> None:
        """Sees to the row's id: its own, or else its place."""
        if not self._named:
            fields["id"] = otherwise
            return
        name = fields.get("id")
        if isinstance(name, bool) or not isinstance(name, (str, int)) or (isinstance(name, int) and abs(name) >> 63):
            raise InvalidRequest(f"its id must be text or a whole number of 64 bits, got {name!r:.80}")

    def _images(self, given: Any) -> tuple[Any, ...]:
        """Of a row's field ``image``, which may be one, a list of them, or None."""
        several = given if isinstance(given, list) else () if given is None else (given,)
        return tuple([self._image(image) for image in several])

    def _image(self, image: Any) -> Any:
        """A ``data:`` URL as it is, a path as one from the folder."""
        if not isinstance(image, str) or not image:
            raise InvalidRequest(f"its image must be a path, a data: URL or a list of them, got {image!r:.80}")
        return image if image.startswith(("/", "data:")) else os.path.join(self.folder, image)

    def _made(self, number: int, fields: Mapping[str, Any], own: bytes, messages: Conversation | None = None) -> Row:
        """A row of its fields. ``own`` is all that it says itself: a line of a file, say. ``messages``: in the place of
        a question. Raises InvalidRequest."""
        options, question = self._options_of(fields), fields.get("question")
        if messages is not None:
            question = ""
        elif question is None:
            question = self._question
        if not isinstance(question, str):
            raise InvalidRequest(
                "it has no question" if question is None else f"its question must be text, not {question!r:.80}",
                "give --prompt, or a field 'question'",
            )
        images = self._images(fields.get("image"))
        stat = self._stat((*images, *self._files))
        return Row(number, fields["id"], images, question, options, self._asked(own), stat, messages=messages)

    def _options_of(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        if (given := fields.get("options")) is None:
            return self._options
        if not isinstance(given, dict) or NOT_OPTIONS & set(given):
            raise InvalidRequest(f"its options must be an object of names such as max_tokens, got {given!r:.80}")
        options = {**self._options, **given}
        without_priority(options)
        return options

    def _stat(self, images: Iterable[Any]) -> int:
        """See :class:`Row`. Size, time of writing, time of any change, and inode: so a file that was put in another's
        place with its time set back is noticed too."""
        found: tuple[int, ...] = ()
        for image in images:
            if isinstance(image, str) and not image.startswith("data:"):
                about = self._about(image)
                if not about:
                    return 0
                found += about
        return (hash(found) & ALL_BITS or 1) if found else 0

    def _asked(self, own: bytes) -> int:
        digest = self._digest.copy()
        digest.update(own)
        return int.from_bytes(digest.digest(), "big")
