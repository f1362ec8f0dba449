"""build/render_repository.py fits the named config `tensorrt` to a plan and refuses what does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from document_shape import build_config
from google.protobuf import text_format
from render_repository import SOURCE, PlanShape, render
from tritonclient.grpc import model_config_pb2

from tessera.errors import CheckpointError


def config(folder: Path, model: str, file: str = "config.pbtxt") -> model_config_pb2.ModelConfig:
    return text_format.Parse((folder / model / file).read_text(), model_config_pb2.ModelConfig())


NAMED = "configs/tensorrt.pbtxt"


def test_the_tracked_named_config_is_the_one_for_the_default_checkpoint(tmp_path):
    plan = PlanShape.of_checkpoint(SOURCE / "../build/default_model/checkpoint", 32)
    render(tmp_path / "out", plan)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in SOURCE.iterdir()}
    for model in ("preprocess", "vision_encoder", "language_model", "vlm"):
        assert config(tmp_path / "out", model, NAMED) == config(SOURCE, model, NAMED)
    with pytest.raises(FileExistsError):
        render(tmp_path / "out", plan)


def test_a_plan_of_another_checkpoint(tmp_path):
    shape = SOURCE.parent / "loadtest" / "shapes" / "internvl3-8b-shape"
    render(tmp_path / "out", PlanShape.of_checkpoint(shape, 13))
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
    # The default config keeps its own limit.
    assert "max_cost" not in config(tmp_path / "out", "preprocess").parameters


def test_a_model_without_tiles_is_refused(tmp_path):
    build_config().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="qwen2_vl cuts no tiles"):
        PlanShape.of_checkpoint(tmp_path, 32)
