"""A thumbnail is the picture in one tile: where its rows are known by that, a finer cut has a tile less to compute."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from tessera.models.family import cut_otherwise
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest
from tessera.settings.stages import PreprocessSettings, VisionSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.memory import DeviceStreams
from tessera.vision.pictures import VisionItem

CHECKPOINT = Path(__file__).parents[2] / "build" / "default_model" / "checkpoint"
PIXELS = np.random.default_rng(0).integers(0, 255, (30, 45, 3), dtype=np.uint8)


def picture(width: int, height: int) -> bytes:
    return bytes(cv2.imencode(".jpg", cv2.resize(PIXELS, (width, height)))[1])


def prepared(preprocessor: Preprocessor, data: bytes, **policy: Any) -> Prepared:
    return preprocessor(PreprocessRequest(text="?", images=[data], tile_policy=policy))


def items(*cuts: Prepared) -> list[VisionItem]:
    return [VisionItem(cut.pixels, cut.plan, cut.digest) for cut in cuts]


@pytest.fixture(scope="module")
def encoder() -> VisionEncoder:
    return VisionEncoder.from_checkpoint(CHECKPOINT)


@pytest.fixture
def forwards(encoder: VisionEncoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tiles each had."""
    tiles: list[int] = []
    run = encoder.runner.run
    monkeypatch.setattr(encoder.runner, "run", lambda pixels, wires=(): tiles.append(len(pixels)) or run(pixels, wires))
    return tiles


def test_the_rows_of_a_thumbnail_are_those_of_the_first_cut(encoder: VisionEncoder, forwards: list[int]) -> None:
    preprocessor = Preprocessor.from_checkpoint(CHECKPOINT)
    shown = picture(480, 320)
    one, full = prepared(preprocessor, shown, max_tiles=1), prepared(preprocessor, shown, name="reference")
    others = prepared(preprocessor, shown, thumbnail="never"), prepared(preprocessor, picture(240, 160))
    (alone,) = VisionEncoder.from_checkpoint(CHECKPOINT, VisionSettings(cache_bytes=0)).encode(items(full))
    encoder.encode(items(one))
    assert forwards == [1]
    found = encoder.encode(items(full, *others))
    assert sum(forwards) == 1 + 6 + 6 + 7  # without a thumbnail, or of another picture, there is nothing to know
    assert alone is not None and found[0] is not None and torch.equal(found[0], alone)
    (again,) = encoder.encode(items(full))  # as a whole it is known now
    assert again is not None and torch.equal(again, alone) and sum(forwards) == 20


def test_what_is_known_in_part_does_not_run_beside_another_forward(
    encoder: VisionEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache gives rows in the order of the others."""
    monkeypatch.setattr(DeviceStreams, "free", False)
    monkeypatch.setattr(encoder.runner, "beside", 8)
    monkeypatch.setattr(encoder, "_last_cost", 16)
    preprocessor = Preprocessor.from_checkpoint(CHECKPOINT)
    shown = picture(450, 300)
    (full,) = items(prepared(preprocessor, shown, name="reference"))
    assert encoder.fit_beside([full]) == 1
    encoder.encode(items(prepared(preprocessor, shown, max_tiles=1)))
    assert encoder.fit_beside([full]) == 0


@pytest.mark.parametrize(("resize", "alike"), [("reference", True), ("fast", False)])
def test_where_the_decoder_leaves_pixels_out_a_thumbnail_has_a_name_of_its_own(resize: str, alike: bool) -> None:
    preprocessor = Preprocessor.from_checkpoint(CHECKPOINT, PreprocessSettings(resize=resize))
    shown = picture(3600, 2400)
    one, full = prepared(preprocessor, shown, max_tiles=1), prepared(preprocessor, shown, name="reference")
    assert np.array_equal(full.pixels[-one.pixels.size :], one.pixels) is alike
    last = preprocessor.family.last_part(full.plans[0])
    assert last == one.plans[0]
    assert np.array_equal(cut_otherwise(full.digest, 0, full.plans[0], last), one.digest) is alike
