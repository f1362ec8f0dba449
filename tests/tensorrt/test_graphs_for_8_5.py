"""build/tensorrt85: graphs that TensorRT 8.5 reads give the same rows, and packed libraries come back whole."""

from __future__ import annotations

import hashlib
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build" / "tensorrt85"))

import libraries
import towers

CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    graphs = ["free", "typed-2", "half", "plugin"]
    towers.main(["graphs", "--checkpoint", str(CHECKPOINT), "--out", str(folder), *graphs])
    return folder


@pytest.mark.parametrize("name", ["free", "typed-2", "half"])
def test_the_rows_are_torchs(written: Path, name: str) -> None:
    tiles = np.fromfile(written / "tiles.u8", np.uint8).reshape(6, 448, 448, 3)[:2]
    session = onnxruntime.InferenceSession(written / f"{name}.onnx", providers=["CPUExecutionProvider"])
    (rows,) = session.run(None, {"TILES": tiles})
    assert rows.dtype == np.float16
    assert towers.least_cosine(rows, np.load(written / "rows.npy"))[0] > 0.9999
    assert session.get_inputs()[0].shape[0] == (2 if name == "typed-2" else "n")


@pytest.mark.parametrize("name", ["free", "typed-2", "half", "plugin"])
def test_nothing_is_left_that_the_parser_does_not_know(written: Path, name: str) -> None:
    graph = onnx.load(written / f"{name}.onnx").graph
    operators = {node.op_type for node in graph.node}
    assert not operators & {"LayerNormalization", "Pad", "Shape"}
    assert ("LayerNorm" in operators) == (name == "plugin")
    types = {node.attribute[0].i for node in graph.node if node.op_type == "Cast"}
    assert onnx.TensorProto.BFLOAT16 not in types
    casts = sum(node.op_type == "Cast" for node in graph.node)
    assert casts == 2 or name == "typed-2"  # of the pixels and of the rows


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
    assert libraries.slim(library) == 2 * len(other)
    assert bytes(library) == before.replace(other, bytes(len(other)), 2)


def test_packed_libraries_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "CHUNK", 5000)
    random = np.random.default_rng(0)
    (tmp_path / "wheels").mkdir()
    names = (*libraries.WHOLE, *libraries.HOST, *libraries.SLIMMED)
    with zipfile.ZipFile(tmp_path / "wheels" / "all.whl", "w") as wheel:
        for number, name in enumerate(names):
            wheel.writestr(f"lib/{name}", random.bytes(2500 * number + 1))
    libraries.main(["pack", str(tmp_path / "wheels"), str(tmp_path / "out"), "--megabytes", "0.04"])
    folders = sorted((tmp_path / "out").glob("p*"))
    assert len(folders) > 1 and all(sum(f.stat().st_size for f in p.iterdir()) <= 40000 for p in folders)
    for folder in folders:
        for piece in folder.iterdir():
            (tmp_path / "lib").mkdir(exist_ok=True)
            libraries.place((tmp_path / "lib", piece))
    for line in (tmp_path / "out" / "libs.sha256").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((tmp_path / "lib" / name).read_bytes()).hexdigest() == digest
        assert libraries.check((tmp_path / "lib" / name, digest)) == ""
    (tmp_path / "lib" / names[-1]).write_bytes(b"broken")
    assert "not whole" in libraries.check((tmp_path / "lib" / names[-1], digest))
