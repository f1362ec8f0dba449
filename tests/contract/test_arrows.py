"""The arrows between the packages run one way: each is imported with what it may not need blocked."""

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parents[2]
SOURCES = [PACKAGES / "python_backends", PACKAGES / "clients"]

# package or module -> what importing it may not touch
_ABOVE = "tessera.preprocess tessera.vision tessera.engine tessera.tritonserver tessera.launcher"
_HEAVY = "cv2 onnxruntime transformers tritonclient"
_NO_TORCH = f"torch {_HEAVY} PIL sentencepiece safetensors"
BLOCKED = {
    "tessera.errors": f"{_NO_TORCH} numpy tessera.settings",
    "tessera.settings": f"torch numpy tessera.checkpoint tessera.kernels tessera.models tessera.prompt {_ABOVE}",
    "tessera.checkpoint": f"{_HEAVY} tessera.models.family tessera.kernels tessera.prompt {_ABOVE}",
    "tessera.checkpoint.config": f"torch {_HEAVY}",
    "tessera.kernels": f"{_HEAVY} tokenizers tessera.attention tessera.linear tessera.models tessera.prompt {_ABOVE}",
    "tessera.kernels.tuning": "torch numpy",
    "tessera.attention": f"{_HEAVY} tokenizers tessera.models tessera.prompt {_ABOVE}",
    "tessera.linear": f"{_HEAVY} tokenizers tessera.models tessera.prompt {_ABOVE}",
    "tessera.models": f"{_HEAVY} tessera.prompt {_ABOVE}",
    "tessera.models.registry": f"{_NO_TORCH}",
    "tessera.models.internvl.processor": f"{_NO_TORCH}",
    "tessera.models.qwen2_vl.processor": f"{_NO_TORCH}",
    "tessera.prompt": f"{_NO_TORCH} {_ABOVE}",
    "tessera.preprocess": "onnxruntime transformers tritonclient tessera.vision tessera.engine tessera.tritonserver",
    "tessera.vision": "cv2 transformers tritonclient tessera.preprocess tessera.engine tessera.tritonserver",
    "tessera.engine": f"{_HEAVY} tessera.preprocess tessera.vision tessera.tritonserver",
    "tessera.engine.structured_output.labels": "torch numpy tessera.prompt",
    "tessera.engine.engine": "torch tokenizers",
    "tessera.engine.scheduling": "torch",
    "tessera.cascade": f"{_NO_TORCH} numpy tessera.prompt {_ABOVE}",
    "tessera.tritonserver": f"{_HEAVY} triton_python_backend_utils".replace("cv2 ", "").replace(" tritonclient", ""),
    "tessera.tritonserver.fronts": f"torch triton_python_backend_utils {_ABOVE.replace('tessera.tritonserver ', '')}",
    "tessera.launcher": "torch numpy tritonclient triton_python_backend_utils pytriton",
    "tessera_wire": "torch numpy grpc tritonclient httpx tessera tessera_client",
    "tessera_client": "torch numpy grpc tritonclient ray pyarrow tessera tessera_evaluation tessera_command",
    "tessera_evaluation": "torch numpy grpc tritonclient tessera tessera_command",
    "tessera_quantize": "onnxruntime transformers compressed_tensors grpc tritonclient tessera_command",
    "tessera_gateway": "torch numpy grpc tritonclient tessera tessera_evaluation tessera_command",
    "tessera_jobs": "torch grpc tritonclient PIL tessera tessera_evaluation tessera_gateway tessera_command",
    "tessera_documents": "torch torchvision transformers grpc tritonclient tessera tessera_gateway tessera_command",
    "tessera_command": "torch numpy grpc tritonclient tessera tessera_quantize tessera_gateway fastapi"
    " tessera_documents mineru_vl_utils pypdfium2 tessera_jobs pyarrow",
}

