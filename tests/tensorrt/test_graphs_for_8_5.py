"""build/tensorrt85: graphs that TensorRT 8.5 reads give the same rows, and packed libraries come back whole."""

import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build" / "tensorrt85"))

import plans


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    plans.main(
        ["graphs", "--checkpoint", str(plans.DEFAULT), "--out", str(folder), "free", "typed-2", "half", "plugin"]
    )
    return folder


@pytest.mark.parametrize("name", ["free", "typed-2", "half"])
def test_the_rows_are_torchs(written: Path, name: str, tmp_path: Path, capsys) -> None:
    tiles, _ = plans.reference(written)
    session = onnxruntime.InferenceSession(written / f"{name}.onnx", providers=["CPUExecutionProvider"])
    (rows,) = session.run(None, {"TILES": tiles[1:3]})
    assert rows.dtype == np.float16
    assert session.get_inputs()[0].shape[0] == (2 if name == "typed-2" else "n")
    for first, code in ((1, 0), (2, 1)):  # which tiles they are
        rows.tofile(tmp_path / "rows")
        assert plans.main(["judge", str(written), str(tmp_path / "rows"), str(first)]) == code
    right, wrong = capsys.readouterr().out.splitlines()
    assert "over 2 tiles (white 0.9999" in right or "over 2 tiles (white 1.0000" in right
    assert "(noise -0." in wrong and wrong.endswith("finite: True")


@pytest.mark.parametrize("name", ["free", "typed-2", "half", "plugin"])
def test_nothing_is_left_that_the_parser_does_not_know(written: Path, name: str) -> None:
    graph = onnx.load(written / f"{name}.onnx").graph
    operators = {node.op_type for node in graph.node}
    assert not operators & {"LayerNormalization", "Pad", "Shape"}
    assert ("LayerNorm" in operators) == (name == "plugin")
    types = [node.attribute[0].i for node in graph.node if node.op_type == "Cast"]
    assert onnx.TensorProto.BFLOAT16 not in types
    assert len(types) == 2 or name == "typed-2"  # of the pixels and of the rows


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """Entries of kind, chip and payload, as nvcc lays them out."""
    body = b"".join(
        struct.pack("<HHIQ", kind, 1, 64, len(code)) + bytes(12) + struct.pack("<I", chip) + bytes(32) + code
        for kind, chip, code in entries
    )
    return b"\x50\xed\x55\xba\x01\x00\x10\x00" + struct.pack("<Q", len(body)) + body


def test_only_the_code_of_other_chips_is_zeroed() -> None:
    ours, other = b"hopper" * 4, b"ampere" * 4
    library = bytearray(b"host" + fatbin((2, 80, other), (2, 90, ours), (1, 90, other)) + fatbin((1, 80, other)))
    before = bytes(library)
    assert plans.slim(library) == 2 * len(other)
    assert bytes(library) == before.replace(other, bytes(len(other)), 2)


def test_packed_libraries_come_back_whole(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    (tmp_path / "wheels").mkdir()
    libraries = {name: random.bytes(2500) for name in (*plans.WHOLE, *plans.HOST, *plans.SLIMMED)}
    libraries[plans.HOST[0]] = bytes(plans.CHUNK) + b"the second piece"
    with zipfile.ZipFile(tmp_path / "wheels" / "all.whl", "w") as wheel:
        for name, content in libraries.items():
            wheel.writestr(f"lib/{name}", content)
    plans.main(["pack", str(tmp_path / "wheels"), str(tmp_path / "out"), "--megabytes", "0.008"])
    folders = sorted((tmp_path / "out").glob("p*"))
    assert len(folders) > 1 and all(sum(f.stat().st_size for f in p.iterdir()) <= 8000 for p in folders)
    environment = os.environ | {"TRT": str(tmp_path / "trt"), "PROBE": "/bin/true"}
    (tmp_path / "trt" / "kit").mkdir(parents=True)
    (tmp_path / "out" / "libs.sha256").rename(tmp_path / "trt" / "kit" / "libs.sha256")

    def go(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(Path(plans.__file__).with_name("go.sh")), *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    for folder in folders:
        assert go("unpack", folder).returncode == 0
    assert {file.name: file.read_bytes() for file in (tmp_path / "trt" / "lib").iterdir()} == libraries
    assert go("check").returncode == 0
    (tmp_path / "trt" / "lib" / plans.HOST[1]).write_bytes(b"broken")
    broken = go("check")
    assert broken.returncode == 1 and f"{plans.HOST[1]}: FAILED" in broken.stdout
