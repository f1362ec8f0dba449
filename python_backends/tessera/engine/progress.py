"""What a step did to requests, as the engine tells it: plain data, cheap to send to another process.

What the engine counts. Plain numbers; whoever exports them reads a snapshot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tessera.engine.sequence import Report
from tessera.engine.structured_output.labels import LabelAnswer


@dataclass(frozen=True, slots=True)
class End:
    """A request's last news. ``reason``: see TokenEvent's ``finish_reason``; ``error``: words for the client.

    Times are on time.monotonic_ns's clock, 0 where it did not happen.
    """

    number: int
    reason: str
    error: str | None = None
    cached_tokens: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    labels: LabelAnswer | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did: a token each for some requests, by number and with its report, then the requests that ended.

    Exactly one End of a request is ever told, and nothing of it afterwards.
    """

    tokens: list[tuple[int, int, Report | None]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.ends)


ENDED = "finished_"  # before a reason in a snapshot


@dataclass
class EngineMetrics:
    """Counters since the start; gauges describe the moment after the last step.

    ``prompts`` began in ``prefill_steps`` of the ``steps``. ``graph_steps``: steps that ran as a CUDA graph;
    ``busy_ns``: time in which a step ran. ``held_up_ns``: time that planning and launching took beyond what they
    computed, which on a GPU is waiting for the interpreter's lock, or for room in the GPU's queue.
    ``not_finite_logits``: requests that ended because their logits were NaN or infinite.
    """

    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    graph_steps: int = 0
    prompts: int = 0
    prefill_steps: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    not_finite_logits: int = 0
    requests_waiting: int = 0
    requests_running: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    max_model_len: int = 0
    busy_ns: int = 0
    held_up_ns: int = 0

    def snapshot(self) -> dict[str, int]:
        """All numbers under flat names; ends of requests as finished_<reason>."""
        values = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return values | {f"{ENDED}{reason}": count for reason, count in dict(self.finished).items()}
