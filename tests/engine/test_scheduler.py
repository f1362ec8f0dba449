"""Order, budget, preemption and starvation."""

from __future__ import annotations

from dataclasses import replace

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

from tessera.engine.kv_cache.block_manager import BlockManager
from tessera.engine.scheduling import policies
from tessera.engine.scheduling.policies import Load
from tessera.engine.scheduling.scheduler import Scheduler
from tessera.engine.sequence import Sequence


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


def test_nobody_is_admitted_into_blocks_that_running_sequences_need_next():
    engine, runner = make_engine(num_blocks=10, prefix_cache="off")
    engine.submit(make_request([1] * 32, "running", max_tokens=4, ignore_eos=True))
    engine.submit(make_request([2] * 7, "next", max_tokens=1))
    run(engine)
    assert engine.metrics.preemptions == 0
    assert [len(batch) for batch in runner.batches] == [1, 1, 1, 1, 1]


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


def test_a_preempted_sequence_is_passed_by_a_better_priority_only():
    engine, runner = make_engine(num_blocks=9, prefix_cache="off")
    for name in ("first", "second"):
        engine.submit(make_request([1] * 12, name, max_tokens=12, ignore_eos=True))
    engine.step()
    while not engine.metrics.preemptions:
        engine.step()
    assert [sequence.request.request_id for sequence in engine.scheduler.waiting] == ["second"]
    engine.submit(make_request([2] * 12, "late", max_tokens=1))
    engine.submit(make_request([2] * 12, "urgent", max_tokens=1, priority=-5))
    run(engine)
    assert begun(runner) == ["first", "second", "urgent", "first", "second", "late"]


def a_question_waits(*others, **settings):
    """An engine that has read the prompt of twenty 7s and now answers another, and the names of those that wait,
    which came in this order: (name, prompt, ms after the first, priority)."""
    engine, _ = make_engine(num_blocks=400, **({"max_sequences": 1} | settings))
    engine.submit(make_request([7] * 20, "known", max_tokens=1))
    run(engine)
    engine.submit(make_request([1], "running", max_tokens=9, ignore_eos=True, priority=-9))
    engine.step()
    for name, prompt, ms, priority in others:
        request = make_request(prompt, name, max_tokens=1, priority=priority)
        engine.submit(replace(request, arrival_ns=10**12 + 1_000_000 * ms))
        engine.step()
    return engine, [sequence.request.request_id for sequence in engine.scheduler.waiting]


LONGEST_PASSED_MS = policies.MOST_PASSED_NS // 1_000_000


def test_a_follow_up_passes_what_came_shortly_before_and_is_to_be_read():
    follow, other = [7] * 20 + [8, 9], [7] * 8 + [8] * 12  # of which 20 of 22 are cached, and 8 of 20
    unread = ("other", other, 0, 0), ("new", [5] * 20, 1, 0)
    assert a_question_waits(*unread, ("one", follow, 2, 0), ("two", follow, 3, 0))[1] == ["one", "two", "other", "new"]
    # Nobody is passed for long.
    late = LONGEST_PASSED_MS + 1
    assert a_question_waits(*unread, ("one", follow, late, 0))[1] == ["other", "one", "new"]
    assert a_question_waits(*unread, ("one", follow, late + 1, 0))[1] == ["other", "new", "one"]


@pytest.mark.parametrize(
    ("cached", "unread", "follows"), [(20, 16, True), (20, 17, False), (8, 8, True), (8, 9, False), (0, 1, False)]
)
def test_of_a_follow_up_at_least_half_is_cached_and_little_is_left(cached, unread, follows):
    engine, _ = make_engine(max_sequences=8)  # 16 tokens are little
    engine.submit(make_request([7] * 20, max_tokens=1))
    run(engine)
    sequence = engine._new_sequence(make_request([7] * cached + [8] * unread))
    engine.scheduler.add(sequence)
    assert sequence.follows == follows


def test_a_follow_up_passes_none_that_has_begun():
    engine, _ = make_engine(num_blocks=9)
    for name, token in (("first", 1), ("second", 2)):
        engine.submit(make_request([token] * 12, name, max_tokens=12, ignore_eos=True))
    while not engine.metrics.preemptions:
        engine.step()
    follow_up = engine._new_sequence(make_request([1] * 12 + [3], "follow-up"))
    engine.scheduler.add(follow_up)
    assert follow_up.follows
    assert [sequence.request.request_id for sequence in engine.scheduler.waiting] == ["second", "follow-up"]


