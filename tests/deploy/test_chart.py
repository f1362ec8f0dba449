"""The Helm chart as Helm renders it: every object against the API's schemas, and its words against the code's.

Helm's own library renders it and `kubernetes-validate` has the schemas (requirements-clients.txt); nothing here was
ever sent to a cluster. KEDA's and the Prometheus operator's objects have no schema there.
"""

import copy
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tessera.launcher import cli
from tessera.launcher.health import health_port
from tessera.tritonserver import engine_metrics
from tessera_gateway import cli as gateway_cli
from tessera_gateway import page, service, tracing
from tessera_wire.tensors import addresses

pytestmark = pytest.mark.clients
helm = pytest.importorskip("helm_python", reason="Helm's library is not installed here (requirements-clients.txt)")
schemas = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "kubernetes"
DOCKERFILE = (ROOT / "Dockerfile").read_text().partition("\nFROM nvcr.io/nvidia/tensorrt")[0]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["server-gpu"]
OLDEST, NEWEST = "1.30", "1.37"
FOREIGN = {"ScaledObject", "ServiceMonitor"}
EVERYTHING = {
    "image": {"pullSecrets": [{"name": "registry"}]},
    "server": {
        "checkpointClaim": "weights",
        "extraArgs": ["--quantization=fp8", "--", "--log-verbose=1"],
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
    "gateway": {"keysSecret": "keys", "extraArgs": ["--fetch-from=pictures.example"]},
    "tracing": {"endpoint": "http://collector:4318", "variables": {"OTEL_TRACES_SAMPLER_ARG": "0.1"}},
    "autoscaling": {"enabled": True, "maxReplicas": 3},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"gatewayEgress": [{"ports": [{"port": 443}]}]},
}
Objects = dict[tuple[str, str], dict[str, Any]]


