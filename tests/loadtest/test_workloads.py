"""The standard workloads' prompt and pictures are the peers', and no two pictures are alike."""

from __future__ import annotations

import hashlib
import io
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
from PIL import Image
from workloads import PROMPT, WORKLOADS, Pictures, Workload, _draw, picture

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
