"""The gateway's counters: one page for all workers, and what the page of the servers says."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from clients.fake_transport import final
from gateway_doubles import gateway, listening
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tessera_client import Unavailable
from tessera_gateway import metrics
from tessera_gateway.metrics import NAMES
from tessera_gateway.settings import Settings

WORKER = """
import sys
from pathlib import Path
from tessera_gateway.metrics import Counters
counters = Counters(Path(sys.argv[1]), 2)
counters.ended(200)
counters.add("requests_under_way")
print(counters.total('requests_total{status="200"}'), counters.total("requests_under_way"), flush=True)
sys.stdin.read()
"""


def test_workers_add_up_and_a_successor_goes_on_where_a_dead_one_stopped(tmp_path: Path) -> None:
    command, environment = (
        [sys.executable, "-c", WORKER, str(tmp_path / "counters")],
        {"PYTHONPATH": ":".join(sys.path)},
    )
    pipe = subprocess.PIPE
    with ExitStack() as ends:

        def worker() -> tuple[subprocess.Popen[str], str]:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
            ends.callback(process.communicate)
            ends.callback(process.kill)
            assert process.stdout is not None
            return process, process.stdout.readline().strip()

        first, said = worker()
        assert (said, worker()[1]) == ("1.0 1.0", "2.0 2.0")
        third, said = worker()
        assert said == "" and third.stderr is not None and "more than 2 workers" in third.stderr.read()
        first.kill()
        first.wait()
        assert worker()[1] == "3.0 2.0"  # what the dead one had under way is over


def test_the_page_is_prometheus_text() -> None:
    door = gateway([final("a")], [Unavailable("stopping")], [final("b")])
    door.app.state.counters.ended(418)
    assert [door.ask(stream=streamed).status_code for streamed in (False, False, True)] == [200, 503, 200]
    assert door("POST", "/v1/responses", json={"model": "vlm", "input": "?"}).status_code == 200
    response = door("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    assert list(values) == [metrics.PREFIX + name for name in NAMES]
    assert values['tessera_gateway_requests_total{status="200"}'] == 3
    assert values['tessera_gateway_requests_total{status="503"}'] == 1
    assert values['tessera_gateway_requests_total{status="other"}'] == 1
    assert values["tessera_gateway_completion_seconds_count"] == 3
    assert values['tessera_gateway_completion_seconds_bucket{le="+Inf"}'] == 3
    assert values['tessera_gateway_tokens_total{kind="prompt"}'] == 30
    assert values['tessera_gateway_tokens_total{kind="completion"}'] == 6
    assert values["tessera_gateway_requests_under_way"] == 1  # the one for this page
    assert values["tessera_gateway_body_bytes_total"] > 100


def test_the_servers_pages_are_passed_on() -> None:
    """One as it is; several with each metric described once, and apart where they are behind one address."""

    def page(up: int) -> Route:
        head = f"# HELP nv_up In words of version {up}.\n# TYPE nv_up gauge\n"
        text = f'plain 1\n{head}nv_up{{gpu="0"}} {up}\nnv_up{{}} NaN\n# HELP rest More.\nrest{{a="}} b"}} 2 17\n'
        return Route("/metrics" if up else "/0/metrics", lambda _: PlainTextResponse(text))

    with listening(Starlette(routes=[page(1), page(0)])) as address:
        one, other = f"{address}/metrics", f"{address}/0/metrics"
        assert gateway(metrics=(one,))("GET", "/metrics/servers").text.startswith("plain 1\n# HELP nv_up")
        both = gateway(metrics=(one, other))
        named = [each["server"] for each in both("GET", "/tessera/status").json()["servers"]]
        assert named == [address.removeprefix("http://"), f"{address.removeprefix('http://')}/0"]
        a, b = (f'server="{name}"' for name in named)
        assert both("GET", "/metrics/servers").text.splitlines() == [
            *(f"plain{{{a}}} 1", f"plain{{{b}}} 1", "# HELP nv_up In words of version 1.", "# TYPE nv_up gauge"),
            *(f'nv_up{{{a},gpu="0"}} 1', f"nv_up{{{a},}} NaN", f'nv_up{{{b},gpu="0"}} 0', f"nv_up{{{b},}} NaN"),
            *("# HELP rest More.", f'rest{{{a},a="}} b"}} 2 17', f'rest{{{b},a="}} b"}} 2 17'),
        ]
    response = gateway(metrics=(one,))("GET", "/metrics/servers")
    assert response.status_code == 503 and one in response.json()["error"]["message"]


def test_metrics_pages_are_looked_for_beside_the_servers() -> None:
    assert Settings(url="a:8001,[::1]:8011").metrics_urls == ["http://a:8002/metrics", "http://[::1]:8012/metrics"]
    assert Settings(url="http://a:8000").metrics_urls == ["http://a:8002/metrics"]
    assert Settings(metrics=("http://m/metrics",)).metrics_urls == ["http://m/metrics"]
