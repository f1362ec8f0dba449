"""200 pages through mineru-vl-utils' own http-client, and by our gRPC client, beside its `transformers` backend.

The weights are random, so that what is read makes no sense and never ends by itself: the layouts that crops are cut by
are given, and answers are short. The penalties that transformers does not know are 0; all else is MinerU's default.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway.gateway_doubles import free_port
from mineru_vl_utils import MinerUClient, MinerUSamplingParams
from mineru_vl_utils.mineru_client import DEFAULT_PROMPTS
from PIL import Image, ImageDraw, ImageFont
from server.toy_servers import Launched
from tiny_qwen2_vl import reference_processor, write_model

from tessera_command.cli import main
from tessera_documents import TesseraVlmClient, mineru_client
from tessera_documents.job import Job, quiet

pytestmark = [pytest.mark.clients, pytest.mark.server]

ROOT = Path(__file__).resolve().parents[2]
PAGES, COMPARED = 200, 24
LIMITS = {"min_pixels": 784, "max_pixels": 50176}
BLOCKS = [
    {"type": "title", "bbox": [0.1, 0.0, 0.9, 0.2]},
    {"type": "text", "bbox": [0.1, 0.2, 0.9, 0.7], "angle": 90},
    {"type": "equation", "bbox": [0.1, 0.7, 0.6, 1.0]},
]
PARAMS = {"[layout]": MinerUSamplingParams(max_new_tokens=16), "[default]": MinerUSamplingParams(max_new_tokens=12)}
OPTIONS: dict[str, Any] = {"sampling_params": PARAMS, "layout_image_size": (196, 196), "use_tqdm": False}


def page(number: int) -> Image.Image:
    random = np.random.default_rng((31, number))
    image = Image.new("RGB", (200, 260), tuple(int(level) for level in random.integers(200, 256, 3)))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    for line in range(12):
        words = " ".join(str(word) for word in random.integers(0, 10**5, 4))
        draw.text((10, 20 * line + 5), words, tuple(int(level) for level in random.integers(0, 120, 3)), font)
    return image


def read(reader: MinerUClient, pages: list[Image.Image]) -> list[list[str | None]]:
    """For each page what the model says to the layout prompt and to the prompts for its crops."""
    layouts = reader.client.batch_predict(
        [reader.helper.prepare_for_layout(image) for image in pages], DEFAULT_PROMPTS["[layout]"], PARAMS["[layout]"]
    )
    crops = reader.batch_extract_with_layout(pages, [BLOCKS] * len(pages))
    return [[layout, *(block.content for block in blocks)] for layout, blocks in zip(layouts, crops, strict=True)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, str, str]]:
    """The model and the processor of transformers; the gateway's and the server's addresses."""
    folder = tmp_path_factory.mktemp("served")
    model = write_model(folder / "checkpoint", **LIMITS)
    flags = ["--checkpoint", str(folder / "checkpoint"), "--device", "cpu", "--openai-port", str(free_port())]
    launched = Launched(ROOT / "model_repository", folder / "log", *flags)
    try:
        processor = reference_processor(folder / "checkpoint", **LIMITS)
        processor.tokenizer.pad_token = "<|endoftext|>"  # asked for even where a batch is of one
        yield model, processor, f"http://{launched.url('openai')}", launched.url("grpc")
    finally:
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(20) == 0


def test_pages_read_the_same_by_every_way(served: tuple[Any, Any, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    quiet()  # a random model never ends by itself, and each answer that was cut is a warning
    model, processor, gateway, server = served
    pages = [page(number) for number in range(PAGES)]
    by_http = read(MinerUClient("http-client", server_url=gateway, **OPTIONS), pages)
    assert len(by_http) == PAGES and all(text for each in by_http for text in each)
    assert len({tuple(each) for each in by_http}) > PAGES * 0.9  # the pictures count
    reference = read(MinerUClient("transformers", model=model, processor=processor, **OPTIONS), pages[:COMPARED])
    assert by_http[:COMPARED] == reference
    with TesseraVlmClient(server) as vlm:
        assert read(mineru_client(vlm, **OPTIONS), pages) == by_http


def test_the_command_before_a_real_server(
    served: tuple[Any, Any, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for number in range(6):
        page(number).save(tmp_path / f"{number}.png")
    asked = ["--url", served[3], "--max-tokens", "16", "-o", str(tmp_path / "out")]
    assert main(["parse", str(tmp_path), *asked]) == 2  # its weights are random
    assert "reads no documents: it found nothing on a page of text" in capsys.readouterr().err

    async def looked_at(job: Job) -> None:
        pass

    monkeypatch.setattr(Job, "_check_reads_documents", looked_at)
    assert main(["parse", str(tmp_path), *asked]) == 0
    found = [json.loads((tmp_path / "out" / f"{number}.png" / "page-0001.json").read_text()) for number in range(6)]
    assert [each["blocks"] for each in found] == [[]] * 6
    assert [each["warnings"][0] for each in found] == ["an answer was cut after 16 tokens"] * 6
    assert all(each["warnings"][1].startswith("Layout output does not match expected format: ") for each in found)