def test_a_follow_up_passes_no_better_priority_and_gives_way_to_none():
    engine, waiting = a_question_waits(
        ("question", [5] * 20, 0, -1), ("job", [6] * 20, 1, 1), ("follow-up", [7] * 20, 2, 0), ("other", [4] * 20, 3, 0)
    )
    assert waiting == ["question", "follow-up", "other", "job"]
    assert engine.metrics.preemptions == 0


def test_where_nothing_is_cached_nobody_is_passed():
    _, waiting = a_question_waits(("new", [5] * 20, 0, 0), ("again", [7] * 20, 1, 0), prefix_cache="off")
    assert waiting == ["new", "again"]


@pytest.mark.parametrize(("ns_a_token", "answers", "most"), [(2, 1, 256), (1, 1, 512), (2, 17, 512)])
def test_beside_follow_ups_with_short_answers_long_steps_are_half_as_long(monkeypatch, ns_a_token, answers, most):
    monkeypatch.setattr(policies, "LEAST_CHUNK", 10_000)  # those cut steps by a rule of their own
    engine, runner = make_engine(num_blocks=900, max_model_len=1000, max_batched_tokens=512, max_sequences=8)
    runner.device_ns = lambda number, tokens: policies.LONG_NS // 512 * ns_a_token * tokens
    for number in range(20):
        engine.submit(make_request([100 + number] * 400, max_tokens=answers, ignore_eos=True))
    run(engine)
    begun = len(runner.batches)
    engine.submit(make_request([5] * 900, "new", max_tokens=1))
    engine.submit(make_request([119] * 400 + [1], "follow-up", max_tokens=answers, ignore_eos=True))
    engine.step()
    run(engine)
    steps = [sum(end - start for _, start, end, _ in batch) for batch in runner.batches[begun:]]
    assert steps[0] == most and ("follow-up", 400, 401) in spans_of(runner, begun)
    # So they are while one is answered.
    begun = len(runner.batches)
    engine.submit(make_request([119] * 400 + [2], "follow-up", max_tokens=answers + 1, ignore_eos=True))
    engine.step()
    engine.submit(make_request([8] * 900, "new", max_tokens=1))
    engine.step()
    assert sum(end - start for _, start, end in spans_of(runner, begun + 1)) == most
    run(engine)
    # Alone as much as fits.
    begun = len(runner.batches)
    engine.submit(make_request([6] * 900, max_tokens=1))
    run(engine)
    assert sum(end - start for _, start, end, _ in runner.batches[begun]) == 512


def long_steps(monkeypatch, ns_a_token=2, answers=1, before=(), **config):
    """An engine in which steps of 512 tokens take long, or not, after N answers of M tokens and after one
    of each of the priorities ``before``."""
    monkeypatch.setattr(policies, "LEAST_CHUNK", 10_000)  # those cut steps by a rule of their own
    sizes = {"num_blocks": 4000, "max_model_len": 1000, "max_batched_tokens": 512, "max_sequences": 40}
    engine, runner = make_engine(**sizes | config, prefix_cache="off")
    runner.device_ns = lambda number, tokens: policies.LONG_NS // 512 * ns_a_token * tokens
    for number in range(20):
        engine.submit(make_request([number] * 400, max_tokens=answers, ignore_eos=True))
    for priority in before:
        engine.submit(make_request([1], max_tokens=1, priority=priority))
    run(engine)
    return engine, runner


def tokens_of_step(runner, number):
    return sum(end - start for _, start, end, _ in runner.batches[number])


EVEN = 320  # 23/32 of 512, in whole tiles


@pytest.mark.parametrize(
    ("given", "prompt", "priority", "most"),
    [
        pytest.param({}, 24, 0, EVEN, id="many"),
        pytest.param({}, 34, 0, EVEN, id="16 begin"),
        pytest.param({}, 35, 0, 512, id="15 begin"),
        pytest.param({"ns_a_token": 1}, 24, 0, 512, id="short full steps"),
        pytest.param({"answers": 17}, 24, 0, 512, id="long answers"),
        pytest.param({}, 24, 1, 512, id="of a job beside questions"),
        pytest.param({"before": [1]}, 24, 0, EVEN, id="of questions after a job"),
        pytest.param({"max_sequences": 15}, 34, 0, 510, id="15 run at most"),
    ],
)
def test_long_steps_that_many_prompts_with_short_answers_share_are_shorter(monkeypatch, given, prompt, priority, most):
    engine, runner = long_steps(monkeypatch, **given)
    begun = len(runner.batches)
    for number in range(32):
        answer = given.get("answers", 1)
        engine.submit(make_request([number] * prompt, max_tokens=answer, ignore_eos=True, priority=priority))
    run(engine)
    assert tokens_of_step(runner, begun) == most


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


