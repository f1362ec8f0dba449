"""A cascade through the real server: the full cut's answer is that of a request which asked for it at once."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from http_door import QUESTION, read
from toy_servers import REPOSITORY, Launched, wait_until

from tessera_client import Answer, Cancelled, Client, InvalidRequest
from tessera_wire import question_class

pytestmark = pytest.mark.server

FIRST, FULL = {"max_tiles": 1}, {"name": "reference"}
ASKED: list[dict[str, Any]] = [
    {"choices": ["no", "yes"]},
    {"max_tokens": 3, "ignore_eos": True, "logprobs": 2},
    {"max_tokens": 16, "logprobs": 2, "repetition_penalty": 1.3},
    {"max_tokens": 16, "regex": "(yes|no), [a-z]{3}", "logprobs": 2},
]


def cascade(margin: Any, **more: Any) -> dict[str, Any]:
    return {"cascade": {"margin": margin, **more}}


MARKS = itertools.count()


def unseen(picture: bytes) -> bytes:
    """The same picture to the eye, and another to every cache: what is recomputed differs in its last bits."""
    return picture + b"%d" % next(MARKS)


def told(answer: Answer) -> tuple[Any, ...]:
    """All that the model says, to the bit."""
    return answer.text, answer.finish_reason, answer.logprobs, answer.choices, answer.usage


@pytest.mark.parametrize("asked", ASKED)
def test_the_answer_is_one_cuts_and_the_first_ones_margin_is_told(doors, picture, asked):
    client = doors["grpc"]
    client.ask(unseen(picture), QUESTION, max_tokens=1)  # what stands before the first picture is known from here on
    first, full = (client.ask(unseen(picture), QUESTION, tile_policy=policy, **asked) for policy in (FIRST, FULL))
    assert first.usage.image_tokens < full.usage.image_tokens and first.cascade is None
    for door in doors.values():
        kept = door.ask(unseen(picture), QUESTION, tile_policy=cascade(0), **asked)
        escalated = door.ask(unseen(picture), QUESTION, tile_policy=cascade("inf", first=FIRST, full=FULL), **asked)
        assert told(kept) == told(first) and told(escalated) == told(full)
        assert not kept.cascade.escalated and escalated.cascade.escalated
        assert kept.cascade.margin == escalated.cascade.margin > 0
    margin = kept.cascade.margin
    for threshold, policy in ((margin, first), (margin * 1.001, full)):
        found = client.ask(unseen(picture), QUESTION, tile_policy=cascade(threshold), **asked)
        assert told(found) == told(policy)


def test_the_margin_is_the_log_odds_or_the_least_distance(client, picture):
    labels = client.ask(picture, QUESTION, choices=["no", "yes", "a door"], tile_policy=cascade(0))
    *_, second, best = sorted(score.logprob for score in labels.choices)
    assert labels.cascade.margin == best - second
    asked = {"max_tokens": 6, "ignore_eos": True}
    answer = client.ask(unseen(picture), QUESTION, logprobs=2, tile_policy=cascade(0), **asked)
    distances = [one["top"][0]["logprob"] - one["top"][1]["logprob"] for one in answer.logprobs]
    assert len(distances) == 6 and answer.cascade.margin == pytest.approx(min(distances), abs=1e-4)
    bare = client.ask(unseen(picture), QUESTION, tile_policy=cascade(0), **asked)
    assert bare.cascade == answer.cascade and bare.logprobs is None


def test_a_stream_begins_once_it_is_decided(doors, picture):
    asked = {"max_tokens": 16, "ignore_eos": True}
    for door in doors.values():
        for margin, policy in ((0, FIRST), ("inf", FULL)):
            with door.stream(picture, QUESTION, tile_policy=policy, **asked) as plain:
                whole = "".join(delta.text for delta in plain)
            with door.stream(picture, QUESTION, tile_policy=cascade(margin), **asked) as stream:
                deltas = list(stream)
            assert "".join(delta.text for delta in deltas) == whole
            assert [delta.cascade is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
            assert (len(deltas) > 1) == deltas[-1].cascade.escalated == (margin == "inf")


def test_several_pictures_messages_and_none(client, picture):
    asked = {"choices": ["no", "yes"], "tile_policy": cascade("inf")}
    turns = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]}]
    assert client.chat(turns, **asked).text == client.ask(picture, QUESTION, choices=["no", "yes"]).text
    two = [unseen(picture), unseen(picture)]
    found = client.ask(two, "Alike?", **asked)
    assert found.cascade.escalated and found.text == client.ask(two, "Alike?", choices=["no", "yes"]).text
    for pictures, policy in ((None, asked["tile_policy"]), (picture, cascade("inf", full=FIRST))):
        alike = client.ask(pictures, QUESTION, choices=["no", "yes"], tile_policy=policy)
        assert not alike.cascade.escalated and alike.cascade.margin > 0  # there is but one cut


@pytest.mark.parametrize(
    ("policy", "more", "words"),
    [
        (cascade(1), {}, "cascade takes short answers alone: send choices, or max_tokens of at most 16"),
        (cascade(1), {"max_tokens": 17}, "cascade takes short answers alone"),
        (cascade(1), {"max_tokens": 4, "temperature": 0.5}, "cascade and temperature exclude each other"),
        (cascade(-1), {"max_tokens": 4}, "margin must be a number from 0 on or 'inf', not -1"),
        ({"cascade": {"first": "native"}}, {"max_tokens": 4}, "must be an object with a margin"),
        (cascade(1, third=FULL), {"max_tokens": 4}, "cascade: unknown key 'third'; known are first, full, margin"),
        (cascade(1) | {"max_tiles": 3}, {"max_tokens": 4}, "'max_tiles' beside cascade"),
        (cascade(1, full={"max_tiles": 105}), {"max_tokens": 4}, "max_tiles 105 is above this server's limit of 104"),
        (cascade(1, first=cascade(1)), {"max_tokens": 4}, "unknown key 'cascade'"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(client, picture, policy, more, words):
    with pytest.raises(InvalidRequest, match=f"tile policy: .*{words}"):
        client.ask(picture, QUESTION, tile_policy=policy, **more)


def test_who_goes_away_takes_the_full_cut_along(server, picture):
    """Nothing of it is left at any stage, and not all that was escalated is answered."""
    before = read(server.metrics_url)
    with Client(server.grpc_url) as client, ThreadPoolExecutor(24) as pool:
        asked = {"max_tokens": 16, "ignore_eos": True, "tile_policy": cascade("inf", full={"name": "dense"})}
        streams = [client.stream(unseen(picture), QUESTION, **asked) for _ in range(24)]
        read_on = [pool.submit(list, stream) for stream in streams]
        until(lambda page: risen(page, before, "tessera_escalations_total") > 4, server)
        for stream in streams:
            stream.close()
        assert sum(isinstance(each.exception(), Cancelled) for each in read_on) > 8
        until(lambda page: page["tessera_requests_in_flight"] == page["tessera_vision_row_bytes"] == 0, server)
        time.sleep(1)  # what was still on its way
        after = read(server.metrics_url)
        assert after["tessera_requests_in_flight"] == after["tessera_vision_row_bytes"] == 0
        answered = risen(after, before, 'tessera_requests_total{reason="length"}')
        full = answered - risen(after, before, "tessera_cascades_total")
        assert full < risen(after, before, "tessera_escalations_total")
        assert client.ask(picture, QUESTION, choices=["no", "yes"], tile_policy=cascade("inf")).cascade.escalated


def risen(page: dict[str, float], before: dict[str, float], family: str) -> float:
    return page.get(family, 0) - before.get(family, 0)


def until(holds: Callable[[dict[str, float]], bool], server: Any) -> None:
    """Waits for what the metrics page tells."""
    started = time.monotonic()
    while not holds(read(server.metrics_url)):
        assert time.monotonic() - started < 60
        time.sleep(0.05)


def test_a_policy_file_is_followed_audited_and_watched(tmp_path, picture):
    """One question is never escalated and always audited, another always escalated, until that is too often."""
    rare, half = ({"share": share, "limit": share} for share in (0.0005, 0.5))
    watched = {"low": 0.0, "high": 1e9, "escalated": rare, "below": half, "above": half, "disagreed": half}
    sure, unsure = "Is there a door?", QUESTION
    margins = {"margin": "inf", "classes": {question_class(sure): 0}}
    policy = {"tile_policy": {"cascade": margins}, "watch": watched, "audit": 1, "on_alarm": "escalate"}
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(policy))
    asked = {"choices": ["no", "yes"]}
    with (
        Launched(REPOSITORY, tmp_path / "log", "--set", f"preprocess.tile_policy={file}") as server,
        Client(server.url("grpc")) as client,
    ):
        metrics = SimpleNamespace(metrics_url=f"http://{server.url('metrics')}/metrics")
        kept = client.ask(unseen(picture), sure, **asked)
        full = client.ask(unseen(picture), sure, tile_policy={}, **asked)
        assert not kept.cascade.escalated and full.cascade is None
        assert full.usage.image_tokens > kept.usage.image_tokens
        assert client.ask(unseen(picture), unsure, max_tokens=40).cascade is None  # can have no margin
        until(lambda page: page["tessera_cascade_audits_total"] == 1, metrics)
        page = read(metrics.metrics_url)
        assert page.get("tessera_cascade_disagreements_total", 0) == (kept.text != full.text)
        assert page["tessera_cascade_alarm"] == 0 and "alarm" not in server.health()
        assert wait_until(lambda: server.health().get("cascade_audits") == 1, 60)
        for _ in range(40):
            assert client.ask(picture, unsure, **asked).cascade.escalated
        assert client.ask(unseen(picture), sure, **asked).cascade.escalated  # as set
        assert wait_until(lambda: "answers escalated" in server.health().get("alarm", ""), 60)
        until(lambda page: page["tessera_cascade_alarm"] == 1, metrics)
        assert server.health()["state"] == "ready"
        log = (tmp_path / "log").read_text()
        assert log.count("the cascade's plan does not hold any more: answers escalated") == 1
