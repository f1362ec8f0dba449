"""build/render_repository.py changes what it was asked to and refuses what does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from render_repository import GPU_SETTINGS, PlanShape, render
from tritonclient.grpc import model_config_pb2

SOURCE = Path(__file__).resolve().parents[2] / "model_repository"


def config(folder: Path, model: str, file: str = "config.pbtxt") -> model_config_pb2.ModelConfig:
    return text_format.Parse((folder / model / file).read_text(), model_config_pb2.ModelConfig())


NAMED = "configs/tensorrt.pbtxt"


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
    with pytest.raises(ValueError, match="no parameter 'runer'; did you mean runner"):
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


def test_the_tracked_named_config_is_the_one_for_the_default_checkpoint(tmp_path):
    plan = PlanShape.of_checkpoint(SOURCE / "../build/default_model/checkpoint", 32)
    render(SOURCE, tmp_path / "out", {}, {}, plan)
    assert config(tmp_path / "out", "vision_encoder", NAMED) == config(SOURCE, "vision_encoder", NAMED)
    tracked = config(SOURCE, "preprocess", NAMED)
    tracked.parameters["checkpoint"].string_value = str((SOURCE / "../build/default_model/checkpoint").resolve())
    assert config(tmp_path / "out", "preprocess", NAMED) == tracked


def test_a_plan_of_another_checkpoint(tmp_path):
    shape = SOURCE.parent / "loadtest" / "shapes" / "internvl3-8b-shape"
    render(
        SOURCE, tmp_path / "out", {"preprocess": 3}, {"language_model.threads": "2"}, PlanShape.of_checkpoint(shape, 13)
    )
    vision = config(tmp_path / "out", "vision_encoder", NAMED)
    assert vision.max_batch_size == 13
    assert list(vision.input[0].dims) == [448, 448, 3]
    assert list(vision.output[0].dims) == [256, 3584]
    graphs = vision.optimization.cuda.graph_spec
    # Every number of tiles has exactly one graph that may run it.
    assert [(graph.graph_lower_bound.batch_size, graph.batch_size) for graph in graphs] == [
        (1, 1), (2, 2), (3, 4), (5, 8), (9, 13)
    ]  # fmt: skip
    assert all(list(graph.input["TILES"].dim) == [448, 448, 3] for graph in graphs)
    preprocess = config(tmp_path / "out", "preprocess", NAMED)
    assert preprocess.parameters["max_cost"].string_value == "13"
    # Other settings reach the named configs as well; the default config keeps its own limit.
    assert preprocess.instance_group[0].count == 3
    assert config(tmp_path / "out", "language_model", NAMED).parameters["threads"].string_value == "2"
    assert "max_cost" not in config(tmp_path / "out", "preprocess").parameters
