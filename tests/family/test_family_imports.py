"""What tessera.family may not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = ("torch", "cv2", "transformers", "PIL", "onnxruntime", "sentencepiece", "safetensors")
PROGRAM = """
import sys
for name in {blocked}:
    sys.modules[name] = None
import importlib, pkgutil
sys.path[:0] = {path}
import tessera.family
for module in pkgutil.iter_modules(tessera.family.__path__):
    importlib.import_module("tessera.family." + module.name)
from tessera.family.family import TilePolicy
print(TilePolicy())
"""


@pytest.mark.parametrize("blocked", [BLOCKED])
def test_family_imports_without_heavy_libraries(blocked: tuple[str, ...]) -> None:
    program = PROGRAM.format(blocked=blocked, path=sys.path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