def steps_of_a_job(beside=None, tokens=1, before=None):
    """Tokens of each step of four prompts of 40 at priority 10, and how many steps were launched behind one under way.
    ``beside``: the priority of a question that comes with them; ``before``: of one that was answered already. None
    waits for the rest of a burst: all came long ago."""

    def submit(ids, **sampling):
        engine.submit(replace(make_request(ids, **sampling), arrival_ns=0))

    engine, runner = make_engine(num_blocks=400, max_batched_tokens=64, max_sequences=6, async_launch=True)
    if before is not None:
        submit([1], max_tokens=1, priority=before)
        run(engine)
    begun, ahead = len(runner.batches), 0
    for number in range(4):
        submit([2 + number] * 40, max_tokens=1, priority=10)
    if beside is not None:
        submit([9] * 4, max_tokens=tokens, ignore_eos=True, priority=beside)
    while engine.has_work():
        launched = len(runner.batches)
        behind_one = bool(engine._under_way) and not engine.scheduler.must_finish_before_next(engine._under_way[-1][0])
        engine.step()
        ahead += behind_one and len(runner.batches) > launched
    return [sum(end - start for _, start, end, _ in batch) for batch in runner.batches[begun:]], ahead


def cut(tokens, step):
    """This many tokens in steps of at most that many."""
    return [min(step, tokens - start) for start in range(0, tokens, step)]


def beside_long_answers(decoding, tokens=0):
    """How many tokens a step has that decodes this many sequences and would read this many: the next tile's end or the
    last one's, whichever is nearer."""
    wanted = decoding + max(tokens, policies.LEAST_CHUNK)
    return min(range(0, 10_000, policies.TILE), key=lambda ends: abs(ends - wanted))


def test_beside_questions_no_step_is_launched_behind_one_of_many_tokens():
    alone = steps_of_a_job()
    assert alone == steps_of_a_job(before=10) == steps_of_a_job(before=11)
    assert alone[0] == [64, 64, 32] and alone[1] > 0
    assert steps_of_a_job(before=0) == (alone[0], 0)


def test_the_step_that_reads_a_question_has_few_tokens_of_a_job():
    first, *rest = steps_of_a_job(beside=0, tokens=3)[0]
    assert first == 12  # twice the most sequences
    # And the answer's next tokens.
    assert max(rest) == 64 and sum(rest) == 4 + 160 + 2 - first


def test_beside_an_answer_that_is_read_as_it_comes_steps_are_short():
    engine, runner = make_engine(num_blocks=400, max_batched_tokens=64, max_sequences=4)
    engine.submit(make_request([9] * 4, max_tokens=40, ignore_eos=True))
    for _ in range(20):
        engine.step()
    begun = len(runner.batches)
    engine.submit(make_request([2] * 40, max_tokens=1, priority=10))
    run(engine)
    assert [sum(end - start for _, start, end, _ in batch) for batch in runner.batches[begun : begun + 4]] == [8] * 4


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


def test_nothing_of_a_long_prompt_is_lost_for_a_question():
    """Where nothing read is found again, the prompt is read to its end first."""
    engine, runner = make_engine(num_blocks=400, max_batched_tokens=64, max_sequences=4, prefix_cache="off")
    engine.submit(make_request(list(range(150)), "page", max_tokens=1, priority=10))
    engine.step()
    engine.submit(make_request([7] * 50, "question", max_tokens=1))
    run(engine)
    assert engine.metrics.preemptions == 0
    assert begun(runner) == ["page", "question"]


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


def steps_with_a_prompt(device_ns, tokens=480, said=policies.SHORT_ANSWER + 1, before=10):
    """Tokens of each step of up to 2048 that reads of a prompt of N, beside an answer with N ``said`` and
    after others, which told how long a token takes, all of priority 10; ``before`` is that of the first one."""
    engine, runner = make_engine(
        num_blocks=3000, max_model_len=4000, max_batched_tokens=2048, max_sequences=8, prefix_cache="off"
    )
    runner.device_ns = device_ns
    for number in range(16):
        priority = 10 if number else before
        engine.submit(make_request([number] * 300, max_tokens=17, ignore_eos=True, priority=priority))
    run(engine)
    engine.submit(make_request([1] * 10, max_tokens=1000, ignore_eos=True, priority=10))
    for _ in range(said):
        engine.step()
    begun = len(runner.batches)
    engine.submit(make_request([2] * tokens, "prompt", max_tokens=1, priority=10))
    while "prompt" not in ends(engine.step()):
        engine.scheduler.check()
    return [sum(end - start for _, start, end, _ in batch) for batch in runner.batches[begun:]]


