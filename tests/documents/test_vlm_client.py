"""Our VlmClient beside mineru-vl-utils' http-client: the same question must be the same request to the server, to the
pixel."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients.fake_transport import FakeTransport, final
from documents.document_reader import BOXES, DocumentReader, picture
from gateway.gateway_doubles import Asked, listening
from mineru_vl_utils import MinerUClient, MinerUSamplingParams
from mineru_vl_utils.mineru_client import DEFAULT_SAMPLING_PARAMS
from mineru_vl_utils.vlm_client import RequestError, SamplingParams, UnsupportedError
from mineru_vl_utils.vlm_client.http_client import HttpVlmClient
from PIL import Image

from tessera_client import ConnectionFailed, Retry
from tessera_client.messages import Request
from tessera_documents import TesseraVlmClient, mineru_client
from tessera_gateway.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = picture(("red", "green", "blue"))
ALL = SamplingParams(0.7, 0.9, 40, 0.5, -0.25, 1.1, 20, 123)


@pytest.fixture(scope="module")
def http() -> Iterator[tuple[FakeTransport, str]]:
    """A gateway's address, and the server behind it."""
    asked = Asked(DocumentReader(), Settings())
    with pytest.MonkeyPatch.context() as patch, listening(asked.app) as address:
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield asked.fake, address


def question(request: Request) -> dict[str, Any]:
    return {
        "messages": json.loads(request.messages or ""),
        "sampling": json.loads(request.sampling or ""),
        "pictures": [np.asarray(Image.open(io.BytesIO(each))).tolist() for each in request.images],
        "rest": (request.text, request.stream, request.exclude_input),
    }


@pytest.mark.parametrize("params", [None, ALL, *DEFAULT_SAMPLING_PARAMS.values()])
@pytest.mark.parametrize("own", [None, SamplingParams(temperature=0.3, top_k=5, max_new_tokens=7)])
def test_sampling_parameters_arrive_as_by_http(
    http: tuple[FakeTransport, str], params: SamplingParams | None, own: SamplingParams | None
) -> None:
    behind, address = http
    ours = DocumentReader()
    by_http = HttpVlmClient(server_url=address, sampling_params=own)
    by_grpc = TesseraVlmClient(transport=ours, sampling_params=own)
    for client in (by_http, by_grpc):
        assert client.predict(PAGE, "\nText Recognition:", params, priority=-3) == "green words"
    asyncio.run(by_http.aclose())
    assert question(behind.requests[-1][0]) == question(ours.requests[-1][0])


@pytest.mark.parametrize("images", [None, [PAGE, PAGE.rotate(180)]])
@pytest.mark.parametrize("prompt", ["", "Text", "<image>before and after<image>", "<image><image> <image>"])
@pytest.mark.parametrize("prompting", [{}, {"text_before_image": True}, {"system_prompt": ""}, {"prompt": "Default"}])
def test_prompts_and_pictures_arrive_as_by_http(
    monkeypatch: pytest.MonkeyPatch,
    http: tuple[FakeTransport, str],
    images: Any,
    prompt: str,
    prompting: dict[str, Any],
) -> None:
    monkeypatch.setattr(DocumentReader, "answer_to", lambda self, request: [final("an answer")])
    behind, address = http
    ours = DocumentReader()
    by_http = HttpVlmClient(server_url=address, **prompting)
    by_http.predict(images, prompt)
    asyncio.run(by_http.aclose())
    asyncio.run(TesseraVlmClient(transport=ours, **prompting).aio_predict(images, prompt))
    assert question(behind.requests[-1][0]) == question(ours.requests[-1][0])


def test_a_page_in_two_steps_is_the_same_by_either_way(http: tuple[FakeTransport, str]) -> None:
    behind, address = http
    behind.requests.clear()
    ours = DocumentReader()
    readers = (
        MinerUClient("http-client", server_url=address, use_tqdm=False),
        mineru_client(TesseraVlmClient(transport=ours)),
    )
    pages = [reader.two_step_extract(PAGE, priority=2) for reader in readers]
    assert pages[0] == pages[1] and [block.type for block in pages[1]] == list(BOXES)
    asyncio.run(readers[0].aclose())
    asked = [[question(request) for request, *_ in fake.requests] for fake in (behind, ours)]
    # The crops of a page are asked at once, in no order.
    assert sorted(asked[0], key=str) == sorted(asked[1], key=str) and len(asked[0]) == 4
    sampling = [each["sampling"] for each in asked[1]]
    same = ("no_repeat_ngram_size", "skip_special_tokens", "top_k", "top_p", "priority")
    assert {tuple(each[name] for name in same) for each in sampling} == {(100, False, 1, 0.01, 2)}
    assert not any("max_tokens" in each for each in sampling)  # as much as fits
    penalties = sorted((each["presence_penalty"], each["frequency_penalty"]) for each in sampling)
    assert penalties == [(0, 0), (1, 0.005), (1, 0.05), (1, 0.05)]


def test_a_sampling_parameter_without_a_name_here_is_refused() -> None:
    class Newer(MinerUSamplingParams):
        def __init__(self) -> None:
            super().__init__()
            self.min_p = 0.1

    ours = DocumentReader()
    client = TesseraVlmClient(transport=ours)
    with pytest.raises(UnsupportedError, match="no sampling parameter min_p"):
        client.predict(PAGE, "\nText Recognition:", Newer())
    with pytest.raises(UnsupportedError, match="predict_scored"):
        client.predict_scored(PAGE)
    assert ours.requests == []
    with pytest.raises(TypeError, match="http_timeout, server_headers: not among the options"):
        mineru_client(client, http_timeout=3, server_headers={}, debug=True)


@pytest.mark.parametrize("reason", ["length", "deadline"])
def test_an_answer_that_is_not_finished(reason: str) -> None:
    script = [[final("half an ans", reason)]]
    if reason == "length":
        assert TesseraVlmClient(transport=FakeTransport(script)).predict(None, "Text") == "half an ans"
    with pytest.raises(RequestError, match="cut after 2 tokens" if reason == "length" else "deadline"):
        TesseraVlmClient(transport=FakeTransport(script), allow_truncated_content=False).predict(None, "Text")


def test_a_batch_keeps_its_order_and_ends_with_the_first_error() -> None:
    prompts = [f"Text {number}" for number in range(5)]

    class Echo(FakeTransport):
        def answer_to(self, request: Request) -> Any:
            return [final(json.loads(request.messages or "")[-1]["content"][-1]["text"])]

    with TesseraVlmClient(transport=Echo(), max_concurrency=2) as client:
        assert client.batch_predict([None] * 5, prompts, ALL, [1, 2, 3, 4, 5]) == prompts
        assert client.batch_predict([], "Text") == []
        with pytest.raises(ValueError, match="zip"):
            client.batch_predict([None] * 5, prompts[:4])
    away = FakeTransport([[ConnectionFailed("away")]] * 5)
    with pytest.raises(ConnectionFailed, match="away"):
        TesseraVlmClient(transport=away, retry=Retry(attempts=1)).batch_predict([None] * 5, prompts)


def test_what_is_not_installed_is_named() -> None:
    missing = "pypdfium2"
    program = f"import sys; sys.modules[{missing!r}] = None; from tessera_command.cli import main; "
    program += "sys.exit(main(['parse', 'a.pdf', '-o', 'out']))"
    path = ":".join(str(ROOT / folder) for folder in ("python_backends", "clients"))
    run = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout == ""
    words = f"{missing} is not installed; documents need it: pip install '.[documents]' in Tessera's source"
    assert run.stderr == f"tessera parse: {words}\n"
