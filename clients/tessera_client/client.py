"""The client for programs with threads or none: :class:`Client`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from copy import copy
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from tessera_client.messages import (
    Answer,
    Models,
    PicturePlan,
    Request,
    ServedModel,
    ServerStatus,
    chat_request,
    check_job,
    item_request,
    question_request,
)
from tessera_client.pictures import Image
from tessera_client.retry import Retry
from tessera_client.streaming import Stream
from tessera_client.transports import Transport
from tessera_client.transports.pool import PooledTransport, open_transport
from tessera_wire.errors import TesseraClientError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from typing_extensions import Self

    from tessera_client.tracing import Trace

CLIENTS_TIMEOUT: Any = object()  # "the timeout given to the client"
Seconds = float | None
Images = Image | Sequence[Image] | None
Messages = Iterable[Mapping[str, Any]]
AnswerT = TypeVar("AnswerT", covariant=True)
StreamT = TypeVar("StreamT", covariant=True)


class BaseClient(ABC, Generic[AnswerT, StreamT]):
    """What both clients are given, and what they ask: an AnswerT is an answer, or what is awaited for one."""

    _new_stream: Callable[..., StreamT]

    def __init__(
        self,
        url: str | Sequence[str] = "localhost:8001",
        *,
        timeout: float | None = 120.0,
        retry: Retry | None = None,
        models: Models | None = None,
        transport: Transport | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._timeout = timeout
        self._retry = retry or Retry()
        self._models = models or Models()
        to = transport or open_transport(url, self._models)
        self.url = url if isinstance(url, str) else ",".join(url)
        self._transport = to if isinstance(to, PooledTransport) else PooledTransport({self.url: to})
        self._tracer = tracer
        self._name = ""

    def ask(self, image: Images, question: str, *, timeout: Seconds = CLIENTS_TIMEOUT, **sampling: Any) -> AnswerT:
        """The whole answer to a question.

        Args:
            image: one picture, a list of them, or None; for the forms see :data:`~tessera_client.pictures.Image`.
            question: plain text; ``<image>`` in it marks where a picture goes (before the text if there is none).
            timeout: seconds for this request, in place of the client's.
            sampling: vLLM's names: max_tokens (without it as many as fit), min_tokens, temperature, top_p, top_k,
                min_p, seed, stop, stop_token_ids, ignore_eos, logprobs, logit_bias (a dict of token ids and
                numbers from -100 to 100), presence_penalty, frequency_penalty, repetition_penalty,
                no_repeat_ngram_size, priority (lower runs earlier). And ``max_tiles``, ``min_tiles``,
                ``thumbnail`` or a whole ``tile_policy``, or of models of native resolution ``min_pixels`` and
                ``max_pixels``: how finely pictures are cut.
                ``choices=["yes", "no"]``: the answer is the likeliest of these labels, see :attr:`Answer.choices`.
                ``regex="..."``, ``json_schema={...}`` or ``json_object=True``: what the answer must match.
                ``draft="..."``: text that the answer is likely to have, which then comes sooner and is the same.
                ``exclude_input_in_output=False`` repeats the question before the answer.
        """
        return self._answer(partial(question_request, image, question, **sampling), timeout)

    def stream(self, image: Images, question: str, *, timeout: Seconds = CLIENTS_TIMEOUT, **sampling: Any) -> StreamT:
        """The answer as it is written, for a ``with`` block; leaving it early cancels. Arguments as for :meth:`ask`."""
        return self._stream(replace(question_request(image, question, **sampling), stream=True), timeout)

    def chat(
        self, messages: Messages, images: Images = None, *, timeout: Seconds = CLIENTS_TIMEOUT, **sampling: Any
    ) -> AnswerT:
        """The answer to a conversation of OpenAI-style messages.

        ``content`` is a string or a list of parts: ``{"type": "text", "text": ...}``, ``{"type": "image_url",
        "image_url": {"url": "data:..."}}``, ``{"type": "image"}`` for the next of ``images``, or
        ``{"type": "image", "image": "room.jpg"}``. The other arguments are those of :meth:`ask`.
        """
        return self._answer(partial(chat_request, messages, images, **sampling), timeout)

    def chat_stream(
        self, messages: Messages, images: Images = None, *, timeout: Seconds = CLIENTS_TIMEOUT, **sampling: Any
    ) -> StreamT:
        """:meth:`chat`, streamed as :meth:`stream` does."""
        return self._stream(replace(chat_request(messages, images, **sampling), stream=True), timeout)

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses of the servers."""
        return self._transport.addresses

    def only(self, server: str) -> Self:
        """A client of one of the servers, on this one's connections."""
        return self._but(_transport=self._transport.only(server))

    def together(self) -> Self:
        """A client on this one's connections whose requests go to one server while it takes them.

        For those that share pictures, which are then encoded once.
        """
        return self._but(_transport=self._transport.together())

    def named(self, name: str) -> Self:
        """A client on this one's connections whose request ids have ``name`` in them, which the server's log and the
        spans then name: up to 128 printable characters of ASCII without spaces and brackets."""
        return self._but(_name=name)

    def untraced(self) -> Self:
        """This client on the same connections, for probes, which are no user's questions and have no spans."""
        return self._but(_tracer=None)

    def _but(self, **changed: Any) -> Self:
        one = copy(self)
        vars(one).update(changed)
        return one

    def _plan_request(self, image: Images, tiles: Mapping[str, Any]) -> Request:
        # One token: how a picture is cut must not depend on the room that an answer would take.
        return question_request(image, "?", max_tokens=1, **tiles)

    @abstractmethod
    def _answer(self, request: Callable[[], Request], timeout: Seconds, retry: Retry | None = None) -> AnswerT:
        """The answer to the request that is made when its turn comes."""

    def _stream(self, request: Request, timeout: Seconds, retry: Retry | None = None) -> StreamT:
        return self._new_stream(
            self._transport, request, self._seconds(timeout), retry or self._retry, self._begin_trace, self._name
        )

    def _begin_trace(self, request: Request) -> Trace | None:
        if self._tracer is None:
            return None
        from tessera_client.tracing import Trace

        return Trace(self._tracer, self._models.vlm, request)

    def _seconds(self, timeout: Seconds) -> Seconds:
        return self._timeout if timeout is CLIENTS_TIMEOUT else timeout

    def _is_ready(self, status: ServerStatus) -> bool:
        return status.ready and any(m.name == self._models.vlm and m.state == "READY" for m in status.models)


