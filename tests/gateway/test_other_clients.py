"""Clients built on OpenAI's protocol, each used as its users do; the model behind the gateway is a stand-in."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clients.fake_transport import USAGE, final
from gateway_doubles import HELLO, Asked, client_of, served
from PIL import Image
from pydantic import BaseModel

from tessera_client.messages import Delta

pytestmark = pytest.mark.clients


class Room(BaseModel):
    name: str
    sockets: int


KITCHEN = {"name": "kitchen", "sockets": 2}


@pytest.fixture(autouse=True)
def kitchen(play: Any) -> None:
    play(*[[final(json.dumps(KITCHEN))]] * 2)


def properties(door: tuple[Asked, str]) -> set[str]:
    """Of the schema that was asked for."""
    return set(json.loads(door[0].fake.requests[-1][0].sampling or "{}")["json_schema"]["properties"])


@pytest.mark.parametrize("mode", [None, "JSON_SCHEMA", "TOOLS_STRICT", "JSON"])
def test_instructor(door: tuple[Asked, str], mode: str | None) -> None:
    import instructor

    modes: dict[str, Any] = {"mode": instructor.Mode[mode]} if mode else {}
    with client_of(door[1]) as client:
        asker = instructor.from_openai(client, **modes)
        room = asker.chat.completions.create(model="vlm", messages=HELLO, response_model=Room, max_retries=0)
        assert isinstance(room, Room) and room.model_dump() == KITCHEN
        if mode != "JSON":
            assert properties(door) == {"name", "sockets"}
        options: Any = {"model": "vlm", "messages": HELLO, "response_model": Room, "max_retries": 0}
        *_, last = asker.chat.completions.create_partial(**options)
    assert last.model_dump() == KITCHEN


@pytest.mark.parametrize("method", [None, "function_calling", "json_schema", "json_mode"])
def test_langchain_with_structured_output(door: tuple[Asked, str], method: Any) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="vlm", base_url=f"{door[1]}/v1", api_key="none", max_retries=0)  # type: ignore[arg-type]
    methods = {"method": method} if method else {}
    room = model.with_structured_output(Room, **methods).invoke("Which room?")
    assert isinstance(room, Room) and room.model_dump() == KITCHEN
    if method != "json_mode":
        assert properties(door) == {"name", "sockets"}


def test_aiperf_with_pictures(tmp_path: Path) -> None:
    aiperf = Path(sys.prefix) / "aiperf" / "bin" / "aiperf"
    checkpoint = Path(__file__).parents[2] / "build" / "default_model" / "checkpoint"
    shape = {"image-width-mean": 448, "image-height-mean": 320, "image-batch-size": 1, "image-format": "jpeg"}
    load = {"request-count": 8, "concurrency": 3, "synthetic-input-tokens-mean": 20, "output-tokens-mean": 5}
    with served(*[[Delta("an "), Delta("answer"), final()]] * 8) as (door, address):
        command = [str(aiperf), "profile", "--model", "vlm", "--url", address, "--endpoint-type", "chat", "--streaming"]
        command += ["--tokenizer", str(checkpoint), "--ui", "none", "--output-artifact-dir", str(tmp_path)]
        command += [part for name, value in (shape | load).items() for part in (f"--{name}", str(value))]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["is_complete"] and report["error_summary"] == [] and report["request_count"]["avg"] == 8
    assert report["total_usage_completion_tokens"]["avg"] == 8 * USAGE.completion_tokens
    sizes = [Image.open(io.BytesIO(picture)).size for request, *_ in door.fake.requests for picture in request.images]
    assert sizes == [(448, 320)] * 8
