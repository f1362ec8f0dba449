"""What the Python stages do for a plan: preprocess gives whole tiles, the language model takes what goes round it."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.backend import InferenceRequest, Tensor, stage_args, strings
from tiny_qwen2_vl import write_folder

import scene
from tessera.errors import ConfigError, InvalidRequest
from tessera.tritonserver.preprocess import TritonPythonModel
from tessera.tritonserver.tensors import OF_BOTH, OF_PREPROCESS, RequestTimestamps, timestamps


def stage(config_name: str | None = None, **changed: str) -> TritonPythonModel:
    started = TritonPythonModel()
    started.initialize(stage_args("preprocess", config_name, **changed))
    return started


def outputs(stage: TritonPythonModel, *tensors: Tensor) -> dict[str, np.ndarray]:
    (response,) = stage.execute([InferenceRequest(list(tensors))])
    assert not response.has_error(), response.error()
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def test_tiles_are_the_same_pixels_and_there_is_always_one(backend: Any) -> None:
    picture = strings("image", scene.encode_jpeg(scene.sample(7, "heldout")))
    asked = strings("text_input", b"Is there a door?")
    flat, tiled = outputs(stage(), picture, asked), stage("tensorrt")
    given = outputs(tiled, picture, asked)
    assert given.keys() == flat.keys() - {"PIXELS", "PLAN"} | {"TILES"}
    assert given["TILES"].shape == (flat["PLAN"][0, 1], 448, 448, 3)
    assert np.array_equal(given["TILES"].ravel(), flat["PIXELS"][0])
    for name in ("INPUT_IDS", "SPANS", "DIGEST"):
        assert np.array_equal(given[name], flat[name]), name
    alone = outputs(tiled, strings("text_input", b"Hello?"))
    assert alone["TILES"].shape == (1, 448, 448, 3) and not alone["TILES"].any()
    assert alone["SPANS"].size == 0


def test_encoded_pictures_are_refused_where_pictures_leave_as_tiles(backend: Any) -> None:
    with pytest.raises(ConfigError, match="set gpu_pixels to 0, not 9"):
        stage("tensorrt", gpu_pixels="9")


def test_pictures_that_are_no_tiles_do_not_leave_as_such(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_CHECKPOINT", str(write_folder(tmp_path)))
    with pytest.raises(ConfigError, match="TILES does not go with pictures of image tokens"):
        stage("tensorrt")


def stamps(*values: int) -> RequestTimestamps:
    request = InferenceRequest([Tensor("STAMPS", np.array([values], np.int64))] if values else [])
    return timestamps(request, "STAMPS", "language_model", OF_BOTH, OF_PREPROCESS)


def test_without_the_vision_stages_own_times_all_the_time_is_its(backend: Any) -> None:
    assert stamps(1, 2, 3, 4, 5, 6) == (1, 2, 3, 4, 5, 6)
    assert stamps() == (0,) * 6
    before = time.monotonic_ns()
    *given, began, ended = stamps(1, 2, 3, 4)
    assert given == [1, 2, 3, 4] and began == 4 and before <= ended <= time.monotonic_ns()
    with pytest.raises(InvalidRequest, match="STAMPS has 5 values; language_model wants 6 or 4"):
        stamps(1, 2, 3, 4, 5)
