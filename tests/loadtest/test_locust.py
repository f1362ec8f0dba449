"""Locust with our users, before servers that do nothing: what it counts, its shapes, its page and its report.

Locust is a process of its own here as everywhere, for it makes the standard library cooperative.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from standin_server import standin

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.clients  # locust is installed for these alone


def command(host: str, user: str, *flags: str) -> list[str]:
    file = str(ROOT / "loadtest" / "locustfile.py")
    return [sys.executable, "-m", "locust", "-f", file, "--host", host, *flags, user]


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
