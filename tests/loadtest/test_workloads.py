"""The standard workloads: their numbers, and pictures of which no two are alike."""

from __future__ import annotations

import base64
import hashlib
from concurrent.futures import ThreadPoolExecutor

import cv2
import pytest
from workloads import PROMPT, WORKLOADS, Pictures, Workload


def test_the_workloads_are_the_standard_ones():
    shapes = {name: (w.width, w.height, w.tokens, w.concurrency, w.max_tiles) for name, w in WORKLOADS.items()}
    assert shapes == {
        "W1": (448, 448, 4, 256, None),
        "W2": (480, 320, 4, 256, 12),
        "W3": (1920, 1080, 4, 192, None),
        "W4a": (448, 448, 256, 64, None),
        "W4b": (448, 448, 256, 10, None),
        "W5a": (1036, 1036, 4, 256, None),
        "W5b": (448, 448, 4, 256, None),
        "W5c.c64": (1036, 1036, 256, 64, None),
        "W5c.c10": (1036, 1036, 256, 10, None),
        "W6": (448, 448, 4, 256, None),
        "W6.text_first": (448, 448, 4, 256, None),
    }
    assert {name for name, w in WORKLOADS.items() if len(set(w.prompts)) == 4} == {"W6", "W6.text_first"}
    assert [name for name, w in WORKLOADS.items() if w.text_first] == ["W6.text_first"]
    assert [name for name, w in WORKLOADS.items() if w.streamed] == ["W4a", "W4b", "W5c.c64", "W5c.c10"]
    assert WORKLOADS["W2"].sampling == {"temperature": 0, "ignore_eos": True, "max_tokens": 4, "max_tiles": 12}
    assert [WORKLOADS[name].question("q") for name in ("W6", "W6.text_first")] == ["q", "q\n<image>"]
    assert hashlib.md5(PROMPT.encode()).hexdigest() == "8282c11b95c7b0c2d3f2915e1c47f5cf"


# What the peers' load generator makes of the same seed: its base64 text by the first digits of MD5.
PEERS = {
    "W1": ["97d9903e", "2936937f", "c2fd03ea"],
    "W2": ["0013112d", "2f64d15c", "8337f106"],
    "W3": ["aedf03be", "e7d06c44", "b5a87c54"],
}


@pytest.mark.skipif(not cv2.__version__.startswith("4.11"), reason="another OpenCV's JPEGs have other bytes")
@pytest.mark.parametrize("name", PEERS)
def test_pictures_equal_those_that_the_peers_were_measured_with(name):
    dealer = Pictures(WORKLOADS[name], seed=449, stock=2)  # the third is made on demand
    dealt = [base64.b64encode(dealer.deal()) for _ in PEERS[name]]
    assert [hashlib.md5(text).hexdigest()[:8] for text in dealt] == PEERS[name]


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
