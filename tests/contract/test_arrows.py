"""The arrows between the packages run one way: each is imported with what it may not need blocked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parents[2]
SOURCES = [PACKAGES / "python_backends", PACKAGES / "clients"]

# package or module -> what importing it may not touch
BLOCKED = {
    "tessera.family": "torch cv2 onnxruntime transformers PIL sentencepiece safetensors"
    " tessera.preprocess tessera.vision tessera.engine",
    "tessera.checkpoint.config": "torch cv2 onnxruntime transformers",
    "tessera.preprocess": "onnxruntime transformers tritonclient PIL tessera.vision tessera.engine",
    "tessera.vision": "cv2 transformers tritonclient tessera.preprocess tessera.engine",
    "tessera.engine": "cv2 onnxruntime transformers tritonclient tessera.preprocess tessera.vision",
    "tessera.engine.config": "torch numpy tessera.family",
    "tessera.engine.labels": "torch numpy tessera.family",
    "tessera.engine.engine": "torch tokenizers",
    "tessera.engine.loop": "torch tokenizers",
    "tessera.engine.scheduling": "torch",
    "tessera.engine.cache.block_manager": "torch",
    "tessera.engine.cache.prefix_index": "torch",
    "tessera.measured_choices": "torch numpy tessera.engine tessera.vision",
    "tessera.tritonserver": "torch triton_python_backend_utils",
    "tessera.fronts": "torch triton_python_backend_utils tessera.engine tessera.vision tessera.preprocess",
    "tessera.launcher": "torch numpy tritonclient triton_python_backend_utils pytriton",
    "tessera_client": "torch numpy tritonclient tessera",
}

PROGRAM = """
import importlib, pkgutil, sys
name, blocked = sys.argv[1], sys.argv[2].split()
class Wall:
    def find_spec(self, module, path=None, target=None):
        if any(module == b or module.startswith(b + ".") for b in blocked):
            raise ImportError(f"{name} may not need {module}")
sys.meta_path.insert(0, Wall())
package = importlib.import_module(name)
for found in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
    importlib.import_module(found.name)
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized(), "importing touched a device"
"""


@pytest.mark.parametrize("package", BLOCKED)
def test_importing_needs_only_what_it_may(package):
    environment = {"PYTHONPATH": ":".join(map(str, SOURCES)), "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, package, BLOCKED[package]], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr.strip().splitlines()[-1]


def test_the_wall_stops_what_is_blocked():
    environment = {"PYTHONPATH": ":".join(map(str, SOURCES)), "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, "tessera.family", "numpy"], env=environment, capture_output=True, text=True
    )
    assert "tessera.family may not need numpy" in run.stderr
