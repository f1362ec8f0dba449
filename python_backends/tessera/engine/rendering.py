"""What steps did to requests, as text and events."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from tessera.engine.detokenizer import Decoder, Detokenizer
from tessera.engine.progress import Progress
from tessera.engine.request import Request, TokenEvent
from tessera.engine.sequence import SampledToken

_LOG = logging.getLogger(__name__)


class Renderer:
    """Turns progress into events, on one thread; exactly one event of a request has a reason, and it is the last.

    ``stop`` is called with a request whose answer is over before the engine knows, because its text met a stop string.
    ``finished`` counts the reasons.
    """

    def __init__(self, tokenizer: Decoder, stop: Callable[[Request], None], finished: Counter[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._finished = finished
        # From a request's first progress to its last; None once its last event is out.
        self._texts: dict[Request, Detokenizer | None] = {}

    def render(self, steps: list[Progress]) -> list[TokenEvent]:
        """The events of what an engine's advance(), fail_all() or close() returned, in their order."""
        events = []
        for progress in steps:
            request = progress.request
            if request not in self._texts:
                self._texts[request] = Detokenizer(self._tokenizer, request.sampling)
            detokenizer = self._texts[request]
            if detokenizer is not None:
                event = self._event_of(progress, detokenizer)
                events.append(event)
                if event.finish_reason is not None:
                    self._texts[request] = None
                    self._finished[event.finish_reason] += 1
                    if progress.reason is None:
                        self._stop(request)
            if progress.reason is not None:
                del self._texts[request]
        return events

    def _event_of(self, progress: Progress, detokenizer: Detokenizer) -> TokenEvent:
        try:
            return self._event(progress, detokenizer)
        except Exception:  # one answer that has no text must not silence the others
            _LOG.exception("request %r has no text", progress.request.request_id)
            failed = progress._replace(
                tokens=(), reason="error", error="no text could be made; the server's log says why"
            )
            return self._event(failed, Detokenizer(self._tokenizer, progress.request.sampling))

    def _event(self, progress: Progress, detokenizer: Detokenizer) -> TokenEvent:
        request, reason, usage, tokens = progress.request, progress.reason, progress.usage, progress.tokens
        ended_by_token = reason == "stop" and not request.sampling.include_stop_str_in_output
        text, count = detokenizer.push([token.token_id for token in (tokens[:-1] if ended_by_token else tokens)])
        if detokenizer.stopped:
            # What was sampled after the stop string, while the text was not known yet, does not count.
            usage = usage._replace(completion_tokens=usage.completion_tokens - len(tokens) + count)
            reason, tokens = "stop", tokens[:count]
        if reason is not None:
            text += detokenizer.flush()
            if detokenizer.stopped and reason == "length":
                reason = "stop"
        if progress.labels is not None:
            text = progress.labels.best
        logprobs = [_logprob_entry(detokenizer, token) for token in tokens if token.logprob is not None]
        return TokenEvent(
            request,
            text,
            [token.token_id for token in tokens],
            logprobs or None,
            reason,
            usage,
            progress.cached_tokens,
            progress.scheduled_ns,
            progress.first_token_ns,
            monotonic_ns(),
            progress.error,
            progress.labels and progress.labels.scores,
        )


def _logprob_entry(detokenizer: Detokenizer, token: SampledToken) -> dict[str, Any]:
    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        return {"token_id": token_id, "text": detokenizer.token_text(token_id), "logprob": logprob}

    return entry(token.token_id, token.logprob) | {"top": [entry(*pair) for pair in token.top]}