# Imports each package in a process of its own, a core each: all are forks of one, which loads torch before those that
# may have it.
PROGRAM = """
import importlib, json, os, pkgutil, sys
class Wall:
    def __init__(self, name, blocked):
        self.name, self.blocked = name, blocked
    def find_spec(self, module, path=None, target=None):
        if any(module == b or module.startswith(b + ".") for b in self.blocked):
            raise ImportError(f"{self.name} may not need {module}")
def touch(name, blocked):
    assert not blocked & set(sys.modules), "it came with torch"
    sys.meta_path.insert(0, Wall(name, blocked))
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        importlib.import_module(found.name)
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "importing touched a device"
packages = {name: set(blocked.split()) for name, blocked in json.loads(sys.argv[1]).items()}
under_way = 0
for name in sorted(packages, key=lambda name: "torch" not in packages[name]):
    if "torch" not in packages[name]:
        import torch
    if under_way == os.cpu_count():
        os.wait()
        under_way -= 1
    under_way += 1
    if os.fork() == 0:
        try:
            touch(name, packages[name])
        except BaseException as error:
            print(json.dumps([name, repr(error)]), flush=True)
        os._exit(0)
for _ in range(under_way):
    os.wait()
"""


@pytest.fixture(scope="module")
def refused():
    """Package -> what its import needed and may not; without those that need nothing of the kind."""
    environment = {"PYTHONPATH": ":".join(map(str, SOURCES)), "PATH": ""}
    command = [sys.executable, "-c", PROGRAM, json.dumps(BLOCKED | {"tessera_wire.command_line": "torch difflib"})]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(map(json.loads, run.stdout.splitlines()))


@pytest.mark.parametrize("package", BLOCKED)
def test_importing_needs_only_what_it_may(refused, package):
    assert package not in refused, refused[package]


def test_the_wall_stops_what_is_blocked(refused):
    assert "command_line may not need difflib" in refused["tessera_wire.command_line"]


@cache
def imports() -> dict[str, set[str]]:
    """Module -> the modules of this project that it imports, at its top, inside functions, or for types alone."""
    files = {
        ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): file
        for source in SOURCES
        for file in source.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        targets = set()
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= {each if each in files else node.module for each in named}
        found[name] = (targets & set(files)) - {name}
    return found


def circles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """The groups of modules that can reach each other."""
    reach = {name: set(targets) for name, targets in graph.items()}
    while True:
        wider = {name: targets.union(*(reach[target] for target in targets)) for name, targets in reach.items()}
        if wider == reach:
            break
        reach = wider
    return sorted({tuple(sorted(a for a in reach[name] if name in reach[a])) for name in reach if name in reach[name]})


def test_no_modules_import_each_other_in_a_circle():
    graph = imports()
    assert {"tessera_wire.line", "tessera_client.client", "tessera.engine.engine"} <= set(graph)
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [("b", "c")]


def test_the_client_stands_between_the_wire_and_the_command():
    """tessera_wire <- tessera, tessera_client <- tessera_evaluation <- tessera_command; lazy imports count as well.

    tessera_quantize stands above tessera and tessera_evaluation, and below the command."""
    may = {
        "tessera_wire": {"tessera_wire"},
        "tessera": {"tessera", "tessera_wire"},
        "tessera_client": {"tessera_client", "tessera_wire"},
        "tessera_gateway": {"tessera_gateway", "tessera_jobs", "tessera_client", "tessera_wire"},
        "tessera_documents": {"tessera_documents", "tessera_jobs", "tessera_client", "tessera_wire"},
        "tessera_jobs": {"tessera_jobs", "tessera_client", "tessera_wire"},
        "tessera_evaluation": {"tessera_evaluation", "tessera_client", "tessera_wire"},
        "tessera_quantize": {"tessera_quantize", "tessera", "tessera_evaluation", "tessera_wire"},
    }
    for name, targets in imports().items():
        room = name.partition(".")[0]
        rooms = {target.partition(".")[0] for target in targets}
        assert rooms <= may.get(room, rooms), f"{name} imports {rooms - may[room]}"
    assert {target for target in imports()["tessera_command.cli"] if target.partition(".")[0] == "tessera"} == {
        "tessera.launcher.cli"
    }
