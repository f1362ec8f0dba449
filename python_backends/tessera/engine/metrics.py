"""What the engine counts. Plain numbers; whoever exports them reads a snapshot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

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