def rendered(values: dict[str, Any]) -> Objects:
    """(kind, part) -> object."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="vlm", namespace="rooms").values()
    found = [each for text in texts for each in yaml.safe_load_all(text) if each]
    objects = {(each["kind"], each["metadata"]["labels"]["app.kubernetes.io/component"]): each for each in found}
    assert len(objects) == len(found)
    return objects


@pytest.fixture(scope="module", params=[{}, EVERYTHING], ids=["as it is", "everything"])
def objects(request: pytest.FixtureRequest) -> Objects:
    return rendered(request.param)


def pods(objects: Objects) -> dict[str, dict[str, Any]]:
    return {part: each["spec"]["template"] for (_, part), each in objects.items() if "template" in each["spec"]}


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return only


def test_helm_finds_nothing_wrong() -> None:
    report = helm.lint(CHART, EVERYTHING, strict=True)
    assert report["errors"] == [] and [each for each in report["messages"] if each["severity"] > 1] == []


def test_every_object_follows_the_schemas_of_the_api(objects: Objects) -> None:
    ours = [each for (kind, _), each in objects.items() if kind not in FOREIGN]
    assert len(ours) == 8
    for each in ours:
        for version in (OLDEST, NEWEST):
            assert schemas.validate(each, version, strict=True) == version
    wrong = copy.deepcopy(objects["StatefulSet", "server"])
    container(wrong["spec"]["template"])["readinesProbe"] = {}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, NEWEST, strict=True)


def test_what_is_off_is_not_there() -> None:
    assert not FOREIGN & {kind for kind, _ in rendered({})}
    everything = rendered(EVERYTHING)
    assert {("ScaledObject", "server"), ("ServiceMonitor", "server")} <= set(everything)
    # A gateway with keys is not scraped without one.
    assert ("ServiceMonitor", "gateway") in rendered({"serviceMonitor": {"enabled": True}})
    assert ("ServiceMonitor", "gateway") not in everything
    assert not [kind for kind, _ in rendered({"networkPolicy": {"enabled": False}}) if kind == "NetworkPolicy"]


def test_the_launcher_understands_its_options_and_listens_where_the_chart_says(
    objects: Objects, tmp_path: Path
) -> None:
    server = container(pods(objects)["server"])
    assert "command" not in server  # the image's entry point is the launcher
    words = [word.replace("=/checkpoint", f"={tmp_path}") for word in server["args"]]
    options, gpus, supervision, rest = cli.parse(words)
    assert options.host == "0.0.0.0" and str(options.model_repository) == "/opt/tessera/model_repository"
    assert not gpus and rest.openai_port == 0
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    listening = (options.http_port, options.grpc_port, options.metrics_port, supervision.health_port)
    assert ports == dict(zip(("http", "grpc", "metrics", "health"), listening))
    assert {each.split(":")[-1] for each in COMPOSE["ports"]} >= {str(port) for port in ports.values()}
    # Helm's clock and the launcher's are one.
    probe = server["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == options.ready_timeout_s
    mounted = {each["mountPath"] for each in server["volumeMounts"]}
    assert (options.checkpoint is not None) == ("/checkpoint" in mounted)


def test_the_gateway_understands_its_options_and_knows_every_server(objects: Objects) -> None:
    gateway = container(pods(objects)["gateway"])
    assert gateway["command"] == ["python3", "-m", "tessera_gateway.cli"]
    options = gateway_cli._parser().parse_args(gateway["args"])
    assert (options.host, options.port) == ("0.0.0.0", gateway["ports"][0]["containerPort"])
    servers = objects["StatefulSet", "server"]
    name, service = servers["metadata"]["name"], servers["spec"]["serviceName"]
    assert ("Service", "server") in objects and objects["Service", "server"]["metadata"]["name"] == service
    scaled = objects.get(("ScaledObject", "server"))
    most = scaled["spec"]["maxReplicaCount"] if scaled else servers["spec"]["replicas"]
    assert ("replicas" in servers["spec"]) == (scaled is None)
    assert addresses(options.url) == [f"grpc://{name}-{number}.{service}:8001" for number in range(most)]
    mounted = [each["mountPath"] for each in gateway["volumeMounts"]]
    assert options.keys is None or str(options.keys.parent) in mounted


def test_the_pages_that_probes_ask_for_are_there(objects: Objects) -> None:
    asked = {name: probe for name, probe in container(pods(objects)["server"]).items() if name.endswith("Probe")}
    assert set(asked) == {"startupProbe", "readinessProbe", "livenessProbe"}
    with health_port(lambda: {"state": "starting"}, "127.0.0.1", 0) as address:
        for name, probe in asked.items():
            assert probe["httpGet"]["port"] == "health"
            url = str(httpx.URL(address).copy_with(path=probe["httpGet"]["path"]))
            assert httpx.get(url, trust_env=False).status_code == (200 if name == "livenessProbe" else 503)
    gateway = container(pods(objects)["gateway"])
    paths = {gateway[name]["httpGet"]["path"] for name in ("readinessProbe", "livenessProbe")}
    assert paths <= {getattr(route, "path", "") for route in page.router.routes}


def test_the_image_is_the_dockerfiles_and_its_user_too(objects: Objects) -> None:
    user, group = re.findall(r"^USER (\d+):(\d+)", DOCKERFILE, re.MULTILINE)[-1]
    for pod in pods(objects).values():
        assert container(pod)["image"] == COMPOSE["image"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] == int(user)
        assert pod["spec"]["securityContext"]["runAsGroup"] == int(group)
        mine = container(pod)["securityContext"]
        assert mine["readOnlyRootFilesystem"] and mine["capabilities"] == {"drop": ["ALL"]}
        assert mine["allowPrivilegeEscalation"] is False
        # With service links a variable TESSERA_..._PORT would be a setting that no stage knows.
        assert pod["spec"]["enableServiceLinks"] is False and pod["spec"]["automountServiceAccountToken"] is False
    resources = container(pods(objects)["server"])["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 1


def test_what_is_written_lies_in_a_volume(objects: Objects) -> None:
    for pod in pods(objects).values():
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        mounts = {each["mountPath"]: volumes.pop(each["name"]) for each in container(pod)["volumeMounts"]}
        assert not volumes
        writable = {path for path, volume in mounts.items() if "emptyDir" in volume}
        assert "/tmp" in writable
        assert all(volume["emptyDir"]["sizeLimit"] for path, volume in mounts.items() if path in writable)
    server = pods(objects)["server"]
    volumes = {each["name"]: each for each in server["spec"]["volumes"]}
    shared = volumes["shared-memory"]["emptyDir"]
    assert shared == {"medium": "Memory", "sizeLimit": COMPOSE["shm_size"].replace("g", "Gi")}
    (cache,) = (each["mountPath"] for each in container(server)["volumeMounts"] if each["name"] == "cache")
    kept = re.findall(r"(?:XDG_CACHE_HOME|TESSERA_CACHE|TRITON_CACHE_DIR)=(\S+)", DOCKERFILE)
    assert len(kept) == 3 and all(Path(folder).is_relative_to(cache) for folder in kept)


def test_selectors_find_pods_and_ports_have_names_that_pods_know(objects: Objects) -> None:
    labels = {part: pod["metadata"]["labels"] for part, pod in pods(objects).items()}
    ports = {part: {each["name"] for each in container(pod)["ports"]} for part, pod in pods(objects).items()}
    checked = 0
    for (kind, part), each in objects.items():
        selector = each["spec"].get("podSelector") or each["spec"].get("selector")
        if selector:
            assert selector.get("matchLabels", selector) == labels[part], (kind, part)
            checked += 1
        if kind == "Service":
            # A port without a target goes to the same number.
            own = {(port["name"], port["containerPort"]) for port in container(pods(objects)[part])["ports"]}
            assert {(port["name"], port["port"]) for port in each["spec"]["ports"]} == own
        if kind == "ServiceMonitor":
            assert {end["port"] for end in each["spec"]["endpoints"]} <= ports[part]
        if kind == "NetworkPolicy":
            (to_servers,) = [rule for rule in objects[kind, "gateway"]["spec"]["egress"] if "to" in rule]
            assert to_servers["to"] == [{"podSelector": {"matchLabels": labels["server"]}}]
            for rule in each["spec"]["ingress"]:
                assert {port["port"] for port in rule["ports"]} <= ports[part]
    assert checked >= 8


def test_where_nobody_is_named_nobody_is_let_in() -> None:
    """In a rule of Kubernetes' an empty list is everybody."""
    chart = rendered({"networkPolicy": {"askers": [], "monitoring": []}})
    (to_servers,) = chart["NetworkPolicy", "server"]["spec"]["ingress"]
    assert to_servers["from"] == [{"podSelector": {"matchLabels": pods(chart)["gateway"]["metadata"]["labels"]}}]
    assert not chart["NetworkPolicy", "gateway"]["spec"]["ingress"]


