"""Tokens are gathered so that text is made once for several: none late, none lost, none twice."""

from dataclasses import replace

import pytest
from engine_fakes import EOS, ByteTokenizer, make_engine, make_request, run, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.engine.process.messages import End, Progress
from tessera.engine.rendering import HOLD_S, MOST_PARTS_S, Answers, Detokenizer
from tessera.engine.sequence import Report, SamplingParameters
from tessera.errors import InvalidRequest


class Asked:
    """A request of which one token after the other becomes known."""

    def __init__(self, answers, events, stream=True, **sampling):
        self.request = replace(make_request([1], max_tokens=100, **sampling), stream=stream)
        self.count = 0
        answers.add(self.request, events.append)

    def token(self, reason=None):
        self.count += 1
        return Progress([(self.request.number, self.count, None)], self.end(reason).ends if reason else [])

    def end(self, reason):
        return Progress([], [End(self.request.number, reason)])


class Parts:
    """Answers under a clock that stands still; ``take`` gives the events that a step brought."""

    def __init__(self):
        self.now, self.events, self.cancelled = 0.0, [], []
        self.answers = Answers(
            ByteTokenizer(), lambda *cancelled: self.cancelled.append(cancelled), clock=lambda: self.now
        )

    def asked(self, **settings):
        return Asked(self.answers, self.events, **settings)

    def take(self, *steps):
        numbers = [token for step in steps for token in step.tokens]
        self.answers.take(Progress(numbers, [end for step in steps for end in step.ends]))
        events, self.events[:] = list(self.events), []
        return events


@pytest.fixture
def parts():
    return Parts()


def ids(due):
    return [event.token_ids for event in due]


def test_the_first_token_goes_at_once_and_later_ones_together(parts):
    answer = parts.asked()
    assert ids(parts.take(answer.token())) == [[1]]
    for _ in range(30):
        assert parts.take(answer.token()) == []
    parts.now = HOLD_S
    (due,) = parts.take(answer.token())
    assert ids([due]) == [list(range(2, 33))]
    assert due.usage.completion_tokens == 32
    assert parts.answers.wait_s() is None


def test_many_streams_are_held_longer_but_for_their_first_tokens(parts):
    """At 50 steps a second each could send 50 parts."""
    streams = [parts.asked() for _ in range(4 * int(HOLD_S * MOST_PARTS_S))]
    assert ids(parts.take(*[stream.token() for stream in streams])) == [[1]] * len(streams)
    sent = 0
    for _ in range(50):
        sent += len(parts.take(*[stream.token() for stream in streams]))
        parts.now += HOLD_S
    assert 0.75 * MOST_PARTS_S <= sent <= MOST_PARTS_S
    late = parts.asked()
    assert ids(parts.take(late.token()))[-1] == [1]


def test_held_tokens_go_when_their_time_is_up_the_oldest_first(parts):
    slow, fast = parts.asked(), parts.asked()
    parts.take(slow.token(), fast.token())
    parts.take(slow.token())
    parts.now = HOLD_S / 2
    parts.take(fast.token(), slow.token())
    assert parts.answers.wait_s() == pytest.approx(HOLD_S / 2)
    parts.now = HOLD_S
    assert ids(parts.take()) == [[2, 3]]
    due = parts.take(slow.token("length"), fast.end("cancelled"))  # which goes at once, with all that was held
    assert ids(due) == [[4], [2]]
    assert [event.finish_reason for event in due] == ["length", "cancelled"]
    assert parts.answers.wait_s() is None


def test_an_answer_that_is_not_streamed_waits_for_its_end(parts):
    answer = parts.asked(stream=False)
    for _ in range(24):
        assert parts.take(answer.token()) == []
        parts.now += HOLD_S
    assert parts.answers.wait_s() is None
    assert ids(parts.take(answer.token("stop"))) == [list(range(1, 26))]


def test_a_stop_string_is_searched_for_meanwhile(parts):
    """It cancels the request at the engine, whose end brings the times of the last event."""
    answer = parts.asked(stream=False, stop=bytes([3]).decode())
    assert parts.take(answer.token()) == parts.take(answer.token()) == parts.take(answer.token()) == []
    parts.now = HOLD_S
    assert parts.take() == []
    assert parts.cancelled == [(answer.request.number, "stop")]
    end = End(answer.request.number, "stop", cached_tokens=4, scheduled_ns=5, first_token_ns=6, drafted_tokens=(8, 7))
    (event,) = parts.take(answer.token(), Progress([], [end]))
    assert (event.text, event.token_ids, event.finish_reason) == (bytes([1, 2]).decode(), [1, 2, 3], "stop")
    assert (event.cached_tokens, event.scheduled_ns, event.first_token_ns) == (4, 5, 6)
    assert event.drafted_tokens == (8, 7)


def test_an_answer_that_stops_before_an_error_has_none(parts):
    answer = parts.asked(stream=False, stop=bytes([2]).decode())
    failed = Progress([], [End(answer.request.number, "error", "nothing can follow")])
    (event,) = parts.take(answer.token(), answer.token(), answer.token(), failed)
    assert (event.text, event.finish_reason, event.error) == (bytes([1]).decode(), "stop", None)
    (event,) = parts.take(Progress([], [End(parts.asked().request.number, "error", "nothing can follow")]))
    assert (event.finish_reason, event.error) == ("error", "nothing can follow")