class Client(BaseClient[Answer, Stream]):
    """Asks a Tessera server questions about pictures.

    ::

        with Client("localhost:8001") as client:
            answer = client.ask("room.jpg", "Is there an exposed wire?", max_tokens=5)
            print(answer.text, answer.timings.vision)

    One client serves any number of threads; it keeps one connection to a server (gRPC) or a few (HTTP).

    Args:
        url: ``host:port`` or ``grpc://host:port`` for gRPC (port 8001 if left out; ``grpcs://`` for TLS),
            ``http://host:port`` for HTTP (8000; or ``https://``).
            Several servers as a list or with commas between: each request goes to the one with the fewest of this
            client's requests under way, and its retries pass over a server that cannot be reached.
        timeout: seconds a request may take in all, retries included; None for ever. Each call may give its own.
        retry: what to do about UNAVAILABLE; ``Retry(attempts=1)`` turns retries off.
        models: the names under which the server's repository has the models.
        transport: used in place of one opened for ``url``; for tests.
        tracer: of OpenTelemetry, ``trace.get_tracer("my program")``; each question is then a span of its own under the
            current one, with a span for each of the server's stages (:mod:`tessera_client.tracing`).

    Every method raises errors of :mod:`tessera_wire.errors` only.
    """

    _new_stream = Stream

    def ask_many(
        self,
        items: Iterable[tuple[Images, str]],
        *,
        concurrency: int = 16,
        progress: Callable[[int], None] | None = None,
        errors: Literal["raise", "return"] = "raise",
        retry: Retry | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """Answers to many (image, question) pairs, in their order, ``concurrency`` at a time.

        ``items`` may be endless: it is read only a little ahead of the answers given out, and picture files only
        when their turn comes. Unavailability is waited out for about two minutes (:meth:`Retry.patient`) as far as
        each request's timeout allows, so that a job survives restarts of the server.

        Args:
            progress: called with the number of requests that have ended, after each (one thread at a time).
            errors: ``"raise"`` ends the job with the first error met; ``"return"`` puts the error in its place.
            options: as for :meth:`ask`.
        """
        check_job(items, concurrency, errors)
        retry = retry or Retry.patient()
        timeout = options.pop("timeout", CLIENTS_TIMEOUT)
        ended, lock = 0, Lock()

        def work(item: Any) -> Answer | TesseraClientError:
            nonlocal ended
            try:
                return self._answer(partial(item_request, item, options), timeout, retry)
            except TesseraClientError as error:
                return error
            finally:
                with lock:
                    ended += 1
                    if progress is not None:
                        progress(ended)

        return _in_order(work, items, concurrency, errors)

    def plan(self, image: Images, *, timeout: Seconds = CLIENTS_TIMEOUT, **tiles: Any) -> tuple[PicturePlan, ...]:
        """How the server would cut these pictures, without an answer: one plan a picture, in their order.

        ``tiles``: what says how finely they are cut, as for :meth:`ask`. Not retried.
        """
        return self._transport.plan(self._plan_request(image, tiles), self._seconds(timeout))

    def ready(self) -> bool:
        """Whether the server answers and the model is ready. Never raises for a server that is not there."""
        try:
            return self._is_ready(self._transport.status())
        except TesseraClientError:
            return False

    def status(self) -> ServerStatus:
        """The server's version and models. Note that tritonserver calls a model ready even when its process died."""
        return self._transport.status()

    def served(self) -> ServedModel:
        """Which model answers; raises InvalidRequest where several servers have different ones. Not retried."""
        return self._transport.served()

    def close(self) -> None:
        """Closes the connection. Streams still open break."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _answer(self, request: Callable[[], Request], timeout: Seconds, retry: Retry | None = None) -> Answer:
        with self._stream(request(), timeout, retry) as stream:
            return stream.answer()


def _in_order(
    work: Callable[[Any], Answer | TesseraClientError], items: Iterable[Any], concurrency: int, errors: str
) -> Iterator[Any]:
    """Results in the items' order, computed by ``concurrency`` threads at most four times that many ahead."""
    waiting: deque[Future[Answer | TesseraClientError]] = deque()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="tessera-ask") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(copy_context().run, work, item))  # the caller's current span
                while len(waiting) >= 4 * concurrency or (waiting and waiting[0].done()):
                    yield given_out(waiting.popleft().result(), errors)
            while waiting:
                yield given_out(waiting.popleft().result(), errors)
        finally:  # left early: what has not begun never will
            for future in waiting:
                future.cancel()


def given_out(result: Answer | TesseraClientError, errors: str) -> Answer | TesseraClientError:
    """A result in its place; raises an error where ``errors`` is ``"raise"``."""
    if errors == "raise" and isinstance(result, TesseraClientError):
        raise result
    return result
