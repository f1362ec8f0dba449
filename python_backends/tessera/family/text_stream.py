"""Token ids to text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable


class TextStream:
    """Whole characters, each as soon as its last byte is there; the parts together are the text of all ids at once.

    ``token_bytes`` gives what a token adds to the text, in UTF-8; of bytes that make no character comes U+FFFD.
    ``strip_space``: a space in front of the whole text is no part of it.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], strip_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._strip_space = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        data = b"".join(map(self._token_bytes, ids))
        if data and self._strip_space:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def end(self) -> str:
        """What an unfinished character leaves."""
        return self._utf8.decode(b"", final=True)
