"""Other people's clients against the running ensemble, and what a stranger may not do with it."""

from __future__ import annotations

import base64
import importlib.util
import json
import queue
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import numpy as np
import pytest

import scene

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "Is there an exposed wire?"
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
GPU_ONLY = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"}


@pytest.fixture(scope="module")
def picture() -> bytes:
    return scene.encode_jpeg(scene.sample(7, "heldout"))


def generate_body(picture: bytes | None, text: str = QUESTION, **sampling) -> str:
    body = {
        "text_input": text,
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps({"max_tokens": 8, **sampling}),
    }
    if picture is not None:
        body["image"] = base64.b64encode(picture).decode()
    return json.dumps(body)


def curl(url: str, body: str | None = None) -> tuple[int, str]:
    """Status and body, as curl had them; what is sent goes over its standard input."""
    command = [
        "curl",
        "--silent",
        "--show-error",
        "--no-buffer",
        "--max-time",
        "60",
        "--write-out",
        "\n%{http_code}",
        url,
    ]
    if body is not None:
        command += ["--header", "Content-Type: application/json", "--data-binary", "@-"]
    run = subprocess.run(command, input=body, capture_output=True, text=True, check=True)
    text, _, status = run.stdout.rpartition("\n")
    return int(status), text


def call(url: str, body: object = None, method: str | None = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def text_tensor(name: str, *values: bytes):
    import tritonclient.grpc as grpcclient

    tensor = grpcclient.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array(values, dtype=np.object_))
    return tensor


@needs_curl
def test_curl_gets_an_answer_a_stream_and_an_error(server, picture):
    status, text = curl(f"{server.http_url}/v2/models/vlm_unary/generate", generate_body(picture))
    assert status == 200
    answer = json.loads(text)
    assert answer["finish_reason"] in ("stop", "length")
    assert answer["usage"][2] > 0

    status, text = curl(f"{server.http_url}/v2/models/vlm/generate_stream", generate_body(picture))
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert status == 200
    assert "".join(event["text_output"] for event in events) == answer["text_output"]
    assert events[-1]["finish_reason"] == answer["finish_reason"]

    status, text = curl(f"{server.http_url}/v2/models/vlm_unary/generate", generate_body(b"no picture"))
    assert status == 400
    assert "image 0" in json.loads(text)["error"]


@needs_curl
def test_curl_sees_health_and_metrics(server):
    assert curl(f"{server.http_url}/v2/health/ready")[0] == 200
    assert curl(f"{server.http_url}/v2/models/vlm/ready")[0] == 200
    status, text = curl(server.metrics_url)
    assert status == 200
    assert "nv_inference_request_success" in text


def test_plain_tritonclient_streams_from_the_ensemble(server, picture):
    import tritonclient.grpc as grpcclient

    events: queue.Queue = queue.Queue()
    inputs = [
        text_tensor("text_input", QUESTION.encode()),
        text_tensor("image", picture, picture),
        text_tensor("sampling_parameters", b'{"max_tokens": "6", "ignore_eos": true, "tile_policy": {"max_tiles": 1}}'),
    ]
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: events.put((result, error)))
        client.async_stream_infer("vlm", inputs, request_id=uuid.uuid4().hex, enable_empty_final_response=True)
        reasons, usage, final = [], None, False
        while not final:
            result, error = events.get(timeout=60)
            assert error is None, error
            final = result.get_response().parameters["triton_final_response"].bool_param
            if (reason := result.as_numpy("finish_reason")) is not None:
                reasons.append(reason[0])
                usage = result.as_numpy("usage")
        client.stop_stream()
    assert reasons[-1] == b"length"
    assert set(reasons[:-1]) <= {b""}
    assert usage[1] == 6
    assert usage[2] > 0


def test_json_tensors_over_http_infer(server, picture):
    def tensor(name: str, *values: str) -> dict:
        return {"name": name, "datatype": "BYTES", "shape": [len(values)], "data": list(values)}

    body = {
        "id": uuid.uuid4().hex,
        "inputs": [
            tensor("text_input", QUESTION),
            tensor("image", base64.b64encode(picture).decode()),
            tensor("sampling_parameters", '{"max_tokens": 8}'),
            {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [True]},
        ],
    }
    status, text = call(f"{server.http_url}/v2/models/vlm_unary/infer", body)
    assert status == 200, text
    outputs = {output["name"]: output["data"] for output in json.loads(text)["outputs"]}
    _, generated = call(f"{server.http_url}/v2/models/vlm_unary/generate", json.loads(generate_body(picture)))
    assert outputs["text_output"][0] == json.loads(generated)["text_output"]
    assert outputs["finish_reason"][0] in ("stop", "length")


def test_genai_perfs_way_of_asking_is_understood(server):
    """It sends the model's name as a parameter and numbers as strings."""
    body = {"text_input": "Hello?", "model": "vlm", "stream": True, "exclude_input_in_output": True}
    body["sampling_parameters"] = '{"max_tokens": "5", "min_tokens": "5"}'
    status, text = call(f"{server.http_url}/v2/models/vlm/generate_stream", body)
    assert status == 200, text
    assert json.loads(text.strip().splitlines()[-1].removeprefix("data: "))["usage"][1] == 5


