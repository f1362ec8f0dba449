"""Constrained answers and scored labels through the running ensemble, by every door."""

from __future__ import annotations

import json
import math
import re

import pytest

from tessera_client import InvalidRequest

pytestmark = pytest.mark.server

QUESTION = "Is there an exposed wire?"
SCHEMA = {
    "type": "object",
    "properties": {"wire": {"enum": ["yes", "no"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["wire", "count"],
    "additionalProperties": False,
}


def test_answers_match_at_every_door_and_what_cannot_be_is_refused(doors, picture):
    for client in doors.values():
        answer = client.ask(picture, QUESTION, json_schema=SCHEMA)
        assert list(json.loads(answer.text)) == ["wire", "count"] and answer.finish_reason == "stop"
        assert json.loads(answer.text)["wire"] in ("yes", "no")
        hot = client.ask(picture, QUESTION, regex="(door|wire)( [0-9]{2}){1,3}", temperature=1.5, seed=3)
        assert re.fullmatch("(door|wire)( [0-9]{2}){1,3}", hot.text)
        with client.stream(picture, QUESTION, json_schema=json.dumps(SCHEMA)) as stream:
            assert "".join(delta.text for delta in stream) == answer.text
        with pytest.raises(InvalidRequest, match=r"json_schema\.items: the keyword 'if' is not supported"):
            client.ask(picture[:500], QUESTION, json_schema={"items": {"if": {}}})  # before the picture is looked at
        plain = client.ask(picture, QUESTION, max_tokens=8)
        assert client.ask(picture, QUESTION, max_tokens=8, regex="(?s).*").text == plain.text


def test_a_schema_that_would_take_minutes_is_refused_and_others_are_answered(client, picture):
    endless = {"allOf": [{"type": "integer", "multipleOf": n} for n in (2, 3, 5, 7, 11, 13, 17, 19, 23)]}
    with pytest.raises(InvalidRequest, match="json_schema is too complex: it takes more than 1 s"):
        client.ask(picture, QUESTION, json_schema=endless)
    assert client.ask(picture, QUESTION, json_schema=SCHEMA).finish_reason == "stop"


def test_yes_or_no_is_the_plain_answer_with_its_probability(doors, client, picture):
    plain = client.ask(picture, QUESTION, max_tokens=8)
    first = client.ask(picture, QUESTION, max_tokens=1, logprobs=0).logprobs[0]["logprob"]
    for door in doors.values():
        scored = door.ask(picture, QUESTION, choices=["no", "yes"])
        assert (scored.text, scored.finish_reason, scored.logprobs) == (plain.text, "stop", None)
        assert [score.label for score in scored.choices] == ["no", "yes"]
        best = max(scored.choices, key=lambda score: score.probability)
        assert best.label == plain.text and best.logprob == pytest.approx(first, abs=1e-3)
        assert best.probability == pytest.approx(math.exp(best.logprob))
        assert sum(score.normalized for score in scored.choices) == pytest.approx(1)
        assert scored.usage.completion_tokens == 1 and scored.usage.prompt_tokens == plain.usage.prompt_tokens
        with door.stream(picture, QUESTION, choices=["no", "yes"]) as stream:
            assert [(delta.text, delta.choices is not None) for delta in stream] == [(plain.text, True)]
    assert plain.choices is None
