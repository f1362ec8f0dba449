"""Headless Chromium, one for all tests of this folder, and the stand-in that serves them the page."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from gateway.gateway_doubles import listening
from stand_in import StandIn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build" / "default_model"))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("needs Debian's chromium and chromium-driver (apt-get install chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    # Root in a container has no sandbox, and /dev/shm is small there.
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driven = webdriver.Chrome(options=options, service=Service(driver))
    yield driven
    driven.quit()


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A room of the default model's held-out set, as a JPEG file."""
    import scene

    file = tmp_path_factory.mktemp("picture") / "room.jpg"
    file.write_bytes(scene.encode_jpeg(scene.sample(9_000_006, "heldout")))
    return file


@pytest.fixture(scope="module")
def door() -> Iterator[tuple[StandIn, str]]:
    stand_in = StandIn()
    with listening(stand_in.app) as url:
        stand_in.app.state.metrics_urls = [f"{url}/metrics/servers/0", "http://127.0.0.1:9/metrics"]
        yield stand_in, url


@pytest.fixture(scope="module")
def address(door: tuple[StandIn, str]) -> str:
    return door[1]


@pytest.fixture
def gateway(door: tuple[StandIn, str]) -> Iterator[StandIn]:
    yield door[0]
    door[0].reset()


@pytest.fixture
def page(chromium: Any, address: str) -> Iterator[Browser]:
    browser = Browser(chromium, address)
    browser.open()
    yield browser
    assert browser.complaints() == [], "the browser's console has errors"
    chromium.get("about:blank")  # a page asks its gateway again and again, also one that is gone
