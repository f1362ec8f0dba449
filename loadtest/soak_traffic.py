"""What the soak asks: requests of every kind, and how each of them must end."""

import base64
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import openai
from workloads import picture

from tessera.launcher.process import Server
from tessera_client import Client, InvalidRequest, Models, Retry

TIMEOUT_S = 120.0
QUESTION = "Is there an exposed wire?"
TASK = "Describe the room."

# How often each kind of request comes, out of 100.
MIX = {
    "short": 28,
    "long": 8,
    "text": 8,
    "two pictures": 5,
    "cancelled": 8,
    "vanished": 3,
    "malformed": 11,
    "gateway": 14,
    "gateway stream": 6,
    "gateway left": 4,
    "gateway refused": 5,
}
LEFT, REFUSED = ("cancelled", "vanished", "gateway left"), ("malformed", "gateway refused")
ENDS = dict.fromkeys(MIX, "answered") | dict.fromkeys(LEFT, "left") | dict.fromkeys(REFUSED, "refused")
"""How each kind of request must end."""


class Traffic:
    """The mixed load: some threads, each with one request under way; counts how every one of them ended."""

    def __init__(self, server: Server, gateway: str, seed: int) -> None:
        base = f"http://{gateway}/v1"
        self._openai = openai.OpenAI(base_url=base, api_key="none", timeout=TIMEOUT_S, max_retries=0)
        patience = {"timeout": TIMEOUT_S, "retry": Retry(attempts=1)}
        self._clients = [
            Client(server.grpc_url, **patience),
            Client(server.grpc_url, models=Models(vlm="vlm_stream"), **patience),
            Client(server.http_url, **patience),
        ]
        self._http_url, self._seed = server.http_url, seed
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.sent: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        """Ways in which requests ended: answered, left, refused, and failed, which should not have happened."""
        self.faults: Counter[str] = Counter()

    @property
    def accepted(self) -> int:
        """Requests of which the language model gave at least one token."""
        return self.ended["answered"] + self.ended["left"]

    @property
    def requests(self) -> int:
        return self.sent.total()

    @property
    def unanswered(self) -> int:
        """Requests that had no end, or not the one they should have had."""
        with self._lock:
            return self.requests - self.accepted - self.ended["refused"]

    def start(self, threads: int) -> None:
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"soak-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Lets the requests under way end; one that does not within its time stays unanswered."""
        self._stop.set()
        deadline = time.monotonic() + TIMEOUT_S + 10
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for client in self._clients:
            client.close()

    def _run(self, number: int) -> None:
        dice = random.Random(f"{self._seed} {number}")
        while not self._stop.is_set():
            (kind,) = dice.choices(list(MIX), weights=list(MIX.values()))
            with self._lock:
                self.sent[kind] += 1
            try:
                reason = getattr(self, f"_{kind.replace(' ', '_')}")(dice, dice.choice(self._clients))
                if ENDS[kind] == "answered" and reason not in ("stop", "length"):
                    raise AssertionError(f"ended with finish_reason {reason!r}")
                end, fault = ENDS[kind], None
            except Exception as error:
                end, fault = "failed", f"{kind}: {type(error).__name__}: {error}"
            with self._lock:
                self.ended[end] += 1
                if fault:
                    self.faults[fault] += 1
            if fault:  # a server that is gone must not be asked a million times
                time.sleep(0.2)

    # Each kind asks once: what is to be answered gives its finish reason, and what must end otherwise raises unless it
    # did.

    def _picture(self, dice: random.Random) -> bytes:
        return picture(dice.randrange(64, 640), dice.randrange(64, 640), (self._seed, dice.getrandbits(63)))

    def _short(self, dice: random.Random, client: Client) -> str:
        return client.ask(self._picture(dice), QUESTION, max_tokens=4, max_tiles=dice.randint(1, 4)).finish_reason

    def _long(self, dice: random.Random, client: Client) -> str:
        length = dice.randrange(80, 200)
        with client.stream(self._picture(dice), TASK, max_tokens=length, ignore_eos=True, max_tiles=1) as stream:
            answer = stream.answer()
        if answer.usage is None or answer.usage.completion_tokens != length:
            raise AssertionError(f"asked for {length} tokens, got {answer.usage}")
        return answer.finish_reason

    def _text(self, dice: random.Random, client: Client) -> str:
        return client.ask(None, f"{TASK} {dice.random()}", max_tokens=16, temperature=1.0).finish_reason

    def _two_pictures(self, dice: random.Random, client: Client) -> str:
        pictures = [self._picture(dice), self._picture(dice)]
        return client.ask(pictures, QUESTION, max_tokens=4, max_tiles=2).finish_reason

    def _cancelled(self, dice: random.Random, client: Client) -> None:
        """Leaves after some tokens; the client tells the server."""
        with client.stream(self._picture(dice), TASK, max_tokens=2000, ignore_eos=True, max_tiles=1) as stream:
            for _ in range(dice.randrange(1, 6)):
                next(stream)

    def _vanished(self, dice: random.Random, client: Client) -> None:
        """Breaks the connection off after the first token; the front has to notice by itself."""
        sampling = json.dumps({"max_tokens": 2000, "ignore_eos": True})
        body = {"text_input": f"{TASK} {dice.random()}", "sampling_parameters": sampling}
        url = f"{self._http_url}/v2/models/vlm_stream/generate_stream"
        with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as response:
            line = next(response.iter_lines(), "")
            if response.status_code != 200 or '"error"' in line:
                raise AssertionError(f"HTTP {response.status_code}: {line[:200]!r}")

    def _create(self, image: bytes, text: str, **options: Any) -> Any:
        """What OpenAI's client gets of the gateway: the answer, or the stream of its parts."""
        url = {"url": f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"}
        content: Any = [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]
        asked: dict[str, Any] = {"model": "vlm", "messages": [{"role": "user", "content": content}], **options}
        return self._openai.chat.completions.create(**asked)

    def _long_from_gateway(self, dice: random.Random, length: int) -> Any:
        forced = {"max_tokens": length, "extra_body": {"ignore_eos": True}}
        return self._create(self._picture(dice), TASK, **forced, stream=True)

    def _gateway(self, dice: random.Random, _: Client) -> str:
        return str(self._create(self._picture(dice), QUESTION, max_tokens=4).choices[0].finish_reason)

    def _gateway_stream(self, dice: random.Random, _: Client) -> str:
        parts = self._long_from_gateway(dice, dice.randrange(80, 200))
        *_, reason = (choice.finish_reason for part in parts for choice in part.choices)
        return str(reason)

    def _gateway_left(self, dice: random.Random, _: Client) -> None:
        """Goes away after the first words of a long answer."""
        with self._long_from_gateway(dice, 2000) as parts:
            if not any(choice.delta.content for part in parts for choice in part.choices):
                raise AssertionError("the stream had no words")

    def _gateway_refused(self, dice: random.Random, _: Client) -> None:
        """Sends what must be refused, and by which status."""
        image = self._picture(dice)
        attempts: list[tuple[int, bytes, dict[str, Any]]] = [
            (400, image[: len(image) // 2], {}),
            (400, image, {"extra_body": {"beams": 4}}),
            (404, image, {"model": "another"}),
            (431, image, {"extra_headers": {"X-Long": "x" * 20_000}}),
            (413, b"", {"extra_body": {"messages": [0] * 200_000}}),
        ]
        status, sent, options = dice.choice(attempts)
        try:
            self._create(sent, QUESTION, **options)
        except openai.APIStatusError as refusal:
            if refusal.status_code == status:
                return
            raise
        raise AssertionError(f"what should be refused by {status} was answered")

    def _malformed(self, dice: random.Random, client: Client) -> None:
        image = self._picture(dice)
        url = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.jpg"}}
        attempts: list[Callable[[], object]] = [
            lambda: client.ask(image[: len(image) // 2], QUESTION),
            lambda: client.ask(dice.randbytes(500), QUESTION),
            lambda: client.ask(image, "<image> or <image>?"),
            lambda: client.ask(image, QUESTION, temperature=-1),
            lambda: client.ask(image, QUESTION, beams=4),
            lambda: client.ask(None, "word " * 20_000),
            lambda: client.ask([image] * 9, QUESTION),
            lambda: client.chat([{"role": "user", "content": [url, {"type": "text", "text": QUESTION}]}]),
        ]
        number = dice.randrange(len(attempts))
        try:
            attempts[number]()
        except InvalidRequest:
            return
        raise AssertionError(f"malformed request {number} was answered")
