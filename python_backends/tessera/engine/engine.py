"""The language model as one object: submit requests, step, take events."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceType
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from tessera.engine.cache.block_manager import BlockManager
from tessera.engine.cache.prefix_index import PrefixIndex, image_cache_ids
from tessera.engine.config import EngineConfig
from tessera.engine.detokenizer import Decoder
from tessera.engine.labels import LabelScorer
from tessera.engine.metrics import EngineMetrics
from tessera.engine.progress import LabelAnswer, Progress
from tessera.engine.rendering import Renderer
from tessera.engine.request import Request, TokenEvent
from tessera.engine.scheduling.batch import ScheduledBatch
from tessera.engine.scheduling.scheduler import Scheduler
from tessera.engine.sequence import SampledToken, Sequence
from tessera.errors import ConfigError, InvalidRequest, Unavailable

_LOG = logging.getLogger(__name__)


class StepResult(Protocol):
    """A step that was launched."""

    def tokens(self) -> SequenceType[SampledToken]:
        """Waits for the step; a token for each of the batch's ``sampling``."""

    def device_ns(self) -> int:
        """How long the step took the device; call it after :meth:`tokens`."""


class Runner(Protocol):
    """What runs the batches; ModelRunner outside of tests.

    ``overlaps``: whether a step goes on by itself once it was launched, so that the next should be planned meanwhile.
    ``graph_steps`` counts the steps that ran as CUDA graphs.
    """

    num_blocks: int
    vocab_size: int
    hidden_size: int
    overlaps: bool
    graph_steps: int

    def cache_salt(self, prompt_length: int) -> int: ...

    def launch(self, batch: ScheduledBatch) -> StepResult: ...

    def clear(self, blocks: SequenceType[int]) -> None:
        """Zeros in blocks of the cache, after all that was launched."""


