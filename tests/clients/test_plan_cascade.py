"""`tessera plan --disagree` against a stand-in whose first cut is wrong in one picture of ten, with small margins."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_transport import USAGE, FakeTransport, final

from tessera_client.messages import Cascade
from tessera_command.cli import main

PICTURES = 320


class Server(FakeTransport):
    """Knows the picture by its bytes; its own cut has 448 tokens, one tile 64."""

    def answer_to(self, request: Any) -> Any:
        picture = int(request.images[0].split()[1])
        policy = json.loads(request.sampling).get("tile_policy", {})
        if "cascade" not in policy:
            return [replace(final("yes"), usage=replace(USAGE, image_tokens=448))]
        assert policy["cascade"]["margin"] == 0
        lost = picture % 10 == 0
        told = Cascade(0.25 if lost else 4.0, escalated=False)
        return [replace(final("no" if lost else "yes"), usage=replace(USAGE, image_tokens=64), cascade=told)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(PICTURES):
        (tmp_path / f"{index}.jpg").write_bytes(b"jpeg %d" % index)
    rows = [f"{index}.jpg,{question}" for index in range(PICTURES) for question in ("A door?", "A crack?")]
    (tmp_path / "labels.csv").write_text("\n".join(["file,question", *rows]))
    return tmp_path


def test_the_policy_with_its_evidence(serve: Any, folder: Path, capsys: Any) -> None:
    fake = serve(fake=Server())
    given = ["--disagree", "1%", "--confidence", "95%", "--first", "reference,max_tiles=1", "--choices", "yes,no"]
    assert main(["plan", str(folder), *given]) == 0
    shown = capsys.readouterr()
    policy = json.loads(shown.out)
    first = {"name": "reference", "max_tiles": 1}
    assert policy["tile_policy"] == {"cascade": {"first": first, "margin": 0.2611}}
    evidence = policy["evidence"]
    assert {
        "disagree": 0.01,
        "confidence": 0.95,
        "pictures": 320,
        "escalated": 32,
        "differ": 0,
    }.items() <= evidence.items()
    assert evidence["tokens"] == {"cascade": 64 + 44.8, "full": 448.0} and "recall" not in evidence
    assert evidence["asked"] == {"choices": ["yes", "no"]} and evidence["model"]["model_type"] == "qwen2_vl"
    assert {"tritonserver", "tessera", "date"} <= set(evidence)
    assert policy["watch"]["escalated"]["share"] == 0.1
    assert "the cuts differ in 10 % of the answers" in shown.err and "at most 1 % with 95 % confidence" in shown.err
    # One question of each picture, both ways, and both kinds of question among them.
    assert len(fake.requests) == 2 * PICTURES
    assert {request.text for request, _, _ in fake.requests} == {"A door?", "A crack?"}
    assert all(json.loads(request.sampling)["choices"] == ["yes", "no"] for request, _, _ in fake.requests)


def test_where_right_answers_are_known_recall_stands_beside(serve: Any, folder: Path, capsys: Any) -> None:
    serve(fake=Server())
    (folder / "labels.csv").write_text(
        "\n".join(["file,question,answer", *(f"{index}.jpg,A door?,yes" for index in range(PICTURES))])
    )
    assert main(["plan", str(folder), "--disagree", "0.01"]) == 0
    policy = json.loads(capsys.readouterr().out)
    assert policy["evidence"]["recall"] == {"cascade": 1.0, "first": 0.9, "full": 1.0}
    assert policy["evidence"]["asked"] == {"max_tokens": 16}
    assert policy["tile_policy"] == {"cascade": {"margin": 0.2611}}


@pytest.mark.parametrize(
    "given, words",
    [
        (
            ["--disagree", "0.5%"],
            "320 pictures cannot show that at most 0.5 % may differ, with 95 % confidence: it takes 598",
        ),
        (["--disagree", "1%", "--limit", "200"], "200 pictures cannot show .* it takes 299 at least"),
        (["--disagree", "1%", "--policy", "native"], "--policy does not go with --disagree"),
        (["--each-question"], "--each-question needs --disagree"),
        (["--first", "native"], "--first needs --disagree"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_is_asked(
    serve: Any, folder: Path, capsys: Any, given: list[str], words: str
) -> None:
    fake = serve(fake=Server())
    assert main(["plan", str(folder), *given]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error) and fake.requests == []


@pytest.mark.parametrize("share", ["0", "1", "100%", "much"])
def test_shares_that_are_none(share: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--disagree", share])
    assert "--disagree" in capsys.readouterr().err


def test_a_server_that_knows_of_no_cascades(serve: Any, folder: Path, capsys: Any) -> None:
    serve()
    assert main(["plan", str(folder), "--disagree", "1%"]) == 1
    assert "the server did not say the answer's margin" in capsys.readouterr().err
