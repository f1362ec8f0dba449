"""`tessera audit`: the rows of a batch are asked again, a stand-in in the server's place."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clients.fake_transport import FINGERPRINT, final
from fakes.answering_server import AnsweringServer
from jobs.batch_runs import Capture, results, write_rows

from tessera_client import client
from tessera_client.messages import Delta
from tessera_command.cli import main

LOGPROB = -0.24723474681377411
ROWS = [
    {"id": "plain", "image": None, "question": "Why?"},
    {"id": "told", "image": None, "question": "How?", "options": {"logprobs": 1}},
    {"id": "drawn", "image": None, "question": "Who?", "options": {"temperature": 1.0}},
    {"id": "seeded", "image": None, "question": "What?", "options": {"temperature": 1.0, "seed": 3}},
]


def told(*logprobs: float, fingerprint: str = FINGERPRINT) -> list[Delta]:
    """An answer of these log probabilities."""
    entries = [
        {"token_id": 7, "text": "x", "logprob": each, "top": [{"token_id": 7, "logprob": each}]} for each in logprobs
    ]
    return [replace(final("x"), logprobs=entries, fingerprint=fingerprint)]


@pytest.fixture
def audited(batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has a batch answered by one server and audits it at another: the exit code."""
    rows = write_rows(tmp_path / "jobs.jsonl", *ROWS)
    assert batch(AnsweringServer(**{"How?": told(-1.5, LOGPROB)}), rows, "--max-tokens", "5") == 0

    def run(server: Any, *arguments: str) -> int:
        monkeypatch.setattr(client, "open_transport", lambda url, models: server)
        return main(["audit", str(rows), str(tmp_path / "out.jsonl"), *(arguments or ("--max-tokens", "5"))])

    return run


def test_equal_answers(audited: Any, tmp_path: Path, capsys: Capture) -> None:
    assert {result["fingerprint"] for result in results(tmp_path / "out.jsonl")} == {FINGERPRINT}
    capsys.readouterr()
    assert audited(AnsweringServer(**{"How?": told(-1.5, LOGPROB), "Who?": [final("another")]})) == 0
    shown = capsys.readouterr()
    assert shown.out == "3 answers, 1 of them with log probabilities: none differs\n"
    assert "1 rows left out: they had no answer, or were sampled without a seed" in shown.err


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"How?": told(-1.5, math.nextafter(LOGPROB, 0))}, "told: token 1: 7 -0.2472347468137741 (top, 7 -0.24723"),
        ({"How?": told(-1.5)}, "told: token 1: 7 -0.2472347468137741 (top, 7 -0.2472347468137741) then, none now"),
        (
            {"How?": told(-1.5, LOGPROB), "Why?": [final("answer to Why!")]},
            'plain: answer: "answer to Why?" then, "answ',
        ),
        (
            {"How?": told(-1.5, LOGPROB), "What?": [final("answer to What?", "length")]},
            'seeded: finish_reason: "stop" ',
        ),
    ],
)
def test_any_bit_is_a_difference_which_is_shown(audited: Any, capsys: Capture, own: Any, words: str) -> None:
    assert audited(AnsweringServer(**own)) == 1
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0].startswith(words)
    assert lines[1] == "3 answers, 1 of them with log probabilities: 1 differs"


def test_log_probabilities_that_are_gone_from_the_results_are_a_difference(
    audited: Any, tmp_path: Path, capsys: Capture
) -> None:
    lines = results(tmp_path / "out.jsonl")
    kept = [{name: value for name, value in line.items() if name != "logprobs"} for line in lines]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert audited(AnsweringServer(**{"How?": told(-1.5, LOGPROB)})) == 1
    assert "told: token 0: none then, 7 -1.5" in capsys.readouterr().out


def test_another_server_is_refused_and_may_be_compared_all_the_same(
    audited: Any, tmp_path: Path, capsys: Capture
) -> None:
    other = FINGERPRINT.replace("4e5f6071", "00000000").replace("deterministic", "fast")
    own = {
        question: [replace(final(f"answer to {question}"), fingerprint=other)]
        for question in ("Why?", "What?", "Hello")
    }
    server = AnsweringServer(**own, **{"How?": told(-1.5, LOGPROB, fingerprint=other)})
    assert audited(server) == 2 and server.asked == []
    assert f"here answers {other}: code, mode differ (bits are kept only where" in capsys.readouterr().err
    assert audited(server, "--max-tokens", "5", "--force") == 0
    assert "not deterministic" in capsys.readouterr().err
    text = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text(text.replace(f'"fingerprint": "{FINGERPRINT}", ', ""))
    assert audited(AnsweringServer()) == 2
    assert "was answered by a server without a fingerprint" in capsys.readouterr().err


def test_other_questions_and_what_are_no_results_are_refused(audited: Any, tmp_path: Path, capsys: Capture) -> None:
    assert audited(AnsweringServer(), "--max-tokens", "6") == 2
    assert "row 'plain' of" in (said := capsys.readouterr().err) and "was asked something else" in said
    (tmp_path / "out.jsonl").write_text(json.dumps({"id": "plain"}) + "\n")
    assert audited(AnsweringServer()) == 2
    assert "holds no results of `tessera batch`" in capsys.readouterr().err
