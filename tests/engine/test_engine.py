"""Ends, deltas and refusals, on a runner without a model."""

from dataclasses import replace

import pytest
from engine_fakes import EOS, ends, make_engine, make_request, run, text_of, tokens_of

from tessera.engine.sequence import Report
from tessera.errors import InvalidRequest, Unavailable


def answer(script, **sampling):
    """Events of one request whose answer is ``script``, repeated."""
    engine, runner = make_engine()
    runner.script["r"] = list(script)
    engine.submit(make_request([1, 2, 3], **sampling))
    return run(engine)


SHOWN = dict(skip_special_tokens=False)


@pytest.mark.parametrize(
    ("script", "asked", "text", "reason", "completion"),
    [
        (b"abcdef", dict(max_tokens=4), "abcd", "length", 4),
        ([*b"ab", EOS], dict(max_tokens=9, **SHOWN), "ab", "stop", 3),
        ([*b"ab", EOS], dict(max_tokens=9, include_stop_str_in_output=True, **SHOWN), "ab<eos>", "stop", 3),
        ([*b"ab", EOS], dict(max_tokens=5, ignore_eos=True, **SHOWN), "ab<eos>ab", "length", 5),
        (b"yes. no", dict(max_tokens=50, stop=". "), "yes", "stop", 5),
        (b"abc", dict(max_tokens=3, stop="c"), "ab", "stop", 3),
        (b"abcd", dict(max_tokens=3, stop="cdx"), "abc", "length", 3),  # what was held comes with the end
        ("a€".encode()[:3], dict(max_tokens=3), "a\ufffd", "length", 3),
        (b"say STOP now", dict(max_tokens=12, min_tokens=6, stop="STOP"), "say ", "stop", 8),
        (b"STOP", dict(max_tokens=4, min_tokens=4, stop="STOP"), "STOP", "length", 4),
        (b"b!\xe2", dict(max_tokens=3, stop="!\ufffd"), "b", "stop", 3),
        (b"b!b", dict(max_tokens=3, stop="!\ufffd"), "b!b", "length", 3),
    ],
)
def test_how_an_answer_ends(script, asked, text, reason, completion):
    events = answer(script, **asked)
    assert (text_of(events), ends(events)) == (text, {"r": reason})
    assert events[-1].usage == (3, completion, 0) and tokens_of(events) == (list(script) * 2)[:completion]


@pytest.mark.parametrize(
    ("num_blocks", "room", "words"),
    [(100, 200, "exceed the context of 200"), (40, 160, "can never fit the cache of 160")],
)
def test_without_max_tokens_an_answer_is_as_long_as_fits(num_blocks, room, words):
    engine, runner = make_engine(num_blocks=num_blocks, block_size=4, max_model_len=200)
    runner.script["r"] = list(b"abc")
    engine.submit(make_request([1, 2, 3]))
    events = run(engine)
    assert ends(events) == {"r": "length"} and events[-1].usage == (3, room - 3, 0)
    assert text_of(events) == ("abc" * room)[: room - 3]
    assert make_request([1], min_tokens=9).sampling.min_tokens == 9  # no limit to exceed
    for sampling, prompt in (({}, room), ({"min_tokens": 9}, room - 8)):
        with pytest.raises(InvalidRequest, match=f"{prompt} prompt tokens and [19] for the answer {words}"):
            engine.submit(make_request([1] * prompt, **sampling))


def test_too_many_in_flight():
    engine, _ = make_engine(max_in_flight=3, max_sequences=1)
    for _ in range(3):
        engine.submit(make_request([1], max_tokens=2, ignore_eos=True))
    with pytest.raises(Unavailable, match="3 requests are in flight, 3 of them queued"):
        engine.submit(make_request([1]))
    engine.step()
    with pytest.raises(Unavailable, match="3 requests are in flight, 2 of them queued"):
        engine.submit(make_request([1]))
    run(engine)
    engine.submit(make_request([1]))


def test_failing_ends_every_request_and_the_engine_goes_on():
    engine, _ = make_engine(max_sequences=2)
    for number in range(4):
        engine.submit(make_request([number], f"{number}", max_tokens=5, ignore_eos=True))
    engine.step()
    late = engine.submit(make_request([9], "late", max_tokens=1))
    cancelled = engine.submit(make_request([9], "cancelled", max_tokens=1))
    engine.cancel(cancelled.request.number)
    events = engine.text_of(engine.fail_all("the card melted"))
    assert ends(events) == {f"{number}": "error" for number in range(4)}
    assert {event.error for event in events} == {"the card melted"}
    engine.scheduler.check()
    assert engine.scheduler.blocks.used == 0
    assert ends(run(engine)) == {"late": "length", "cancelled": "cancelled"} and late.finished


def test_metrics():
    engine, _ = make_engine()
    for _ in range(2):
        engine.submit(make_request(list(range(10)), max_tokens=3, ignore_eos=True))
        run(engine)
    numbers = engine.metrics.snapshot()
    assert numbers["requests"] == numbers["finished_length"] == 2
    assert (numbers["prompt_tokens"], numbers["cached_tokens"], numbers["generated_tokens"]) == (20, 8, 6)
    assert numbers["computed_tokens"] == 20 - 8 + 4
    assert (numbers["prompts"], numbers["prefill_steps"], numbers["steps"]) == (2, 2, 6)
    assert (numbers["requests_running"], numbers["requests_waiting"], numbers["kv_blocks_used"]) == (0, 0, 0)


def test_a_deadline_ends_a_running_and_a_waiting_request_and_nobody_else(monkeypatch):
    clock = [1_000]
    monkeypatch.setattr("tessera.engine.engine.time.monotonic_ns", lambda: clock[0])
    engine, runner = make_engine(max_sequences=2)
    for name, deadline in (("first", 5_000), ("free", None), ("queued", 5_000)):
        runner.script[name] = list(b"abc")
        request = make_request([1, 2, 3], name, max_tokens=40)
        engine.submit(replace(request, deadline_ns=deadline))
    events = engine.step() + engine.step()
    assert ends(events) == {}
    clock[0] = 5_000
    late = engine.step()
    assert ends(late) == {"first": "deadline", "queued": "deadline"}
    tokens = {e.request.request_id: e.usage.completion_tokens for e in late if e.finish_reason}
    assert tokens["first"] > 0 == tokens["queued"]
    assert ends(run(engine)) == {"free": "length"}
    assert engine.scheduler.blocks.used == 0


def test_an_answer_without_text_ends_alone_and_silences_nobody(monkeypatch, caplog):
    engine, runner = make_engine()
    runner.script |= {"broken": b"ax", "fine": b"ab"}
    for name in ("broken", "fine"):
        engine.submit(make_request([1], name, max_tokens=2, logprobs=0, ignore_eos=True))
    works = engine.answers._logprob

    def breaks(token, logprob):
        if token == ord("x"):
            raise ValueError("no text for this")
        return works(token, logprob)

    monkeypatch.setattr(engine.answers, "_logprob", breaks)
    runner.report = Report(-0.5)
    assert ends(run(engine)) == {"broken": "error", "fine": "length"}
    assert "no text for this" in caplog.text


def test_labels_beyond_the_model_s_vocabulary_are_refused():
    engine, _ = make_engine()
    engine._tokenizer.encode = lambda text, special: [*text.encode(), 1 << 20]
    with pytest.raises(InvalidRequest, match="the model knows 0..299"):
        engine.submit(make_request([1], choices=["a", "b"]))
