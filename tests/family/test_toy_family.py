"""Another family, registered by a test, passes through the real preprocess stage without an edit elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_folders as folders
import numpy as np
import pytest
import toy_family
from fakes.backend import InferenceRequest, strings
from google.protobuf import text_format
from PIL import Image
from preprocess import encoded_pictures as pictures
from tritonclient.grpc import model_config_pb2

from tessera.checkpoint.config import read_config
from tessera.checkpoint.names import split_names
from tessera.errors import CheckpointError, ConfigError, InvalidRequest
from tessera.family.digest import digest
from tessera.family.registry import family_for
from tessera.preprocess.decode import Limits, decode
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest, PreprocessSettings
from tessera.preprocess.tritonserver_model import TritonPythonModel

STAGE = Path(__file__).parents[2] / "model_repository" / "preprocess"
WIDE, TALL = pictures.saved(Image.fromarray(pictures.smooth(80, 32)), "PNG"), pictures.jpeg(50, 97)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    toy_family.register(monkeypatch)
    return toy_family.as_toy(folders.write_hf_folder(tmp_path, folders.byte_level()))


def test_its_layout_is_read_by_its_own_reader(folder: Path) -> None:
    config = read_config(folder)
    assert isinstance(family_for(config), toy_family.Toy)
    assert (config.text.rope_scaling, config.text.mrope_section) == (None, (16, 24, 24))
    split = split_names(["visual.weight", "language_model.lm_head.weight"], config)
    assert split == {
        "vision": {"visual.weight": "weight"},
        "text": {"language_model.lm_head.weight": "lm_head.weight"},
    }
    with pytest.raises(CheckpointError, match=r"vision_tower\.x"):
        split_names(["vision_tower.x"], config)


def test_unregistered_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="ToyForConditionalGeneration"):
        read_config(toy_family.as_toy(folders.write_hf_folder(tmp_path, folders.byte_level())))


def test_pixels_prompt_and_positions(folder: Path) -> None:
    preprocessor = Preprocessor.from_checkpoint(folder)
    found = preprocessor(PreprocessRequest(text="<image> and <image>: alike?", images=[WIDE, TALL]))
    assert found.plan.tolist() == [0, 1, 2, 5, 0, 1, 6, 3]
    assert found.spans[:, 1].tolist() == [10, 18]

    groups = found.pixels.reshape(28, *preprocessor.family.unit_shape)
    whole = decode(WIDE)  # 80x32: not resized
    for index in range(10):
        row, column = divmod(index, 5)
        group = whole[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
        for down in range(2):
            for across in range(2):
                patch = group[8 * down : 8 * down + 8, 8 * across : 8 * across + 8]
                assert np.array_equal(groups[index, down, across], patch)

    assert found.positions is not None and found.positions.dtype == np.int32
    assert found.positions.shape == (3, len(found.input_ids))
    assert found.positions.T.tolist() == expected_positions(found.spans, [(2, 5), (6, 3)], len(found.input_ids))


def expected_positions(spans: np.ndarray, grids: list[tuple[int, int]], length: int) -> list[list[int]]:
    """By walking along the prompt, a position at a time."""
    rows, above = [], 0
    begins = {int(start): grid for (start, _), grid in zip(spans, grids, strict=True)}
    while len(rows) < length:
        down, across = begins.get(len(rows), (1, 1))
        rows += [[above, above + y, above + x] for y in range(down) for x in range(across)]
        above += max(down, across)
    return rows


def test_digests_tell_its_plans_apart(folder: Path) -> None:
    preprocessor = Preprocessor.from_checkpoint(folder)
    plan = preprocessor.family.plan_of((1, 6, 3))
    one, other, again = (
        digest(TALL, 0, cut, "settings", b"id") for cut in (plan, preprocessor.family.plan_of((1, 3, 6)), plan)
    )
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_limits_count_its_own_units(folder: Path) -> None:
    own = Preprocessor.from_checkpoint(folder)
    with pytest.raises(InvalidRequest, match="4 images make 72 groups of patches; the limit is 60"):
        own(PreprocessRequest(text="x", images=[TALL] * 4))
    small = Preprocessor.from_checkpoint(folder, PreprocessSettings(limits=Limits(max_cost=17)))
    with pytest.raises(InvalidRequest, match="18 groups of patches; the limit is 17"):
        small(PreprocessRequest(text="x", images=[TALL]))


def test_it_knows_no_tile_policy(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="tile_policy"):
        Preprocessor.from_checkpoint(folder)(PreprocessRequest(text="x", tile_policy={"max_tiles": 2}))
    with pytest.raises(ConfigError, match="preprocess: tile_policy"):
        Preprocessor.from_checkpoint(folder, PreprocessSettings(tile_policy="native"))


def stage(config: str) -> TritonPythonModel:
    read = text_format.Parse((STAGE / config).read_text(), model_config_pb2.ModelConfig())
    parameters = {name: {"string_value": value.string_value} for name, value in read.parameters.items()}
    whole = {"parameters": parameters, "output": [{"name": tensor.name} for tensor in read.output]}
    started = TritonPythonModel()
    started.initialize({"model_name": "preprocess", "model_repository": str(STAGE), "model_config": json.dumps(whole)})
    return started


def test_positions_leave_the_stage_where_the_family_has_any(
    backend: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = InferenceRequest([strings("image", WIDE), strings("text_input", b"What is this?")])

    def answered() -> dict[str, np.ndarray]:
        (response,) = stage("config.pbtxt").execute([asked])
        assert not response.has_error(), response.error()
        return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}

    assert "POSITIONS" not in answered()
    monkeypatch.setenv("TESSERA_CHECKPOINT", str(folder))
    found = answered()
    assert found["POSITIONS"].shape == (3, len(found["INPUT_IDS"])) and found["POSITIONS"].dtype == np.int32
    assert found["PLAN"].tolist() == [[0, 1, 2, 5]]


def test_its_pictures_do_not_leave_as_tiles(backend: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CHECKPOINT", str(folder))
    with pytest.raises(ConfigError, match="groups of patches"):
        stage("configs/tensorrt.pbtxt")
