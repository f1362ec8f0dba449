"""The second half of a cascade, at the language model: where the first cut's answer has too small a margin, the full
cut's is sent in its place.

This server's own ensemble is asked for it, as the fronts ask, so that the full cut's way and its answer are those of
any request. It keeps the first cut's deadline, its leases and, as its rank, its age.

Where the server follows a policy file, what it decides is watched (tessera/cascade.py), and a share of the
answers to first cuts is audited: the full cut is asked as well, for nobody, at the worst priority and when nothing
waits.
"""

import json
import logging
import random
import threading
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from tessera.cascade import Watch
from tessera.prompt.sampling import LARGEST
from tessera.tritonserver import ensemble, tensors
from tessera.tritonserver.failures import KEY as TIMEOUT_KEY
from tessera.tritonserver.failures import log_exception
from tessera.tritonserver.metrics import Renewed
from tessera.tritonserver.responder import Channel, Outbox
from tessera.tritonserver.tensors import RequestTimestamps
from tessera_wire.errors import TesseraClientError
from tessera_wire.line import Line

MOST_AUDITS = 16  # that wait, with their pictures; of more the oldest goes unaudited
AUDIT_US = 60_000_000
_LOG = logging.getLogger(__name__)


class FullCut:
    """What a request of a cascade asks for if its first cut's answer has less than ``margin`` nats.

    ``alike``: there is nothing finer to ask for. ``planned``: the deployment says the margin.

    Args:
        request: tritonserver's, of the first cut.
        parts: its input CASCADE, which preprocess has made.
        stamps: its times.
        stream: whether its answer is to come in parts.
    """

    def __init__(self, request: Any, parts: list[bytes], stamps: RequestTimestamps, stream: bool) -> None:
        about = json.loads(parts[0])
        self.margin: float = about["margin"]
        self.planned: bool = about["planned"]
        self.alike = len(parts) == 1
        self.request_id, self.lease = request.request_id(), tensors.lease(request)
        self.priority, self.since = stamps.priority, stamps.received
        self.sampling = tensors.sampling(request, "sampling_parameters") | {"tile_policy": about["tile_policy"]}
        self.sampling.pop(TIMEOUT_KEY, None)
        if stamps.deadline:
            self.sampling[TIMEOUT_KEY] = (stamps.deadline - stamps.received) // 1000
        texts = {"text_input": tensors.byte_strings(request, "text_input"), "messages": parts[1:2], "image": parts[2:]}
        self.texts = [(name, values) for name, values in texts.items() if any(values)]
        exclude = tensors.flag(request, "exclude_input_in_output", False)
        self.flags = {"stream": stream, "exclude_input_in_output": exclude}


class Watching(NamedTuple):
    """How a server follows its policy file: the ``share`` of what was not escalated that is audited while ``idle`` says
    that nothing waits, and whether all is escalated once there is an alarm."""

    watch: Watch
    share: float
    escalates: bool
    idle: Callable[[], bool]


