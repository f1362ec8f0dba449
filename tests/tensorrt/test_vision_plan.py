"""The graph compiled ahead of time by TensorRT-RTX for the seeds' RTX 4090 (sm_89): it parses, its types, its profile.

No engine is run, here or anywhere in this project: there is no GPU that could, and tritonserver loads none of these.
"""

import os
import subprocess
import sys
from pathlib import Path

import build_plan
import onnx
import pytest
import torch
from build_plan import Plan, PlanError, Settings, Toolkit, load_toolkit
from export_graph import calibrate, tensorrt_graph

from tessera.launcher.settings import config_file, read_config
from tessera.models.internvl.onnx_graph import vision_graph
from tessera.models.internvl.vision import InternViT
from tessera.models.registry import read_config as read_checkpoint
from tessera.models.tower import load_tower

ROOT = Path(__file__).resolve().parents[2]
RTX_4090 = "8.9"


@pytest.fixture(scope="module")
def toolkit() -> Toolkit:
    try:
        return load_toolkit("tensorrt_rtx")
    except PlanError as error:
        if os.environ.get("TESSERA_REQUIRE_TENSORRT"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tower() -> InternViT:
    return load_tower(read_checkpoint(ROOT / "build" / "default_model" / "checkpoint"))


@pytest.fixture(scope="module")
def graph(tower: InternViT, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("graph") / "typed.onnx"
    onnx.save(tensorrt_graph(tower), str(file))
    return file


def build(toolkit: Toolkit, file: Path, **settings) -> Plan:
    given = {"workspace_bytes": 1 << 30, "compute_capability": RTX_4090} | settings
    return build_plan.build_plan(toolkit, file, Settings(**given))


def test_the_plan_fits_the_named_config(toolkit: Toolkit, graph: Path, tower: InternViT, tmp_path, monkeypatch) -> None:
    """With a timing cache: TensorRT-RTX still has its calls, though they do nothing there."""
    monkeypatch.setattr(Toolkit, "has_timing_cache", True)
    config = read_config(config_file(ROOT / "model_repository", "vision_encoder", "tensorrt"))
    kept = tmp_path / "caches" / "timing"
    plan = build(toolkit, graph, timing_cache=kept)
    for tensor, named in ((plan.input, config.input[0]), (plan.output, config.output[0])):
        kind = type(named).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[named.data_type].name
        assert (tensor.name, f"TYPE_{tensor.dtype}", tensor.shape) == (named.name, kind, (-1, *named.dims))
    tile = tuple(config.input[0].dims)
    assert plan.profile == [(tiles, *tile) for tiles in (1, 8, config.max_batch_size)]
    assert len(plan.engine) > graph.stat().st_size / 2
    report = plan.report()
    assert plan.builder in report and "TILES" in report
    assert 0 < sum(plan.kinds().values()) < len(onnx.load(str(graph)).graph.node) / 2
    # Scores, softmax and their product with v are one kernel a layer, though the softmax is float32.
    assert sum("mha" in line.partition(",")[0] for line in plan.layers) == tower.depth
    assert kept.stat().st_size > 0
    assert build(toolkit, graph, max_tiles=4, usual_tiles=2, timing_cache=kept).profile[-1] == (4, *tile)


@pytest.mark.parametrize(
    ("options", "shown"),
    [({"precision": "bfloat16"}, "BFloat16"), ({"quantize": "int8"}, "Int8"), ({"quantize": "fp8"}, "FP8")],
    ids=["bfloat16", "int8", "fp8"],
)
def test_other_types_compile_too(toolkit: Toolkit, tower: InternViT, tmp_path: Path, options, shown) -> None:
    if "quantize" in options:
        tiles = torch.randint(0, 256, (1, 448, 448, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        options = options | {"amax": calibrate(tower, [tiles])}
    file = tmp_path / "typed.onnx"
    onnx.save(tensorrt_graph(tower, **options), str(file))
    plan = build(toolkit, file)
    assert (plan.input.dtype, plan.output.dtype) == ("UINT8", "BF16")
    assert any(shown.lower() in line.lower() for line in plan.layers if "gemm" in line.partition(",")[2][:30])


def test_graphs_of_other_targets_and_broken_ones_are_refused(
    toolkit: Toolkit, graph: Path, tower: InternViT, tmp_path: Path
) -> None:
    renamed = onnx.load(str(graph))
    for node in renamed.graph.node:
        node.output[:] = ["ROWS" if name == "EMBEDDINGS" else name for name in node.output]
    renamed.graph.output[0].name = "ROWS"
    file = tmp_path / "graph.onnx"
    for content, words in (
        (vision_graph(tower).SerializeToString(), "cannot parse|--target tensorrt"),
        (renamed.SerializeToString(), "ROWS.*--target tensorrt"),
        (b"no graph", "cannot parse"),
    ):
        file.write_bytes(content)
        with pytest.raises(PlanError, match=words):
            build(toolkit, file)
    with pytest.raises(PlanError, match="does not exist"):
        build(toolkit, tmp_path / "none.onnx")


def test_a_gpu_that_it_cannot_compile_for_is_named(toolkit: Toolkit, graph: Path) -> None:
    """The H200 of this project is one: so no plan has been run by it."""
    with pytest.raises(PlanError, match=r"compute capability 9\.0; it knows .*89"):
        build(toolkit, graph, compute_capability="9.0")


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"max_tiles": 4}, "usual tiles"), ({"max_tiles": 0}, "usual tiles"), ({"workspace_bytes": 1}, "1 MiB")],
)
def test_settings_that_cannot_work_are_refused(settings, words) -> None:
    with pytest.raises(PlanError, match=words):
        Settings(**settings)


def test_without_tensorrt_the_message_says_what_to_install() -> None:
    with pytest.raises(PlanError, match=r"no absent_module here .* requirements-tensorrt\.txt"):
        load_toolkit("absent_module")


def test_only_tensorrt_rtx_compiles_for_another_gpu() -> None:
    with pytest.raises(PlanError, match="for the GPU at hand only"):
        Toolkit(build_plan).aim_at(None, RTX_4090)


def test_by_command_and_never_as_a_plan(toolkit: Toolkit, graph: Path, tmp_path: Path) -> None:
    def run(out: Path) -> subprocess.CompletedProcess[str]:
        script = [
            sys.executable,
            str(ROOT / "build" / "vision" / "build_plan.py"),
            "--onnx",
            str(graph),
            "--out",
            str(out),
        ]
        return subprocess.run([*script, "--compute-capability", RTX_4090], capture_output=True, text=True, timeout=120)

    refused = run(tmp_path / "model.plan")
    assert refused.returncode == 1 and "no plan for tritonserver" in refused.stderr
    done = run(tmp_path / "vision.engine")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vision.engine", "vision.txt"]
