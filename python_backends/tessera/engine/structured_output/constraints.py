"""Constrained answers: which tokens may come next where an answer must match a regular expression or a JSON schema."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakSet

import numpy as np

from tessera.engine.structured_output.labels import label_token_ids
from tessera.errors import InvalidRequest
from tessera.prompt import grammar
from tessera.prompt.sampling import SamplingParameters

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from tessera.prompt.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
MOST_COMPILED_BYTES = 256 << 20
# One counts as its bytes when it was tried, at least these, and for what its lexer grows by while masks are made.
_LEAST_BYTES = 1 << 20
_GROWTH_A_SECOND = 64 << 20
# A mask may take so long on the thread that steps; a grammar so much beyond that is slow for its next masks. Most
# are so at first only, while their lexer is built.
_MASK_S = 0.00025
_MOST_BEYOND_S = 0.005
# But no mask alone shows that: its time may hold what is none of its own, as where a host takes the CPU away. The
# first one, when a grammar is compiled, is taken at its word: where that is slow the next may be too.
_MOST_AT_ONCE_S = 0.003
_SLOW_FOR = 64
# What all masks of a step may take on the thread that steps; where they would take longer, they are made beside it.
_MOST_A_STEP_S = 0.002
_MEAN_OF = 16  # masks, about
# Matchers of one compiled grammar share its lexer: what one finds out is quick for the others, but the memory and the
# limits of the library count for all of them together.
MOST_COPIES = 32

Mask: TypeAlias = "np.ndarray | int"
"""The tokens that may come next, uint8 [ceil(vocabulary / 8)] with the lowest bit first, or the only one."""
_Bits: TypeAlias = "bytes | np.ndarray"  # the lowest first


@dataclass
class _Grammar:
    """What all copies of one compiled grammar have in common. ``seconds``: of computing for masks, all together and
    beyond what they may take."""

    bytes: int
    copies: int = 0
    failed: bool = False
    seconds: float = 0.0
    beyond: float = 0.0
    mean: float = 0.0  # seconds a mask, each counted as what it may take at most
    slow_for: int = 0  # masks
    elsewhere: int = 0  # copies that another thread follows just now

    def computed(self, seconds: float) -> None:
        most = _MOST_AT_ONCE_S if self.seconds else seconds
        self.seconds += seconds
        self.mean += (min(seconds, _MASK_S) - self.mean) / _MEAN_OF
        self.beyond = max(0.0, self.beyond + min(seconds, most) - _MASK_S)
        if self.slow_for:
            self.slow_for -= 1
        elif self.beyond > _MOST_BEYOND_S:
            self.beyond, self.slow_for = 0.0, _SLOW_FOR


class Matcher:
    """Follows one answer. As a Drafter it proposes what the form of the answer leaves no choice about: keys, brackets,
    all but the first of an enumeration's tokens.

    It goes on by such tokens at once, and a mask is made when it is first asked for: where a device computes a step by
    itself that is while it does so.
    """

    prior = 1.0
    holds = 1

    def __init__(
        self,
        matcher: LLMatcher,
        spelling: grammar.Spelling,
        ends: np.ndarray,
        end: int,
        beside: Beside,
        size: int = 0,
    ) -> None:
        """``ends``: the mask of all stop tokens; ``end``: the one that llguidance knows; ``size``: bytes."""
        self._matcher, self._spelling = matcher, spelling
        self._beside = beside
        self._ends, self._others = ends, ~ends
        self._stops = frozenset(np.flatnonzero(np.unpackbits(ends, bitorder="little")).tolist())
        self._end = end
        self._grammar = _Grammar(max(size, _LEAST_BYTES))
        self._mask: np.ndarray | None
        self._mask, self.error = self._compute(matcher, matcher.compute_bitmask)
        self.forced: list[int] = []
        self.rest: list[int] = []
        self._ahead = 0
        self._drafted: list[np.ndarray] = []  # masks behind each token of a draft that is not forced

    @property
    def worn(self) -> bool:
        """Whether there should be no more copies, lest what others wrote ends their answers."""
        return self._grammar.copies >= MOST_COPIES or self._grammar.failed

    @property
    def slow(self) -> bool:
        """Whether :meth:`advance` is not for the thread that steps, but :meth:`advance_later` is.

        So it is while a copy is followed elsewhere: a thread that follows another one would wait for its lexer
        meanwhile, and hold the interpreter.
        """
        return self._grammar.slow_for > 0 or self._grammar.elsewhere > 0

    @property
    def crowded(self) -> bool:
        """Whether the masks of all that are followed, at what this one's take, would hold up a step."""
        return self._masks_a_step < 1

    @property
    def _masks_a_step(self) -> float:
        """How many a step may make for this answer, if for all others as many."""
        return _MOST_A_STEP_S / max(len(self._beside.followed) * self._grammar.mean, 1e-9)

    @property
    def bytes(self) -> int:
        """About what the compiled grammar takes by now."""
        return self._grammar.bytes + int(self._grammar.seconds * _GROWTH_A_SECOND)

    def copy(self) -> Matcher:
        """One that goes its own way from here."""
        self._grammar.copies += 1
        copy = object.__new__(Matcher)
        copy.__dict__.update(self.__dict__, _matcher=self._matcher.deep_copy())
        self._beside.followed.add(copy)
        return copy

    @property
    def mask(self) -> np.ndarray:
        """The tokens that may come behind all that is forced, uint8 [ceil(vocabulary / 8)], the lowest bit first.

        A stop token may come wherever the answer may end.
        """
        if self._mask is None:
            self._make(self._matcher.compute_bitmask)
        assert self._mask is not None
        return self._mask

    def behind(self, drafted: int) -> Mask:
        """The tokens that may come next, or behind this many of a draft that :meth:`along` allowed. Any mask where
        there is none, see :meth:`knows`."""
        if drafted < len(self.forced):
            return self.forced[drafted]
        if drafted > len(self.forced):
            return self._drafted[drafted - 1]
        mask = self._ends if self._mask is None and self.slow else self.mask
        return mask if self.error is None else self._ends

    def knows(self, drafted: int) -> bool:
        """Whether what was chosen by :meth:`behind` counts: not where nothing can follow, and not where the grammar
        turned out to be slow, so that the mask is yet to be made by :meth:`advance_later`."""
        return drafted < len(self.forced) or (self._mask is not None and self.error is None)

    def advance(self, *tokens: int) -> None:
        """Takes tokens of the answer that are no stop tokens. Where nothing can follow them, ``error`` says why, at the
        latest when their mask is made."""
        self._follow(tokens, self._look_ahead)

    def advance_later(self, *tokens: int) -> Callable[[], None]:
        """What does so on another thread and makes the mask there at a low priority; it must be called."""
        self._grammar.elsewhere += 1
        return partial(self._advance_elsewhere, tokens)

    def forbid(self, tokens: np.ndarray) -> None:
        """Takes a mask's tokens out of those that may come next."""
        self._mask = self.mask & ~tokens

    def look_ahead(self, most: int) -> None:
        """From now on ``forced`` are the tokens that must come next, as the tokenizer writes them, as far as there is
        no choice: this many and one at most. Where nothing may follow these but one stop token, ``rest`` are they and
        it."""
        self._ahead = most + 1
        self._follow((), self._look_ahead)

    def propose(self, outputs: SequenceType[int], most: int) -> SequenceType[int]:
        return self.forced[:most]

    def along(self, draft: SequenceType[int]) -> SequenceType[int]:
        """A draft up to the first token that must not come; nothing else changes. Of any but a forced one no more than
        the step has time to make masks for."""
        if self.forced:
            return [token for token, _ in takewhile(lambda both: both[0] == both[1], zip(draft, self.forced))]
        if self.slow or self.crowded:
            return ()
        self._drafted, mask = [], self.mask
        try:
            ahead = self._matcher.deep_copy()
            for token in draft[: int(self._masks_a_step)]:
                if not (mask & self._others)[token // 8] >> token % 8 & 1:
                    break
                ahead.consume_token(token)
                mask, error = self._compute(ahead, ahead.compute_bitmask)
                if error is not None:
                    break
                self._drafted.append(mask)
        except Exception:
            _LOG.exception("a draft could not be followed")
        return draft[: len(self._drafted)]

    def _follow(self, tokens: tuple[int, ...], go_on: Callable[[], None]) -> None:
        """``go_on`` runs once nothing is forced any more."""
        try:
            known = min(len(tokens), len(self.forced))
            self.forced, self.rest = self.forced[known:], []
            self._consume(tokens[known:])
            if not self.forced:
                go_on()
        except Exception:
            self._fail()

    def _advance_elsewhere(self, tokens: tuple[int, ...]) -> None:
        try:
            self._follow(tokens, lambda: self._make(partial(self._beside.mask, self._matcher)))
        finally:
            self._grammar.elsewhere -= 1

    def _consume(self, tokens: SequenceType[int]) -> None:
        if tokens:
            self._matcher.consume_tokens([*tokens])
            self._mask = None

    def _look_ahead(self) -> None:
        """llguidance allows nothing but the first of the tokens that it says must come. Behind each it is asked again,
        as where nothing is drafted, unless it is known to say the others."""
        if self._ahead:
            forced, matcher, stops = list[int](), self._matcher, self._stops
            while len(forced) < self._ahead and (left := matcher.compute_ff_tokens()) and left[0] not in stops:
                run = tuple(left[: self._ahead - len(forced)])
                alike = len(run) == 1 or self._spelling.goes_on(matcher.compute_ff_bytes(), run)
                if not (alike and stops.isdisjoint(run)):
                    run = run[:1]
                matcher.consume_tokens([*run])
                forced += run
            self.forced = forced
            if forced:
                self._mask = None
            if len(stops) == 1 and matcher.is_stopped() and matcher.is_accepting():
                self.rest = [*forced, self._end]

    def _make(self, compute: Callable[[], _Bits]) -> None:
        try:
            self._mask, self.error = self._compute(self._matcher, compute)
        except Exception:
            self._mask = self._ends
            self._fail()

    def _fail(self) -> None:
        _LOG.exception("a grammar could not be followed")
        self.error = "it could not be followed; the server's log says why"

    def going_on(self, mask: np.ndarray) -> np.ndarray:
        """A mask without the stop tokens, unless nothing else is in it."""
        others = mask & self._others
        return others if others.any() else mask

    def _compute(self, matcher: LLMatcher, compute: Callable[[], _Bits]) -> tuple[np.ndarray, str | None]:
        """The mask, and why nothing can follow."""
        began, began_on_cpu = time.perf_counter(), time.thread_time()
        mask = np.frombuffer(compute(), np.uint8)[: len(self._ends)]
        may_end = mask[self._end // 8] >> self._end % 8 & 1 and matcher.is_accepting()
        mask = mask | self._ends if may_end else mask & self._others
        error = grammar.failure(matcher)
        # The CPU's time, but no more than passed: some kernels count it in whole ticks of up to 10 ms.
        self._grammar.computed(min(time.thread_time() - began_on_cpu, time.perf_counter() - began))
        if error is None and not mask.any():
            error = grammar.NOTHING_FOLLOWS
        if error is not None:
            self._grammar.failed = True
        return mask, error


class Beside:
    """Makes masks on a thread of the library's own, which gets of a busy CPU what others leave.

    A thread of Python's must not have a low priority: it would hold the interpreter and not run.
    """

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self.followed: WeakSet[Matcher] = WeakSet()  # one for each answer
        self._vocabulary = vocabulary
        self._executor: LLExecutor | None = None

    def mask(self, matcher: LLMatcher) -> np.ndarray:
        """uint8, the lowest bit first. For one thread."""
        if self._executor is None:
            beginning = threading.Thread(target=self._begin)
            beginning.start()
            beginning.join()
        assert self._executor is not None
        masks = np.zeros((2, -(-self._vocabulary.vocab_size // 32)), np.uint32)
        both = [(matcher, 0), (self._other, 1)]  # one alone would be made on this thread
        self._executor.unsafe_compute_mask_ptr(both, masks.ctypes.data, masks[0].nbytes, 2)
        return masks[0].view(np.uint8)

    def _begin(self) -> None:
        from llguidance import LLExecutor, LLMatcher

        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), grammar.NICE)  # which its threads inherit
        self._executor = LLExecutor(1)
        self._other = LLMatcher(self._vocabulary, LLMatcher.grammar_from_regex("."), log_level=0)


class Constraints:
    """Compiles what answers must match for one vocabulary, each text now and then; any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Collection[int]) -> None:
        """``vocab_size``: the model's; ``stop_ids`` are smaller."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: dict[tuple[str, object], Matcher] = {}  # the one used last at the end

    def matcher(self, parameters: SamplingParameters) -> Matcher:
        """At the beginning of an answer. Raises InvalidRequest where none could be constrained as asked."""
        while True:
            with self._lock:
                compiled = self._compiled.pop(_asked(parameters), None)
                if compiled is not None and not compiled.worn:
                    self._compiled[_asked(parameters)] = compiled
                    return compiled.copy()
            self.compile(parameters)

    def has(self, parameters: SamplingParameters) -> bool:
        """Whether an answer has nothing to compile."""
        if parameters.constraint is None:
            return True
        with self._lock:
            compiled = self._compiled.get(_asked(parameters))
            return compiled is not None and not compiled.worn

    def compile(self, parameters: SamplingParameters, size: int = 0) -> None:
        """What :meth:`matcher` does where it has none: takes milliseconds, or seconds; nobody else waits for it.

        ``size``: bytes of what is compiled, as far as they are known. What was not asked for for longest gives way.
        """
        if not self._stop_ids:
            raise InvalidRequest(
                f"{parameters.constraint} needs a checkpoint that names the token that ends an answer; this one does "
                "not"
            )
        self.read_vocabulary()
        compiled = self._compile(parameters, size)
        with self._lock:
            self._compiled.pop(_asked(parameters), None)
            self._compiled[_asked(parameters)] = compiled
            total = sum(each.bytes for each in self._compiled.values())
            for asked, each in list(self._compiled.items())[:-1]:
                if total > MOST_COMPILED_BYTES:
                    total -= each.bytes
                    del self._compiled[asked]

    def read_vocabulary(self) -> None:
        """Takes up to three seconds for 150,000 tokens, and no other thread runs meanwhile: best before any request."""
        with self._lock:
            if self._vocabulary is None and self._stop_ids:
                self._spelling = self._spelled()
                self._vocabulary = grammar.tokenizer(self._spelling)
                self._beside = Beside(self._vocabulary)

    def _compile(self, parameters: SamplingParameters, size: int) -> Matcher:
        assert self._vocabulary is not None
        compiled = grammar.compiled(parameters, self._vocabulary)
        matcher = Matcher(compiled, self._spelling, self._mask(self._stop_ids), min(self._stop_ids), self._beside, size)
        if self._tokenizer.strips_space:
            matcher.forbid(self._spaced)
        if matcher.error is not None or not matcher.mask.any():
            reason = matcher.error or "it begins with a space, which this checkpoint's tokenizer takes off an answer"
            raise grammar.refusal(parameters.constraint or "", reason)
        return matcher

    def _spelled(self) -> grammar.Spelling:
        encode = partial(label_token_ids, encode=partial(self._tokenizer.encode, special=False))
        no_text = {*self._stop_ids, *self._tokenizer.special_ids}
        tokens = [b"" if token in no_text else self._tokenizer.token_bytes(token) for token in range(self._vocab_size)]
        self._spaced = self._mask([token for token, spelled in enumerate(tokens) if spelled.startswith(b" ")])
        return grammar.Spelling(tokens, min(self._stop_ids), encode)

    def _mask(self, tokens: Collection[int]) -> np.ndarray:
        allowed = np.zeros(-(-self._vocab_size // 8) * 8, np.uint8)
        allowed[list(tokens)] = 1
        return np.packbits(allowed, bitorder="little")


def _asked(parameters: SamplingParameters) -> tuple[str, object]:
    name = parameters.constraint
    assert name is not None, "nothing is constrained"
    return name, getattr(parameters, name)