def test_requests_are_found_by_their_id_until_they_end(parts):
    first, second = parts.asked(), parts.asked()
    assert parts.answers.numbers_of("r") == [first.request.number, second.request.number]
    parts.take(first.end("cancelled"))
    number, refusal = second.request.number, InvalidRequest("no")
    (event,) = parts.take(Progress.refused(number, refusal))
    assert (event.finish_reason, event.refusal) == ("refused", refusal)
    assert parts.answers.numbers_of("r") == parts.answers.numbers_of() == []
    assert parts.take(Progress.refused(number, refusal)) == []  # once more does no harm


def test_a_failing_listener_silences_nobody_else(parts, caplog):
    def fail(event):
        raise OSError("the client left")

    deaf, other = make_request([1]), parts.asked()
    parts.answers.add(deaf, fail)
    step = Progress([(deaf.number, 65, None), *other.token().tokens])
    assert ids(parts.take(step)) == [[1]]
    assert "the client left" in caplog.text


@pytest.mark.parametrize("kept", [False, True])
def test_the_token_that_ends_an_answer_has_no_logprob_unless_its_text_is_kept(kept):
    engine, runner = make_engine()
    runner.report, runner.script["r"] = Report(-0.5), [104, 105, EOS]
    engine.submit(make_request([1], logprobs=0, include_stop_str_in_output=kept, skip_special_tokens=False))
    events = run(engine)
    entries = [entry["text"] for event in events for entry in event.logprobs or []]
    assert entries == ["h", "i", *["<eos>"] * kept] and text_of(events) == "".join(entries)
    assert events[-1].usage.completion_tokens == 3


def test_every_token_up_to_a_stop_string_has_its_logprob_when_the_answer_ends_with_it(parts):
    """As all accepted tokens of a draft come together, and the token that ends the answer too."""
    request = replace(make_request([1], logprobs=0, stop=["b"]), stream=False)
    parts.answers.add(request, parts.events.append)
    step = [(request.number, token, Report(-0.5)) for token in (*b"abc", EOS)]
    (event,) = parts.take(Progress(step, [End(request.number, "stop")]))
    assert [entry["text"] for entry in event.logprobs] == ["a", "b"]
    assert (event.text, event.token_ids, event.usage.completion_tokens) == ("a", list(b"ab"), 2)


@pytest.mark.parametrize(
    ("stop", "reason", "least"),
    [(None, "length", 0.25), (None, "stop", 0.25), ("b", None, 2.0), ("c", None, 1.0)],
)
def test_the_margin_is_the_least_of_the_answers_tokens_its_end_included(parts, stop, reason, least):
    """And nothing that came behind a stop string. Log probabilities are told only where they were asked for."""
    request = replace(make_request([1], **({"stop": stop} if stop else {})), stream=False, margin=True)
    parts.answers.add(request, parts.events.append)
    reports = [Report(-0.5, (), margin) for margin in (3.0, 2.0, 1.0, 0.25)]
    step = [(request.number, token, report) for token, report in zip(b"abcd", reports)]
    parts.take(Progress(step[:3]))
    (event,) = parts.take(Progress(step[3:], [End(request.number, reason or "length")]))
    assert (event.margin, event.logprobs) == (least, None)
    parts.answers.add(plain := make_request([1]), parts.events.append)
    (event,) = parts.take(Progress([(plain.number, 97, None)], [End(plain.number, "stop")]))
    assert event.margin is None


def deltas(tokens, together=1, **parameters):
    """Each push's text, then the flush's; ends at a stop string as the engine does."""
    detokenizer = Detokenizer(ByteTokenizer(), SamplingParameters.parse(parameters))
    texts, tokens = [], list(tokens)
    for first in range(0, len(tokens), together):
        text, taken = detokenizer.push(tokens[first : first + together])
        texts.append(text)
        assert detokenizer.stopped or taken == len(tokens[first : first + together])
        if detokenizer.stopped:
            break
    return [*texts, detokenizer.flush()], detokenizer.stopped


@settings(max_examples=100)
@given(st.binary(max_size=60))
def test_any_bytes_come_out_once(data):
    assert "".join(deltas(data)[0]) == data.decode("utf-8", errors="replace")


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from("ab€"), max_size=24),
    st.lists(st.sampled_from(["ab", "ab€", "€ab", "aa", "b€ab"]), max_size=3, unique=True),
    st.integers(0, 12),
    st.integers(1, 7),
)
def test_deltas_are_the_answer_up_to_the_first_stop_of_which_any_follows_min_tokens(letters, stops, least, together):
    """vLLM's rule: what is complete within min_tokens does not stop, what ends after them does, wherever it began."""
    answer = "".join(letters).encode()
    texts, stopped = deltas(answer, together, stop=stops, min_tokens=least)
    for end in range(least + 1, len(answer) + 1):
        begun = [end - len(stop.encode()) for stop in stops if answer[:end].endswith(stop.encode())]
        if begun:
            assert stopped and "".join(texts).encode() == answer[: min(begun)]
            return
    assert not stopped and "".join(texts).encode() == answer
