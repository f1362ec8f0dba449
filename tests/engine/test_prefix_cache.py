"""Reuse by content: which prefixes share blocks, and which must not."""

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


def text(ids, *pictures):
    return make_request(ids, "r", pictures, max_tokens=4, ignore_eos=True)


LEADING = text([*range(30, 40)] + [0] * 8 + QUESTION, (10, 8, 7))  # words before its picture


@pytest.mark.parametrize(
    ("settings", "asked", "cached"),
    [
        pytest.param({}, [picture_prompt(7, "r"), picture_prompt(8, "r")], [0, 0], id="another picture of its size"),
        # 18 positions are equal, in blocks of 4.
        pytest.param({}, [picture_prompt(7, "r"), picture_prompt(7, "r", [21, 22])], [0, 16], id="another question"),
        pytest.param({"prefix_cache": "exclude"}, [LEADING, LEADING], [0, 8], id="excluded pictures"),
        pytest.param({"prefix_cache": "exclude"}, [text(range(20))] * 2, [0, 16], id="text beside excluded pictures"),
        pytest.param({"prefix_cache": "off"}, [text(range(20))] * 2, [0, 0], id="off"),
        pytest.param(
            {"salt": lambda length: length if length > 18 else 0},
            [text(range(length)) for length in (16, 17, 24, 20, 20)],
            [0, 16, 0, 0, 16],
            id="salt",
        ),
        # The third takes 7 of 12 blocks: the oldest go first.
        pytest.param(
            {"num_blocks": 12}, [text([n] * 12 * (1 + n // 3)) for n in (1, 2, 3, 2, 1)], [0, 0, 0, 8, 0], id="evicted"
        ),
        # The first leaves 4 blocks to be found and 3 others, and the second takes 6: a prefix goes from its end.
        pytest.param({"num_blocks": 8}, [text([1] * 16), text([2] * 20), text([1] * 16)], [0, 0, 8], id="evicted end"),
    ],
)
def test_what_is_found_again(settings, asked, cached):
    assert serve(make_engine(**settings)[0], *asked) == cached


def test_failed_step_makes_everything_written_unfindable():
    engine, _ = make_engine()
    serve(engine, picture_prompt(7, "a"))
    engine.fail_all("broken")
    assert serve(engine, picture_prompt(7, "b")) == [0]


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
    """Who calls the stage itself may send any digest: text, another picture's halves, or its place swapped."""
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
        first, turn = (replace(each, positions=np.arange(len(each.input_ids))[None] + 5) for each in (first, turn))
    assert serve(engine, first, turn) == [0, 144]  # the last token was never computed


def test_equal_tokens_at_other_positions_share_nothing():
    engine, _ = make_engine()
    request = make_request(list(range(16)), "a", max_tokens=4, ignore_eos=True)
    usual = np.arange(16)[None]
    moved = np.concatenate([usual[:, :6], usual[:, 6:] + 9], axis=1)
    placed = [replace(request, positions=positions) for positions in (usual, usual, moved, moved)]
    assert serve(engine, *placed, request) == [0, 12, 4, 12, 0]
