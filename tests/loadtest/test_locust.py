"""Locust with our users, before servers that do nothing: what it counts, its shapes, its page and its report.

Locust is a process of its own here as everywhere, for it makes the standard library cooperative.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway.gateway_doubles import free_port
from standin_server import standin

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(find_spec("locust") is None, reason="locust is not installed (requirements-loadtest.txt)"),
]
ROOT = Path(__file__).resolve().parents[2]


def command(host: str, user: str, *flags: str) -> list[str]:
    file = str(ROOT / "loadtest" / "locustfile.py")
    stock = ("--stock", "4", "--again")
    return [sys.executable, "-m", "locust", "-f", file, "--host", host, *stock, *flags, user]


def run(tmp_path: Path, host: str, user: str, *flags: str) -> dict[tuple[str, str], dict[str, Any]]:
    """(type, name) -> the entry of Locust's statistics."""
    flags = ("--headless", "--json-file", str(tmp_path / "stats"), *flags)
    done = subprocess.run(command(host, user, *flags), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return {(each["method"], each["name"]): each for each in json.loads((tmp_path / "stats.json").read_text())}


@pytest.mark.parametrize(
    ("kind", "user", "scheme"), [("tessera", "GrpcUser", "grpc"), ("openai", "OpenAiUser", "openai")]
)
def test_answers_and_what_is_measured_beside_them(kind: str, user: str, scheme: str, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    flags = ("--workload", "W4b", "--users", "2", "--run-time", "12s", "--html", str(html))
    with standin(kind) as host:
        found = run(tmp_path, host, user, *flags)
    assert set(found) == {(scheme, "W4b"), ("TTFT", "W4b"), ("ms/token", "W4b"), ("QPM", "of all users")}
    answers, first, tokens = (found[what, "W4b"] for what in (scheme, "TTFT", "ms/token"))
    assert answers["num_failures"] == 0
    assert answers["num_requests"] == first["num_requests"] == tokens["num_requests"] > 0
    # Each answer is its first token and 255 more.
    whole = first["total_response_time"] + 255 * tokens["total_response_time"]
    assert whole == pytest.approx(answers["total_response_time"], rel=0.01)
    per_minute = found["QPM", "of all users"]
    rate = answers["num_requests"] / (answers["last_request_timestamp"] - answers["start_time"])
    assert per_minute["total_response_time"] / per_minute["num_requests"] == pytest.approx(60 * rate, rel=0.5)
    report = html.read_text()
    assert all(name in report for name in ("W4b", "TTFT", "ms/token", "QPM"))


def test_the_mix_asks_each_of_its_questions_over_processes(tmp_path: Path) -> None:
    flags = ("--shape", "mix", "--users", "8", "--run-time", "8s", "--processes", "2")
    with standin() as host:
        found = run(tmp_path, host, "GrpcUser", *flags)
    counts = {name: each["num_requests"] for (what, name), each in found.items() if what == "grpc"}
    assert set(counts) == {"short", "long_prompt", "long_answer"}
    assert counts["short"] > 0.9 * sum(counts.values())


def test_a_ramp_ends_by_itself_with_all_its_users(tmp_path: Path) -> None:
    with standin() as host:
        flags = ("--headless", "--shape", "ramp", "--users", "5", "--run-time", "8s")
        done = subprocess.run(
            command(host, "GrpcUser", *flags), cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr[-2000:]
    updates = [int(users) for users in re.findall(r"Shape test updating to (\d+) users", done.stderr)]
    assert updates == [1, 2, 3, 4, 5]


@contextmanager
def locusts_page(host: str, tmp_path: Path) -> Iterator[str]:
    port = free_port()
    flags = ("--workload", "W4b", "--users", "2", "--web-host", "127.0.0.1", "--web-port", str(port))
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command(host, "GrpcUser", *flags), cwd=tmp_path, stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
            try:
                httpx.get(url, timeout=5, trust_env=False)
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def test_the_page_starts_a_run_and_shows_what_is_measured(tmp_path: Path) -> None:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("needs Debian's chromium and chromium-driver (apt-get install chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1400,1000"):
        options.add_argument(f"--{flag}")
    with standin() as host, locusts_page(host, tmp_path) as url:
        browser = webdriver.Chrome(options=options, service=Service(driver))
        try:
            browser.get(url)
            wait = WebDriverWait(browser, 60)
            button = "//button[translate(normalize-space(.), 'STAR', 'star') = 'start']"
            wait.until(lambda _: browser.find_elements("xpath", button))[-1].click()
            text = "return document.body.innerText"
            wait.until(lambda _: all(each in browser.execute_script(text) for each in ("TTFT", "ms/token", "QPM")))
            assert "W4b" in browser.execute_script(text)
        finally:
            browser.quit()
        running = httpx.get(f"{url}/stats/requests", timeout=10, trust_env=False).json()
        assert running["state"] == "running" and running["user_count"] == 2
        assert httpx.post(f"{url}/stop", timeout=10, trust_env=False).json()["success"]
