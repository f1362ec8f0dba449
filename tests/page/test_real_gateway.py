"""The page before the real gateway and the real server: what a stand-in cannot prove. It takes docs/page's pictures."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from browser import Browser
from gateway.gateway_doubles import listening

from tessera.launcher.process import Server
from tessera_gateway.app import create_app
from tessera_gateway.settings import Settings

pytestmark = pytest.mark.server

HAZARDS = ["crack", "burnt socket", "exposed wire", "damp", "blocked exit"]  # the first two are in the picture


@pytest.fixture(scope="module")
def address(chromium: Any, server: Server) -> Iterator[str]:
    with listening(create_app(Settings(url=server.grpc_url, metrics=(server.metrics_url,)))) as url:
        yield url


def test_questions_about_a_picture(page: Browser, picture: Path) -> None:
    assert page("model").text == "vlm"
    page.choose(picture)
    width, height = PIL.Image.open(picture).size
    cut = re.fullmatch(rf"{width} × {height} pixels, resized to .* tiles.*, (\d+) tokens in all", page("cut").text)
    assert cut
    page.ask("Describe the picture.")
    answer = page.until_answered()
    assert len(answer.split()) > 3 and not page.shows("problem")
    assert f"({cut[1]} of the picture)" in page("usage").text

    page.ask("What hazard is there?", ", ".join(HAZARDS))
    best = page.until_answered()
    assert best in HAZARDS[:2]
    shares = [float(cell.text.strip("< %")) for cell in page.all("#scores tbody td:nth-child(3)")]
    assert sum(shares) == pytest.approx(100, abs=2) and HAZARDS[shares.index(max(shares))] == best
    page.keep_screenshot("labels")

    page("tab-status").click()
    page.until(lambda: page.servers() and int(page.servers()[0]["Requests ended"]) >= 2)  # the page lags a little
    (shown,) = page.servers()
    assert shown["Requests under way"] == "0"
    assert int(shown["KV blocks"].split(" of ")[1].replace(",", "")) > 0
    assert "–" not in shown.values(), "a number that the metrics page no longer has"
    page.keep_screenshot("status")


def test_a_picture_that_is_none_is_refused_in_the_servers_words(page: Browser, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff not a JPEG")
    page("file").send_keys(str(broken))
    page.until(lambda: "not known" in page("cut").text)
    page.ask("What is here?")
    page.until(lambda: page.shows("problem"))
    assert "picture 1 (broken.jpg)" in page("problem").text and "image 0" not in page("problem").text
