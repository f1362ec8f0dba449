"""The picture of what was read worst: which answers are on it, what it shows of them, and its size."""

from __future__ import annotations

import io

import failure_sheet
import numpy as np
from failure_sheet import TRUE, Failure, chosen, sheet
from PIL import Image, ImageColor

LAYOUT = "<|box_start|>{} 100 900 900<|box_end|><|ref_start|>text<|ref_end|><|rotate_up|>"


def failure(
    step: str, error: float, picture: np.ndarray | None = None, expected: str = "rain", got: str = "ruin"
) -> Failure:
    return Failure(step, step, error, np.full((60, 400), 255, np.uint8) if picture is None else picture, expected, got)


def test_the_worst_of_each_step_are_chosen_and_none_without_a_fault() -> None:
    found = [failure("text", error) for error in (0.1, 0.5, 0.2)] + [failure("table", 0.3), failure("layout", 0.0)]
    assert [(each.step, each.error) for each in chosen(found, 2)] == [("text", 0.5), ("table", 0.3), ("text", 0.2)]
    assert chosen([failure("layout", 0.0)], 2) == []


def test_a_page_has_its_true_boxes_and_those_read() -> None:
    page = failure("layout", 0.5, np.full((300, 300), 255, np.uint8), LAYOUT.format("100"), LAYOUT.format("500"))
    pixels = np.asarray(Image.open(io.BytesIO(sheet([page]))).convert("RGB")).astype(int)
    lines = [abs(pixels[12 + 150, 12 + at] - ImageColor.getrgb(TRUE)).max() < 40 for at in (31, 120, 151)]
    assert lines == [True, False, False]
    red, green, _ = pixels[12 + 150, 12 + 151]
    assert red > 150 and green < 100


def test_it_is_never_larger_than_a_model_card_bears(monkeypatch) -> None:
    monkeypatch.setattr(failure_sheet, "MOST_BYTES", 12_000)
    noise = np.random.default_rng(0).integers(0, 255, (40, 488), np.uint8)
    data = sheet([failure("text", 1.0, noise)])
    assert len(data) <= 12_000
    with Image.open(io.BytesIO(data)) as picture:
        assert 300 < picture.width < failure_sheet.WIDTH  # it had to be made smaller
