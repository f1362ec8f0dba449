"""A server that answers with the question, for jobs that ask many: :class:`AnsweringServer`."""

import json
from collections.abc import Sequence
from typing import Any

from clients.fake_transport import FakeTransport, final

from tessera_client.messages import Request

PROBE = "Hello"
"""What is asked to see whether a server is in order."""


class AnsweringServer(FakeTransport):
    """``own`` has what it yields to some questions, and ``once`` what to the first asking of some."""

    def __init__(self, once: dict[str, Any] | None = None, **own: Any) -> None:
        super().__init__()
        self.once, self.own = dict(once or {}), own

    def answer_to(self, request: Request) -> Sequence[Any]:
        text = question(request)
        return self.once.pop(text, None) or self.own.get(text) or [final(f"answer to {text}")]

    @property
    def asked(self) -> list[str]:
        """The questions, in order."""
        return [text for request, *_ in self.requests if (text := question(request)) != PROBE]


def question(request: Request) -> str:
    """A request's text, or that of the first part of its last message."""
    if request.messages is None:
        return request.text or ""
    return json.loads(request.messages)[-1]["content"][0]["text"]
