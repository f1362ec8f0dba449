"""The language model as one object: submit requests, step, take events."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceType
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tessera.engine.cache.block_manager import BlockManager
from tessera.engine.cache.prefix_index import PrefixIndex, image_cache_ids
from tessera.engine.config import EngineConfig
from tessera.engine.detokenizer import Decoder, Detokenizer
from tessera.engine.metrics import EngineMetrics
from tessera.engine.request import Request, TokenEvent
from tessera.engine.scheduling.batch import SampledToken, ScheduledBatch
from tessera.engine.scheduling.scheduler import Scheduler
from tessera.engine.sequence import Sequence
from tessera.errors import ConfigError, InvalidRequest, Unavailable


class Runner(Protocol):
    """What runs the batches; ModelRunner outside of tests."""

    num_blocks: int
    vocab_size: int
    hidden_size: int

    def cache_salt(self, prompt_length: int) -> int: ...

    def run(self, batch: ScheduledBatch) -> SequenceType[SampledToken]: ...


class Engine:
    """Continuous batching over one model.

    :meth:`submit` and :meth:`abort` may be called from any thread, :meth:`step` and :meth:`fail_all` from one.
    Every request that was submitted ends in exactly one event with a finish_reason.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Decoder,
        config: EngineConfig,
        max_model_len: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        index = None if config.prefix_cache == "off" else PrefixIndex()
        self.scheduler = Scheduler(
            BlockManager(runner.num_blocks, config.block_size, index),
            config.max_batched_tokens,
            config.max_sequences,
        )
        self.metrics = EngineMetrics(blocks_total=runner.num_blocks)
        self.max_model_len = max_model_len
        self._runner = runner
        self._tokenizer = tokenizer
        self._config = config
        self._eos_token_ids = frozenset(token for token in eos_token_ids if token < runner.vocab_size)
        self._cache_secret = secrets.token_bytes(16)
        self._events: list[TokenEvent] = []  # of the step under way; only the stepping thread's
        self._lock = threading.Lock()  # guards what follows
        self._live: dict[Sequence, Detokenizer] = {}  # until the final event exists
        self._arrived: list[Sequence] = []
        self._aborted: list[Sequence] = []
        self._closed = ""

    @classmethod
    def from_checkpoint(cls, folder: Path | str, config: EngineConfig, tokenizer: Decoder | None = None) -> Engine:
        """The text model of a checkpoint folder, ready to step.

        Raises CheckpointError for a folder that does not hold what it should, ConfigError for settings that
        contradict each other or the checkpoint.
        """
        from tessera.checkpoint.config import read_config
        from tessera.engine.execution.model_runner import ModelRunner

        checkpoint = read_config(folder)
        stop_ids: Iterable[int] = checkpoint.eos_token_ids
        if tokenizer is None:
            from tessera.family.prompt import stop_token_ids
            from tessera.family.tokenizer import Tokenizer

            tokenizer = own = Tokenizer.from_folder(Path(folder))
            stop_ids = stop_token_ids(checkpoint, own)
        trained = checkpoint.text.max_position_embeddings
        max_model_len = config.max_model_len or trained
        if max_model_len > trained and (checkpoint.text.rope_scaling or {}).get("rope_type") != "dynamic":
            raise ConfigError(f"engine: max_model_len {max_model_len} exceeds the checkpoint's context of {trained}")
        runner = ModelRunner.from_checkpoint(checkpoint, config, max_model_len)
        return cls(runner, tokenizer, config, max_model_len, stop_ids)

    def submit(self, request: Request) -> Sequence:
        """Queues a request.

        Raises InvalidRequest when it is malformed or can never fit, Unavailable when too many are in flight.
        """
        request.validate(self._runner.vocab_size, self._runner.hidden_size)
        self._check_fits(request)
        sequence = self._new_sequence(request)
        with self._lock:
            if self._closed:
                raise Unavailable(self._closed)
            if len(self._live) >= self._config.max_in_flight:
                queued = len(self._arrived) + len(self.scheduler.waiting)
                raise Unavailable(f"{len(self._live)} requests are in flight, {queued} of them queued; try again later")
            self._live[sequence] = Detokenizer(self._tokenizer, request.sampling)
            self._arrived.append(sequence)
            self.metrics.requests += 1
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Ends a request early: its last event, "cancelled", comes with the next step. Too late does no harm."""
        with self._lock:
            if sequence in self._live:
                self._aborted.append(sequence)

    def has_work(self) -> bool:
        with self._lock:
            return bool(self._arrived or self._aborted or self._events) or self.scheduler.has_work

    def step(self) -> list[TokenEvent]:
        """Plan, run, apply, emit. If it raises, call :meth:`fail_all`."""
        self._take_in()
        batch = self.scheduler.schedule()
        if batch.spans:
            self._mark_scheduled(batch)
            sampled = self._runner.run(batch)
            taken = set(self.scheduler.apply(batch, [token.token_id for token in sampled]))
            self._emit((s, token) for s, token in zip(batch.sampling, sampled) if s in taken)
        self._count(batch)
        return self._take_events()

    def fail_all(self, message: str) -> list[TokenEvent]:
        """Ends every request that a step may have seen with reason "error"; the engine then starts afresh."""
        self.scheduler.drop_all()
        with self._lock:
            arrived = set(self._arrived)
            known = [sequence for sequence in self._live if sequence not in arrived]
        for sequence in known:
            sequence.finish_reason = "error"
            self._add_event(sequence, error=message)
        self._count(ScheduledBatch([]))
        return self._take_events()

    def close(self, message: str) -> list[TokenEvent]:
        """Takes no more requests and ends all there are with reason "error"."""
        with self._lock:
            self._closed = message
            self._arrived = []
        return self.fail_all(message)

    def _check_fits(self, request: Request) -> None:
        prompt, answer = len(request.input_ids), request.sampling.max_tokens
        if prompt + answer > self.max_model_len:
            raise InvalidRequest(
                f"{prompt} prompt tokens and max_tokens {answer} exceed the context of {self.max_model_len} tokens; "
                "shorten the prompt, use fewer image tiles or lower max_tokens"
            )
        blocks = self.scheduler.blocks
        capacity = blocks.num_blocks * blocks.block_size
        if prompt + answer > capacity:
            raise InvalidRequest(
                f"{prompt} prompt tokens and max_tokens {answer} can never fit the cache of {capacity} tokens; "
                "ask for less, or give the server more kv_cache_bytes"
            )

    def _new_sequence(self, request: Request) -> Sequence:
        spans = np.asarray(request.spans).reshape(-1, 2)
        limit = int(spans[0, 0]) if len(spans) and self._config.prefix_cache == "exclude" else None
        return Sequence(
            request,
            cache_limit=limit,
            image_cache_ids=image_cache_ids(request.digest, spans[:, 1], self._cache_secret),
            cache_salt=self._runner.cache_salt(len(request.input_ids)),
            stop_ids=self._eos_token_ids,
        )

    def _take_in(self) -> None:
        """New requests into the queue; aborted and overdue ones out, wherever they are."""
        now = time.monotonic_ns()
        with self._lock:
            arrived, self._arrived = self._arrived, []
            aborted, self._aborted = self._aborted, []
            overdue = [s for s in self._live if s.request.deadline_ns is not None and s.request.deadline_ns <= now]
        for sequence in arrived:
            self.scheduler.add(sequence)
        for reason, sequences in (("cancelled", aborted), ("deadline", overdue)):
            for sequence in sequences:
                if not sequence.finished:
                    self.scheduler.finish(sequence, reason)
                    self._add_event(sequence)

    def _mark_scheduled(self, batch: ScheduledBatch) -> None:
        now = time.monotonic_ns()
        for span in batch.spans:
            if not span.sequence.scheduled_ns:
                span.sequence.scheduled_ns = now
                span.sequence.cached_tokens = span.start
                self.metrics.prompt_tokens += span.sequence.prompt_length
                self.metrics.cached_tokens += span.sequence.cached_tokens

    def _emit(self, tokens: Iterable[tuple[Sequence, SampledToken]]) -> None:
        now = time.monotonic_ns()
        for sequence, token in tokens:
            sequence.first_token_ns = sequence.first_token_ns or now
            detokenizer = self._live[sequence]
            ended_by_token = sequence.finish_reason == "stop"
            show = not ended_by_token or sequence.request.sampling.include_stop_str_in_output
            text = detokenizer.push(token.token_id) if show else ""
            if sequence.finished:
                text += detokenizer.flush()
            if detokenizer.stopped:
                if not sequence.finished:
                    self.scheduler.finish(sequence, "stop")
                sequence.finish_reason = "stop"
            self._add_event(sequence, text, token)

    def _add_event(
        self, sequence: Sequence, text: str = "", token: SampledToken | None = None, error: str | None = None
    ) -> None:
        with self._lock:
            detokenizer = self._live.pop(sequence) if sequence.finished else self._live[sequence]
        logprobs = None
        if token is not None and token.logprob is not None:
            logprobs = [_logprob_entry(detokenizer, token)]
        if sequence.finished:
            sequence.embeddings = None
            self.metrics.finished[sequence.finish_reason or ""] += 1
        event = TokenEvent(
            sequence,
            text,
            [] if token is None else [token.token_id],
            logprobs,
            sequence.finish_reason,
            sequence.usage,
            sequence.cached_tokens,
            sequence.scheduled_ns,
            sequence.first_token_ns,
            time.monotonic_ns(),
            error,
        )
        self._events.append(event)

    def _take_events(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events

    def _count(self, batch: ScheduledBatch) -> None:
        metrics, scheduler = self.metrics, self.scheduler
        metrics.steps += bool(batch.spans)
        metrics.computed_tokens += batch.tokens
        metrics.generated_tokens += len(batch.sampling)
        metrics.preemptions = scheduler.preemptions
        metrics.waiting, metrics.running = len(scheduler.waiting), len(scheduler.running)
        metrics.blocks_used = scheduler.blocks.used


def _logprob_entry(detokenizer: Detokenizer, token: SampledToken) -> dict[str, Any]:
    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        return {"token_id": token_id, "text": detokenizer.token_text(token_id), "logprob": logprob}

    return entry(token.token_id, token.logprob) | {"top": [entry(*pair) for pair in token.top]}
