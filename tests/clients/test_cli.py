"""The command line: output, exit codes, faults in one line."""

import json
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fake_transport import READY, SCORES, FakeTransport, final
from fakes.web_page import serving

from tessera_client import ConnectionFailed, DeadlineExceeded, InvalidRequest, ModelStatus, ServerError, ServerStatus
from tessera_command import ask, terminal
from tessera_command.cli import main
from tessera_evaluation.datasets import folder_items

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def picture(tmp_path: Path) -> str:
    path = tmp_path / "room.jpg"
    path.write_bytes(b"jpeg")
    return str(path)


def test_ask_prints_the_answer(serve: Any, picture: str, capsys: Capture) -> None:
    fake = serve([final("yes")])
    assert main(["ask", picture, picture, "A crack?", "--max-tokens", "5", "--max-tiles", "2"]) == 0
    assert capsys.readouterr().out == "yes\n"
    request = fake.requests[0][0]
    assert request.text == "A crack?" and request.images == (b"jpeg", b"jpeg")
    assert json.loads(request.sampling or "") == {"max_tokens": 5, "tile_policy": {"max_tiles": 2}}
    assert fake.closed


def test_ask_among_choices(serve: Any, capsys: Capture) -> None:
    fake = serve(*[[replace(final("yes"), choices=SCORES)]] * 2)
    arguments = ["ask", "q", "--choices", "yes, not sure"]
    assert main([*arguments, "--stream"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "yes\n"
    assert shown.err.splitlines() == [
        "label     probability  normalized",
        "yes            0.6065      0.7500",
        "not sure       0.0821      0.2500",
    ]
    assert main([*arguments, "--json"]) == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert (answer["text"], answer["usage"]["image_tokens"], answer["timings"]["first_token"]) == ("yes", 4, 5)
    assert answer["choices"][1] == asdict(SCORES[1]) and shown.err == ""
    assert [request.stream for request, *_ in fake.requests] == [True, False]
    assert {request.sampling for request, *_ in fake.requests} == {'{"choices": ["yes", "not sure"]}'}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("max_tokens\nis wrong"), 2),
        (ConnectionFailed("refused"), 3),
        (DeadlineExceeded("late"), 4),
        (ServerError("broken"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_faults_are_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, error: BaseException, code: int
) -> None:
    monkeypatch.setattr(ask, "Client", Mock(side_effect=error))
    assert main(["ask", "q"]) == code
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and shown.err.startswith("tessera ask: ")


@pytest.fixture(autouse=True)
def no_service_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESSERA_HEALTH_URL", raising=False)
    monkeypatch.setattr(terminal, "DEFAULT_PORT", 9)  # nobody listens there


def test_status(serve: Any, capsys: Capture) -> None:
    fake = serve([final("x")])
    assert main(["status", "--probe"]) == 0
    out = capsys.readouterr().out
    assert "ready, tritonserver 2.51.0" in out and "vlm" in out and len(fake.requests) == 1
    broken = ServerStatus(True, "2.51.0", (ModelStatus("vlm", "1", "UNAVAILABLE", "no weights"),))
    serve(fake=FakeTransport(status=broken))
    assert main(["status"]) == 3
    out = capsys.readouterr().out
    assert "not ready" in out and "no weights" in out
    serve(fake=FakeTransport(status=ConnectionFailed("refused")))
    assert main(["status", "--json"]) == 3


PAGE = {
    "state": "ready",
    "since": "2026-01-01T00:00:00.000Z",
    "restarts": 2,
    "reason": "the Python process of 'vision_encoder_0_0' (process 7) died",
    "grpc": "127.0.0.1:8001",
    "http": "http://127.0.0.1:8000",
    "stages": {"vision_encoder_0_0": {"alive": True, "pid": 8, "last_ping_ms": 1.5, "last_ping_age_s": 2.0}},
}


@pytest.fixture
def health_page() -> Iterator[Any]:
    """A health port; `page.update(...)` changes what it says."""
    page: dict[str, Any] = dict(PAGE)
    with serving(lambda: (200 if page.get("state") == "ready" else 503, json.dumps(page).encode())) as port:
        yield page, port


def test_status_tells_what_the_supervisor_knows(serve: Any, health_page: Any, capsys: Capture) -> None:
    page, port = health_page
    arguments = ["status", "--health-url", f"http://127.0.0.1:{port}"]
    serve()
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "ready, tritonserver 2.51.0" in out and "restarts 2" in out and "process 8, answered a ping in 1.5" in out
    page.update(restarts=0)
    assert main(arguments) == 0 and "because" not in capsys.readouterr().out

    page.update(restarts=2)
    page.update(state="restarting")
    serve(fake=FakeTransport(status=ConnectionFailed("refused")))  # the ports are closed meanwhile
    assert main(arguments) == 3
    out = capsys.readouterr().out
    assert out.startswith("localhost:8001: restarting\n") and "'vision_encoder_0_0' (process 7) died" in out

    # tritonserver says "ready" over a dead stage; the launcher has not acted yet, but its page shows it.
    page.update(state="ready", stages={"vision_encoder_0_0": {"alive": False, "pid": 8}})
    serve()
    assert main([*arguments, "--json"]) == 3
    shown = json.loads(capsys.readouterr().out)
    assert shown["ready"] is False and shown["health"]["stages"][0]["alive"] is False


def test_status_goes_by_the_default_port_only_for_the_same_server(
    serve: Any, health_page: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    page, port = health_page
    monkeypatch.setattr(terminal, "DEFAULT_PORT", port)
    page.update(state="restarting")
    serve()
    assert main(["status"]) == 3
    serve()
    assert main(["status", "--url", "localhost:9001"]) == 0  # another server on this machine
    page.clear()  # something else listens there
    serve()
    assert main(["status"]) == 0
    assert "ready" in capsys.readouterr().out


def test_recall_on_a_folder(serve: Any, tmp_path: Path, capsys: Capture) -> None:
    rows = "file,question,answer,class\n" + "".join(f"a.jpg,q{i},{'yes' if i % 2 else 'no'},damp\n" for i in range(8))
    (tmp_path / "a.jpg").write_bytes(b"jpeg")
    (tmp_path / "labels.csv").write_text(rows)

    class AlwaysYes(FakeTransport):
        def answer_to(self, request: Any) -> Any:
            return [InvalidRequest("seven")] if request.text == "q7" else [final("yes")]

    fake = AlwaysYes(status=READY)
    serve(fake=fake)
    arguments = ["recall", "--folder", str(tmp_path), "--concurrency", "2", "--max-tiles", "1"]
    assert main(arguments) == 1  # one question failed
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["recall.macro"] == pytest.approx(0.375) and result["errors"] == 1
    assert result["classes"]["damp"]["precision"] == pytest.approx(3 / 7)
    assert (result["max_tiles"], result["concurrency"]) == (1, 2)
    assert "seven" in shown.err and "damp" in shown.err
    assert json.loads(fake.requests[0][0].sampling or "")["tile_policy"] == {"max_tiles": 1}
    assert main([*arguments, "--limit", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["questions"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ask", "q", "--max-toks", "5"], "there is no option --max-toks; did you mean --max-tokens?"),
        (["ask", "--max_tokns=5", "q"], "there is no option --max_tokns; did you mean --max-tokens?"),
        (["ask", "q", "--max-tokens", "0"], "must be at least 1"),
        (["batch", "photos", "--ouput", "o.jsonl"], "there is no option --ouput; did you mean --output?"),
        (["batch", "photos"], "the following arguments are required: -o/--output"),
        (["recall", "photos"], "unexpected: photos"),
        (["aks", "q"], "did you mean ask?"),
        (["--verson"], "there is no option --verson"),
        (["serve", "--gpu-mem=1", "--chekpoint", "x"], "there is no option --chekpoint; did you mean --checkpoint?"),
        (["serve", "--default", "room"], "did you mean rooms?"),
    ],
)
def test_what_was_meant_is_said_in_one_line(
    words: list[str], said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of which `serve` takes two
    with pytest.raises(SystemExit) as caught:
        main(words)
    shown = capsys.readouterr().err
    assert caught.value.code == 2 and said in shown and shown.count("\n") == 1
    assert shown.startswith(f"tessera {words[0]}: " if words[0] in ("ask", "batch", "serve") else "tessera")


@pytest.mark.parametrize("question", ["-5 degrees?", "--what is this?", "-5"])
def test_what_begins_with_a_dash_may_be_a_question(serve: Any, question: str) -> None:
    fake = serve([final("yes")])
    assert main(["ask", question, "--seed", "-3", "--max-tok", "5"]) == 0
    assert fake.requests[0][0].text == question
    serve([final("yes")])
    assert main(["ask", "--", "--question"]) == 0


@pytest.mark.parametrize("words", [["room.jpg"], ["a.png", "B.JPG"], ["Which?", "nowhere.webp"], ["room.jpg", " "]])
def test_a_picture_without_a_question(serve: Any, words: list[str], picture: str, capsys: Capture) -> None:
    fake = serve()
    assert main(["ask", *words]) == 2
    shown = capsys.readouterr().err
    assert "there is no question: it is the last word" in shown and '"What is in this picture?"' in shown
    assert main(["ask", picture]) == 2 and fake.requests == []


def test_a_file_that_does_not_exist(
    serve: Any, tmp_path: Path, picture: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    serve()
    for words in (["ask", "rom.jpg", "q?"], ["batch", "rom.jpg", "-o", "out.jsonl"]):
        assert main(words) == 2
        assert capsys.readouterr().err == (
            f"tessera {words[0]}: there is no file or folder rom.jpg (looked for {tmp_path}/rom.jpg); "
            "did you mean room.jpg?\n"
        )
    assert main(["ask", "no/rom.jpg", "q?"]) == 2
    assert f"there is no folder {tmp_path}/no either" in capsys.readouterr().err
    serve(fake=FakeTransport(status=ConnectionFailed("refused")))
    assert main(["recall", "--limit", "2"]) == 3 and "refused" in capsys.readouterr().err
    assert main(["recall", "--folder", "nothing"]) == 2  # before it is asked
    assert "there is no file or folder nothing (looked for" in capsys.readouterr().err


def test_sample_writes_pictures_with_questions(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sample", "my photos"]) == 0
    shown = capsys.readouterr().out
    assert "12 pictures" in shown and "tessera plan 'my photos'\n" in shown
    items = folder_items(tmp_path / "my photos")
    assert len(items) == 12 and len({(item.kind, item.cls) for item in items}) == 12
    assert all(item.width * item.height > 0 for item in items)
    assert main(["sample", "my photos"]) == 0  # the same again
    capsys.readouterr()
    Path("my photos", "room-03.jpg").write_bytes(b"mine")
    Path("my photos", "room-01.jpg").unlink()
    assert main(["sample", "my photos"]) == 2
    assert "my photos/room-03.jpg is there already, and is another file" in capsys.readouterr().err
    assert not Path("my photos", "room-01.jpg").exists(), "all or nothing"
    assert main(["sample", "my photos/labels.csv"]) == 2
    assert "cannot write to my photos/labels.csv" in capsys.readouterr().err
