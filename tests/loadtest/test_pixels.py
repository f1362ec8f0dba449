"""Where the GPU begins to decode pictures faster than the CPU, and that both ways are asked alike."""

from typing import Any

import pytest
from bench import pixels
from turns import Ratio

SURE, UNSURE, SLOWER = Ratio(1.2, 0.1), Ratio(1.2, 0.3), Ratio(0.8, 0.1)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([SLOWER, SURE, SURE], 200),
        ([SURE, UNSURE, SURE], 300),
        ([SURE, SURE, SURE], 100),
        ([SURE, SURE, UNSURE], 0),
        ([SURE, SURE, SLOWER], 0),
    ],
)
def test_the_crossover_is_where_all_that_is_larger_gains(ratios: list[Ratio], expected: int) -> None:
    sizes = list(zip((100, 200, 300), ratios))
    assert pixels.crossover(sizes) == pixels.crossover(reversed(sizes)) == expected


def test_two_servers_that_differ_in_who_decodes(emitted: Any, stood_in: Any) -> None:
    started = stood_in(pixels)
    options = ["--workloads", "W1", "--concurrency", "2", "--turns", "2", "--processes", "1", "--set", "threads=2"]
    found = emitted(pixels, *options)
    own = [{**setup.settings} for setup in started]
    assert [settings.pop("gpu_pixels") for settings in own] == ["0", "1"]
    assert own[0] == own[1] == {"gpu_memory": "0.45", "threads": "2"}
    assert {setup.checkpoint for setup in started} == {pixels.SHAPE} and all(setup.random_weights for setup in started)
    name = "seeds.pixels.W1.mineru25"
    assert set(found) == {
        *(f"{name}.{way}.{what}" for way in ("cpu", "gpu") for what in ("req_s", "p99_ms")),
        *(f"{name}.gpu_over_cpu", "preprocess.gpu_crossover_pixels"),
    }
    assert found["preprocess.gpu_crossover_pixels"]["shape"] == "mineru25"
    ratio = found[f"{name}.gpu_over_cpu"]
    assert found["preprocess.gpu_crossover_pixels"]["ratios"] == {"200704": [ratio["value"], ratio["ci95"]]}
