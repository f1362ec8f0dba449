"""The container files, as far as they can be checked without Docker: what they grant, pin and mount.

Nothing here builds or runs an image. `docker compose config` is asked where the client has compose.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tessera.launcher import cli
from tessera.settings.gpu import DEFAULT_MODELS

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
TRITON_RELEASE = "24.10"  # tritonserver 2.51.0, which everything else here runs on

FILE = yaml.safe_load(COMPOSE.read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
every_service = pytest.mark.parametrize("name", sorted(SERVICES))


def defaulted(value: Any) -> str:
    """A value with `${NAME:-default}` replaced by its default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))


def base_images() -> list[str]:
    return re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)


@every_service
def test_a_service_is_pinned_confined_and_limited(name):
    service = SERVICES[name]
    for image in (service["image"], *base_images()):
        assert re.fullmatch(r"v?\d+(\.\d+)+[\w.-]*", image.rpartition(":")[2]), f"{image} has no version"
    assert int(service["user"].partition(":")[0]) > 0, "neither root nor able to become it"
    confined = {"cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"], "read_only": True}
    assert {key: service[key] for key in confined} == confined
    assert not {"cap_add", "privileged", "pid", "ipc", "network_mode", "devices"} & set(service)
    for mount in service.get("volumes", []):
        source, _, *options = mount.split(":")
        if source.startswith("."):
            assert options == ["ro"] and (ROOT / source).exists(), f"{mount} can be written to, or is not there"
        else:
            assert source in FILE["volumes"]
    assert any(entry.startswith("/tmp:size=") for entry in service["tmpfs"])
    assert re.fullmatch(r"\d+[mg]", defaulted(service["mem_limit"])) and float(defaulted(service["cpus"])) > 0
    assert int(service["pids_limit"]) > 0 and service["logging"]["options"]["max-size"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert not re.search(r"(password|secret|token|api_key)\w*'?: '?[^'{}]+", str(service), re.IGNORECASE)
    if service["restart"] != "no":
        assert service["healthcheck"]["test"][0] == "CMD"
    if name.startswith("server"):
        assert "http://127.0.0.1:8003/healthz" in service["healthcheck"]["test"][-1]
        assert int(service["shm_size"].removesuffix("g")) >= 2  # for its stages
        assert "OTEL_EXPORTER_OTLP_ENDPOINT" in service["environment"]  # by name alone: unset stays unset


def test_the_images_stand_on_the_release_everything_was_tested_with_and_end_as_an_ordinary_user():
    # A plan runs on the TensorRT that built it: the same release.
    assert {f"nvcr.io/nvidia/{image}:{TRITON_RELEASE}-py3" for image in ("tritonserver", "tensorrt")} <= set(
        base_images()
    )
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        users = re.findall(r"^USER (\S+)", stage, re.MULTILINE)
        assert users and int(users[-1].partition(":")[0]) > 0 and stage.rindex("USER ") > stage.rindex("RUN ")


def test_the_model_repository_is_part_of_the_read_only_image():
    stage = DOCKERFILE.partition(" AS server")[2].partition("\nFROM ")[0]
    assert "COPY model_repository/" in stage and "chmod -R a+rX,go-w /opt/tessera" in stage and "--chown" not in stage
    assert "volumes" not in SERVICES["server"] and "volumes" not in SERVICES["server-gpu"]
    assert SERVICES["server-tensorrt"]["volumes"] == ["plan:/opt/tessera/plan:ro"]


def test_the_gpu_server_is_the_path_that_was_measured():
    """The launcher's own defaults on a GPU: every figure of docs/figures.md is theirs, none a plan's."""
    service = SERVICES["server-gpu"]
    options = cli.parse(service["command"])[0]
    assert options.settings == {"device": "cuda"} and not options.model_config_name and not options.extra_flags
    assert options.mps and not options.only and service["profiles"] == ["gpu"] and "profiles" not in SERVICES["server"]
    assert "depends_on" not in service
    # Triton's kernels are shared objects in there.
    (tmp,) = service["tmpfs"]
    assert "exec" in tmp.partition(":")[2].split(",")
    assert re.search(r"TRITON_CACHE_DIR=/tmp/", DOCKERFILE)


def test_the_plan_is_built_first_and_where_the_server_looks_for_it():
    plan, server = SERVICES["plan"], SERVICES["server-tensorrt"]
    options = cli.parse(server["command"])[0]
    assert options.model_config_name == "tensorrt" and options.extra_flags == ("--cache-config=local,size=1073741824",)
    assert server["depends_on"] == {"plan": {"condition": "service_completed_successfully"}}
    assert plan["deploy"] == server["deploy"]
    assert plan["restart"] == "no" and plan["profiles"] == server["profiles"] == ["tensorrt"]
    folder = plan["volumes"][0].partition(":")[2]
    assert server["volumes"] == [f"plan:{folder}:ro"]
    assert f"ln -s {folder}/model.plan model_repository/vision_encoder/1/model.plan" in DOCKERFILE
    stage = DOCKERFILE.partition(" AS plan")[2].partition("\nFROM ")[0]
    assert '"--out", "plan/model.plan"' in stage
    assert "install -d -o 1000 -g 1000 plan" in stage
    assert plan["user"] == "1000:1000"


def test_what_the_dockerfile_copies_exists_and_is_let_through():
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for arguments in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = arguments.split()
        if sources[0].startswith("--from="):
            assert f" AS {sources[0].removeprefix('--from=')}\n" in DOCKERFILE
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(source.startswith(entry) for entry in allowed), f".dockerignore keeps {source} out"


def test_the_server_command_is_one_the_launcher_understands(monkeypatch):
    default = re.findall(r"^CMD (\[.+\])$", DOCKERFILE, re.MULTILINE)[0]
    own = list(map(defaulted, SERVICES["server"]["command"]))  # on a host with a GPU too it is the CPU's
    monkeypatch.setattr(Path, "is_dir", lambda self: True)  # of the image's folders none is here
    assert cli.parse(own)[0].settings["device"] == "cpu"
    for model in DEFAULT_MODELS:
        chosen = cli.parse([*own, f"--default={model}"])[0].checkpoint
        assert f"COPY {chosen.relative_to('/opt/tessera')}/ " in DOCKERFILE
    served = (SERVICES[name]["command"] for name in ("server-gpu", "server-tensorrt"))
    for command in (yaml.safe_load(default), own, *served):
        options = cli.parse([str(word) for word in command])[0]
        assert options.host == "0.0.0.0"
        assert str(options.model_repository) == "/opt/tessera/model_repository"
        assert (options.http_port, options.grpc_port, options.metrics_port) == (8000, 8001, 8002)


def test_the_containers_pins_are_the_projects():
    def pins(file: Path) -> dict[str, str]:
        lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
        return dict(line.split("==") for line in lines if "==" in line and ";" not in line)

    ours, container = pins(ROOT / "requirements.txt"), pins(ROOT / "deploy" / "requirements-container.txt")
    ours.pop("onnxruntime", None)
    # The last ones for the container's Python 3.10.
    assert container.pop("onnxruntime") == "1.23.2"
    assert container.pop("pillow") == "12.3.0"
    assert container
    assert {name: ours.get(name) for name in container} == container


def test_docker_compose_accepts_the_file():
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("this docker client has no compose plugin (or there is none): the file was not checked by it")
    command = [docker, "compose", "-f", str(COMPOSE), "--profile", "*", "config", "--quiet"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
