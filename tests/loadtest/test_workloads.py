"""The standard workloads' prompt and pictures are the peers', and no two pictures are alike."""

import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import cv2
import numpy as np
import pytest
from figures import ROOT
from PIL import Image
from workloads import FEW, PROMPT, WORKLOADS, Pictures, Workload, _draw, picture

from tessera.models.registry import family_for, read_config
from tessera.preprocess.decode import read_checked_header
from tessera.preprocess.preprocessor import MOST_GPU_SIDE
from tessera.settings.stages import Limits
from tessera_client.pictures import LARGEST_REQUEST
from tessera_gateway.settings import Settings

# What the peers' load generator draws from the same seed: field and noise of three pictures by the first digits of MD5.
# Not their JPEGs: OpenCV's cubic resize rounds otherwise with other vector instructions.
PEERS = {
    "W1": ["4492d282", "d22414d2", "c5639041"],
    "W2": ["478b61ad", "a8a579f8", "d94e213c"],
    "W3": ["f3d99de2", "bdad79e0", "f3fec983"],
}


@pytest.mark.parametrize("name", PEERS)
def test_pictures_are_drawn_as_those_that_the_peers_were_measured_with(name, monkeypatch):
    monkeypatch.setattr("workloads._encode", lambda drawn: b"".join(part.tobytes() for part in drawn))
    assert hashlib.md5(PROMPT.encode()).hexdigest() == "8282c11b95c7b0c2d3f2915e1c47f5cf"
    dealer = Pictures(WORKLOADS[name], seed=449, stock=2)  # the third is made on demand
    assert [hashlib.md5(dealer.deal()).hexdigest()[:8] for _ in PEERS[name]] == PEERS[name]


def test_a_picture_is_a_jpeg_of_its_field_and_noise():
    field, noise = _draw(np.random.default_rng(449), 448, 448)
    encoded = picture(448, 448, 449)
    expected = cv2.add(cv2.resize(field, (448, 448), interpolation=cv2.INTER_CUBIC), noise)
    decoded = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    assert np.abs(decoded.astype(int) - expected).mean() < 4
    with Image.open(io.BytesIO(encoded)) as told:
        assert told.quantization[0][:3] == [3, 2, 2]  # of quality 90


def test_the_dealer_never_deals_one_twice_whatever_the_threads():
    small = Workload("small", 48, 32, tokens=1, concurrency=1)
    pictures = Pictures(small, seed=5, stock=20)
    assert pictures.left == 20
    dealt: list[bytes] = []

    def draw() -> None:
        for _ in range(15):
            dealt.append(pictures.deal())

    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(draw)
    assert pictures.left == 0 and len(set(dealt)) == 60
    assert not set(dealt) & {Pictures(small, seed=6).deal() for _ in range(10)}


def test_large_pictures_are_the_same_few_in_distinct_files() -> None:
    wide = Workload("wide", 4001, 1000, tokens=1, concurrency=1)
    dealer = Pictures(wide, seed=7, stock=6)
    files = [dealer.deal() for _ in range(10)]
    assert len(set(files)) == 10
    pixels = {cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR).tobytes() for file in files}
    assert len(pixels) == FEW
    assert not set(files) & {Pictures(wide, seed=8).deal() for _ in range(3)}


@pytest.mark.parametrize("shape", sorted(path.name for path in (ROOT / "loadtest" / "shapes").iterdir()))
def test_an_8k_picture_passes_every_limit_of_the_product(shape: str) -> None:
    """Of files in the client, the gateway and preprocess; of pixels and tokens with each shape, which are the same by
    the CPU and by the GPU. Native resolution is shrunk to the processor's ``max_pixels``, as the reference does it."""
    workload = WORKLOADS["W8b"]
    file = large_file()
    assert len(file) < min(LARGEST_REQUEST, Limits().max_request_bytes)
    assert 4 / 3 * len(file) < Settings().max_body_mib << 20
    config = read_config(ROOT / "loadtest" / "shapes" / shape)
    family = family_for(config)
    header = read_checked_header(file, Limits(), "image 0")
    assert header.upright_size == (workload.width, workload.height)
    assert header.chroma_step is not None and max(header.upright_size) <= MOST_GPU_SIDE
    policy = family.policy({})
    plan = family.plan(*header.upright_size, policy)
    assert plan.cost <= family.max_cost and plan.tokens + 100 < config.text.max_position_embeddings
    if hasattr(policy, "max_pixels"):
        assert 0.9 * policy.max_pixels < plan.views[0].width * plan.views[0].height <= policy.max_pixels
    else:
        assert (plan.cost, policy.max_tiles) == (9, 12)  # 4 x 2 and a thumbnail


@cache
def large_file() -> bytes:
    return Pictures(WORKLOADS["W8b"], seed=3).deal()
