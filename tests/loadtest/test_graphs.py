"""What a trace says of launches and of the time in which kernels run, its picture, and a trial of the benchmark."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench import graphs, timeline
from bench.graphs import emptied
from bench.timeline import Kernel, Trace
from tiny_checkpoints import Shape, hf_native


def event(name: str, category: str, began: float, lasted: float) -> dict[str, Any]:
    """Microseconds."""
    return {"ph": "X", "name": name, "cat": category, "ts": began, "dur": lasted}


EVENTS = [
    event("flash_fwd_kernel", "kernel", 1500, 1000),
    event("nvjet_tst_64x8", "kernel", 1000, 1000),  # half of it beside the attention
    event("Memcpy DtoD", "gpu_memcpy", 9000, 2000),
    event("aten::mm", "cpu_op", 0, 9000),
    event("cudaLaunchKernel", "cuda_runtime", 0, 5),
    event("cuLaunchKernelEx", "cuda_driver", 6, 5),
    event("cudaGraphLaunch", "cuda_runtime", 12, 5),
    event("cudaMemcpyAsync", "cuda_runtime", 18, 5),
    event("cudaStreamSynchronize", "cuda_runtime", 24, 9000),
    {"ph": "i", "name": "cudaLaunchKernel", "ts": 0},
]


def test_a_trace_is_what_ran_on_the_gpu_and_what_the_host_launched() -> None:
    trace = Trace.read(EVENTS)
    assert trace.kernels == [Kernel(1, 2, "product"), Kernel(1.5, 2.5, "attention"), Kernel(9, 11, "other")]
    assert trace.launches == 4 and trace.busy_ms == pytest.approx(3.5)
    on_cpu = Trace.read([each for each in EVENTS if each.get("cat") == "cpu_op"])
    assert on_cpu.kernels == [Kernel(0, 9, "product")] and on_cpu.launches == 1


def test_a_window_is_the_middle_and_cuts_what_lies_across() -> None:
    assert Trace.read(EVENTS).window(8).kernels == [Kernel(0, 0.5, "attention"), Kernel(7, 8, "other")]
    assert Trace.read(EVENTS).window(20).kernels[-1] == Kernel(8, 10, "other")  # less than there is room for


def test_a_bar_is_as_long_as_its_kernels_and_close_ones_are_one() -> None:
    trace = Trace([Kernel(0, 10, "product"), Kernel(10.001, 20, "product"), Kernel(30, 30.001, "product")], 0)
    root = ElementTree.fromstring(timeline.picture({"row <1>": trace, "row 2": trace}, "title"))
    dashes = [path.get("stroke-dasharray") for path in root.iter("{http://www.w3.org/2000/svg}path")]
    scale = 10 * (timeline.WIDTH - 2 * timeline.LEFT) / timeline.WINDOW_MS  # a path for each kind in each row
    drawn = f"0 {10 * timeline.LEFT} {20 * scale:.0f} {10 * scale:.0f} 1 {10 * timeline.WIDTH}"
    assert dashes == ["0 10000", drawn, "0 10000"] * 2


def test_graphs_are_away_for_a_time_alone() -> None:
    class Pool:
        recorded, step = {1: "graph"}, "graph"

    pool = Pool()
    with pytest.raises(KeyError), emptied(pool, "recorded", "step"):
        assert pool.step is None
        pool.recorded[1]
    assert (pool.recorded, pool.step) == ({1: "graph"}, "graph")


def test_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emitted: Any) -> None:
    hf_native(tmp_path, Shape(image_size=56, patch_size=14))
    for name, value in {"TURNS": 2, "STEPS": 2, "MOST_TRACED": 2, "DECODE_SKIP": 2, "MOST_TOKENS": 40}.items():
        monkeypatch.setattr(graphs, name, value)
    drawn = tmp_path / "drawn.svg"
    options = ["--checkpoint", str(tmp_path), "--set", "device=cpu", "--batches", "1", "3", "--picture", str(drawn)]
    found = emitted(graphs, *options)
    kinds = ("ms", "launches", "eager_ms", "eager_launches", "eager_over_graphs")
    named = {f"trial.engine.graphs.{work}.{kind}" for work in ("vit", "b1", "b3") for kind in kinds}
    assert set(found) == named | {"trial.seeds.timeline"}
    assert all(line["value"] > 0 for line in found.values()) and len(found["trial.seeds.timeline"]["shares"]) == 4
    rows = re.findall(r">(ViT, one tile|decode, one sequence), (with|without) graphs: [\d.]+ ms", drawn.read_text())
    assert len(rows) == 4
