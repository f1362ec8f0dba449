"""The language model as one object: submit requests, step, hear what came of them."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceType
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tessera.engine.drafts.drafter import Drafter, Drafting
from tessera.engine.drafts.text import EarlierAnswers, Suffixes, TextDraft, read_tokens
from tessera.engine.process.messages import End, EngineMetrics, Progress
from tessera.engine.scheduling.block_manager import BlockManager, image_cache_ids
from tessera.engine.scheduling.policies import LEAST_CHUNK, LEAST_CHUNK_OF_EXPERTS, CostModel, Load, Rules
from tessera.engine.scheduling.scheduler import ScheduledBatch, Scheduler
from tessera.engine.sequence import Request, SampledToken, Sequence
from tessera.engine.structured_output.constraints import Constraints
from tessera.engine.structured_output.labels import LabelScorer
from tessera.engine.structured_output.sequences import ConstrainedSequence, LabelSequence, MaskLane
from tessera.errors import InvalidRequest, Unavailable
from tessera.settings.stages import EngineConfig

if TYPE_CHECKING:
    from tessera.engine.execution.model_runner import ModelRunner
    from tessera.engine.execution.sampler import SampledRows
    from tessera.prompt.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_LANE_PART = 4  # a quarter of the sequences that may run may follow slow grammars
_LANE_WAIT_S = 0.02  # for masks or a request, where nothing else is to be done; then deadlines are looked at again
# A request is looked at beside the steps, but not while the device waits for the next: the interpreter is one.
_LONGEST_HURRY_S = 0.02


class _Launched(NamedTuple):
    """A step, and whether it was planned once the tokens of the one before were ``known``."""

    batch: ScheduledBatch
    result: SampledRows
    known: bool


class Engine:
    """Continuous batching over one model.

    The owner of an engine calls :meth:`step` while it has work, on one thread, and there :meth:`fail_all` and
    :meth:`close`; :meth:`submit` and :meth:`cancel` may be called from any. What came of a request is told as
    :class:`Progress`, each time up to its one End; text is made of it elsewhere (`rendering.py`).
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        config: EngineConfig,
        max_model_len: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        blocks = BlockManager(runner.num_blocks, config.block_size)
        rules, costs = Rules(bursts=runner.async_launch), CostModel(runner.step_times)
        limits = config.max_batched_tokens, config.max_sequences
        chunk = LEAST_CHUNK_OF_EXPERTS if runner.experts else LEAST_CHUNK
        self.scheduler = Scheduler(blocks, Load(*limits, rules, costs, config.drafts, config.max_rows, chunk))
        self.metrics = EngineMetrics(kv_blocks_total=runner.num_blocks, max_model_len=max_model_len)
        self.max_model_len = max_model_len
        self.weights, self.weight_bytes = runner.weights, runner.weight_bytes
        self._runner = runner
        self._tokenizer = tokenizer
        self._config = config
        self._eos_token_ids = frozenset(token for token in eos_token_ids if token < runner.vocab_size)
        self.constraints = Constraints(tokenizer, runner.vocab_size, self._eos_token_ids)
        self._lane = MaskLane(max(1, config.max_sequences // _LANE_PART))
        self._earlier = EarlierAnswers(tokenizer.numbers if config.drafts else frozenset())
        self._priors = dict[type, float]()
        self._cache_secret = secrets.token_bytes(16)
        self._under_way: deque[_Launched] = deque()  # not yet applied
        self._applying_ns = 0  # what it took to take the tokens of the step applied last
        #: of applied steps that are not told yet: when their tokens were there, and who took which
        self._taken: list[tuple[int, list[tuple[Sequence, list[SampledToken]]]]] = []
        self._ran: list[_Launched] = []  # applied, but how long they took is not noted yet
        self._before: SampledRows | None = None  # of the last one whose time is, as long as one follows at once
        self._news = Progress()  # of the step under way
        self._unhurried = threading.Event()  # not set while the device waits for the thread that steps
        self._unhurried.set()
        self._lock = threading.Lock()  # guards what follows
        self._live: dict[int, Sequence] = {}  # by request number, until their ends are told
        self._arrived: list[Sequence] = []
        self._cancelled: dict[int, str] = {}  # reasons by request number
        self._closed = ""

    @classmethod
    def from_checkpoint(cls, folder: Path | str, config: EngineConfig) -> Engine:
        """The text model of a checkpoint folder, ready to step.

        Raises CheckpointError for a folder that does not hold what it should, ConfigError for settings that
        contradict each other or the checkpoint.
        """
        from tessera.checkpoint.config import context_length
        from tessera.engine.execution.model_runner import ModelRunner, load_model
        from tessera.models.registry import read_config
        from tessera.prompt.prompt import stop_token_ids
        from tessera.prompt.tokenizer import Tokenizer

        checkpoint = read_config(folder)
        tokenizer = Tokenizer.from_folder(Path(folder))
        max_model_len = context_length(checkpoint.text, config.max_model_len)
        runner = ModelRunner.of_model(load_model(checkpoint, config), config, max_model_len)
        engine = cls(runner, tokenizer, config, max_model_len, stop_token_ids(checkpoint, tokenizer))
        engine.constraints.read_vocabulary()
        return engine

    def step(self) -> Progress:
        """Plans and runs a step, applies what is done and tells what came of it.

        Where the runner launches asynchronously, a step is launched before the one before it is applied, unless that
        should end first or its tokens should be known. Rows of pictures may be reused when their request's end is told:
        every step that reads them has been applied by then. If this raises, call :meth:`fail_all`.
        """
        self._cancel_overdue()
        if self._under_way:
            last = self._under_way[-1].batch
            self._lane.in_steps = self.scheduler.tokens_should_be_known(last)
            if self._lane.in_steps or self.scheduler.must_finish_before_next(last):
                self._apply_until(0)
        began, began_ns, known = _waited_ns(), time.perf_counter_ns(), not self._under_way
        batch = self._plan()
        if not batch.spans and self._lane and not self._under_way:
            self._unhurried.set()
            self._lane.wait(_LANE_WAIT_S)
        if batch.spans:
            self._mark_scheduled(batch)
            launched = self._runner.launch(batch)
            self._under_way.append(_Launched(batch, launched, known))
            self._unhurried.set()
            self.scheduler.load.record_host_time(known, self._applying_ns + time.perf_counter_ns() - began_ns)
            self.scheduler.offer(batch)
        self.metrics.host_wait_ns += _waited_ns() - began
        self._apply_until(int(bool(batch.spans) and self._runner.async_launch))
        self._unhurried.set()
        return self._emit(batch)

    def has_work(self) -> bool:
        """Whether :meth:`step` would do or tell anything."""
        with self._lock:
            waiting = bool(self._arrived or self._cancelled)
        return waiting or bool(self._under_way) or self.scheduler.has_work

    def submit(self, request: Request) -> Sequence:
        """Queues a request; its progress may be told before this returns.

        Raises InvalidRequest when it is malformed or can never fit, Unavailable when too many are in flight.
        """
        self._unhurried.wait(_LONGEST_HURRY_S)
        request.validate(self._runner.vocab_size, self._runner.hidden_size, self._runner.position_axes)
        sequence = self._new_sequence(request)
        self.scheduler.blocks.prepare(sequence)
        with self._lock:
            if self._closed:
                raise Unavailable(self._closed)
            if len(self._live) >= self._config.max_in_flight:
                queued = len(self._arrived) + len(self.scheduler.waiting)
                raise Unavailable(f"{len(self._live)} requests are in flight, {queued} of them queued; try again later")
            self._live[request.number] = sequence
            self._arrived.append(sequence)
            if isinstance(sequence, ConstrainedSequence):
                sequence.take_place()
            self.metrics.requests += 1
        self._lane.wake()
        return sequence

    def cancel(self, number: int, reason: str = "cancelled") -> None:
        """Ends a request early: the next step tells its end, with this reason. Too late does no harm."""
        with self._lock:
            if number in self._live:
                self._cancelled.setdefault(number, reason)

    def fail_all(self, error: str) -> Progress:
        """Ends every request that a step may have seen with reason "error"; the engine then starts afresh."""
        self._under_way.clear()
        self._ran.clear()  # a lost device would not say
        self._before = None
        self._unhurried.set()
        self._tell()
        self.scheduler.drop_all()
        with self._lock:
            unseen = {sequence.request.number for sequence in self._arrived}
            seen = [sequence for number, sequence in self._live.items() if number not in unseen]
        for sequence in seen:
            sequence.finish_reason, sequence.error = "error", error
            self._end(sequence)
        return self._emit(ScheduledBatch([]))

    def close(self, error: str) -> Progress:
        """Takes no more requests and ends all there are with reason "error"."""
        with self._lock:
            self._closed, self._arrived = error, []
        return self.fail_all(error)

    def _room(self, prompt: int, answer: int) -> int:
        """Tokens that an answer can have. Raises InvalidRequest where that is less than ``answer``."""
        wanted = f"{prompt} prompt tokens and {answer} for the answer"
        if prompt + answer > self.max_model_len:
            raise InvalidRequest(
                f"{wanted} exceed the context of {self.max_model_len} tokens; "
                f"shorten the prompt, use fewer image tiles or ask for less"
            )
        blocks = self.scheduler.blocks
        capacity = blocks.num_blocks * blocks.block_size
        if prompt + answer > capacity:
            raise InvalidRequest(
                f"{wanted} can never fit the cache of {capacity} tokens; "
                "ask for less, or give the server more kv_cache_bytes"
            )
        return min(self.max_model_len, capacity) - prompt

    def _new_sequence(self, request: Request) -> Sequence:
        spans = np.asarray(request.spans).reshape(-1, 2)
        cache_limit = {"off": 0, "exclude": int(spans[0, 0]) if len(spans) else None}.get(self._config.prefix_cache)
        options: dict[str, Any] = dict(
            cache_limit=cache_limit,
            image_cache_ids=image_cache_ids(request.digest, spans[:, 1], self._cache_secret),
            cache_salt=self._runner.cache_salt(len(request.input_ids)),
            stop_ids=self._eos_token_ids,
        )
        prompt = len(request.input_ids)
        if request.sampling.choices is not None:
            scorer = self._label_scorer(request.sampling.choices)
            self._room(prompt, scorer.longest_path + 1)
            return LabelSequence(request, scorer, **options)
        room = self._room(prompt, request.sampling.least_room)
        options["max_tokens"] = request.sampling.max_tokens or room
        if request.sampling.constraint is not None:
            matcher = self.constraints.matcher(request.sampling)
            if matcher.slow and self._lane.full:
                raise Unavailable("the queue is full of answers whose grammars take long; try again later")
            if self._config.drafts:
                matcher.look_ahead(self._config.drafts)
                options["drafting"] = self._drafting([matcher, *self._drafters(request)])
            return ConstrainedSequence(request, matcher, self._lane, **options)
        if self._config.drafts and (drafters := self._drafters(request)):
            options["drafting"] = self._drafting(drafters)
        return Sequence(request, **options)

    def _drafting(self, drafters: list[Drafter]) -> Drafting:
        return Drafting(drafters, self._runner.vocab_size, self._priors)

    def _drafters(self, request: Request) -> list[Drafter]:
        """Who proposes tokens for an answer as its request asks for it."""
        asked, drafters = request.sampling, list[Drafter]()
        if request.draft is not None:
            end = [] if asked.ignore_eos else [self._tokenizer.eos_id]
            drafters.append(TextDraft(request.draft + [token for token in end if token in self._eos_token_ids]))
        if asked.draft_pool is not None:
            drafters.append(Suffixes(read_tokens(request.input_ids, request.spans), self._earlier, asked.draft_pool))
        return drafters

    def _label_scorer(self, choices: SequenceType[str]) -> LabelScorer:
        if not self._eos_token_ids:
            raise InvalidRequest(
                "choices need a checkpoint that names the token that ends an answer; this one does not"
            )
        labels = LabelScorer(choices, partial(self._tokenizer.encode, special=False), self._eos_token_ids)
        if labels.largest_token >= self._runner.vocab_size:
            raise InvalidRequest(
                f"choices hold the token {labels.largest_token}; the model knows 0..{self._runner.vocab_size - 1}"
            )
        return labels

    def _cancel_overdue(self) -> None:
        """Requests whose time is over, and what cannot go on: before anything that the device waits for."""
        now = time.monotonic_ns()
        with self._lock:
            for number, sequence in self._live.items():
                if sequence.request.deadline_ns is not None and sequence.request.deadline_ns <= now:
                    self._cancelled.setdefault(number, "deadline")
                elif sequence.failure is not None:
                    self._cancelled.setdefault(number, "error")

    def _plan(self) -> ScheduledBatch:
        """New requests into the queue, cancelled ones out, wherever they are; then the next batch."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, {}
            ended = [(self._live[number], reason) for number, reason in cancelled.items() if number in self._live]
        for sequence in arrived:
            self.scheduler.add(sequence)
        if ended:
            self._tell()
        for sequence, reason in ended:
            if sequence.finish_reason is not None:  # of itself, in the step that was applied last
                continue
            sequence.error = sequence.failure
            self.scheduler.cancel(sequence, reason)
            self._end(sequence)
        return self.scheduler.schedule()

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

    def _apply_until(self, under_way: int) -> None:
        """Waits for the oldest steps until no more than this many are under way."""
        while len(self._under_way) > under_way:
            self._apply(self._under_way.popleft())

    def _apply(self, step: _Launched) -> None:
        """What the next plan depends on; all else is :meth:`_emit`'s, for which the device need not wait."""
        tokens = step.result.tokens()
        if not self._under_way:
            self._unhurried.clear()
        began_ns = time.perf_counter_ns()
        self._taken.append((time.monotonic_ns(), self.scheduler.apply(step.batch, tokens)))
        self._lane.begin()
        self._ran.append(step)
        self._applying_ns = time.perf_counter_ns() - began_ns

    def _tell(self) -> None:
        """Puts into the news what applied steps gave."""
        told, self._taken = self._taken, []
        for now, taken in told:
            for sequence, answer in taken:
                sequence.first_token_ns = sequence.first_token_ns or now
                number = sequence.request.number
                self._news.tokens.extend((number, token, report) for token, report in answer)
                if sequence.finish_reason is not None:  # not sequence.finished: once a token
                    self._end(sequence)
                    if sequence.error is not None:
                        self.metrics.not_finite_logits += not sequence.finite
                        _LOG.error("request %r: %s", sequence.request.request_id, sequence.error)

    def _end(self, sequence: Sequence) -> None:
        number, reason = sequence.request.number, sequence.finish_reason or ""
        with self._lock:
            del self._live[number]
        self._lane.leave(sequence)
        drafted, pool = (0, 0), sequence.request.sampling.draft_pool
        if sequence.drafting is not None:
            drafted = sequence.drafting.proposed, sequence.drafting.accepted
            self.metrics.drafted_tokens += drafted[0]
            self.metrics.accepted_tokens += drafted[1]
            if pool is not None:
                self._earlier.add(pool, sequence.outputs)
        sequence.embeddings = None
        self.metrics.finished[reason] += 1
        times = (sequence.cached_tokens, sequence.scheduled_ns, sequence.first_token_ns)
        self._news.ends.append(End(number, reason, sequence.error, *times, sequence.labels, drafted_tokens=drafted))

    def _emit(self, batch: ScheduledBatch) -> Progress:
        self._tell()
        metrics, scheduler = self.metrics, self.scheduler
        for ran in self._ran:
            device_ns = ran.result.device_ns()
            scheduler.record_step_time(ran.batch, device_ns)
            if ran.known and self._before is not None:
                scheduler.load.between.record(ran.result.waited_ns(self._before))
            self._before = ran.result
            metrics.busy_ns += device_ns
            metrics.drafted_steps += bool(ran.batch.drafted)
        self._ran.clear()
        if not (batch.spans and scheduler.has_work):
            self._before = None
        metrics.steps += bool(batch.spans)
        metrics.graph_steps = self._runner.graph_steps
        metrics.computed_tokens += batch.tokens
        metrics.preemptions = scheduler.preemptions
        metrics.requests_waiting = len(scheduler.waiting) + len(scheduler.parked)
        metrics.requests_running = len(scheduler.running)
        metrics.kv_blocks_used = scheduler.blocks.used
        news, self._news = self._news, Progress()
        metrics.generated_tokens += len(news.tokens)
        return news


def _waited_ns() -> int:
    """Grows by what passes beyond what this thread computes."""
    return time.perf_counter_ns() - time.thread_time_ns()
