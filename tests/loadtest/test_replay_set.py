"""A set of pages on disk, and that its crops are those of `tessera parse`, byte by byte."""

import io
import json
import tarfile
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench import replay_set
from bench.replay_set import Client, Page, ReplaySet, Request, marked, png
from documents.document_reader import write_drawn_pdf
from mineru_vl_utils.mineru_client import MinerUClientHelper
from PIL import Image

from tessera_documents import TesseraVlmClient, mineru_client
from tessera_documents.sources import open_document

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


def test_a_set_is_made_of_the_packages_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that are recorded, as `tessera parse` renders them; the same bytes each time."""
    pdf = write_drawn_pdf(
        tmp_path / "two.pdf", ["BT /F 10 Tf 60 700 Td (One) Tj ET", "BT /F 10 Tf 60 600 Td (Two) Tj ET"]
    )
    with tarfile.open(tmp_path / "a-1.tar.gz", "w:gz") as package:
        package.add(pdf, "a-1/tests/two.pdf")
    name = "a-1.tar.gz/a-1/tests/two.pdf"
    pages = [
        Page(f"{name} 2", (Request("[default]", 30), Request("[default]", 7, (1, 2, 3, 4)))),
        Page(f"{name} 1", ()),
    ]
    recorded = {"client": asdict(CLIENT), "pages": [astuple(page) for page in pages]}
    (tmp_path / "recorded.json").write_text(json.dumps(recorded))
    monkeypatch.setattr(replay_set, "RECORDED", tmp_path / "recorded.json")
    for out in ("set.zip", "again.zip"):
        monkeypatch.setattr("sys.argv", ["replay_pages", str(tmp_path), "-o", str(tmp_path / out)])
        assert replay_set.main() == 0 and capsys.readouterr().out.startswith("2 pages, ")
    read = ReplaySet(tmp_path / "set.zip")
    assert (read.client, read.pages) == (CLIENT, pages)
    document = open_document(pdf)
    assert [png(read.picture(number)) for number in (1, 0)] == [png(document.render(page, 200)) for page in (0, 1)]
    assert (tmp_path / "again.zip").read_bytes() == (tmp_path / "set.zip").read_bytes()
    (tmp_path / "a-1.tar.gz").unlink()
    with pytest.raises(SystemExit, match=r"has no a-1\.tar\.gz"):
        replay_set.main()


def test_marks_change_bytes_and_no_pixel() -> None:
    plain = png(page())
    one, two = marked(plain, "7 1"), marked(plain, "7 2")
    assert len({plain, one, two}) == 3
    for each in (one, two):
        picture = Image.open(io.BytesIO(each))
        assert np.array_equal(np.asarray(picture), np.asarray(page()))
    assert picture.text == {"Comment": "7 2"}  # whose checksums Pillow has checked
