"""Constrained answers through the running ensemble."""

from __future__ import annotations

import json
import re

import pytest

import scene
from tessera_client import Client, InvalidRequest, Models

pytestmark = pytest.mark.server

QUESTION = "Is there an exposed wire?"
SCHEMA = {
    "type": "object",
    "properties": {"wire": {"enum": ["yes", "no"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["wire", "count"],
    "additionalProperties": False,
}


def test_answers_match_at_every_door_and_what_cannot_be_is_refused(server):
    picture = scene.encode_jpeg(scene.sample(7, "heldout"))
    for client in (
        Client(server.grpc_url),
        Client(server.http_url),
        Client(server.grpc_url, models=Models("vlm_stream")),
    ):
        with client:
            answer = client.ask(picture, QUESTION, json_schema=SCHEMA)
            assert list(json.loads(answer.text)) == ["wire", "count"] and answer.finish_reason == "stop"
            assert json.loads(answer.text)["wire"] in ("yes", "no")
            hot = client.ask(picture, QUESTION, regex="(door|wire)( [0-9]{2}){1,3}", temperature=1.5, seed=3)
            assert re.fullmatch("(door|wire)( [0-9]{2}){1,3}", hot.text)
            with client.stream(picture, QUESTION, json_schema=json.dumps(SCHEMA)) as stream:
                assert "".join(delta.text for delta in stream) == answer.text
            with pytest.raises(InvalidRequest, match=r"json_schema\.items: the keyword 'if' is not supported"):
                client.ask(
                    picture[:500], QUESTION, json_schema={"items": {"if": {}}}
                )  # before the picture is looked at
            plain = client.ask(picture, QUESTION, max_tokens=8)
            assert client.ask(picture, QUESTION, max_tokens=8, regex="(?s).*").text == plain.text


def test_a_schema_that_would_take_minutes_is_refused_and_others_are_answered(server):
    endless = {"allOf": [{"type": "integer", "multipleOf": n} for n in (2, 3, 5, 7, 11, 13, 17, 19, 23)]}
    picture = scene.encode_jpeg(scene.sample(7, "heldout"))
    with Client(server.grpc_url) as client:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="json_schema is too complex: it takes more than 1 s"):
                client.ask(picture, QUESTION, json_schema=endless)
        assert client.ask(picture, QUESTION, json_schema=SCHEMA).finish_reason == "stop"