def test_servers_are_added_by_metrics_that_they_have() -> None:
    scaled = rendered(EVERYTHING)["ScaledObject", "server"]
    (trigger,) = scaled["spec"]["triggers"]
    named = set(re.findall(r"\b(?:tessera|nv)_\w+", trigger["metadata"]["query"]))
    waiting = {"tessera_requests_waiting", "tessera_vision_requests_waiting"}
    assert named == waiting | {"nv_inference_pending_request_count"}
    assert "requests_waiting" in engine_metrics._GAUGES
    # The gateway's status reads the other one, of the same stages.
    assert '"nv_inference_pending_request_count"' in Path(service.__file__).read_text()
    (stages,) = re.findall(r'model=~"([^"]+)"', trigger["metadata"]["query"])
    assert set(stages.split("|")) < set(service.STAGES)
    assert scaled["spec"]["scaleTargetRef"]["name"] == rendered(EVERYTHING)["StatefulSet", "server"]["metadata"]["name"]


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://collector:4318", 4318), ("https://traces.example/otlp", 443), ("http://[fd00::7]/", 80)],
)
def test_traces_are_sent_by_gateways_which_may_go_to_the_collector(endpoint: str, port: int) -> None:
    variables = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"}
    chart = rendered({"tracing": {"endpoint": endpoint, "serviceName": "rooms", "variables": variables}})
    told = container(pods(chart)["gateway"])["env"]
    assert {each["name"]: each["value"] for each in told} == {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_SERVICE_NAME": "rooms",
        **variables,
    }
    assert tracing.wanted({each["name"]: each["value"] for each in told})
    assert {"ports": [{"port": port}]} in chart["NetworkPolicy", "gateway"]["spec"]["egress"]
    assert not chart["NetworkPolicy", "server"]["spec"]["egress"] and "env" not in container(pods(chart)["server"])


def test_without_a_collector_there_are_no_traces() -> None:
    chart = rendered({"tracing": {"variables": {"OTEL_TRACES_SAMPLER": "always_on"}}})
    assert not any("env" in container(pod) for pod in pods(chart).values())
    assert len(chart["NetworkPolicy", "gateway"]["spec"]["egress"]) == 2
    for wrong in ({"endpoint": "collector:4317"}, {"variables": {"TESSERA_URL": "elsewhere"}}):
        with pytest.raises(Exception, match="tracing|OTEL_"):
            rendered({"tracing": wrong})


def test_batches_are_refused_where_no_disk_lasts() -> None:
    with pytest.raises(Exception, match="no --batch-folder here"):
        rendered({"gateway": {"extraArgs": ["--batch-folder=/tmp/batches"]}})


@pytest.mark.parametrize("values", [{"serevr": {}}, {"server": {"replica": 2}}, {"server": {"replicas": "two"}}])
def test_a_value_that_the_chart_does_not_know_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=next(iter(values.get("server", values)))):
        rendered(values)
