"""build/render_repository.py changes what it was asked to and refuses what does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from render_repository import GPU_SETTINGS, render
from tritonclient.grpc import model_config_pb2

SOURCE = Path(__file__).resolve().parents[2] / "model_repository"


def config(folder: Path, model: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse((folder / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def test_instances_and_parameters_change_and_the_checkpoint_stays_found(tmp_path):
    out = tmp_path / "rendered"
    render(SOURCE, out, {"preprocess": 5}, {"vision_encoder.runner": "torch"})
    assert config(out, "preprocess").instance_group[0].count == 5
    changed = config(out, "vision_encoder").parameters
    assert changed["runner"].string_value == "torch"
    assert Path(changed["checkpoint"].string_value) == (SOURCE / "../build/default_model/checkpoint").resolve()
    # Everything else is as it was.
    assert config(out, "vlm") == config(SOURCE, "vlm")
    assert {p.name for p in out.iterdir()} == {p.name for p in SOURCE.iterdir()}


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no model 'vission'; there are .*vision_encoder"):
        render(SOURCE, tmp_path / "a", {"vission": 2}, {})
    with pytest.raises(ValueError, match="no parameter 'runer'; it has .*runner"):
        render(SOURCE, tmp_path / "b", {}, {"vision_encoder.runer": "torch"})
    with pytest.raises(ValueError, match="exists already"):
        render(SOURCE, tmp_path, {}, {})


def test_the_gpu_settings_are_parameters_of_the_stages(tmp_path):
    render(SOURCE, tmp_path / "gpu", {}, GPU_SETTINGS)
    for name, value in GPU_SETTINGS.items():
        model, _, parameter = name.partition(".")
        assert config(tmp_path / "gpu", model).parameters[parameter].string_value == value


def test_one_model_can_be_rendered_alone(tmp_path):
    render(SOURCE, tmp_path / "vision", {}, {"vision_encoder.threads": "2"}, only=["vision_encoder"])
    assert [path.name for path in (tmp_path / "vision").iterdir()] == ["vision_encoder"]
    with pytest.raises(ValueError, match="no model 'eyes'"):
        render(SOURCE, tmp_path / "other", {}, {}, only=["eyes"])


def test_shares_of_one_gpu_must_agree(tmp_path):
    greedy = {**GPU_SETTINGS, "vision_encoder.memory_bytes": str(8 << 30)}
    with pytest.raises(ValueError, match="vision_encoder.memory_bytes 8589934592 .* exceed .*vision_memory_bytes"):
        render(SOURCE, tmp_path / "greedy", {}, greedy)
    render(SOURCE, tmp_path / "elsewhere", {}, greedy | {"vision_encoder.vision_url": "other:8001"})
