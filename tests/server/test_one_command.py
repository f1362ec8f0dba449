"""`tessera serve --checkpoint DIR`, then `tessera ask`: nothing else is typed, also for a checkpoint of another layout
than those that come with the source (tests/conftest.py and test_readme.py serve these)."""

from __future__ import annotations

import io
import json
import os
import signal
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_checkpoints import Shape, as_internvl_chat, hf_native
from toy_servers import Launched

from tessera.launcher.installation import STUB
from tessera.launcher.process import command_line, model_of
from tessera_client import Client
from tessera_command.cli import main

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkpoint_is_served_and_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (480, 640, 3), np.uint8)).save(picture, "JPEG")
    (tmp_path / "picture.jpg").write_bytes(picture.getvalue())
    checkpoint = as_internvl_chat(hf_native(tmp_path / "native", Shape(text="llama")), tmp_path / "chat", "internlm2")
    # On the CPU, also where there is a GPU: a tiny model is no shape for its kernels.
    flags = ["--checkpoint", str(checkpoint), "--device", "cpu", "--set", "preprocess.instances=3"]
    launched = Launched(ROOT / "model_repository", tmp_path / "log", *flags, "--set", "dtype=float32")
    try:
        monkeypatch.setenv("TESSERA_URL", launched.url("grpc"))
        assert main(["ask", str(tmp_path / "picture.jpg"), "What is this?", "--max-tokens", "4"]) == 0
        assert capsys.readouterr().out.strip()
        with Client(launched.url("grpc")) as client:
            (plan,) = client.plan(picture.getvalue())
        parts = sum(view.rows * view.columns for view in plan.views)
        assert plan.unit == "tiles" and plan.policies and plan.tokens % parts == 0 and parts > 1
        with urllib.request.urlopen(f"http://{launched.url('health')}/healthz", timeout=30) as page:
            weights = json.load(page)["weights"]
        kinds = {stage: words.partition(",")[0] for stage, words in weights.items()}
        assert kinds == {"language_model": "float32", "vision_encoder": "float32"}
        stubs = [command_line(pid) for pid in launched.pids]
        names = [stub[-2] for stub in stubs if stub and Path(stub[0]).name == STUB]
        assert sum(model_of(name) == "preprocess" for name in names) == 3
        regions = launched.regions()
        assert any(path.endswith("-models") for path in regions)
    finally:
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(20) == 0
    assert not any(os.path.exists(path) for path in regions)
