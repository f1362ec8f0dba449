"""Tokens become text here, several at a time, and text becomes events.

Token ids -> text, piece by piece: whole characters only, and nothing that may become a stop string.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tessera.engine.process.messages import End, Progress
from tessera.engine.sequence import MOST_MARGIN, Report, Request, SamplingParameters, TokenEvent, Usage
from tessera.errors import TesseraError

if TYPE_CHECKING:
    from tessera.prompt.tokenizer import Tokenizer


_LOG = logging.getLogger(__name__)
HOLD_S = 0.02
MOST_PARTS_S = 1000  # of all streams together: taking requests waits for each (docs/gpu.md)


@dataclass
class Answer:
    """One request's answer as far as it is known. Of ``tokens``, all but the ``held`` are in the text."""

    request: Request
    deliver: Callable[[TokenEvent], None]
    detokenizer: Detokenizer
    tokens: int = 0
    held: list[int] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)  # of the held ones, if the request asked for any
    margin: float = MOST_MARGIN  # the least of the tokens so far, if the request asked for it
    last: TokenEvent | None = None  # its text is over, though the engine may not know yet
    # Not delivered yet:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def watched(self) -> bool:
        """Whether somebody looks at it before its end: a client, or the search for a stop string."""
        return self.request.stream or bool(self.request.sampling.stop)


