"""What may import what: planning knows no torch, and importing touches no device."""

from __future__ import annotations

import subprocess
import sys

import pytest

PLAIN = [
    "tessera.engine.config",
    "tessera.engine.request",
    "tessera.engine.sequence",
    "tessera.engine.scheduling.scheduler",
    "tessera.engine.scheduling.batch",
    "tessera.engine.cache.block_manager",
    "tessera.engine.cache.prefix_index",
    "tessera.engine.detokenizer",
    "tessera.engine.metrics",
    "tessera.engine.engine",
    "tessera.engine.loop",
]
ALL = ["tessera.engine.execution.model_runner", "tessera.engine.attention.sdpa_backend", *PLAIN]


def import_without(blocked, modules):
    block = "".join(f"sys.modules[{name!r}] = None; " for name in blocked)
    code = f"import sys; sys.path[:0] = {sys.path!r}; {block}import {', '.join(modules)}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("blocked", "modules"),
    [
        (["torch", "transformers", "tokenizers", "cv2", "onnxruntime", "triton_python_backend_utils"], PLAIN),
        (["transformers", "tokenizers", "cv2", "onnxruntime", "tessera.vision", "tessera.preprocess"], ALL),
    ],
)
def test_imports_with_the_rest_blocked(blocked, modules):
    result = import_without(blocked, modules)
    assert result.returncode == 0, result.stderr
