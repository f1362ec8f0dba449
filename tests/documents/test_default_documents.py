"""200 pages read by the default document model through mineru-vl-utils' own http-client, as a user would have it; some
of them beside its `transformers` backend."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from document_shape import load_processor
from gateway.gateway_doubles import free_port
from mineru_vl_utils import MinerUClient, MinerUSamplingParams
from PIL import Image
from server.toy_servers import Launched
from transformers import Qwen2VLForConditionalGeneration

import pages
from tessera_documents.job import quiet

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "build" / "document_model" / "checkpoint"
PAGES, COMPARED = 200, 24
# transformers does not know the penalties that are MinerU's default.
GREEDY = {kind: MinerUSamplingParams(max_new_tokens=1000) for kind in ("[layout]", "[default]")}

pytestmark = [pytest.mark.clients, pytest.mark.server]


def picture(number: int) -> Image.Image:
    return Image.fromarray(pages.sample(number, "heldout").picture).convert("RGB")


def test_pages_read_the_same_as_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    quiet()
    port = ("--openai-port", str(free_port()))
    launched = Launched(ROOT / "model_repository", tmp_path / "log", "--default", "documents", "--device", "cpu", *port)
    try:
        server = {"backend": "http-client", "server_url": f"http://{launched.url('openai')}", "use_tqdm": False}
        server["max_concurrency"] = 16  # with its 100 a page waits longer on two cores than the gateway's five minutes
        read = [
            found
            for first in range(0, PAGES, 40)  # so that not all pictures are in memory
            for found in MinerUClient(**server).batch_two_step_extract(list(map(picture, range(first, first + 40))))
        ]
        compared = list(map(picture, range(COMPARED)))
        ours = MinerUClient(**server, sampling_params=GREEDY).batch_two_step_extract(compared)
    finally:
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(20) == 0
    assert len(read) == PAGES and all(any(block["content"] for block in blocks) for blocks in read)
    model = Qwen2VLForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    theirs = MinerUClient(
        "transformers",
        model=model,
        processor=load_processor(CHECKPOINT),
        batch_size=8,
        use_tqdm=False,
        sampling_params=GREEDY,
    ).batch_two_step_extract(compared)
    equal = [list(a) == list(b) for a, b in zip(ours, theirs, strict=True)]
    assert sum(equal) >= 20, f"pages that differ: {[page for page, same in enumerate(equal) if not same]}"
