"""Order, budget, preemption and starvation."""

from __future__ import annotations

import pytest
from engine_fakes import (
    contents_of,
    ends,
    expected_answer,
    make_engine,
    make_request,
    run,
    tokens_of,
)

from tessera.engine.scheduling import policies


def spans_of(runner, step):
    return [(sequence.request.request_id, start, end) for sequence, start, end, _ in runner.batches[step]]


def test_decodes_run_in_every_step_beside_long_prompts():
    engine, runner = make_engine(max_batched_tokens=10, num_blocks=200)
    engine.submit(make_request([5], "decode", max_tokens=30, ignore_eos=True))
    for number in range(6):
        engine.submit(make_request([number] * 60, f"long {number}", max_tokens=1))
    run(engine)
    steps = [step for step in range(len(runner.batches)) if "decode" in {s[0] for s in spans_of(runner, step)}]
    assert steps == list(range(30))


def test_head_of_the_queue_is_not_overtaken():
    engine, runner = make_engine(num_blocks=12, prefix_cache="off")
    engine.submit(make_request([1] * 20, "running", max_tokens=8, ignore_eos=True))
    engine.step()
    engine.submit(make_request([2] * 36, "large", max_tokens=1))
    engine.submit(make_request([3], "small", max_tokens=1))
    run(engine)
    first_run = {}
    for step, batch in enumerate(runner.batches):
        for sequence, *_ in batch:
            first_run.setdefault(sequence.request.request_id, step)
    assert first_run["large"] <= first_run["small"]


def test_a_preempted_sequence_comes_before_those_that_wait():
    engine, runner = make_engine(num_blocks=9, prefix_cache="off")
    for name in ("first", "second"):
        engine.submit(make_request([1] * 12, name, max_tokens=12, ignore_eos=True))
    engine.step()
    engine.submit(make_request([2] * 12, "late", max_tokens=1))
    run(engine)
    assert engine.metrics.preemptions == 1
    starts = [sequence.request.request_id for batch in runner.batches for sequence, start, *_ in batch if not start]
    assert starts == ["first", "second", "second", "late"]


def begun(runner):
    """Names in the order in which their prompts were begun."""
    return [sequence.request.request_id for batch in runner.batches for sequence, start, *_ in batch if not start]


def test_those_that_wait_go_by_priority_then_by_arrival():
    engine, runner = make_engine(max_sequences=1)
    engine.submit(make_request([1], "running", max_tokens=5, ignore_eos=True, priority=-9))
    engine.step()
    for name, priority in (("a", 0), ("b", 3), ("c", -1), ("d", 0), ("e", -1), ("f", 3)):
        engine.submit(make_request([1], name, max_tokens=1, priority=priority))
        engine.step()
    run(engine)
    assert begun(runner) == ["running", "c", "e", "a", "d", "b", "f"]


@pytest.mark.parametrize("short_of", [{"max_sequences": 4}, {"num_blocks": 30}])
def test_in_a_full_house_the_last_of_a_worse_priority_gives_way(short_of):
    engine, runner = make_engine(**({"num_blocks": 200, "prefix_cache": "off", "max_sequences": 8} | short_of))
    job = [make_request([n] * 12, f"{n}", max_tokens=16, ignore_eos=True, priority=10) for n in range(8)]
    for request in job:
        engine.submit(request)
    events = engine.step()
    assert len(engine.scheduler.running) < 8
    engine.submit(make_request([9] * 30, "question", max_tokens=2))
    events += engine.step()
    engine.scheduler.check()
    assert "question" in {name for name, *_ in spans_of(runner, -1)}
    assert engine.metrics.preemptions > 0
    events += run(engine)
    for request in job:
        assert tokens_of(events, request.request_id) == expected_answer(contents_of(request), 16, ())


def test_a_question_passes_a_long_prompt_that_is_half_read():
    engine, runner = make_engine(num_blocks=400, max_batched_tokens=64, max_sequences=4)
    engine.submit(make_request(list(range(180)), "page", max_tokens=1, priority=10))
    engine.submit(make_request(list(range(50, 230)), "next page", max_tokens=1, priority=10))
    engine.step()
    engine.submit(make_request([7] * 50, "question", max_tokens=1))
    events = engine.step()
    engine.scheduler.check()
    assert spans_of(runner, 1) == [("question", 0, 50)]
    events += run(engine)
    assert spans_of(runner, 2)[0] == ("page", 64, 128)  # from where it was
    assert ends(events) == dict.fromkeys(["question", "page", "next page"], "length")


@pytest.mark.parametrize(("too_much", "behind_prompts"), [(0, 1), (1, 0)])
def test_no_step_is_launched_behind_one_that_takes_long(too_much, behind_prompts):
    engine, runner = make_engine(
        num_blocks=600, max_model_len=2100, max_batched_tokens=512, max_sequences=4, async_launch=True
    )
    runner.device_ns = lambda number, tokens: (policies.LONG_NS // 512 + too_much) * tokens
    under_way, launch = [], runner.launch
    runner.launch = lambda batch: (under_way.append(len(engine._under_way)), launch(batch))[1]
    engine.submit(make_request([7] * 2048, max_tokens=4, ignore_eos=True))
    run(engine)
    assert [sum(end - start for _, start, end, _ in batch) for batch in runner.batches] == [512] * 4 + [1] * 3
    # How long the first step takes is not known yet when the second is planned; and a decode step is short.
    assert under_way == [0, 1] + [behind_prompts] * 3 + [1, 1]
