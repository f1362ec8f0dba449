"""A set of pages on disk, and that its crops are those of MinerU's own client, byte by byte."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.replay_set import Client, Page, ReplaySet, Request, marked, png, write
from mineru_vl_utils.mineru_client import MinerUClientHelper
from PIL import Image

from tessera_documents import TesseraVlmClient, mineru_client

CLIENT = Client("2.0.7", "Be kind.", {"[default]": {"prompt": "\nRead:", "sampling": {"top_k": 1}}}, (84, 56), 28, 50)
BOXES = [(100, 50, 900, 150), (0, 0, 1000, 1000), (333, 100, 336, 900), (10, 500, 990, 502), (1, 1, 3, 3)]
"""Plain, the page, too long upright and lying, and too small."""


def page(size: tuple[int, int] = (611, 793)) -> Image.Image:
    pixels = np.random.default_rng(5).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def helper() -> MinerUClientHelper:
    with TesseraVlmClient() as vlm:
        return mineru_client(vlm, layout_image_size=CLIENT.layout_size).helper


@pytest.mark.parametrize("box", BOXES)
def test_a_crop_is_the_clients_own(box: Any, helper: MinerUClientHelper) -> None:
    layout = "<|box_start|>{} {} {} {}<|box_end|><|ref_start|>text<|ref_end|><|rotate_up|>".format(*box)
    theirs, *_ = helper.prepare_for_extract(page(), helper.parse_layout_output(layout))
    assert [CLIENT.picture(page(), Request("[default]", 9, box))] == theirs


def test_a_pages_picture_is_the_clients_own(helper: MinerUClientHelper) -> None:
    assert CLIENT.picture(page(), Request("[layout]", 9)) == helper.prepare_for_layout(page())


def test_a_set_is_read_as_it_was_written(tmp_path: Path) -> None:
    pages = [Page("a.pdf 1", (Request("[default]", 30), Request("[default]", 7, (1, 2, 3, 4)))), Page("a.pdf 2", ())]
    pictures = [page(), page((31, 20))]
    write(tmp_path / "set.zip", CLIENT, zip(pages, pictures))
    read = ReplaySet(tmp_path / "set.zip")
    assert (read.client, read.pages) == (CLIENT, pages)
    assert [png(read.picture(number)) for number in range(2)] == [png(picture) for picture in pictures]
    assert (pages[0].tokens, pages[0].read_tokens) == (37, 7)
    again = tmp_path / "again.zip"
    write(again, CLIENT, zip(pages, pictures))
    assert again.read_bytes() == (tmp_path / "set.zip").read_bytes()


def test_marks_change_bytes_and_no_pixel() -> None:
    plain = png(page())
    one, two = marked(plain, "7 1"), marked(plain, "7 2")
    assert len({plain, one, two}) == 3
    for each in (one, two):
        picture = Image.open(io.BytesIO(each))
        assert np.array_equal(np.asarray(picture), np.asarray(page()))
    assert picture.text == {"Comment": "7 2"}  # whose checksums Pillow has checked
