"""The engine's counters on the server's metrics page, renewed four times a second."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from tessera.engine.process.messages import ENDED
from tessera.engine.sequence import TokenEvent
from tessera.settings.gpu import GpuMeter
from tessera.tritonserver import engine_busy
from tessera.tritonserver.metrics import Counter, Gauge, Histogram, Renewed

SECONDS_BUCKETS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]
TOKEN_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0]

# What follows "tessera_" in a metric's name -> what it means.
_GAUGES = {
    "requests_running": "Requests in the running batch",
    "requests_waiting": "Requests that wait for room in the batch",
    "requests_in_flight": "Requests accepted and not yet ended",
    "kv_blocks_used": "Blocks of the key/value cache in use",
    "kv_blocks_total": "Blocks of the key/value cache",
    "max_model_len": "Tokens that prompt and answer may have together",
    "device_busy_fraction": "Share of the time in which a step ran",
    "embedding_bytes": "Rows of pictures held on the device",
    "embedding_bytes_peak": "The most of them so far",
    "embedding_bytes_spilled": "Rows held in pinned memory",
    "cascade_alarm": "Whether the cascade's plan does not hold any more",
}
# The same, and "_total" behind it.
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts, image rows included",
    "cached_tokens": "Prompt tokens taken from the prefix cache",
    "generated_tokens": "Tokens generated",
    "drafted_steps": "Steps that verified drafted tokens",
    "drafted_tokens": "Drafted tokens that were verified",
    "accepted_tokens": "Drafted tokens that were right",
    "preemptions": "Sequences put back for lack of cache blocks",
    "not_finite_logits": "Requests ended by logits that were NaN or infinite",
    "steps": "Steps of the engine",
    "graph_steps": "Steps that ran as a CUDA graph",
    "prompts": "Prompts begun",
    "prefill_steps": "Steps in which a prompt began",
    "engine_held_up_seconds": "Time the engine's thread waited while it planned and launched steps",
    "cascades": "Requests of a cascade whose first cut has an answer",
    "escalations": "Those of them that went on with the full cut",
    "cascade_audits": "Answers to first cuts for which the full cut was asked as well",
    "cascade_disagreements": "Those of them that the full cut answered otherwise",
    "embeddings_on_cpu": "Requests whose rows came over the CPU to an engine on a GPU",
}


class MetricsPage:
    """Publishes what ``counts`` returns, an EngineProcess's and a FullCuts's, and what its GPU draws, by ``meter``; one
    thread of its own, ended by close()."""

    def __init__(self, counts: Callable[[], dict[str, int]], meter: GpuMeter | None = None) -> None:
        self._counts = counts
        self._meter, self._joules = meter, Counter("tessera_gpu_joules_total", "Energy that the engine's GPU has drawn")
        self._joules_before = meter.joules() if meter else 0.0
        self._seen_busy = (0, time.monotonic_ns())
        self._gauges = {name: Gauge(f"tessera_{name}", words) for name, words in _GAUGES.items()}
        self._counters = {name: Counter(f"tessera_{name}_total", words) for name, words in _COUNTERS.items()}
        self._ended = Counter("tessera_requests_total", "Requests ended, by reason")
        self._first_token = Histogram(
            "tessera_time_to_first_token_seconds",
            "From arrival at the language model to the first token",
            buckets=SECONDS_BUCKETS,
        )
        self._per_token = Histogram(
            "tessera_time_per_output_token_seconds", "Mean time between the tokens of one answer", buckets=TOKEN_BUCKETS
        )
        self._observed: deque[tuple[Histogram, float]] = deque()
        self._renewed = Renewed(self._renew)

    def observe(self, event: TokenEvent) -> None:
        """Takes the times of a request from its last event. They are told later: each asks the server, and the answer
        waits to be sent."""
        if not event.first_token_ns:
            return
        self._observed.append((self._first_token, (event.first_token_ns - event.request.arrival_ns) / 1e9))
        if event.usage.completion_tokens > 1:
            spent = (event.emitted_ns - event.first_token_ns) / 1e9
            self._observed.append((self._per_token, spent / (event.usage.completion_tokens - 1)))

    def close(self) -> None:
        self._renewed.close()

    def _renew(self) -> None:
        while self._observed:
            histogram, value = self._observed.popleft()
            histogram.observe(value)
        now = self._counts()
        ended = {name.removeprefix(ENDED): count for name, count in now.items() if name.startswith(ENDED)}
        values = now | {
            "requests_in_flight": now["requests"] - sum(ended.values()),
            "device_busy_fraction": self._busy_since_last(now["busy_ns"]),
            "engine_held_up_seconds": now["host_wait_ns"] / 1e9,
        }
        engine_busy.tell(values["device_busy_fraction"] > engine_busy.MOST)
        for name, gauge in self._gauges.items():
            gauge.set(values[name])
        for name, counter in self._counters.items():
            counter.raise_to(values[name])
        for reason, count in ended.items():
            self._ended.raise_to(count, reason=reason)
        if self._meter:
            with suppress(OSError):  # this time it did not tell
                self._joules.raise_to(self._meter.joules() - self._joules_before)

    def _busy_since_last(self, busy: int) -> float:
        """Share of the time since the last call; a step counts when it ends, so a long one is capped."""
        before, then = self._seen_busy
        now = time.monotonic_ns()
        self._seen_busy = (busy, now)
        return min(1.0, (busy - before) / max(1, now - then))
