"""Reuse by content: which prefixes share blocks, and which must not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_fakes import contents_of, expected_answer, make_engine, make_request, run, tokens_of

from tessera.engine.scheduling.block_manager import PrefixIndex, image_cache_ids

QUESTION = [11, 12, 13, 14, 15]


def picture_prompt(content, name, question=QUESTION, rows=16):
    """Two text tokens, a picture, a question."""
    return make_request([1, 2] + [0] * rows + question, name, [(2, rows, content)], max_tokens=4, ignore_eos=True)


def serve(engine, *requests):
    """One after the other; returns the cached positions of each, and checks the answers."""
    cached = []
    for request in requests:
        engine.submit(request)
        events = run(engine)
        expected = expected_answer(contents_of(request), request.sampling.max_tokens, ())
        assert tokens_of(events, request.request_id) == expected
        cached.append(events[-1].cached_tokens)
    return cached


def test_two_pictures_of_equal_size_and_prompt_never_share():
    engine, _ = make_engine()
    assert serve(engine, picture_prompt(7, "a"), picture_prompt(8, "b")) == [0, 0]


def test_same_picture_with_another_question_shares_up_to_the_question():
    engine, _ = make_engine()
    cached = serve(engine, picture_prompt(7, "a"), picture_prompt(7, "b", [21, 22, 23]))
    assert cached == [0, 16]  # 18 positions are equal, in blocks of 4


def test_answers_are_reused_in_the_next_turn():
    engine, _ = make_engine()
    first = make_request(list(range(10)), "a", max_tokens=4, ignore_eos=True)
    engine.submit(first)
    answer = tokens_of(run(engine), "a")
    turn = make_request([*range(10), *answer, 5, 6], "b", max_tokens=4, ignore_eos=True)
    assert serve(engine, turn) == [12]


def test_shared_within_one_step():
    engine, runner = make_engine()
    for name in ("a", "b"):
        engine.submit(picture_prompt(7, name))
    events = run(engine)
    assert [(start, end) for _, start, end, _ in runner.batches[0]] == [(0, 23), (20, 23)]
    for name in ("a", "b"):
        assert tokens_of(events, name) == expected_answer(contents_of(picture_prompt(7, name)), 4, ())


def test_policy_exclude_stops_at_the_first_picture():
    engine, _ = make_engine(prefix_cache="exclude")
    text = [[*range(30, 40)] + [0] * 8 + QUESTION] * 2
    requests = [make_request(t, str(i), [(10, 8, 7)], max_tokens=4, ignore_eos=True) for i, t in enumerate(text)]
    assert serve(engine, *requests) == [0, 8]
    pure = make_request(list(range(20)), "text", max_tokens=4, ignore_eos=True)
    assert serve(engine, pure, pure) == [0, 16]


def test_salt_keeps_prompts_apart():
    engine, _ = make_engine(salt=lambda length: length if length > 18 else 0)
    tokens = list(range(24))
    lengths = [(16, 0), (17, 16), (24, 0), (20, 0), (20, 16)]
    requests = [make_request(tokens[:n], f"{i}", max_tokens=4, ignore_eos=True) for i, (n, _) in enumerate(lengths)]
    assert serve(engine, *requests) == [cached for _, cached in lengths]


def test_evicted_blocks_are_not_found_and_the_oldest_go_first():
    engine, _ = make_engine(num_blocks=12)
    first, second = ([start] * 12 for start in (1, 2))
    requests = [make_request(ids, str(ids[0]), max_tokens=4, ignore_eos=True) for ids in (first, second)]
    assert serve(engine, *requests) == [0, 0]
    other = make_request([3] * 24, "3", max_tokens=4, ignore_eos=True)  # takes 7 of 12 blocks
    assert serve(engine, other, requests[1], requests[0]) == [0, 8, 0]


def test_the_end_of_a_prefix_goes_before_its_beginning():
    engine, _ = make_engine(num_blocks=8)
    request = make_request([1] * 16, "1", max_tokens=4, ignore_eos=True)  # leaves 4 findable blocks, 3 others
    assert serve(engine, request) == [0]
    other = make_request([2] * 20, "2", max_tokens=4, ignore_eos=True)  # takes 6 blocks
    assert serve(engine, other, request) == [0, 8]


def test_cancel_in_the_middle_of_a_prompt_leaves_nothing_to_reuse():
    """Nobody has seen its logits, so what it wrote may be NaN; what it shares with others stays."""
    engine, _ = make_engine(max_batched_tokens=10)
    sequence = engine.submit(picture_prompt(7, "a"))
    engine.step()
    engine.cancel(sequence.request.number)
    assert [event.finish_reason for event in engine.step()] == ["cancelled"]
    assert engine.scheduler.blocks.used == 0
    assert serve(engine, picture_prompt(7, "b")) == [0]


def test_forged_digests_reach_nobody_else_s_blocks():
    """Whoever calls the stage itself may send any digest: text, another picture's halves, or its place swapped."""
    engine, _ = make_engine()
    cached = serve(
        engine, picture_prompt(7, "victim"), make_request(list(range(20)), "text", max_tokens=4, ignore_eos=True)
    )
    assert cached == [0, 0]
    for number, digest in enumerate(([~7, 7], [7, 7], [~7, ~7], [0, 0], [1 << 62, 1 << 62], list(range(2)))):
        forged = replace(picture_prompt(9, f"{number}"), digest=np.array(digest, np.int64))
        assert serve(engine, forged) == [0]
    ids = image_cache_ids(np.arange(400), np.full(200, 16), b"secret")
    assert len(set(ids.tolist())) == 200 * 16 and ids.min() >= 1 << 62


def test_equal_keys_are_not_enough():
    """Where two prefixes collide in their key, the ids decide."""
    index = PrefixIndex()
    ids, others = np.arange(4).tobytes(), np.arange(1, 5).tobytes()
    key = index.chain(index.root(0), ids)
    index.insert(key, index.root(0), ids, 3)
    assert index.find(key, index.root(0), ids) == 3
    assert index.find(key, index.root(0), others) is None
    assert index.find(key, index.root(1), ids) is None


@pytest.mark.parametrize("given", [False, True])
def test_an_answer_longer_than_the_places_made_at_first_is_found_again(given):
    engine, _ = make_engine()
    first = make_request(list(range(8)), "a", max_tokens=140, ignore_eos=True)
    turn = make_request([*range(8), *expected_answer(range(8), 140, ())], "b", max_tokens=4, ignore_eos=True)
    if given:
        first, turn = (replace(each, positions=np.arange(len(each.input_ids))[None]) for each in (first, turn))
    assert serve(engine, first, turn) == [0, 144]  # the last token was never computed


def test_equal_tokens_at_other_positions_share_nothing():
    engine, _ = make_engine()
    request = make_request(list(range(16)), "a", max_tokens=4, ignore_eos=True)
    usual = np.arange(16)[None]
    moved = np.concatenate([usual[:, :6], usual[:, 6:] + 9], axis=1)
    placed = [replace(request, positions=positions) for positions in (usual, usual, moved, moved)]
    assert serve(engine, *placed, request) == [0, 12, 4, 12, 0]