@pytest.mark.parametrize(("user", "url"), [("GrpcUser", "grpc_url"), ("HttpUser", "http_url")])
def test_locust_drives_the_server(server, user, url, tmp_path):
    if importlib.util.find_spec("locust") is None:
        pytest.skip("locust is not installed (pip install -r requirements-loadtest.txt)")
    run = subprocess.run(
        [
            sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py"), "--headless", "--json",
            "--workload", "W1", "--stock", "8", "--users", "2", "--run-time", "3s",
            "--host", getattr(server, url), user,
        ],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "clients")},
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    entries = {entry["method"]: entry for entry in json.loads(run.stdout)}
    answers = entries.pop("grpc" if user == "GrpcUser" else "http")
    assert answers["name"] == "W1"
    assert answers["num_requests"] > 0
    assert answers["num_failures"] == 0
    assert set(entries) <= {"ms/token", "QPM"}


def test_the_dashboard_asks_for_metrics_that_the_server_has(server, picture):
    call(f"{server.http_url}/v2/models/vlm_unary/generate", json.loads(generate_body(picture, ignore_eos=True)))
    dashboard = (ROOT / "deploy" / "grafana" / "dashboards" / "tessera.json").read_text()
    expressions = [t["expr"] for panel in json.loads(dashboard)["panels"] for t in panel.get("targets", [])]
    wanted = {name for expression in expressions for name in re.findall(r"\b(?:nv|tessera)_\w+", expression)}
    wanted = {re.sub(r"_bucket$", "", name) for name in wanted} - GPU_ONLY
    deadline = time.monotonic() + 10
    missing = wanted
    while missing and time.monotonic() < deadline:  # the page is renewed every second
        _, page = call(server.metrics_url)
        # A family without a member would leave its panel empty for ever.
        missing = {name for name in wanted if not re.search(rf"^{name}(_bucket)?(\{{| )", page, re.MULTILINE)}
        time.sleep(0.2)
    assert not missing


def test_contents_of_requests_never_reach_the_log(server, picture):
    """Prompts, messages and pictures of requests that succeed and of such that are refused in every stage."""
    marker = f"marker{uuid.uuid4().hex}"
    asked = 0
    for model, endpoint in (("vlm_unary", "generate"), ("vlm", "generate_stream"), ("vlm_stream", "generate_stream")):
        url = f"{server.http_url}/v2/models/{model}/{endpoint}"
        messages = [{"role": "user", "content": marker}]
        for body in (
            generate_body(picture, marker),
            generate_body(picture + marker.encode(), marker),
            generate_body(marker.encode(), marker),
            generate_body(picture, f"<image> <image> {marker}"),
            generate_body(picture, marker, temperature=-1),
            generate_body(picture, marker, stop=[marker, 7]),
            generate_body(None, marker + " long" * 20_000),
            json.dumps({"messages": json.dumps(messages)}),
            json.dumps({"messages": json.dumps(messages)[:-1]}),
            json.dumps({"messages": json.dumps([{"role": marker, "content": marker}])}),
            json.dumps({"text_input": marker, "sampling_parameters": f'{{"{marker}": 1}}'}),
            json.dumps({"text_input": marker, "image": f"http://127.0.0.1/{marker}.jpg"}),
        ):
            status, text = call(url, json.loads(body))
            assert status in (200, 400), text
            assert "Traceback" not in text
            asked += 1
    assert asked == 36
    log = server.read_log()
    assert "HTTPService" in log  # it is the log we think it is
    assert marker not in log
    assert base64.b64encode(marker.encode()).decode()[:40] not in log


def test_the_server_listens_on_loopback_only(server):
    """By the kernel's table: local addresses of listening sockets, little-endian hexadecimal."""
    ports = {
        int(url.rpartition(":")[2].partition("/")[0]) for url in (server.http_url, server.grpc_url, server.metrics_url)
    }
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, port = local.partition(":")
            if state == "0A" and int(port, 16) in ports:
                found.setdefault(int(port, 16), set()).add(address)
    assert set(found) == ports
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert set().union(*found.values()) <= loopback


def test_the_administrative_endpoints_are_closed(server, tmp_path):
    """tritonserver lets whoever may load a model run code of his own: file contents come with the request."""
    witness = tmp_path / "ran"
    code = (
        f"open({str(witness)!r}, 'w').close()\nclass TritonPythonModel:\n    def execute(self, requests): return []\n"
    )
    config = {
        "name": "stranger",
        "backend": "python",
        "max_batch_size": 0,
        "input": [{"name": "I", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "O", "data_type": "TYPE_INT32", "dims": [1]}],
    }
    parameters = {"config": json.dumps(config), "file:1/model.py": base64.b64encode(code.encode()).decode()}
    status, text = call(f"{server.http_url}/v2/repository/models/stranger/load", {"parameters": parameters})
    assert not witness.exists(), "a client's own code ran on the server"
    assert status in (403, 503), text
    for model in ("stranger", "vlm"):
        assert call(f"{server.http_url}/v2/repository/models/{model}/unload", {})[0] in (403, 503)
    region = {"key": f"/{server.shm_prefix}", "offset": 0, "byte_size": 64}
    assert call(f"{server.http_url}/v2/systemsharedmemory/region/x/register", region)[0] == 403
    assert call(f"{server.http_url}/v2/logging", {"log_verbose_level": 1})[0] == 403
    assert call(f"{server.http_url}/v2/trace/setting", {"trace_level": ["TENSORS"]})[0] == 403
    assert call(f"{server.http_url}/v2/health/ready")[0] == 200
