"""A body of multipart/form-data, read as it comes: :class:`FormReader`."""

from __future__ import annotations

import email
from collections.abc import Callable, Iterator
from email.message import Message
from typing import NamedTuple

from tessera_gateway.errors import ApiError

MOST_HEADERS = 8192  # bytes of a field's


class Field(NamedTuple):
    """Where a part of the form belongs; ``number`` counts them, for a name may stand twice."""

    number: int
    name: str
    filename: str


class FormReader:
    """Takes a body piece by piece. Raises ApiError for what is no form."""

    def __init__(self, content_type: str) -> None:
        header = Message()
        header["Content-Type"] = content_type
        boundary = _text(header.get_boundary)
        if header.get_content_type() != "multipart/form-data" or not boundary:
            raise ApiError(415, "the body must be a form: multipart/form-data", code="unsupported_media_type")
        self._line = b"\r\n--" + boundary.encode()
        self._buffer = bytearray(b"\r\n")  # with which the first boundary is like the others
        self._field: Field | None = None
        self._fields = 0
        self._at_boundary = False
        self.finished = False
        """Whether the last boundary has come."""

    def feed(self, data: bytes) -> Iterator[tuple[Field, bytes]]:
        """What is new of which field; each field comes once with nothing, before its content."""
        self._buffer += data
        while not self.finished:
            if self._at_boundary:
                if len(self._buffer) < 2:
                    return
                if self._buffer.startswith(b"--"):
                    self.finished = True
                elif not self._begin():
                    return
                else:
                    assert self._field is not None
                    yield self._field, b""
            else:
                end = self._buffer.find(self._line)
                # Of what is not known yet to be content, as much stays as may be the beginning of a boundary.
                content = bytes(self._buffer[: end if end >= 0 else max(0, len(self._buffer) - len(self._line) + 1)])
                del self._buffer[: len(content)]
                if self._field is not None and content:
                    yield self._field, content
                if end < 0:
                    return
                del self._buffer[: len(self._line)]
                self._at_boundary = True
        self._buffer.clear()

    def _begin(self) -> bool:
        """Reads a field's headers; whether they are there."""
        end = self._buffer.find(b"\r\n\r\n")
        if end > MOST_HEADERS or (end < 0 and len(self._buffer) > MOST_HEADERS):
            raise _broken("a field's headers are too long")
        if end < 0:
            return False
        if not self._buffer.startswith(b"\r\n"):
            raise _broken("a boundary does not end its line")
        headers = email.message_from_string(self._buffer[2 : end + 4].decode("utf-8", "replace"))
        name = headers.get_param("name", header="content-disposition")
        if headers.get_content_disposition() != "form-data" or not isinstance(name, str):
            raise _broken("a field has no name")
        del self._buffer[: end + 4]
        self._fields += 1
        self._field = Field(self._fields, name, _text(headers.get_filename))
        self._at_boundary = False
        return True


def _text(read: Callable[[], str | None]) -> str:
    """A parameter of a header, whose sender may name any of Python's codecs for it (RFC 2231)."""
    try:
        return (read() or "").encode("utf-8", "replace").decode()
    except ValueError:
        raise _broken("a header does not follow the character set that it names") from None


def _broken(why: str) -> ApiError:
    return ApiError(400, f"the form cannot be read: {why}", code="invalid_form")
