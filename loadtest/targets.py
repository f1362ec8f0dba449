"""Whom the load asks: our server, through its own client over gRPC, or any server of OpenAI's API over HTTP.

Both are sent the same pictures and prompts, asked for the same number of tokens, and asked once: what fails, fails.
"""

import hashlib
import http.client
import itertools
import json
import threading
import time
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import cv2
from closed_loop import PATIENCE_S, Ask, Reply
from workloads import Pictures, Workload

from tessera_client import Answer, Client, Retry, Stream

IDLE_S = 2.0
"""A connection that waited longer is opened again: servers close those that wait (uvicorn after 5 s)."""

AskAbout = Callable[[bytes, Workload, str], Reply]
"""(a picture, whose tokens and order are asked for, the prompt) -> the whole answer."""


@dataclass(frozen=True)
class Asker(ABC):
    """Asks the servers at these addresses the requests of a workload."""

    addresses: list[str]
    workload: Workload
    seed: int
    """Of the run; a process's pictures are those of 64 x seed + its number, as the peers' load generator has them."""
    patience_s: float = PATIENCE_S
    """A request that takes longer fails."""

    @abstractmethod
    def connection(self) -> AbstractContextManager[AskAbout]:
        """What asks about a picture, on any thread. It raises what went wrong."""

    @contextmanager
    def prepare(self, number: int, stock: int) -> Iterator[Ask]:
        """For :func:`closed_loop.run`: makes the pictures, and the connection."""
        workload, own = self.workload, threading.local()
        pictures = self.pictures(number, -(-stock // len(workload.prompts)))

        def ask_next(ask: AskAbout) -> Reply:
            # A thread asks all its questions about a picture, one after the other, before it takes another.
            if not getattr(own, "prompts", None):
                own.picture, own.prompts = pictures.deal(), list(workload.prompts)
            return ask(own.picture, workload, own.prompts.pop(0))

        with self.connection() as ask:
            yield partial(ask_next, ask)

    def pictures(self, number: int, stock: int) -> Pictures:
        """The pictures of a process."""
        cv2.setNumThreads(1)
        return Pictures(self.workload, process_seed(self.seed, number), stock)


class TesseraAsker(Asker):
    """Our servers, by gRPC."""

    @contextmanager
    def connection(self) -> Iterator[AskAbout]:
        with Client(self.addresses, timeout=self.patience_s, retry=Retry(attempts=1)) as client:
            yield partial(self._ask, client)

    def _ask(self, client: Client, picture: bytes, workload: Workload, prompt: str) -> Reply:
        ask, sampling = client.stream if workload.streamed else client.ask, workload.sampling
        tokens = workload.tokens if sampling.get("ignore_eos") else None
        return reply_of(ask(picture, workload.question(prompt), **sampling), tokens)


def reply_of(answer: Answer | Stream, tokens: int | None) -> Reply:
    """Of an answer, or of a stream that is yet to come. Raises RuntimeError where it has another number of tokens; None
    is any."""
    first, parts = None, 0
    if not isinstance(answer, Answer):
        with answer as stream:
            for _ in stream:
                first = first or time.perf_counter()
                parts += 1
            answer = stream.answer()
    if answer.usage is None or answer.usage.completion_tokens != (tokens or answer.usage.completion_tokens):
        raise RuntimeError(f"asked for {tokens} tokens, got {answer.usage}")
    assert answer.timings is not None
    return Reply(first, answer.usage.completion_tokens, max(1, parts), astuple(answer.timings))


@dataclass(frozen=True)
class OpenAiAsker(Asker):
    """Servers of OpenAI's API at ``host:port``, by a connection for each thread."""

    model: str | None = None
    """None: the first that the server names."""

    @contextmanager
    def connection(self) -> Iterator[AskAbout]:
        with openai_chat(self.addresses, self.model, self.patience_s) as chat:
            yield lambda picture, workload, prompt: chat(fields(workload, picture, prompt))


@contextmanager
def openai_chat(
    addresses: list[str], model: str | None = None, patience_s: float = PATIENCE_S
) -> Iterator[Callable[[dict[str, Any]], Reply]]:
    """What sends a request, its fields but the model's name, and raises RuntimeError unless it gets as many tokens as
    are asked for. ``model`` and how connections are made: as :class:`OpenAiAsker` has them."""
    model = model or first_model(addresses[0])
    own, next_address = threading.local(), itertools.cycle(addresses)

    def chat(request: dict[str, Any]) -> Reply:
        if not hasattr(own, "connection"):
            own.connection = http.client.HTTPConnection(next(next_address), timeout=patience_s)
        elif time.monotonic() - own.used > IDLE_S:
            own.connection.close()  # it opens again with the next request
        try:
            return _chat(own.connection, {"model": model, **request})
        except BaseException:
            own.connection.close()
            raise
        finally:
            own.used = time.monotonic()

    yield chat


def first_model(address: str) -> str:
    """The name of the first model of a server of OpenAI's API."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    connection.request("GET", "/v1/models")
    return json.load(connection.getresponse())["data"][0]["id"]


def _chat(connection: http.client.HTTPConnection, request: dict[str, Any]) -> Reply:
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(request).encode(), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"the server answers {response.status}: {response.read(500)!r}")
    first, parts = None, 1
    if request.get("stream"):
        first, parts, last = read_events(response)
    else:
        last = json.load(response)
    tokens, usage = request["max_tokens"], last.get("usage") or {}
    if usage.get("completion_tokens") != tokens:
        raise RuntimeError(f"asked for {tokens} tokens, got {last}"[:500])
    timings = last.get("tessera", {}).get("timings", {})  # our gateway's alone
    return Reply(first, tokens, max(1, parts), tuple(timings.values()))


STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def fields(workload: Workload, picture: bytes, prompt: str) -> dict[str, Any]:
    """The request as OpenAI's clients write it, with vLLM's ``ignore_eos``, but for the model's name."""
    content = [picture_part(picture, "jpeg"), {"type": "text", "text": prompt}]
    if workload.text_first:
        content.reverse()
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": content}], **workload.sampling}
    if (most := asked.pop("max_tiles", None)) is not None:
        asked["tessera"] = {"tile_policy": {"max_tiles": most}}
    return asked | (STREAMED if workload.streamed else {})


def picture_part(encoded: bytes, kind: str) -> dict[str, Any]:
    """A picture in a message; ``kind``: jpeg, png, ..."""
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{b64encode(encoded).decode()}"}}


def read_events(response: http.client.HTTPResponse) -> tuple[float | None, int, dict[str, Any]]:
    """When the first token came, how many parts had any, and the last object.

    A part's text may be empty: random weights give tokens that are none of the tokenizer's. What names the role and has
    no text tells only that the answer begins.
    """
    first, parts, last = None, 0, {}
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        last = json.loads(line[6:])
        delta = last["choices"][0]["delta"] if last.get("choices") else {}
        text = delta.get("content")
        if text or (text is not None and not delta.get("role")):
            first = first or time.perf_counter()
            parts += 1
    return first, parts, last


def process_seed(seed: int, number: int) -> int:
    """The seed of a process's pictures."""
    return 64 * seed + number


def first_picture(workload: Workload, seed: int) -> str:
    """Eight hex digits that name the first picture of a run, as the peers' load generator does."""
    jpeg = Pictures(workload, process_seed(seed, 0)).deal()
    return hashlib.md5(b64encode(jpeg)).hexdigest()[:8]