class Answers:
    """Gathers the tokens of requests and delivers events; the last one of each has the reason.

    A streamed answer's first token goes at once, later ones after ``hold_s``, or with the last; they are held for
    longer where all streams together would get more than ``MOST_PARTS_S`` events a second. Any other answer is one
    event. ``cancel`` is called with number and reason where an answer is over before the engine knows, because its text
    met a stop string. :meth:`add` and :meth:`numbers_of` may be called from any thread, the rest from one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        cancel: Callable[[int, str], None],
        hold_s: float = HOLD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._cancel = cancel
        self._hold_s = hold_s
        self._clock = clock
        self._answers: dict[int, Answer] = {}  # until the engine has ended them
        self._begun: set[int] = set()  # of them those that are watched and have a token
        self._since: dict[int, float] = {}  # of those with tokens that may not wait for the end, the longest held first

    def add(self, request: Request, deliver: Callable[[TokenEvent], None]) -> None:
        """Of this request progress may come; ``deliver`` gets its events and must be quick."""
        self._answers[request.number] = Answer(request, deliver, Detokenizer(self._tokenizer, request.sampling))

    def numbers_of(self, name: str | None = None) -> list[int]:
        """The requests under way that go by this id or name this lease; all, without one."""
        return [
            number
            for number, answer in list(self._answers.items())
            if name is None or name in (answer.request.request_id, *answer.request.lease.split())
        ]

    def take(self, progress: Progress) -> None:
        """Takes what a step did and delivers what is due."""
        ending = {end.number for end in progress.ends}  # their last token may be no text: the end says so
        now = self._clock()
        for number, token, report in progress.tokens:
            answer = self._answers[number]
            answer.tokens += 1
            answer.held.append(token)
            if report is not None:
                answer.reports.append(report)
            if not answer.watched or number in ending:
                continue
            if answer.tokens == 1:
                self._begun.add(number)
                self._advance(answer)
            elif answer.last is None:
                self._since.setdefault(number, now)
        for end in progress.ends:
            if end.refusal is not None:
                self._refuse(end.number, end.refusal)
                continue
            answer = self._answers.pop(end.number)
            self._begun.discard(end.number)
            if answer.last is None:
                self._advance(answer, end)
            else:  # only the end tells when it was scheduled and had its first token
                told = ("cached_tokens", "scheduled_ns", "first_token_ns", "drafted_tokens")
                self._deliver(answer, replace(answer.last, **{name: getattr(end, name) for name in told}))
        self.deliver_due()

    def deliver_due(self) -> None:
        """Delivers what was held long enough."""
        while self.wait_s() == 0.0:
            self._advance(self._answers[next(iter(self._since))])

    def wait_s(self) -> float | None:
        """Until when something held is due; None if nothing is."""
        if not self._since:
            return None
        hold_s = max(self._hold_s, len(self._begun) / MOST_PARTS_S)
        return max(0.0, next(iter(self._since.values())) + hold_s - self._clock())

    def _refuse(self, number: int, refusal: TesseraError) -> None:
        """Of a malformed request nothing is read; where the engine is gone, its end may have come already."""
        self._since.pop(number, None)
        self._begun.discard(number)
        if (answer := self._answers.pop(number, None)) is not None:
            unused = Usage(0, 0, 0), 0, 0, 0, time.monotonic_ns()
            self._deliver(answer, TokenEvent(answer.request, "", [], None, "refused", *unused, refusal=refusal))

    def _advance(self, answer: Answer, end: End | None = None) -> None:
        number = answer.request.number
        self._since.pop(number, None)
        try:
            event = self._event(answer, end)
        except Exception:  # one answer that has no text must not silence the others
            _LOG.exception("request %r has no text", answer.request.request_id)
            answer.text, answer.token_ids, answer.logprobs, answer.held, answer.reports = "", [], [], [], []
            failed = End(number, "error", "no text could be made; the server's log says why")
            event = self._flush(answer, "error", failed, answer.tokens)
        if event is None:
            return
        if event.finish_reason is not None and end is None:  # it goes out with the engine's end, a step later
            answer.last = event
            self._cancel(number, event.finish_reason)
        else:
            self._deliver(answer, event)

    def _deliver(self, answer: Answer, event: TokenEvent) -> None:
        try:
            answer.deliver(event)
        except Exception:
            _LOG.exception("an event of request %r could not be delivered", answer.request.request_id)

    def _event(self, answer: Answer, end: End | None) -> TokenEvent | None:
        """Makes text of what was held; None where the event would tell nobody anything yet."""
        tokens, answer.held = answer.held, []
        reports, answer.reports = answer.reports, []
        detokenizer, completion = answer.detokenizer, answer.tokens
        reason = None if end is None else end.reason
        ended_by_token = reason == "stop" and not answer.request.sampling.include_stop_str_in_output
        text, count = detokenizer.push(tokens[:-1] if ended_by_token else tokens)
        if detokenizer.stopped:
            # What was sampled after the stop string, while the text was not known yet, does not count.
            completion += count - len(tokens)
            reason, tokens, ended_by_token = "stop", tokens[:count], False
        if reason is not None:
            text += detokenizer.flush()
            if detokenizer.stopped and reason == "length":
                reason = "stop"
        if end is not None and end.labels is not None:
            text, completion = end.labels.best, len(end.labels.tokens)
        answer.text += text
        answer.token_ids += tokens
        spoken = tokens[:-1] if ended_by_token else tokens
        if answer.request.margin:
            answer.margin = min([answer.margin, *(report.margin for report in reports[: len(tokens)])])
        for token, report in zip(spoken, reports if answer.request.sampling.logprobs is not None else ()):
            top = [self._logprob(*pair) for pair in report.top]
            answer.logprobs.append(self._logprob(token, report.logprob) | {"top": top})
        if reason is None and not answer.request.stream:
            return None
        return self._flush(answer, reason, end, completion)

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return {"token_id": token, "text": text, "logprob": logprob}

    def _flush(self, answer: Answer, reason: str | None, end: End | None, completion: int) -> TokenEvent:
        request, end = answer.request, end or End(answer.request.number, "")
        event = TokenEvent(
            request,
            answer.text,
            answer.token_ids,
            answer.logprobs or None,
            reason,
            Usage(len(request.input_ids), completion, request.image_tokens),
            end.cached_tokens,
            end.scheduled_ns,
            end.first_token_ns,
            time.monotonic_ns(),
            end.error if reason == "error" else None,  # it may have stopped before that
            end.labels and end.labels.scores,
            drafted_tokens=end.drafted_tokens,
            margin=end.labels.margin if end.labels else answer.margin if request.margin else None,
        )
        answer.text, answer.token_ids, answer.logprobs = "", [], []
        return event


class Detokenizer:
    """The text of one answer. All its deltas together are the decoded answer, cut at a stop string."""

    def __init__(self, tokenizer: Tokenizer, parameters: SamplingParameters) -> None:
        self.stopped = False
        self._parameters = parameters
        self._longest_stop = max(map(len, parameters.stop), default=0)
        self._stream = tokenizer.stream(parameters.skip_special_tokens)
        self._tokens = 0
        self._held = ""
        self._exempt = 0  # characters of it that min_tokens covers

    def push(self, tokens: SequenceType[int]) -> tuple[str, int]:
        """Takes the next tokens; returns the text that is certain now, and how many tokens were taken.

        Those after the one that completes a stop string are not: ``stopped`` is then set.
        """
        if not self._parameters.stop:
            return self._stream.push(tokens), len(tokens)
        text = ""
        for count, token in enumerate(tokens, 1):
            self._tokens += 1
            text += self._release(self._stream.push([token]))
            if self.stopped:
                return text, count
        return text, len(tokens)

    def flush(self) -> str:
        """The answer has ended: whatever was held back."""
        if self.stopped:
            return ""
        text = self._release(self._stream.end())
        held, self._held = self._held, ""
        return text + held

    def _release(self, fresh: str) -> str:
        if not self._parameters.stop:
            return fresh
        text = self._held + fresh
        if self._tokens <= self._parameters.min_tokens:
            self._exempt = len(text)
        # As in vLLM: a stop string counts if any of it follows the first min_tokens tokens.
        found = [
            (at, stop)
            for stop in self._parameters.stop
            if (at := text.find(stop, max(0, self._exempt - len(stop) + 1))) >= 0
        ]
        if found:
            at, stop = min(found)
            self.stopped, self._held = True, ""
            return text[: at + len(stop)] if self._parameters.include_stop_str_in_output else text[:at]
        keep = self._length_of_possible_stop(text)
        shown = len(text) - keep
        self._held, self._exempt = text[shown:], max(0, self._exempt - shown)
        return text[:shown]

    def _length_of_possible_stop(self, text: str) -> int:
        """Characters at the end of ``text`` that begin a stop string."""
        lengths = range(min(len(text), self._longest_stop - 1), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._parameters.stop)), 0)
