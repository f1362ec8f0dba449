"""build/vision/plan_repository.py fits the named config `tensorrt` to a plan and refuses what does not exist."""

from pathlib import Path

import pytest
from checkpoints import DOCUMENTS, ROOMS
from plan_repository import SOURCE, main, render

from tessera.launcher.settings import config_file, read_config


def test_the_tracked_named_config_is_the_one_for_the_default_checkpoint(tmp_path, capsys):
    given = ["--tensorrt", str(ROOMS), "--out", str(tmp_path / "out")]
    assert main(given) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in SOURCE.iterdir()}
    for model in ("preprocess", "vision_encoder", "language_model", "vlm"):
        written, tracked = (read_config(config_file(each, model, "tensorrt")) for each in (tmp_path / "out", SOURCE))
        assert written == tracked
    assert main(given) == 2 and "File exists" in capsys.readouterr().err


def test_a_plan_of_another_checkpoint(tmp_path):
    render(tmp_path / "out", SOURCE.parent / "loadtest" / "shapes" / "internvl3-8b-shape", 13)
    vision = read_config(config_file(tmp_path / "out", "vision_encoder", "tensorrt"))
    assert vision.max_batch_size == 13
    assert (list(vision.input[0].dims), list(vision.output[0].dims)) == ([448, 448, 3], [256, 3584])
    graphs = vision.optimization.cuda.graph_spec
    # Every number of tiles has exactly one graph that may run it.
    assert [(graph.graph_lower_bound.batch_size, graph.batch_size) for graph in graphs] == [
        (1, 1), (2, 2), (3, 4), (5, 8), (9, 13)
    ]  # fmt: skip
    assert all(list(graph.input["TILES"].dim) == [448, 448, 3] for graph in graphs)
    limits = [
        read_config(config_file(tmp_path / "out", "preprocess", named)).parameters["max_cost"].string_value
        for named in ("tensorrt", None)
    ]
    assert limits == ["13", ""]  # the default config keeps its own


@pytest.mark.parametrize(
    ("tiles", "checkpoint", "words"),
    [("32", DOCUMENTS, "qwen2_vl cuts no tiles"), ("0", ROOMS, "--max-tiles wants 1 or more, not 0")],
)
def test_a_model_without_tiles_is_refused(tmp_path: Path, capsys, tiles, checkpoint, words):
    given = ["--tensorrt", str(checkpoint), "--out", str(tmp_path / "out"), "--max-tiles", tiles]
    assert main(given) == 2 and words in capsys.readouterr().err
