"""The soak's requests through the gateway: :class:`Door`."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx

from tessera.launcher.guard import descendants

PATH = "/v1/chat/completions"


class Door:
    """A gateway's address and processes, and what is asked of it."""

    def __init__(self, address: str, pid: int, timeout: float) -> None:
        self._http = httpx.Client(base_url=f"http://{address}", timeout=timeout)
        names = ["gateway", *(f"gateway's {number}" for number in range(1, 9))]  # its workers, and what counts for them
        self.processes = dict(zip([pid, *sorted(descendants(pid))], names))

    def whole(self, picture: bytes, text: str) -> str:
        """The finish reason of an answer that comes at once."""
        return str(self._answer(asked(text, picture, max_tokens=4))["choices"][0]["finish_reason"])

    def streamed(self, picture: bytes, text: str, length: int) -> str:
        """The finish reason of a stream of that many tokens."""
        *events, last = self._events(asked(text, picture, max_tokens=length, ignore_eos=True, stream=True))
        if last != "[DONE]":
            raise AssertionError(f"the stream ended with {last[:200]}")
        reasons = [choice["finish_reason"] for event in events for choice in json.loads(event)["choices"]]
        return str(reasons[-1])

    def left(self, picture: bytes, text: str) -> None:
        """Goes away after the first words of a long answer."""
        for event in self._events(asked(text, picture, max_tokens=2000, ignore_eos=True, stream=True)):
            if event != "[DONE]" and any(choice["delta"].get("content") for choice in json.loads(event)["choices"]):
                return
        raise AssertionError("the stream had no words")

    def refused(self, picture: bytes, text: str, dice: random.Random) -> None:
        """Sends what must be refused, and by which status."""
        attempts: list[tuple[int, dict[str, Any], dict[str, str]]] = [
            (400, asked(text, picture[: len(picture) // 2]), {}),
            (400, asked(text, picture, beams=4), {}),
            (404, asked(text, picture, model="another"), {}),
            (431, asked(text, picture), {"X-Long": "x" * 20_000}),
            (413, {**asked(text), "messages": [0] * 200_000}, {}),
        ]
        status, body, headers = dice.choice(attempts)
        try:
            self._answer(body, headers)
        except Refused as refusal:
            if refusal.status == status:
                return
            raise
        raise AssertionError(f"what should be refused by {status} was answered")

    def _answer(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        return taken(self._http.post(PATH, json=body, headers=headers)).json()

    def _events(self, body: dict[str, Any]) -> Iterator[str]:
        with self._http.stream("POST", PATH, json=body) as response:
            for line in taken(response).iter_lines():
                if line.startswith("data: "):
                    yield line[6:].strip()


class Refused(Exception):
    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body[:200]!r}")
        self.status = status


def taken(response: httpx.Response) -> httpx.Response:
    """A response of status 200. Raises Refused for any other."""
    if response.status_code != 200:
        raise Refused(response.status_code, response.read())
    return response


def asked(text: str, picture: bytes | None = None, **fields: Any) -> dict[str, Any]:
    """A request's body."""
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if picture is not None:
        url = f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {"model": "vlm", "messages": [{"role": "user", "content": content}], **fields}
