"""Pages through mineru-vl-utils' own http-client, as a user would have it, beside its `transformers` backend: 200 of
the default document model; and 200 of random weights, by our gRPC client too.

What random weights read makes no sense and never ends by itself: the layouts that crops are cut by are given, and
answers are short. The penalties that transformers does not know are 0; all else is MinerU's default.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_processor
from gateway.gateway_doubles import free_port
from mineru_vl_utils import MinerUClient, MinerUSamplingParams
from mineru_vl_utils.mineru_client import DEFAULT_PROMPTS
from PIL import Image
from server.toy_servers import Launched
from tiny_qwen2_vl import reference_processor, write_model
from transformers import Qwen2VLForConditionalGeneration

import pages
from tessera_documents import TesseraVlmClient, mineru_client
from tessera_documents.job import quiet

pytestmark = [pytest.mark.clients, pytest.mark.server]

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "build" / "document_model" / "checkpoint"
PAGES, COMPARED = 200, 24
GREEDY = {kind: MinerUSamplingParams(max_new_tokens=1000) for kind in ("[layout]", "[default]")}
SHORT = {"[layout]": MinerUSamplingParams(max_new_tokens=16), "[default]": MinerUSamplingParams(max_new_tokens=12)}
PAD = "<|endoftext|>"
LIMITS = {"min_pixels": 784, "max_pixels": 50176}
BLOCKS = [
    {"type": "title", "bbox": [0.1, 0.0, 0.9, 0.2]},
    {"type": "text", "bbox": [0.1, 0.2, 0.9, 0.7], "angle": 90},
    {"type": "equation", "bbox": [0.1, 0.7, 0.6, 1.0]},
]


@pytest.fixture(autouse=True)
def quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    quiet()  # each answer of a random model is cut, which is a warning


@contextmanager
def served(log: Path, *model: str) -> Iterator[tuple[str, str]]:
    """The addresses of the gateway and of the server."""
    launched = Launched(ROOT / "model_repository", log, *model, "--device", "cpu", "--openai-port", str(free_port()))
    try:
        yield f"http://{launched.url('openai')}", launched.url("grpc")
    finally:
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(20) == 0


def picture(number: int) -> Image.Image:
    return Image.fromarray(pages.sample(number, "heldout").picture).convert("RGB")


def by_http(gateway: str, **options: Any) -> MinerUClient:
    # With its 100 at a time a page waits longer on two cores than the gateway's five minutes.
    return MinerUClient("http-client", server_url=gateway, max_concurrency=16, use_tqdm=False, **options)


def test_the_default_model_reads_pages_as_by_transformers(tmp_path: Path) -> None:
    with served(tmp_path / "log", "--default", "documents") as (gateway, _):
        read = [
            found
            for first in range(0, PAGES, 40)  # so that not all pictures are in memory
            for found in by_http(gateway).batch_two_step_extract(list(map(picture, range(first, first + 40))))
        ]
        compared = list(map(picture, range(COMPARED)))
        ours = by_http(gateway, sampling_params=GREEDY).batch_two_step_extract(compared)
    assert len(read) == PAGES and all(any(block["content"] for block in blocks) for blocks in read)
    model = Qwen2VLForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    asked: dict[str, Any] = {"processor": load_processor(CHECKPOINT), "batch_size": 8, "use_tqdm": False}
    theirs = MinerUClient("transformers", model=model, sampling_params=GREEDY, **asked).batch_two_step_extract(compared)
    equal = [list(a) == list(b) for a, b in zip(ours, theirs, strict=True)]
    assert sum(equal) >= 20, f"pages that differ: {[page for page, same in enumerate(equal) if not same]}"


def read(reader: MinerUClient, shown: list[Image.Image]) -> list[list[str | None]]:
    """For each page what the model says to the layout prompt and to the prompts for its crops."""
    layouts = reader.client.batch_predict(
        [reader.helper.prepare_for_layout(image) for image in shown], DEFAULT_PROMPTS["[layout]"], SHORT["[layout]"]
    )
    crops = reader.batch_extract_with_layout(shown, [BLOCKS] * len(shown))
    return [[layout, *(block.content for block in blocks)] for layout, blocks in zip(layouts, crops, strict=True)]


def test_random_weights_read_the_same_by_every_way(tmp_path: Path) -> None:
    model = write_model(tmp_path / "checkpoint", **LIMITS)
    processor = reference_processor(tmp_path / "checkpoint", **LIMITS)
    processor.tokenizer.pad_token = PAD  # asked for even where a batch is of one
    random = np.random.default_rng(31)
    # The sides of their crops are multiples of 28: resized pixels differ by Pillow's and torch's rounding.
    shown = [Image.fromarray(random.integers(0, 256, (280, 280, 3), np.uint8)) for _ in range(PAGES)]
    options: dict[str, Any] = {"sampling_params": SHORT, "layout_image_size": (196, 196)}
    with served(tmp_path / "log", "--checkpoint", str(tmp_path / "checkpoint")) as (gateway, server):
        found = read(by_http(gateway, **options), shown)
        with TesseraVlmClient(server) as vlm:
            assert read(mineru_client(vlm, **options), shown) == found
    assert len(found) == PAGES and all(text for each in found for text in each)
    assert len({tuple(each) for each in found}) > PAGES * 0.9  # the pictures count
    theirs = MinerUClient("transformers", model=model, processor=processor, use_tqdm=False, **options)
    unpadded = [[(text or "").replace(PAD, "") for text in each] for each in found[:COMPARED]]  # theirs leaves them out
    assert unpadded == read(theirs, shown[:COMPARED])
