"""`tessera serve --checkpoint DIR`, then `tessera ask`: nothing else is typed, whatever the checkpoint's layout."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_checkpoints import Shape, as_internvl_chat, hf_native
from tiny_qwen2_vl import write_model
from toy_servers import Launched

from tessera.launcher.installation import STUB
from tessera.launcher.process import command_line, model_of
from tessera_client import Client

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = ("hf_native", "internvl_chat", "qwen2_vl")


def checkpoint(layout: str, folder: Path) -> Path:
    if layout == "qwen2_vl":
        write_model(folder / "qwen2_vl", min_pixels=784, max_pixels=100352)
        return folder / "qwen2_vl"
    if layout == "hf_native":
        return hf_native(folder / "native", Shape())
    return as_internvl_chat(hf_native(folder / "native", Shape(text="llama")), folder / "chat", text="internlm2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_served_and_asked(layout: str, tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (480, 640, 3), np.uint8)).save(picture, "JPEG")
    (tmp_path / "picture.jpg").write_bytes(picture.getvalue())
    # On the CPU, also where there is a GPU: a tiny model is no shape for its kernels.
    flags = ["--checkpoint", str(checkpoint(layout, tmp_path)), "--device", "cpu"]
    if layout == "hf_native":
        flags += ["--set", "preprocess.instances=3", "--set", "dtype=float32"]
    launched = Launched(ROOT / "model_repository", tmp_path / "log", *flags)
    try:
        command = [sys.executable, "-m", "tessera_command.cli", "ask", str(tmp_path / "picture.jpg"), "What is this?"]
        path = os.pathsep.join(str(ROOT / folder) for folder in ("python_backends", "clients"))
        environment = {**os.environ, "PYTHONPATH": path, "TESSERA_URL": launched.url("grpc")}
        run = subprocess.run([*command, "--max-tokens", "4"], capture_output=True, text=True, env=environment)
        assert run.returncode == 0 and run.stdout.strip(), run.stderr
        with Client(launched.url("grpc")) as client:
            (plan,) = client.plan(picture.getvalue())
        assert (plan.unit, plan.policies == ()) == (
            ("image tokens", True) if layout == "qwen2_vl" else ("tiles", False)
        )
        parts = sum(view.rows * view.columns for view in plan.views)
        assert plan.tokens % parts == 0 and parts > 1
        with urllib.request.urlopen(f"http://{launched.url('health')}/healthz", timeout=30) as page:
            weights = json.load(page)["weights"]
        assert {stage: words.partition(",")[0] for stage, words in weights.items()} == {
            "language_model": "float32",
            "vision_encoder": "float32",
        }
        stubs = [command_line(pid) for pid in launched.pids]
        names = [stub[-2] for stub in stubs if stub and Path(stub[0]).name == STUB]
        assert sum(model_of(name) == "preprocess" for name in names) == (3 if layout == "hf_native" else 2)
        regions = launched.regions()
        assert any(path.endswith("-models") for path in regions) == (layout == "hf_native")
    finally:
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(20) == 0
    assert not any(os.path.exists(path) for path in regions)
