"""The second half of a cascade, at the language model: where the first cut's answer has too small a margin, the full
cut's is sent in its place.

This server's own ensemble is asked for it, as the fronts ask, so that the full cut's way and its answer are those of
any request. It keeps the first cut's deadline, its leases and, as its rank, its age.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from tessera.tritonserver import ensemble, tensors
from tessera.tritonserver.failures import KEY as TIMEOUT_KEY
from tessera.tritonserver.responder import Channel, Outbox
from tessera.tritonserver.tensors import RequestTimestamps
from tessera_wire.errors import TesseraClientError
from tessera_wire.line import Line
from tessera_wire.tensors import Tensor


class FullCut:
    """What a request of a cascade asks for if its first cut's answer has less than ``margin`` nats.

    Args:
        request: tritonserver's, of the first cut.
        parts: its input CASCADE, which preprocess has made.
        stamps: its times.
        stream: whether its answer is to come in parts.
    """

    def __init__(self, request: Any, parts: list[bytes], stamps: RequestTimestamps, stream: bool) -> None:
        about = json.loads(parts[0])
        self.margin: float = about["margin"]
        self.request_id, self.lease = request.request_id(), tensors.lease(request)
        self.priority, self.since = stamps.priority, stamps.received
        self._sampling = tensors.sampling(request, "sampling_parameters") | {"tile_policy": about["tile_policy"]}
        self._sampling.pop(TIMEOUT_KEY, None)
        if stamps.deadline:
            self._sampling[TIMEOUT_KEY] = (stamps.deadline - stamps.received) // 1000
        texts = {"text_input": tensors.byte_strings(request, "text_input"), "messages": parts[1:2], "image": parts[2:]}
        self._texts = {name: values for name, values in texts.items() if any(values)}
        exclude = tensors.flag(request, "exclude_input_in_output", False)
        self._flags = {"stream": stream, "exclude_input_in_output": exclude}

    @property
    def inputs(self) -> list[Tensor]:
        return ensemble.inputs(self._texts.items(), self._sampling, self._flags)


class FullCuts:
    """Decides on first cuts, and asks for the full ones."""

    def __init__(self, line: Line, outbox: Outbox) -> None:
        self._line, self._outbox = line, outbox
        self._lock = threading.Lock()
        self._counts = {"cascades": 0, "escalations": 0}
        self._request_ids: dict[str, str] = {}  # each one's lease -> the id that its client gave

    def decide(self, cut: FullCut, margin: float) -> bool:
        """Whether the full cut is to be asked, for a first cut's answer of this margin."""
        escalated = margin < cut.margin
        with self._lock:
            self._counts["cascades"] += 1
            self._counts["escalations"] += escalated
        return escalated

    def counts(self) -> dict[str, int]:
        """For the metrics."""
        return dict(self._counts)

    def ask(self, asked: FullCut, deliver: Callable[[Any], None], fail: Callable[[Exception], Any]) -> None:
        """``deliver`` gets each response (a ModelInferResponse), then None or an error, on the outbox's threads;
        ``fail`` what it raises."""
        lease = uuid.uuid4().hex
        self._request_ids[lease] = asked.request_id

        def hand_on(items: list[Any]) -> None:
            for item in items:
                if item is None or isinstance(item, TesseraClientError):
                    self._request_ids.pop(lease, None)
                try:
                    deliver(item)
                except Exception as error:
                    fail(error)

        try:
            self._line.send(
                *(ensemble.ENSEMBLE, lease, asked.inputs, partial(self._outbox.post, Channel(hand_on))),
                priority=asked.priority - 1,  # in the queue before preprocess, which knows of no age
                lease=f"{asked.lease} {lease}",
                since=asked.since,
            )
        except TesseraClientError as error:  # this stage ends
            hand_on([error])

    def leases_of(self, request_id: str) -> list[str]:
        """Of those under way whose clients gave this id."""
        return [lease for lease, each in list(self._request_ids.items()) if each == request_id]

    def close(self) -> None:
        self._line.close(ensemble.CLOSE_SECONDS)
