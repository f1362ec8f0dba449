"""Order, budget, preemption and starvation; what steps cost."""

from dataclasses import replace

import pytest
from engine_fakes import (
    BookkeepingRunner,
    Guess,
    contents_of,
    draft,
    ends,
    expected_answer,
    make_engine,
    make_request,
    run,
    tiny_engine,
    tiny_model,
    tokens_of,
)

from tessera.engine.scheduling.policies import LONG_NS, CostModel, Load, prompt_tokens


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
    begun = {
        sequence.request.request_id: step
        for step, batch in enumerate(runner.batches)
        for sequence, start, *_ in batch
        if not start
    }
    assert begun["large"] <= begun["small"]


def test_those_that_wait_go_by_priority_then_by_arrival():
    engine, runner = make_engine(max_sequences=1)
    engine.submit(make_request([1], "running", max_tokens=5, ignore_eos=True, priority=-9))
    engine.step()
    for name, priority in (("a", 0), ("b", 3), ("c", -1), ("d", 0), ("e", -1), ("f", 3)):
        engine.submit(make_request([1], name, max_tokens=1, priority=priority))
        engine.step()
    run(engine)
    begun = [sequence.request.request_id for batch in runner.batches for sequence, start, *_ in batch if not start]
    assert begun == ["running", "c", "e", "a", "d", "b", "f"]


def test_who_waited_before_goes_before_those_of_its_priority_that_came_since():
    engine, runner = make_engine(max_sequences=1)
    engine.submit(make_request([1], "running", max_tokens=9, ignore_eos=True, priority=-9))
    engine.step()
    for name, arrival, since, priority in (
        *(("a", 10, 0, 0), ("b", 20, 0, 0), ("job", 5, 0, 3), ("c", 30, 15, 0), ("d", 40, 1, 3), ("e", 50, 35, 0)),
        ("first", 60, 0, -1),
    ):
        request = make_request([1], name, max_tokens=1, priority=priority)
        engine.submit(replace(request, arrival_ns=arrival, since_ns=since))
        engine.step()
    run(engine)
    begun = [sequence.request.request_id for batch in runner.batches for sequence, start, *_ in batch if not start]
    assert begun == ["running", "first", "a", "c", "b", "e", "d", "job"]


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


def test_what_a_step_costs_by_what_steps_took():
    costs = CostModel([(1, 400), (64, 500), (256, 900)])
    assert [costs.step_ns(tokens) for tokens in (0.5, 1, 64, 160, 256, 512)] == [200, 400, 500, 700, 900, 1800]
    held_up = CostModel([(1, 400), (64, 10**9), (256, 900)])
    assert (held_up.step_ns(64), held_up.step_ns(256)) == (900, 900)  # which makes none of more tokens slower
    costs = CostModel([(100, 1000)])
    for ns, expected in [(3000, 1000)] * 7 + [(2000, 2000), (5000, 2000), (1500, 1500)]:
        costs.record(100, ns)
        assert costs.step_ns(100) == expected  # the fastest of the recent ones of about as many tokens
    costs.record(120, 1200)  # 10 a token
    assert costs.step_ns(100) == pytest.approx(1000)


def test_a_few_slow_steps_do_not_make_a_full_one_long_for_good():
    costs = CostModel([(1, 700_000), (1024, 1_500_000)])
    costs.record(4289, 30_000_000)  # beside a forward of the tower
    assert costs.step_ns(8192) > LONG_NS > costs.full_step_ns(8192) == 12_000_000
    load = Load(8192, 256, costs=costs)
    assert prompt_tokens(load) == 8192


@pytest.mark.parametrize(("experts", "chunk"), [(False, 192), (True, 1024)])
def test_beside_long_answers_prompts_are_read_in_chunks_that_are_longer_where_weights_are_experts(
    monkeypatch, experts, chunk
):
    monkeypatch.setattr(BookkeepingRunner, "experts", experts)
    engine, runner = make_engine(num_blocks=1000, max_batched_tokens=8192, max_model_len=4000)
    runner.device_ns = lambda number, tokens: tokens * 10_000  # a full step is long
    engine.submit(make_request([1], "decodes", max_tokens=90, ignore_eos=True))
    for _ in range(20):
        engine.step()
    engine.submit(make_request([number % 300 for number in range(3000)], "reads", max_tokens=50, ignore_eos=True))
    run(engine)
    spans = [spans_of(runner, step) for step in range(len(runner.batches))]
    read = [end - start for step in spans for name, start, end in step if name == "reads" and end <= 3000]
    assert read[:2] == [chunk - 1] * 2 and sum(read) == 3000  # the other decodes in the same steps


@pytest.mark.parametrize(("wrong", "times", "drafted"), [(0, 4, 3), (1, 1, 0)])
def test_where_drafts_are_right_chunks_of_prompts_are_as_many_times_longer(wrong, times, drafted):
    engine, runner = make_engine(num_blocks=1000, max_batched_tokens=8192, max_model_len=4000, drafts=3)
    draft(engine, lambda request: [Guess([7] * 900, wrong)])
    engine.scheduler.load.costs._best_rate = 1e4  # a full step is long
    runner.script["decodes"] = [7]
    engine.submit(make_request([1], "decodes", max_tokens=900, ignore_eos=True))
    for _ in range(90):
        engine.step()
    engine.submit(make_request([number % 300 for number in range(3000)], "reads", max_tokens=1))
    run(engine)
    spans = [spans_of(runner, step) for step in range(len(runner.batches))]
    read = [end - start for step in spans for name, start, end in step if name == "reads"]
    assert read[:2] == [192 * times - 1 - drafted] * 2 and sum(read) == 3000


def test_labels_do_not_shorten_the_chunks_of_prompts():
    """They end without a token: by as few as these a step read nothing of a prompt, and the next one nothing again."""
    load = make_engine(drafts=3)[0].scheduler.load
    for _ in range(40):
        load.record_pace(0, 4)
    assert load.pace == 1
    load.record_pace(8, 4)
    assert 1 < load.pace < 2


@pytest.mark.parametrize(("cache_bytes", "measured"), [(0, [1, 64, 256, 512]), (40_000, [1, 64])])
def test_a_runner_measures_steps_as_far_as_its_cache_holds_them(cache_bytes, measured):
    engine = tiny_engine(tiny_model(), max_model_len=70, kv_cache_bytes=cache_bytes or None)
    engine._runner.time_steps(70, engine._config)
    assert [tokens for tokens, _ in engine._runner.step_times] == [tokens for tokens in measured for _ in range(4)]
    assert all(ns > 0 for _, ns in engine._runner.step_times)
    engine.submit(make_request([1, 2, 3], max_tokens=5, ignore_eos=True))
    assert len(tokens_of(run(engine))) == 5