class Engine:
    """Continuous batching over one model.

    A step has two halves, so that a second thread, or process, can do the second: :meth:`advance` plans, runs and
    applies; a :class:`Renderer` turns what came of it into text and events. :meth:`step` is both. :meth:`submit`,
    :meth:`abort` and :meth:`stop` may be called from any thread, :meth:`advance`, :meth:`fail_all` and :meth:`close`
    from one, and :meth:`render` from one, in their order. Every request that was submitted makes exactly one progress
    with a reason, and one event with a finish_reason.
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
        self._under_way: deque[tuple[ScheduledBatch, StepResult]] = deque()  # launched, not yet applied
        self._progress: list[Progress] = []  # of the step under way
        self._open: dict[Sequence, None] = {}  # taken in, last progress not made yet
        self._lock = threading.Lock()  # guards what follows
        self._live: dict[Request, Sequence] = {}  # until their last progress exists
        self._arrived: list[Sequence] = []
        self._aborted: list[Sequence] = []
        self._stopped: list[Sequence] = []  # their text met a stop string
        self._closed = ""
        self._renderer = Renderer(tokenizer, self.stop, self.metrics.finished)

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
        sequence = self._new_sequence(request)
        self._check_fits(sequence)
        with self._lock:
            if self._closed:
                raise Unavailable(self._closed)
            if len(self._live) >= self._config.max_in_flight:
                queued = len(self._arrived) + len(self.scheduler.waiting)
                raise Unavailable(f"{len(self._live)} requests are in flight, {queued} of them queued; try again later")
            self._live[request] = sequence
            self._arrived.append(sequence)
            self.metrics.requests += 1
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Ends a request early: its last event, "cancelled", comes with the next step. Too late does no harm."""
        with self._lock:
            if sequence.request in self._live:
                self._aborted.append(sequence)

    def stop(self, request: Request) -> None:
        """Ends a request whose text met a stop string; its last progress comes with the next step."""
        with self._lock:
            if request in self._live:
                self._stopped.append(self._live[request])

    def has_work(self) -> bool:
        with self._lock:
            waiting = self._arrived or self._aborted or self._stopped
        return bool(waiting or self._under_way) or self.scheduler.has_work

    def step(self) -> list[TokenEvent]:
        """Plan, run, apply, emit. If it raises, call :meth:`fail_all`."""
        return self.render(self.advance())

    def advance(self) -> list[Progress]:
        """Plan and run a step, apply what is done; the first half of :meth:`step`.

        Where the runner overlaps, a step is launched before the one before it is applied. Rows of pictures may be
        reused when their request's last progress is returned: every step that reads them has been applied by then.
        """
        began = time.perf_counter_ns() - time.thread_time_ns()
        self._take_in()
        batch = self.scheduler.schedule()
        if batch.spans:
            self._mark_scheduled(batch)
            self._under_way.append((batch, self._runner.launch(batch)))
        self.metrics.held_up_ns += time.perf_counter_ns() - time.thread_time_ns() - began
        while len(self._under_way) > bool(batch.spans and self._runner.overlaps):
            self._apply(*self._under_way.popleft())
        self._count(batch)
        return self._take_progress()

    def render(self, steps: list[Progress]) -> list[TokenEvent]:
        """Text and events of what :meth:`advance`, :meth:`fail_all` or :meth:`close` returned, in their order."""
        return self._renderer.render(steps)

    def fail_all(self, message: str) -> list[Progress]:
        """Ends every request that a step may have seen with reason "error"; the engine then starts afresh."""
        self._under_way.clear()
        self.scheduler.drop_all()
        for sequence in list(self._open):
            sequence.finish_reason = "error"
            self._add_progress(sequence, error=message)
        self._count(ScheduledBatch([]))
        return self._take_progress()

    def close(self, message: str) -> list[Progress]:
        """Takes no more requests and ends all there are with reason "error"."""
        with self._lock:
            self._closed = message
            arrived, self._arrived = self._arrived, []
        self._open |= dict.fromkeys(arrived)
        return self.fail_all(message)

    def _check_fits(self, sequence: Sequence) -> None:
        prompt, answer = sequence.prompt_length, sequence.max_tokens
        what = "max_tokens" if sequence.labels is None else "choices of up to"
        if prompt + answer > self.max_model_len:
            raise InvalidRequest(
                f"{prompt} prompt tokens and {what} {answer} exceed the context of {self.max_model_len} tokens; "
                f"shorten the prompt, use fewer image tiles or ask for less"
            )
        blocks = self.scheduler.blocks
        capacity = blocks.num_blocks * blocks.block_size
        if prompt + answer > capacity:
            raise InvalidRequest(
                f"{prompt} prompt tokens and {what} {answer} can never fit the cache of {capacity} tokens; "
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
            labels=self._labels(request),
        )

    def _labels(self, request: Request) -> LabelScorer | None:
        choices = request.sampling.choices
        if choices is None:
            return None
        if not self._eos_token_ids:
            raise InvalidRequest(
                "choices need a checkpoint that names the token that ends an answer; this one does not"
            )
        encode = partial(self._tokenizer.encode, special=False)
        labels = LabelScorer.encoded(choices, encode, self._eos_token_ids)
        if labels.largest_token >= self._runner.vocab_size:
            raise InvalidRequest(
                f"choices hold the token {labels.largest_token}; the model knows 0..{self._runner.vocab_size - 1}"
            )
        return labels

    def _take_in(self) -> None:
        """New requests into the queue; aborted, stopped and overdue ones out, wherever they are."""
        now = time.monotonic_ns()
        with self._lock:
            arrived, self._arrived = self._arrived, []
            aborted, self._aborted = self._aborted, []
            stopped, self._stopped = self._stopped, []
            overdue = [
                sequence
                for request, sequence in self._live.items()
                if request.deadline_ns is not None and request.deadline_ns <= now
            ]
        for sequence in arrived:
            self._open[sequence] = None
            self.scheduler.add(sequence)
        for reason, sequences in (("stop", stopped), ("cancelled", aborted), ("deadline", overdue)):
            for sequence in sequences:
                if not sequence.finished:
                    self.scheduler.finish(sequence, reason)
                    self._add_progress(sequence)

    def _mark_scheduled(self, batch: ScheduledBatch) -> None:
        now = time.monotonic_ns()
        begun = [span for span in batch.spans if not span.sequence.scheduled_ns]
        for span in begun:
            span.sequence.scheduled_ns = now
            span.sequence.cached_tokens = span.start
            self.metrics.prompt_tokens += span.sequence.prompt_length
            self.metrics.cached_tokens += span.sequence.cached_tokens
        self.metrics.prompts += len(begun)
        self.metrics.prefill_steps += bool(begun)

    def _apply(self, batch: ScheduledBatch, result: StepResult) -> None:
        taken = self.scheduler.apply(batch, result.tokens())
        if spoiled := self.scheduler.spoiled:
            self._runner.clear(spoiled)
            self.scheduler.spoiled = []
        self.metrics.busy_ns += result.device_ns()
        now = time.monotonic_ns()
        for sequence, token in taken:
            sequence.first_token_ns = sequence.first_token_ns or now
            if sequence.error is not None:
                self.metrics.not_finite += 1
                _LOG.error("request %r: %s", sequence.request.request_id, sequence.error)
                self._add_progress(sequence, error=sequence.error)
            elif sequence.labels is None:
                self.metrics.generated_tokens += 1
                self._add_progress(sequence, token)
            elif sequence.finished:
                self._add_progress(sequence)

    def _add_progress(self, sequence: Sequence, *tokens: SampledToken, error: str | None = None) -> None:
        labels = None
        if sequence.finished:
            with self._lock:
                del self._live[sequence.request]
            del self._open[sequence]
            sequence.embeddings = None
            if sequence.labels is not None and sequence.finish_reason == "stop":
                labels = LabelAnswer(sequence.labels.best, [asdict(score) for score in sequence.labels.result()])
        self._progress.append(
            Progress(
                sequence.request,
                sequence.usage,
                tokens,
                sequence.finish_reason,
                error,
                sequence.cached_tokens,
                sequence.scheduled_ns,
                sequence.first_token_ns,
                labels,
            )
        )

    def _take_progress(self) -> list[Progress]:
        progress, self._progress = self._progress, []
        return progress

    def _count(self, batch: ScheduledBatch) -> None:
        metrics, scheduler = self.metrics, self.scheduler
        metrics.steps += bool(batch.spans)
        metrics.graph_steps = self._runner.graph_steps
        metrics.computed_tokens += batch.tokens
        metrics.preemptions = scheduler.preemptions
        metrics.waiting, metrics.running = len(scheduler.waiting), len(scheduler.running)
        metrics.blocks_used = scheduler.blocks.used
