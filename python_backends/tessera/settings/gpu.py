"""Which device there is, and how the stages of one server divide the memory of a GPU.

All of it follows from the environment, the card's size and the checkpoint's files: so the launcher, and each stage
under a tritonserver started by hand, come to the same numbers by themselves.

What GPUs draw, by their own counters (NVML).
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pynvml

from tessera.errors import ConfigError
from tessera.settings.schema import QUANTIZATIONS, Sources, setting

GIB = 1 << 30
CONTEXTS_BYTES = 2 * GIB
"""What CUDA itself takes, for tritonserver and for both stages' processes."""
TRACES_OF_GPUS = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"), ("/dev", "dxg"))  # the last: WSL
FLOATS = ("F64", "F32", "BF16", "F16")
DEFAULT_MODELS = {"rooms": "../build/default_model/checkpoint", "documents": "../build/document_model/checkpoint"}
"""The models that were trained here, by the names of `tessera serve --default`: relative to the model repository."""


@dataclass(frozen=True)
class ServerSettings:
    """What holds for all stages. ``checkpoint``: a folder, absolute or relative to the model repository, or a
    model of the Hugging Face hub (Org/Name) that is in the local cache. ``device``: auto is cuda where there is a GPU.
    ``gpu_memory``: the part of each GPU's memory that this server may use."""

    checkpoint: str = setting(DEFAULT_MODELS["rooms"], common=True)
    device: str = setting("auto", common=True, choices=("auto", "cpu", "cuda"))
    gpu_memory: float = setting(0.9, common=True, least=0.05, most=1.0)


@dataclass(frozen=True)
class Division:
    """Who holds what of one GPU, in bytes.

    ``server``: tritonserver's pool for tensors between the stages; ``embedding_pool``: rows of pictures whose requests
    wait or run; ``vision`` and ``language``: all else of a stage, its weights (``..._weights``, estimated) included.
    """

    card: int
    server: int
    embedding_pool: int
    vision: int
    vision_weights: int
    language: int
    language_weights: int

    def describe(self) -> str:
        """One line for the user."""
        parts = [("CUDA", CONTEXTS_BYTES, ""), ("tritonserver's pool", self.server, "")]
        if self.vision:
            parts.append(("vision stage", self.vision, f" (weights {_gib(self.vision_weights)})"))
        if self.language:
            cache = f" (weights {_gib(self.language_weights)}, then steps and key/value cache)"
            parts += [("picture rows", self.embedding_pool, ""), ("language model", self.language, cache)]
        used = sum(size for _, size, _ in parts)
        named = ", ".join(f"{name} {_gib(size)}{note}" for name, size, note in parts)
        return f"GPU memory: {_gib(used)} of {_gib(self.card)} GiB: {named}"


