"""How the memory of a GPU is divided: by its size, the dial and the checkpoint's files alone."""

import ctypes
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pynvml
import pytest
import safetensors.torch
import torch
from safetensors.numpy import save_file

from tessera.errors import ConfigError
from tessera.models.registry import MODELS, vision_tensors
from tessera.settings import gpu
from tessera.settings.gpu import (
    CONTEXTS_BYTES,
    GIB,
    ServerSettings,
    card_bytes,
    check_gpus,
    divide,
    divide_for,
    find_device,
    refuse_limit,
    refuse_part_of_gpu,
    weights_of,
)
from tessera.settings.schema import Sources

SMI = """#!/bin/sh
case "$*" in
    --id=3\\ *memory.total*) echo 143771 ;;
    --id=*) exit 6 ;;
    *) echo '0, GPU-5ac2-11, NVIDIA H200'; echo '1, GPU-77aa-22, NVIDIA H200' ;;
esac
"""
VISION = MODELS[0].vision_tensors  # InternVL's


@pytest.mark.parametrize("card", [16, 140])
def test_the_shares_are_the_dialled_part_of_the_card(card: int) -> None:
    given = divide(card * GIB, 0.9, (GIB, 4 * GIB))
    shares = given.server + given.embedding_pool + given.vision + given.language + CONTEXTS_BYTES
    assert shares == int(card * GIB * 0.9)
    assert given.vision > GIB and given.language > 4 * GIB
    assert f"of {card:.1f} GiB" in given.describe() and "language model" in given.describe()
    with pytest.raises(ConfigError, match=r"weights take 130.0 GiB and its share is .*: raise gpu_memory \(0.9"):
        divide(card * GIB, 0.9, (GIB, 130 * GIB))


def test_a_vision_stage_elsewhere_leaves_the_rest(tmp_path: Path) -> None:
    usual = divide(80 * GIB, 0.9, (GIB, 4 * GIB))
    alone = divide(80 * GIB, 0.9, (GIB, 4 * GIB), language=False)
    assert (alone.language, alone.embedding_pool) == (0, 0) and alone.vision > 60 * GIB
    for url, vision in (("", divide(80 * GIB, 0.9, (0, 0)).vision), ("other:8001", 0)):
        sources = Sources("vision_encoder", {}, {"TESSERA_VISION_ENCODER_VISION_URL": url})
        assert divide_for(80 * GIB, ServerSettings(), tmp_path, sources, True, VISION).vision == vision
    assert divide(80 * GIB, 0.9, (GIB, 4 * GIB), remote=True).language == usual.language + usual.vision


def test_weights_are_counted_by_their_files_headers(tmp_path: Path) -> None:
    half, whole = np.zeros((4, 8), np.float16), np.zeros((3, 5), np.float32)
    save_file({"vision_tower.a": half, "model.vision_tower.b": half, "mlp1.0.c": whole}, tmp_path / "a.safetensors")
    save_file({"language_model.d": whole, "packed": np.zeros(9, np.int32)}, tmp_path / "b.safetensors")
    fp8 = {"language_model.e": torch.zeros(7, dtype=torch.float8_e4m3fn)}
    safetensors.torch.save_file(fp8, tmp_path / "d.safetensors")
    assert weights_of(tmp_path, "bfloat16", VISION) == (2 * (32 + 32 + 15), 2 * 15 + 36 + 7)
    assert weights_of(tmp_path, "float32", VISION) == (4 * (32 + 32 + 15), 4 * 15 + 36 + 7)
    assert weights_of(tmp_path / "none", "", VISION) == (0, 0)
    default = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"
    assert min(weights_of(default, "", vision_tensors(default))) > 1 << 20
    (tmp_path / "c.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ConfigError, match="c.safetensors is no safetensors file"):
        weights_of(tmp_path, "", VISION)


def test_the_device_is_found_without_touching_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def driver(name: str) -> None:
        if not loadable:
            raise OSError(f"{name}: cannot open shared object file")

    traces = [(str(tmp_path / folder.strip("/")), name) for folder, name in gpu.TRACES_OF_GPUS]
    monkeypatch.setattr(gpu, "TRACES_OF_GPUS", traces)
    monkeypatch.setattr(ctypes, "CDLL", driver)
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0")
    loadable = True
    for name in ("proc/driver/nvidia/gpus/0000:00:06.0", "dev/nvidia3", "dev/dxg"):
        trace = tmp_path / name
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.touch()
        assert find_device({}) == find_device({"CUDA_VISIBLE_DEVICES": "1"}) == "cuda"
        assert find_device({"CUDA_VISIBLE_DEVICES": ""}) == find_device({"CUDA_VISIBLE_DEVICES": "-1"}) == "cpu"
        trace.unlink()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert find_device({}) == "cpu"
    (tmp_path / "dev" / "nvidia0").touch()
    loadable = False  # a container without a GPU on a host with one
    assert find_device({}) == "cpu"
    loadable = True
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cpu")
    assert find_device({}) == "cpu"


def test_a_part_of_a_gpus_multiprocessors_is_refused(monkeypatch):
    refuse_limit({})
    refuse_limit({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"})
    with pytest.raises(ConfigError, match="CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=70 in the environment: .* unset it"):
        refuse_limit({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "70"})

    def cores(card):
        if card not in known:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return known[card]

    def part(uuid, capability, multiprocessors):
        major, minor = capability
        refuse_part_of_gpu(SimpleNamespace(uuid=uuid, major=major, minor=minor, multi_processor_count=multiprocessors))

    known = {"GPU-h200": 16896, "GPU-a100": 6912}
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", str)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNumGpuCores", cores)
    part("h200", (9, 0), 132)
    part("a100", (8, 0), 108)
    part("of-mig", (9, 0), 60)
    with pytest.raises(ConfigError, match="92 of the GPU's 132 multiprocessors: .*set_default_active_thread"):
        part("h200", (9, 0), 92)
    with pytest.raises(ConfigError, match="107 of the GPU's 108 multiprocessors"):
        part("a100", (8, 0), 107)


def test_gpus_that_are_not_here_are_refused_with_what_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TRACES_OF_GPUS", ())
    no_gpu = "^--gpus 0,1 asks for a GPU, but this machine has no NVIDIA GPU.*: leave --gpus out to serve on the CPU$"
    with pytest.raises(ConfigError, match=no_gpu):
        check_gpus(("0", "1"), {"CUDA_VISIBLE_DEVICES": ""})
    monkeypatch.setattr(gpu, "why_no_gpu", lambda environment: None)
    monkeypatch.setenv("PATH", "/nowhere")
    check_gpus(("7",), {})  # CUDA will say
    assert card_bytes({}) is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    check_gpus(("1", "GPU-5ac", "MIG-3"), {})
    with pytest.raises(ConfigError, match="there is no GPU 2 here; .* found: 0 .NVIDIA H200, GPU-5ac2-11.; 1"):
        check_gpus(("0", "2"), {})
    assert card_bytes({"CUDA_VISIBLE_DEVICES": "3,4"}) == 143771 << 20 and card_bytes({}) is None
