"""Random arrivals, cancels and preemptions: exact books, one end each, and the answer that the prompt deserves."""

import itertools
from collections import Counter
from dataclasses import replace

from engine_fakes import (
    EOS,
    Guess,
    contents_of,
    draft,
    ends,
    expected_answer,
    expected_label,
    make_engine,
    make_request,
    run,
    tokens_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.prompt.sampling import STEP_NS

TOKENS = range(240, 262)  # few, so that <eos> comes up


@st.composite
def prompts(draw):
    """Prompts that often begin alike, with up to two pictures out of three."""
    ids = list(range(draw(st.integers(0, 2)), 24))[: draw(st.integers(1, 24))]
    pictures, at = [], draw(st.integers(0, 6))
    for content in draw(st.lists(st.integers(1000, 1002), max_size=2)):
        rows = draw(st.sampled_from([3, 8]))
        if at + rows <= len(ids):
            pictures.append((at, rows, content))
        at += rows + draw(st.integers(0, 2))
    choices = draw(st.none() | st.lists(st.text("ab", min_size=1, max_size=4), min_size=2, max_size=4, unique=True))
    return ids, pictures, draw(st.integers(1, 12)), choices


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), prompts()),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=120)
@given(
    actions,
    st.sampled_from(["content", "exclude", "off"]),
    st.integers(9, 30),
    st.integers(5, 40),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([0, 1, 3, 15]),
    st.integers(0, 4),
    st.lists(st.booleans(), min_size=1),
)
def test_engine_under_random_load(script, policy, num_blocks, budget, sequences, async_launch, drafts, wrong, known):
    engine, _ = make_engine(
        num_blocks,
        drafts=drafts,
        tokens=TOKENS,
        async_launch=async_launch,
        prefix_cache=policy,
        max_batched_tokens=budget,
        max_sequences=sequences,
    )
    draft(engine, lambda request: [Guess(expected_answer(contents_of(request), 12, tokens=TOKENS), wrong)])
    ways = itertools.cycle(known)
    engine.scheduler.tokens_should_be_known = lambda batch: next(ways)
    submitted, events, cancelled = [], [], set()
    for action, value in script:
        if action == "submit":
            ids, pictures, max_tokens, choices = value
            sampling = dict(max_tokens=max_tokens, choices=choices, priority=10 * (max_tokens % 3))
            request = make_request(ids, f"{len(submitted)}", pictures, **sampling)
            submitted.append(engine.submit(request))
        elif action == "cancel" and submitted:
            sequence = submitted[value % len(submitted)]
            cancelled.add(sequence.request.request_id)
            engine.cancel(sequence.request.number)
        elif action == "step":
            for _ in range(value):
                events += engine.step()
                engine.scheduler.check()
    events += run(engine)

    last = Counter(event.request.request_id for event in events if event.finish_reason)
    assert last == Counter(sequence.request.request_id for sequence in submitted), "each request ends once"
    assert engine.scheduler.blocks.used == 0
    reasons = ends(events)
    for sequence in submitted:
        request = sequence.request
        choices = request.sampling.choices
        if choices is not None:
            if reasons[request.request_id] == "stop":
                assert sequence.outputs == expected_label(contents_of(request), choices)
            else:
                assert reasons[request.request_id] == "cancelled" and request.request_id in cancelled
            continue
        answer = expected_answer(contents_of(request), sequence.max_tokens, tokens=TOKENS)
        given_tokens = tokens_of(events, request.request_id)
        if reasons[request.request_id] == "cancelled":
            assert request.request_id in cancelled
            assert given_tokens == answer[: len(given_tokens)]
        else:
            assert given_tokens == answer
            assert reasons[request.request_id] == ("stop" if answer[-1] == EOS else "length")


@settings(max_examples=80)
@given(st.lists(st.tuples(st.integers(-2, 12), st.integers(0, 3 * STEP_NS)), min_size=2, max_size=12))
def test_nobody_is_passed_by_one_who_came_too_much_later(arrivals):
    """However many of a better priority go on coming: each step of priority is worth so much waiting and no more."""
    engine, runner = make_engine(max_sequences=1)
    now, sequences = 0, []
    for priority, gap in arrivals:
        now += gap
        request = make_request([1], f"{len(sequences)}", max_tokens=1, priority=priority)
        sequences.append(engine.submit(replace(request, arrival_ns=now)))
    run(engine)
    begun = [sequence for batch in runner.batches for sequence, start, *_ in batch if not start]
    assert sorted(begun, key=sequences.index) == sequences
    for place, later in enumerate(begun):
        for first in begun[:place]:
            behind = first.request.arrival_ns - later.request.arrival_ns
            better = later.request.sampling.priority - first.request.sampling.priority
            assert behind <= max(0, better * STEP_NS)
