"""The preprocessing benchmark's own arithmetic, on pictures that take no time."""

from __future__ import annotations

import pytest
from bench import preprocess as bench_preprocess

from tessera.preprocess.preprocessor import Preprocessor, PreprocessSettings


def test_a_row_compares_the_same_tiles_of_pillow_and_both_modes() -> None:
    preprocessors = {
        mode: Preprocessor.from_checkpoint(bench_preprocess.CHECKPOINT, PreprocessSettings(resize=mode))
        for mode in ("reference", "fast")
    }
    row = bench_preprocess.compare(preprocessors, (480, 320), pictures=1, rounds=1)
    assert (row["size"], row["tiles"]) == ("480x320", 7)
    assert row["reference"]["mean_difference"] <= 0.1 and row["reference"]["max_difference"] <= 3
    assert row["reference"]["mean_difference"] < row["fast"]["mean_difference"] < 2
    for mode in preprocessors:
        assert row[mode]["pillow_over"] == pytest.approx(row["pillow_ms"] / row[mode]["ms"], rel=0.02)
