"""The vision bench: a trial run of each family's tower."""

from __future__ import annotations

import json

import pytest
from bench import vision as bench_vision
from tiny_checkpoints import Shape, hf_native
from tiny_qwen2_vl import write_model


@pytest.mark.parametrize(
    ("family", "forwards", "found"),
    [
        ("internvl", ["tiles8", "b1"], {"tiles8.ms", "fp8.tiles8.ms", "b1.ms", "fp8.b1.ms"}),
        ("qwen2_vl", ["w5b.1"], {"w5b.1.picture_ms", "w5b.1.fp8.picture_ms"}),
    ],
)
def test_a_trial_run_gives_every_figure(family, forwards, found, tmp_path, capsys, monkeypatch):
    if family == "internvl":
        hf_native(tmp_path, Shape(image_size=56, patch_size=14))
    else:
        write_model(tmp_path)
    options = ["--device", "cpu", "--repeats", "2", "--shape", str(tmp_path), "--only", *forwards]
    monkeypatch.setattr("sys.argv", ["vision", *options])
    assert bench_vision.main() == 0
    figures = {line["metric"]: line["value"] for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(figures) == {f"trial.vision.{name}" for name in found | {"fp8.cosine"}} and min(figures.values()) > 0
    assert 0.99 < figures["trial.vision.fp8.cosine"] < 0.9999
