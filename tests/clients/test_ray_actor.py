"""`tessera_client.ray` without Ray: tables in and out, and which failures are a row's own."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from clients.fake_transport import FakeTransport, final
from fakes.answering_server import PROBE, AnsweringServer

from tessera_client import ConnectionFailed, DeadlineExceeded, InvalidRequest, ServerError
from tessera_client.ray import RESULTS, Ask, ServerAway

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clusters.md"
Asking = Callable[..., Ask]


@pytest.fixture
def asking(serve: Any) -> Asking:
    """Makes the actor, before a server."""

    def make(server: FakeTransport, **arguments: Any) -> Ask:
        serve(fake=server)
        return Ask("anywhere", **arguments)

    return make


def table(*questions: str | None) -> pa.Table:
    return pa.table({"image": pa.array([None] * len(questions), pa.binary()), "prompt": pa.array(questions)})


def test_a_table_comes_back_with_answers(asking: Asking, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"jpeg")
    server = AnsweringServer()
    batch = pa.table({"id": [7, 8], "file": [[str(tmp_path / "a.jpg"), "data:image/png;base64,cG5n"], None]})
    batch = batch.append_column("question", [["Same?", "Why?"]])
    out = asking(server, image="file", prompt="question", max_tokens=5)(batch)
    assert out.select(["id", "file", "question"]) == batch
    assert out["answer"].to_pylist() == ["answer to Same?", "answer to Why?"]
    assert out["finish_reason"].to_pylist() == ["stop", "stop"] and out["error"].null_count == 2
    sent = {request.text: request for request, *_ in server.requests}
    assert sent["Same?"].images == (b"jpeg", b"png") and sent["Why?"].images == ()
    assert {request.sampling for request in sent.values()} == {'{"max_tokens": 5}'}


def test_a_row_that_is_wrong_is_a_row_with_an_error(asking: Asking) -> None:
    own = {"failed": [ServerError("out of luck")], "long": [final("The wi", "deadline")]}
    server = AnsweringServer(bad=[InvalidRequest("image 0 is none")], **own)
    out = asking(server)(table("one", "bad", None, "failed", "long"))
    assert out["answer"].to_pylist() == ["answer to one", None, None, None, None]
    _, bad, none, failed, part = out["error"].to_pylist()
    assert bad == "image 0 is none" and "must be a string" in none and failed == "out of luck"
    assert part == "the answer is not whole" and out["finish_reason"].to_pylist() == ["stop", *[None] * 3, "deadline"]
    for each in (table(), table("one")):  # text, whatever is in them
        assert [asking(server)(each).schema.field(name).type for name in RESULTS] == [pa.string()] * 3


def test_the_pages_function_for_spark_and_dask_keeps_the_same_rule(serve: Any) -> None:
    serve(fake=AnsweringServer(bad=[InvalidRequest("no")], long=[final("The wi", "deadline")]))
    (block,) = re.findall(r"```python\n([^`]*def asked.*?)```", PAGE.read_text(), re.DOTALL)
    exec(block, names := dict[str, Any]())

    class Frame(dict[str, list[Any]]):
        def assign(self, **columns: list[Any]) -> dict[str, list[Any]]:
            return {**self, **columns}

    out = names["asked"](Frame(image=[None] * 3, prompt=["one", "bad", "long"]), "anywhere")
    assert out["answer"] == ["answer to one", None, None] and out["error"] == [None, "no", "the answer is not whole"]


@pytest.mark.parametrize("answer", [[ServerError("died")], [DeadlineExceeded("late")], [final("", "cancelled")]])
def test_what_fails_on_a_server_out_of_order_is_asked_again(asking: Asking, answer: list[Any]) -> None:
    with pytest.raises(ServerAway, match="gone"):
        asking(AnsweringServer(**{"why": answer, PROBE: [ConnectionFailed("gone")]}))(table("one", "why"))


def test_a_wrong_question_says_nothing_about_the_server(asking: Asking) -> None:
    server = AnsweringServer(**{"bad": [InvalidRequest("no")], PROBE: [ConnectionFailed("gone")]})
    assert asking(server)(table("bad"))["error"].to_pylist() == ["no"]


def test_a_server_that_is_away_is_an_exception() -> None:
    with pytest.raises(ServerAway):
        Ask("127.0.0.1:1", timeout=0.2)(table("one"))


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        ({"image": [b""]}, "batch_format='pyarrow'"),
        (pa.table({"picture": [b""], "prompt": [""]}), "lacks image; its columns are picture, prompt"),
        (table("one").append_column("error", [["x"]]), "has error already"),
    ],
)
def test_a_table_that_cannot_be_asked_is_refused(asking: Asking, batch: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        asking(AnsweringServer())(batch)