class FullCuts:
    """Decides on first cuts, and asks for the full ones."""

    def __init__(self, line: Line, outbox: Outbox, watching: Watching | None = None) -> None:
        self._line, self._outbox, self._watching = line, outbox, watching
        self._lock = threading.Lock()
        self._counts = {"cascades": 0, "escalations": 0}
        self._request_ids: dict[str, str] = {}  # each one's lease -> the id that its client gave
        self._unaudited: deque[tuple[FullCut, str]] = deque(maxlen=MOST_AUDITS)  # and the first cut's answers
        self._auditing = Renewed(self._audit) if watching else None

    @property
    def alarm(self) -> str:
        """Why the policy file's plan does not hold any more, in words; empty while it does."""
        return self._watching.watch.alarm if self._watching else ""

    def decide(self, cut: FullCut, margin: float, text: str) -> bool:
        """Whether the full cut is to be asked, for a first cut's answer of this margin and text."""
        small = margin < cut.margin
        with self._lock:
            escalated = small
            if self._watching and cut.planned:
                escalated |= bool(self._watching.escalates and self.alarm)
                self._tell(self._watching.watch.request(margin, small))
                if not (small or escalated) and random.random() < self._watching.share:
                    if cut.alike:
                        self._tell(self._watching.watch.audited(False))
                    else:
                        self._unaudited.append((cut, text))
            escalated &= not cut.alike
            self._counts["cascades"] += 1
            self._counts["escalations"] += escalated
        return escalated

    def counts(self) -> dict[str, int]:
        """For the metrics."""
        return self._counts | self._audits() | {"cascade_alarm": bool(self.alarm)}

    def watched(self) -> str:
        """What is told in answer to a ping: JSON of the alarm and the audits; empty where nothing is watched."""
        return json.dumps({"alarm": self.alarm} | self._audits()) if self._watching else ""

    def _audits(self) -> dict[str, int]:
        watch = self._watching.watch if self._watching else None
        audits, disagreements = (watch.audits, watch.disagreements) if watch else (0, 0)
        return {"cascade_audits": audits, "cascade_disagreements": disagreements}

    def ask(self, cut: FullCut, deliver: Callable[[Any], None], fail: Callable[[Exception], Any]) -> None:
        """``deliver`` gets each response (a ModelInferResponse), then None or an error, on the outbox's threads;
        ``fail`` what it raises."""
        inputs = ensemble.inputs(cut.texts, cut.sampling, cut.flags)
        # In the queue before preprocess, which knows of no age, it goes before others of its priority.
        about = {"priority": cut.priority - 1, "since": cut.since}
        self._send(inputs, deliver, fail, cut.request_id, cut.lease, **about)

    def leases_of(self, request_id: str) -> list[str]:
        """Of those under way whose clients gave this id."""
        return [lease for lease, each in list(self._request_ids.items()) if each == request_id]

    def close(self) -> None:
        if self._auditing:
            self._auditing.close()
        self._line.close(ensemble.CLOSE_SECONDS)

    def _send(
        self,
        inputs: Any,
        deliver: Callable[[Any], None],
        fail: Callable[[Exception], Any],
        request_id: str = "",
        leases: str = "",
        **about: int,
    ) -> None:
        lease = uuid.uuid4().hex
        if request_id:
            self._request_ids[lease] = request_id

        def hand_on(items: list[Any]) -> None:
            for item in items:
                if item is None or isinstance(item, TesseraClientError):
                    self._request_ids.pop(lease, None)
                try:
                    deliver(item)
                except Exception as error:
                    fail(error)

        post = partial(self._outbox.post, Channel(hand_on))
        try:
            self._line.send(ensemble.ENSEMBLE, lease, inputs, post, lease=f"{leases} {lease}", **about)
        except TesseraClientError as error:  # this stage ends
            hand_on([error])

    def _audit(self) -> None:
        """Asks for what waits to be audited, four times a second, if nothing else waits."""
        while self._unaudited and self._watching and self._watching.idle():
            cut, text = self._unaudited.popleft()
            sampling = cut.sampling | {"priority": LARGEST, TIMEOUT_KEY: AUDIT_US}
            flags = {"stream": False, "exclude_input_in_output": True}
            fail = partial(log_exception, "language_model")
            self._send(
                ensemble.inputs(cut.texts, sampling, flags), partial(self._audited, text), fail, priority=LARGEST
            )

    def _audited(self, text: str, item: Any) -> None:
        if item is None or isinstance(item, TesseraClientError) or self._watching is None:
            return
        outputs = ensemble.outputs(item)
        if outputs["finish_reason"][0] in (b"stop", b"length"):
            with self._lock:
                self._tell(self._watching.watch.audited(outputs["text_output"][0] != text.encode()))

    def _tell(self, alarm: str | None) -> None:
        if alarm:
            _LOG.warning("the cascade's plan does not hold any more: %s", alarm)