def divide(
    card: int, fraction: float, weights: tuple[int, int], remote: bool = False, language: bool = True
) -> Division:
    """Divides ``fraction`` of a card of ``card`` bytes.

    Args:
        weights: bytes of the vision stage's and of the language model's, see :func:`weights_of`.
        remote: whether the vision stage is on another server.
        language: whether this server has the language model.

    Raises:
        ConfigError: the weights do not fit.
    """
    usable = int(card * fraction)
    server = pool = min(4 * GIB, usable // 16)
    left = usable - CONTEXTS_BYTES - server
    if not language:
        return Division(card, server, 0, left, weights[0], 0, 0)
    # Beside its weights: activations of a forward, pixels, known rows and rows on their way out.
    vision = 0 if remote else weights[0] + min(8 * GIB, usable // 8)
    division = Division(card, server, pool, vision, weights[0], left - pool - vision, weights[1])
    if division.language <= weights[1]:
        raise ConfigError(
            f"the language model's weights take {_gib(weights[1])} GiB and its share is {_gib(division.language)} GiB: "
            f"raise gpu_memory ({fraction:g}), take --quantization fp8 or a larger GPU "
            f"({division.describe()})"
        )
    return division


def weights_of(checkpoint: Path, dtype: str, vision_tensors: str) -> tuple[int, int]:
    """Bytes that the vision stage and the language model will load, by the headers of the safetensors files alone.

    ``vision_tensors``: the pattern of how names of the vision stage's weights begin. Floating-point tensors count as
    ``dtype``. Zeros for a folder without weights, which only random ones can serve.
    """
    size = {"float32": 4}.get(dtype, 2)
    vision = language = 0
    for file in checkpoint.glob("*.safetensors"):
        with open(file, "rb") as stream:
            try:
                header = json.loads(stream.read(min(int.from_bytes(stream.read(8), "little"), file.stat().st_size)))
                assert isinstance(header, dict), "its header is no object"
            except (ValueError, AssertionError) as error:
                raise ConfigError(f"{file} is no safetensors file: {error}") from None
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            count = size * math.prod(tensor["shape"]) if tensor["dtype"] in FLOATS else end - begin
            if re.match(vision_tensors, name):
                vision += count
            else:
                language += count
    return vision, language


def divide_for(
    card: int, settings: ServerSettings, checkpoint: Path, sources: Sources, language: bool, vision_tensors: str
) -> Division:
    """:func:`divide` for this checkpoint, as ``sources`` say the dtype, the quantization, and where vision is."""
    environment = sources.environment
    remote = bool(environment.get("TESSERA_VISION_ENCODER_VISION_URL"))
    dtype = environment.get("TESSERA_DTYPE") or sources.parameters.get("dtype", "")
    vision, body = weights_of(checkpoint, dtype, vision_tensors)
    said = environment.get("TESSERA_QUANTIZATION") or sources.parameters.get("quantization")
    tower, text = (2 if kind == "fp8" else 1 for kind in QUANTIZATIONS.get(said or "", ("", "")))
    return divide(card, settings.gpu_memory, (vision // tower, body // text), remote, language)


def find_device(environment: Mapping[str, str]) -> str:
    """cuda if an NVIDIA GPU is here and not hidden, and torch is built for it, else cpu."""
    return "cpu" if why_no_gpu(environment) else "cuda"


def why_no_gpu(environment: Mapping[str, str]) -> str | None:
    """What keeps torch from using a GPU here; None where nothing does.

    Looks at the driver's files only: touches no device, imports no torch. A container without a GPU sees its host's in
    /proc all the same, but has no driver library.
    """
    hidden = environment.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "none"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU"
    if not any(any(Path(folder).glob(name)) for folder, name in TRACES_OF_GPUS):
        return "this machine has no NVIDIA GPU, or its driver is not loaded"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "the driver's library libcuda.so.1 is not here (a container gets it by `docker run --gpus all`)"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:  # the stages' interpreter may be another
        return None
    return f"torch {version} is built for the CPU alone" if version.endswith("+cpu") else None


_LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_WRONG = "on a part of a GPU's multiprocessors cuBLAS gives wrong results"  # docs/gpu.md
_CORES_64 = ((7, 0), (7, 2), (7, 5), (8, 0))  # compute capabilities of 64 cores a multiprocessor; the others have 128


def refuse_limit(environment: Mapping[str, str]) -> None:
    """Raises ConfigError where the environment gives processes a part of a GPU's multiprocessors."""
    if (said := environment.get(_LIMIT, "100")) != "100":
        raise ConfigError(
            f"{_LIMIT}={said} in the environment: {_WRONG}; unset it, and share the GPU by the setting gpu_memory"
        )


def refuse_part_of_gpu(found: Any) -> None:
    """The same where an MPS daemon does so by itself, as Kubernetes' sharing by MPS has it.

    ``found``: torch's properties of the GPU, whose multiprocessors are those that this process has; NVML tells the
    cores of all. A part by MIG, which is a GPU to its processes, is none; nor is asked where NVML does not tell.
    """
    try:
        pynvml.nvmlInit()
        cores = pynvml.nvmlDeviceGetNumGpuCores(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{found.uuid}"))
    except pynvml.NVMLError:
        return
    whole = cores // (64 if (found.major, found.minor) in _CORES_64 else 128)
    if found.multi_processor_count < whole:
        raise ConfigError(
            f"this process has {found.multi_processor_count} of the GPU's {whole} multiprocessors: {_WRONG}; have "
            "the MPS daemon give all (set_default_active_thread_percentage 100), and share the GPU by gpu_memory"
        )


def check_gpus(wanted: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises ConfigError where one of the GPUs that `--gpus` names is not here; where the driver's tool does not say
    what is here, CUDA will."""
    asked = f"--gpus {','.join(wanted)}"
    if why := why_no_gpu({**environment, "CUDA_VISIBLE_DEVICES": wanted[0]}):
        raise ConfigError(f"{asked} asks for a GPU, but {why}: leave --gpus out to serve on the CPU")
    here = [line.split(", ") for line in _nvidia_smi("--query-gpu=index,uuid,name", "--format=csv,noheader")]
    for name in wanted if here else ():
        if not name.startswith("MIG-") and not any(name == i or uuid.startswith(name) for i, uuid, *_ in here):
            found = "; ".join(f"{i} ({', '.join(model)}, {uuid})" for i, uuid, *model in here)
            raise ConfigError(f"{asked}: there is no GPU {name} here; name some of those that were found: {found}")


def card_bytes(environment: Mapping[str, str]) -> int | None:
    """The memory of the first GPU that the environment shows; None if the driver's tool does not say."""
    gpu = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    lines = _nvidia_smi(f"--id={gpu}", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    return int(lines[0]) << 20 if lines and lines[0].isdigit() else None


def _nvidia_smi(*arguments: str) -> list[str]:
    """The lines that the driver's tool prints; none where there is no such tool, or it fails."""
    try:
        asked = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return asked.stdout.strip().splitlines() if asked.returncode == 0 else []


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


class GpuMeter:
    """Reads what some GPUs have drawn; NVML numbers them by their place on the bus.

    ``gpus``: their numbers or UUIDs. Raises OSError where there is no driver or no such GPU, or where it does not count
    joules (before Volta, parts of one).
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self.handles: list[Any] = []
        try:
            pynvml.nvmlInit()
            for gpu in gpus:
                by_number = gpu.isdecimal()
                find = pynvml.nvmlDeviceGetHandleByIndex if by_number else pynvml.nvmlDeviceGetHandleByUUID
                self.handles.append(find(int(gpu) if by_number else gpu))
        except pynvml.NVMLError as error:
            raise OSError(f"cannot read GPU {', '.join(gpus)}: {error}") from error
        self.joules()

    @classmethod
    def of_process(cls, environment: Mapping[str, str]) -> GpuMeter:
        """Of the first GPU that the environment shows. Raises OSError."""
        return cls([environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]])

    def joules(self) -> float:
        """Since their driver was loaded, in sum. Raises OSError if a GPU does not answer."""
        try:
            return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, self.handles)) / 1e3
        except pynvml.NVMLError as error:
            raise OSError(f"a GPU does not say what it draws: {error}") from error
