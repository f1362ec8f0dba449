"""Label scoring through the running ensemble, over gRPC and HTTP."""

from __future__ import annotations

import math

import pytest

import scene
from tessera_client import Client, Models

pytestmark = pytest.mark.server

QUESTION = "Is there an exposed wire?"


@pytest.fixture(scope="module")
def picture() -> bytes:
    return scene.encode_jpeg(scene.sample(7, "heldout"))


@pytest.fixture(scope="module")
def client(server):
    with Client(server.grpc_url) as client:
        yield client


def test_yes_or_no_is_the_plain_answer_with_its_probability(server, client, picture):
    plain = client.ask(picture, QUESTION, max_tokens=8)
    first = client.ask(picture, QUESTION, max_tokens=1, logprobs=0).logprobs[0]["logprob"]
    scored = client.ask(picture, QUESTION, choices=["no", "yes"])
    assert (scored.text, scored.finish_reason, scored.logprobs) == (plain.text, "stop", None)
    assert [score.label for score in scored.choices] == ["no", "yes"]
    best = max(scored.choices, key=lambda score: score.probability)
    assert best.label == plain.text
    assert best.logprob == pytest.approx(first, abs=1e-3)
    assert best.probability == pytest.approx(math.exp(best.logprob))
    assert sum(score.probability for score in scored.choices) <= 1 + 1e-6
    assert sum(score.normalized for score in scored.choices) == pytest.approx(1)
    assert scored.usage.completion_tokens == 1
    assert scored.usage.prompt_tokens == plain.usage.prompt_tokens
    assert plain.choices is None

    with client.stream(picture, QUESTION, choices=["no", "yes"]) as stream:
        assert [delta.text for delta in stream] == [plain.text]
    for other in (Client(server.http_url), Client(server.grpc_url, models=Models(vlm="vlm_stream"))):
        with other:
            again = other.ask(picture, QUESTION, choices=["no", "yes"])
        assert again.text == plain.text
        assert [score.logprob for score in again.choices] == pytest.approx(
            [score.logprob for score in scored.choices], abs=1e-3
        )
    with Client(server.http_url) as http, http.stream(picture, QUESTION, choices=["no", "yes"]) as stream:
        assert [delta.choices is not None for delta in stream] == [True]


def test_a_label_that_begins_others_is_scored_along_its_path(client, picture):
    """The plain answer is one token and the stop token: what the model says of both is the short label's score."""
    entries = client.ask(picture, QUESTION, max_tokens=2, ignore_eos=True, logprobs=0).logprobs
    first, stop = (entry["logprob"] for entry in entries)
    plain = entries[0]["text"]
    labels = [f"{plain} wire", f"{plain} damp", plain, "unclear"]
    answer = client.ask(picture, QUESTION, choices=labels)
    scores = {score.label: score for score in answer.choices}
    assert answer.text == plain
    assert answer.usage.completion_tokens == 1
    assert scores[plain].logprob == pytest.approx(first + stop, abs=1e-3)
    assert sum(score.probability for score in answer.choices) <= 1 + 1e-6
    # Labels that begin alike differ in what follows only; what they share is forced.
    forced = client.ask(picture, QUESTION, choices=labels[:2])
    assert forced.usage.completion_tokens == 2
    for score in forced.choices:
        assert scores[score.label].logprob == pytest.approx(first + score.logprob, abs=1e-3)
    # Where nothing goes on, the end of the label is forced too.
    alone = client.ask(picture, QUESTION, choices=["unclear", plain])
    assert alone.choices[1].logprob == pytest.approx(first, abs=1e-3)
    assert alone.choices[0].logprob == pytest.approx(scores["unclear"].logprob, abs=1e-3)
