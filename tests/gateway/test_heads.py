"""What is answered by a request's head: ids, hosts, origins, HEAD; and what the service says of itself: its counters,
and the servers' pages."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from clients.fake_transport import final
from gateway_doubles import ASKED, gateway, listening
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tessera_client import Unavailable
from tessera_gateway import cli, metrics, service
from tessera_gateway.metrics import NAMES
from tessera_gateway.settings import Settings
from tessera_wire import __version__
from tessera_wire.errors import InvalidRequest


@pytest.mark.parametrize(("given", "kept"), [("trace-7.a:b", True), ("a b", False), ("", False), ("x" * 129, False)])
def test_every_answer_has_an_id(given: str, kept: bool) -> None:
    for path in ("/version", "/nothing"):
        name = gateway()("GET", path, headers={"X-Request-Id": given}).headers["x-request-id"]
        assert (name == given) is kept and (kept or name.startswith("req_"))


def test_a_fault_of_the_gateway_is_in_the_log_by_its_id(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    door = gateway()
    monkeypatch.setattr(door.app.state, "metrics_urls", None)
    response = door("GET", "/v1/models", headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
    assert response.json()["error"]["code"] == "gateway_error"
    assert "request mine failed" in capsys.readouterr().err


def test_a_name_that_was_pointed_here_is_not_served() -> None:
    door = gateway(allowed_hosts=("rooms.example.com",))
    own = ("localhost:9000", "LOCALHOST", "a.localhost", "127.0.0.1:9000", "[::1]:9000", "192.168.0.7")
    others = ("evil.example.com", "localhost.evil.com", "127.0.0.1.evil.com", "a@localhost")
    for host in (*own, "rooms.example.com:9000", "Rooms.Example.com.", *others):
        response = door("GET", "/version", headers={"Host": host})
        assert response.status_code == (403 if host in others else 200), host
        if host in others:
            assert response.json()["error"]["code"] == "host_not_allowed" and "--allowed-hosts" in response.text
        assert gateway()("GET", "/version", headers={"Host": host}).status_code == 200


def test_where_it_listens_on_this_machine_only_other_names_are_not_served() -> None:
    def hosts(*flags: str) -> tuple[str, ...] | None:
        return cli._settings(cli._parser().parse_args(flags)).allowed_hosts

    assert hosts() == hosts("--host", "::1") == hosts("--host", "localhost") == ()
    assert hosts("--host", "0.0.0.0") is None
    assert hosts("--allowed-hosts", "a,b") == ("a", "b", "127.0.0.1")
    assert hosts("--host", "rooms", "--allowed-hosts", "a") == ("a", "rooms")


def test_pages_of_allowed_origins_may_ask_and_no_others(tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("secret\n")
    door = gateway([final("a")], allowed_origins=("https://app.example.com",), keys=tmp_path / "keys")
    wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin, allowed in (("https://app.example.com", True), ("https://evil.example.com", False)):
        leave = door("OPTIONS", "/v1/chat/completions", headers={"Origin": origin, **wish})
        assert leave.status_code == (200 if allowed else 400)
        assert leave.headers.get("access-control-allow-origin") == (origin if allowed else None)
        answer = door("GET", "/v1/models", headers={"Origin": origin, "Authorization": "Bearer secret"})
        assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)
        assert not allowed or "authorization" in leave.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-origin" not in gateway()("GET", "/v1/models", headers={"Origin": "https://a"}).headers


def test_head_is_get_without_its_body() -> None:
    door = gateway(allowed_hosts=())
    assert door("GET", "/version", headers={"Host": "localhost"}).json() == {"version": __version__}
    assert door("POST", "/ping", headers={"Host": "localhost"}).status_code == 200
    for path in ("/version", "/ping", "/v1/models", "/", "/page/main.js", "/nothing"):
        headers = {"Host": "localhost"}
        got, head = door("GET", path, headers=headers), door("HEAD", path, headers=headers)
        assert head.status_code == got.status_code and head.content == b""
        assert head.headers["content-length"] == got.headers["content-length"]
    assert door("HEAD", "/v1/chat/completions", headers=headers).status_code == 405
    with listening(gateway().app) as url, httpx.Client(base_url=url, trust_env=False) as client:
        assert client.head("/version").status_code == client.get("/version").status_code == 200


def test_the_models_context_is_the_shortest_of_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: dict[str, Any] = {
        "a": 'x 1\ntessera_max_model_len{model="m",version="1"} 4096\n',
        "b": "tessera_max_model_len 2e3\n",
    }

    async def metrics_pages(*_: Any) -> dict[str, Any]:
        return pages

    monkeypatch.setattr(service, "metrics_pages", metrics_pages)
    door = gateway(model_names=("internvl", "org/other"))
    listed = door("GET", "/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in listed] == [("internvl", 2000), ("org/other", 2000)]
    assert door("GET", "/v1/models/org/other").json() == listed[1]
    assert door("GET", "/v1/models/vlm").status_code == 404
    pages["b"] = OSError("away")
    assert door("GET", "/v1/models/internvl").json()["max_model_len"] is None


def test_health_names_the_server_whose_cascade_is_not_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: dict[str, Any] = {"http://a:8002/metrics": 'tessera_cascade_alarm{model="m"} 0\n', "http://b:2/metrics": "x"}

    reads: list[Any] = []

    async def metrics_pages(*asked: Any) -> dict[str, Any]:
        reads.append(asked)
        return pages

    monkeypatch.setattr(service, "metrics_pages", metrics_pages)
    monkeypatch.setattr(service, "monotonic", lambda: 7.0)
    door = gateway()
    assert [door("GET", "/health").json() for _ in range(3)] == [{"ready": True}] * 3
    assert len(reads) == 1  # in a second
    pages["http://b:2/metrics"] = 'x 1\ntessera_cascade_alarm{model="m",version="1"} 1\ny 1\n'
    monkeypatch.setattr(service, "monotonic", lambda: 8.0)
    response = door("GET", "/health")
    assert response.json() == {"ready": True, "cascade": "the plan does not hold any more: b:2"}
    assert response.status_code == 200


SAMPLING = "sampling_parameters: "
SCHEMA = {"type": "object"}
RING = {"type": "function", "function": {"name": "ring"}}
SAVE = {"type": "function", "function": {"name": "save", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "save"}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
PREDICTION = {"type": "content", "content": "a"}
PIXELS = {"mm_processor_kwargs": {"min_pixels": 4}}
RESPONSE: dict[str, Any] = {"input": "?", "max_output_tokens": 1}


@pytest.mark.parametrize(
    ("fields", "words", "param", "told"),
    [
        ({}, SAMPLING + "max_tokens must be above 0", "max_tokens", "max_tokens must be above 0"),
        (RESPONSE, SAMPLING + "max_tokens must be above 0", "max_output_tokens", "max_output_tokens must be above 0"),
        ({}, SAMPLING + "regex: unclosed group (character 1)", "tessera.regex", "tessera.regex: unclosed"),
        ({}, SAMPLING + "choices[1] has a lone surrogate", "tessera.choices[1]", "tessera.choices[1] has"),
        ({}, SAMPLING + "draft has 70000 characters", "vllm_xargs.draft", "vllm_xargs.draft has 70000"),
        ({"prediction": PREDICTION}, SAMPLING + "draft has 70000 characters", "prediction", "prediction has 70000"),
        ({}, SAMPLING + "logprobs is 99; it must be 20 or less", "top_logprobs", "top_logprobs is 99"),
        ({}, "choices need a checkpoint that names", "tessera.choices", "tessera.choices need a"),
        ({}, "messages[2].content[0]: role must be one", "messages[2].content[0]", "messages[2].content[0]: role"),
        ({}, "image 3 is a damaged or truncated JPEG", "messages", "image 3 is"),
        ({}, "tile policy name 'x' is unknown", "tessera.tile_policy", "tile policy name"),
        (
            PIXELS,
            "min_pixels means nothing to this model",
            "mm_processor_kwargs.min_pixels",
            "min_pixels means nothing",
        ),
        ({}, "max_pixels must be a whole number", "tessera.tile_policy.max_pixels", "tile_policy.max_pixels must be"),
        ({}, "the request has no text and no image; send text_input", None, "no image; send messages"),
        ({}, "input 'text_input' is not valid UTF-8 (byte 1)", "messages", "messages is not valid"),
        ({}, "900 prompt tokens and 200 for the answer exceed the context", "messages", "900 prompt tokens"),
        (RESPONSE, "900 prompt tokens and 200 for the answer exceed the context", "input", "900 prompt tokens"),
        ({"tools": [RING, SAVE], "tool_choice": NAMED}, "", "tools[1].function.parameters", ""),
        ({"tools": [RING, SAVE]}, ".$defs.save.properties.a", "tools[1].function.parameters.properties.a", ""),
        ({"guided_json": SCHEMA}, ".properties.a", "guided_json.properties.a", ""),
        ({"response_format": FORM}, ".properties.a", "response_format.json_schema.schema.properties.a", ""),
        (RESPONSE, ".properties.a", "text.format.schema.properties.a", ""),
    ],
)
def test_a_servers_refusal_names_the_apis_field(fields: Any, words: str, param: str | None, told: str) -> None:
    """A schema's, from a place in it on, has the field that it was sent in."""
    if not told:
        words, told = f"{SAMPLING}json_schema{words}: the keyword 'if'", f"{param}: the keyword 'if'"
    path = "chat/completions" if "input" not in fields else "responses"
    asked = {**ASKED, **fields} if "input" not in fields else {"model": "vlm", **fields}
    error = gateway([InvalidRequest(words)])("POST", f"/v1/{path}", json=asked).json()["error"]
    assert error["param"] == param and told in error["message"]
    assert error["code"] == ("context_length_exceeded" if "context" in words else "invalid_request")
    assert "sampling_parameters" not in error["message"] and "text_input" not in error["message"]


def test_nobody_goes_before_the_floor() -> None:
    door = gateway(*[[final("a")]] * 3, priority_floor=3)
    refusal = door.ask(priority=2)
    assert refusal.status_code == 400 and refusal.json()["error"]["param"] == "priority"
    for asked, given in (({}, 3), ({"priority": 3}, 3), ({"priority": 9}, 9)):
        assert door.ask(**asked).status_code == 200
        assert f'"priority": {given}' in str(door.fake.requests[-1][0].sampling)


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
