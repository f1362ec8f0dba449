"""Other people's clients against the running ensemble, and what a stranger may not do with it."""

import base64
import json
import re
import time
import uuid
from pathlib import Path

import pytest
from http_door import generate_body, post

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
GPU_ONLY = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"}


def test_genai_perfs_way_of_asking_is_understood(server):
    """It sends the model's name as a parameter and numbers as strings."""
    body = {"text_input": "Hello?", "model": "vlm", "stream": True, "exclude_input_in_output": True}
    body["sampling_parameters"] = '{"max_tokens": "5", "min_tokens": "5"}'
    status, text = post(f"{server.http_url}/v2/models/vlm/generate_stream", body)
    assert status == 200, text
    assert json.loads(text.strip().splitlines()[-1].removeprefix("data: "))["usage"][1] == 5


def test_the_dashboard_asks_for_metrics_that_the_server_has(server, picture):
    post(f"{server.http_url}/v2/models/vlm_unary/generate", generate_body(picture, ignore_eos=True))
    dashboard = (ROOT / "deploy" / "grafana" / "dashboards" / "tessera.json").read_text()
    expressions = [t["expr"] for panel in json.loads(dashboard)["panels"] for t in panel.get("targets", [])]
    wanted = {name for expression in expressions for name in re.findall(r"\b(?:nv|tessera)_\w+", expression)}
    wanted = {re.sub(r"_bucket$", "", name) for name in wanted} - GPU_ONLY
    deadline = time.monotonic() + 10
    missing = wanted
    while missing and time.monotonic() < deadline:  # the page is renewed every second
        _, page = post(server.metrics_url)
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
            {"messages": json.dumps(messages)},
            {"messages": json.dumps(messages)[:-1]},
            {"messages": json.dumps([{"role": marker, "content": marker}])},
            {"text_input": marker, "sampling_parameters": f'{{"{marker}": 1}}'},
            {"text_input": marker, "image": f"http://127.0.0.1/{marker}.jpg"},
        ):
            status, text = post(url, body)
            assert status in (200, 400), text
            assert "Traceback" not in text
            asked += 1
    assert asked == 36
    log = server.read_log()
    assert "HTTPService" in log  # it is the log we think it is
    assert marker not in log
    assert base64.b64encode(marker.encode()).decode()[:40] not in log


def test_the_administrative_endpoints_are_closed(server, tmp_path):
    """With tritonserver, a client that may load a model may run code: file contents come with the request."""
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
    status, text = post(f"{server.http_url}/v2/repository/models/stranger/load", {"parameters": parameters})
    assert not witness.exists(), "a client's own code ran on the server"
    assert status in (403, 503), text
    for model in ("stranger", "vlm"):
        assert post(f"{server.http_url}/v2/repository/models/{model}/unload", {})[0] in (403, 503)
    region = {"key": f"/{server.shm_prefix}", "offset": 0, "byte_size": 64}
    assert post(f"{server.http_url}/v2/systemsharedmemory/region/x/register", region)[0] == 403
    assert post(f"{server.http_url}/v2/logging", {"log_verbose_level": 1})[0] == 403
    assert post(f"{server.http_url}/v2/trace/setting", {"trace_level": ["TENSORS"]})[0] == 403
    assert post(f"{server.http_url}/v2/health/ready")[0] == 200