LONG_FULL_STEP = 2 * policies.LONG_NS // 2048  # ns a token, where a step may have 2048 tokens


def a_token_takes(ns):
    return lambda number, tokens: ns * tokens


def test_beside_long_answers_steps_with_prompts_are_short_where_full_ones_are_long():
    steps = steps_with_a_prompt(a_token_takes(LONG_FULL_STEP))
    assert steps == [1 + tokens for tokens in cut(480, beside_long_answers(1) - 1)]  # 1 is the answer's
    assert steps == steps_with_a_prompt(a_token_takes(LONG_FULL_STEP), before=0)  # nor longer beside questions


def test_beside_long_answers_a_step_with_prompts_may_take_two_thirds_longer():
    steps = steps_with_a_prompt(lambda number, tokens: (600 + tokens) * LONG_FULL_STEP, 800)
    assert steps == [384, 384, 1 + 800 - 2 * 383]


def test_beside_long_answers_the_more_is_unread_the_longer_a_step_is(monkeypatch):
    monkeypatch.setattr(policies, "LEAST_CHUNK", 32)
    steps, left = steps_with_a_prompt(a_token_takes(LONG_FULL_STEP), 2000), 2000
    for step in steps:
        assert step - 1 == min(left, beside_long_answers(1, left // policies.LEAST_CHUNK_PART) - 1)
        left -= step - 1
    assert left == 0 and steps[0] > 2000 // policies.LEAST_CHUNK_PART


def test_beside_long_answers_what_could_not_begin_makes_no_step_longer(monkeypatch):
    engine, runner = make_engine(num_blocks=9000, max_model_len=2000, max_batched_tokens=2048, max_sequences=4)
    monkeypatch.setattr(policies, "SHORT_ANSWER", 0)
    monkeypatch.setattr(engine.scheduler.load, "is_long", lambda tokens: tokens == 2048)
    for number in range(3):
        engine.submit(make_request([number], max_tokens=100, ignore_eos=True))
    engine.step()
    for number in range(40):  # 16,000 tokens, of which one prompt's could be read now
        engine.submit(make_request([number] * 400, max_tokens=100, ignore_eos=True))
    engine.step()
    assert sum(end - start for _, start, end, _ in runner.batches[-1]) == beside_long_answers(3)


def test_steps_that_somebody_waits_for_are_no_longer_than_others(monkeypatch):
    engine, _ = make_engine(num_blocks=600, max_model_len=1100, max_batched_tokens=1024, max_sequences=400)
    load = engine.scheduler.load
    load.record_arrival(10, 0)
    load.record_arrival(0, 1)
    load.waiting.append(Sequence(make_request([1], max_tokens=1)))
    monkeypatch.setattr(policies, "prompt_tokens", lambda load: 193)
    budget = policies.StepBudget.of(load)
    assert budget.urgent == 0 and budget.tokens(10) == budget.tokens(0) == 193


@pytest.mark.parametrize(
    ("device_ns", "said"),
    [
        (a_token_takes(LONG_FULL_STEP), policies.SHORT_ANSWER),
        (a_token_takes(policies.LONG_NS // 2048), policies.SHORT_ANSWER + 1),
        (lambda number, tokens: policies.LONG_NS // 2, policies.SHORT_ANSWER + 1),
        (lambda number, tokens: 0 if number else 10**11, policies.SHORT_ANSWER + 1),
    ],
    ids=["short answers", "short full steps", "steps of few tokens that take as long", "one that compiled"],
)
def test_prompts_are_not_cut_where_answers_or_full_steps_are_short(device_ns, said):
    assert steps_with_a_prompt(device_ns, 2000, said) == [2001]


@pytest.mark.parametrize(
    ("said", "asked", "short"),
    [
        pytest.param([], [], True, id="nobody"),
        pytest.param([17, 17], [], False, id="what was said"),
        pytest.param([17, 16], [], False, id="as many of each"),
        pytest.param([17, 16], [8], True, id="one that waits and was asked for little"),
        pytest.param([17, 16], [300], False, id="others were long where as much was asked for"),
        pytest.param([17, 16], [3000], True, id="others were not where more was asked for"),
    ],
)
def test_what_runs_and_waits_says_whether_answers_are_short(said, asked, short):
    """Whatever others with other wishes did just before."""
    load = Load(20, 4)
    for tokens, most in [(400, 400)] * 20 + [(4, 4000)] * 20:
        sequence = Sequence(make_request([1], max_tokens=most))
        sequence.outputs = [7] * tokens
        load.record_answer(sequence)
    for queue, known, most in ((load.running, said, 1000), (load.waiting, [0] * len(asked), asked)):
        for number, tokens in enumerate(known):
            queue.append(Sequence(make_request([1], max_tokens=most if isinstance(most, int) else most[number])))
            queue[-1].outputs = [7] * tokens
    assert load.answers_are_short == short


class Gathering:
    """A scheduler that gathers bursts, and a clock; requests arrive at its times, in milliseconds."""

    def __init__(self, monkeypatch, max_sequences=32):
        self.now_ms = 0
        monkeypatch.setattr(policies.time, "monotonic_ns", lambda: self.now_ms * 1_000_000)
        self.scheduler = Scheduler(BlockManager(400, 4), Load(64, max_sequences))

    def add(self, name, at_ms, tokens=10, **sampling):
        self.now_ms = at_ms
        request = make_request([1] * tokens, name, **({"max_tokens": 64} | sampling))
        self.scheduler.add(Sequence(replace(request, arrival_ns=at_ms * 1_000_000)))

    def started(self, at_ms):
        """Who reads a prompt in the step planned then; whoever ran decodes."""
        self.now_ms = at_ms
        running = list(self.scheduler.running)
        batch = self.scheduler.schedule()
        self.scheduler.apply(batch, [(7, None) for _ in batch.sampling])
        return [span.sequence.request.request_id for span in batch.spans if span.sequence not in running]


def test_a_better_priority_waits_for_no_burst(monkeypatch):
    gathering = Gathering(monkeypatch)
    gathering.add("first", 0, priority=1)
    assert gathering.started(0) == ["first"]
    gathering.add("burst", 10, priority=1)
    assert gathering.started(10) == []
    gathering.add("question", 11)
    assert gathering.started(11) == ["question", "burst"]


def test_a_burst_is_read_in_one_step_while_others_run(monkeypatch):
    gathering = Gathering(monkeypatch)
    gathering.add("first", 0)
    assert gathering.started(0) == ["first"]  # nothing runs that would use the time
    for number in range(4):
        gathering.add(f"{number}", 10 + 2 * number)
        assert gathering.started(10 + 2 * number) == []
    assert gathering.started(28) == []
    assert gathering.started(29) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("ended_by", ["length", "stop string"])
def test_a_burst_is_waited_for_less_beside_long_answers(monkeypatch, ended_by):
    gathering = Gathering(monkeypatch)
    gathering.add("first", 0, max_tokens=400, ignore_eos=True)
    gathering.started(0)
    for number in range(7):  # two answers each of 17 tokens, more than a short one has; twelve of them tell
        arrived, quiet_ms = 100 * number, 12 if number < 6 else 3
        for name in (f"{number}a", f"{number}b"):
            gathering.add(name, arrived, max_tokens=17 + (ended_by != "length"), ignore_eos=True)
        assert gathering.started(arrived + quiet_ms) == []
        assert gathering.started(arrived + quiet_ms + 1) == [f"{number}a", f"{number}b"]
        for _ in range(16):
            gathering.started(arrived + quiet_ms + 1)
        if ended_by != "length":  # which is found where the text is made, and cancels the rest
            for sequence in gathering.scheduler.running[1:]:
                gathering.scheduler.cancel(sequence, "stop")


@pytest.mark.parametrize(
    ("count", "tokens", "max_sequences"),
    [pytest.param(7, 10, 32, id="a full step"), pytest.param(2, 2, 3, id="as many as may run")],
)
def test_a_burst_waits_no_longer_than_for(monkeypatch, count, tokens, max_sequences):
    gathering = Gathering(monkeypatch, max_sequences)
    gathering.add("first", 0)
    gathering.started(0)
    for number in range(count):
        assert gathering.started(10) == []
        gathering.add(f"{number}", 10, tokens=tokens)
    assert gathering.started(10) == [f"{number}" for number in range(count)]


def test_nobody_waits_long_for_those_behind(monkeypatch):
    gathering = Gathering(monkeypatch, max_sequences=64)
    gathering.add("first", 0)
    gathering.started(0)
    for at_ms in range(10, 110, 2):
        gathering.add(f"{at_ms}", at_ms, tokens=1)
        assert gathering.started(at_ms) == []
    gathering.add("110", 111, tokens=1)
    assert len(gathering.started(111)) == 51
