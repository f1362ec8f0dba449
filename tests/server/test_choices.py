"""Label scoring through the running ensemble, over gRPC and HTTP."""

from __future__ import annotations

import concurrent.futures
import math

import pytest

import scene
from tessera_client import Client, InvalidRequest, Models

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


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"choices": ["yes"]}, "holds 1 labels"),
        ({"choices": ["yes", "yes"]}, "'yes' twice"),
        ({"choices": "yes,no"}, "must be a list"),
        ({"choices": ["yes", "no"], "temperature": 0.5}, "choices and temperature"),
        ({"choices": ["yes", "no"], "logprobs": 1}, "choices and logprobs"),
    ],
)
def test_wrong_choices_are_refused_by_name(client, picture, sampling, words):
    with pytest.raises(InvalidRequest, match=words):
        client.ask(picture, QUESTION, **sampling)
    assert client.ask(picture, QUESTION, choices=["yes", "no"]).finish_reason == "stop"


def test_scored_and_free_answers_share_batches(client, picture):
    kinds = [{"choices": ["yes", "no", "no wire", "unclear", "uncle"]}, {"max_tokens": 12}]
    jobs = [(QUESTION + " " * (place // 2), kinds[place % 2]) for place in range(12)]

    def ask(job):
        return client.ask(picture, job[0], **job[1])

    alone = [ask(job) for job in jobs]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, jobs))
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    for one, other in zip(alone[::2], together[::2], strict=True):
        logprobs = [[score.logprob for score in answer.choices] for answer in (one, other)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
